"""Memory that a server gives back."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from kvboost.server import heap
from kvboost.server.heap import Heap

_BLOCK, _BLOCKS = 10_000, 20_000


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries give back alone")
def test_what_is_free_between_blocks_is_given_back_every_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seldom = Heap()
    monkeypatch.setattr(heap, "_EVERY", 0.0)
    often = Heap()
    blocks = [bytes(_BLOCK) for _ in range(_BLOCKS)]
    full = resident()
    kept = blocks[::100]
    del blocks
    seldom.tidy()
    assert full - resident() < _BLOCK * _BLOCKS / 4
    often.tidy()
    assert full - resident() > _BLOCK * _BLOCKS / 2
    assert len(kept) == _BLOCKS / 100
