"""The README's snippet is run, and prints what the README says it prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import kvboost
from kvboost import KVBoost

README = Path(__file__).parents[1] / "README.md"


def test_snippet_prints_what_it_says(
    default_model: tuple[Any, Any], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    blocks = re.findall(r"```(\w*)\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    code = next(text for kind, text in blocks if kind == "python")
    expected = next(text for kind, text in blocks if kind == "")
    monkeypatch.setattr(KVBoost, "from_pretrained", lambda name: KVBoost(*default_model))
    exec(code, {"__name__": kvboost.__name__})
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == expected.splitlines()[:2]
    assert re.fullmatch(r"first token after [\d.]+ s, then after [\d.]+ s", printed[2])
