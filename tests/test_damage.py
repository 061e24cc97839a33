"""Real files and a real server, hurt on purpose: at worst a miss, never a wrong answer."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from families import boost, tokens
from servers import Server
from test_codec import one_group, random_kv
from test_entry import KEYS, an_entry

from kvboost import KVBoost
from kvboost.plan import Entry
from kvboost.store import Codebook, PackedKV, Shelf, encode
from kvboost.store.disk import DiskTier

BOOK = Codebook(KEYS, one_group(16, layers=1, heads=1))


def wait(until: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        time.sleep(0.02)
    return until()


def many(count: int) -> list[tuple[Entry, PackedKV]]:
    entries = [an_entry(8 + n % 30, 10 + n) for n in range(count)]
    return [
        (e, encode(random_kv(BOOK.layout, len(e.ids), n), BOOK.layout, e.position, "raw"))
        for n, e in enumerate(entries)
    ]


def hurt(files: list[Path], rng: random.Random) -> None:
    """Each in one of five ways; the last ones are swapped in pairs."""
    for n, file in enumerate(files[:160]):
        data = bytearray(file.read_bytes())
        at = rng.randrange(len(data))
        if n % 4 == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif n % 4 == 1:
            del data[at:]
        elif n % 4 == 2:
            data[at:] = rng.randbytes(len(data) - at)
        else:
            data += rng.randbytes(1 + at % 50)
        file.write_bytes(data)
    for a, b in zip(files[160::2], files[161::2], strict=True):
        one, other = a.read_bytes(), b.read_bytes()
        a.write_bytes(other)
        b.write_bytes(one)


def test_two_hundred_damaged_files_among_a_hundred_sound_ones(tmp_path: Path) -> None:
    items, rng = many(300), random.Random(3)
    shelf = Shelf(DiskTier(tmp_path, 64 << 20), 1.0, 1 << 26)
    for entry, kv in items:
        shelf.store(entry, kv, BOOK, 0.1)
    assert shelf.flush(10)
    broken = {e.key for e, _ in items[:200]}
    paths = {e.key: Path(shelf.tier.folder.path(e.key.digest)) for e, _ in items}  # type: ignore[attr-defined]
    hurt([paths[e.key] for e, _ in items[:200]], rng)
    loaded = shelf.load([e for e, _ in items], BOOK, 10.0)
    assert loaded.keys() == {e.key for e, _ in items} - broken
    for entry, kv in items[200:]:
        assert all(torch.equal(loaded[entry.key].tensors[n], t) for n, t in kv.tensors.items())
    assert sum(shelf.stats().flaws.values()) == shelf.stats().misses == 200
    assert wait(lambda: (shelf.tier.usage().entries or 0) == 100)
    for entry, kv in items[:200]:  # what was damaged can be stored again
        shelf.store(entry, kv, BOOK, 0.1)
    assert shelf.flush(10)
    assert len(shelf.load([e for e, _ in items], BOOK, 10.0)) == 300
    shelf.close()


def served(made: KVBoost, ids: list[int]) -> tuple[tuple[int, ...], float]:
    start = time.perf_counter()
    answer = made.generate(ids, max_new_tokens=4).token_ids
    return answer, time.perf_counter() - start


def test_a_server_that_dies_hangs_and_comes_back(tmp_path: Path) -> None:
    prompts = [tokens(200, n) for n in range(12)]
    wanted = [boost("llama").generate(ids, max_new_tokens=4).token_ids for ids in prompts]
    with Server(tmp_path) as server, boost("llama", remote=server.url()) as writer:
        reader = boost("llama", remote=server.url(), remote_timeout=0.1)

        def ask(n: int) -> float:
            served(writer, prompts[n])
            answer, took = served(reader, prompts[n])
            assert answer == wanted[n]
            return took

        for n in range(3):
            ask(n)
            assert writer.flush(5)
        for stop, start in ((server.kill, server.start), (server.pause, server.resume)):
            stop()
            assert max(ask(n) for n in range(3, 9)) < 1.0
            assert not reader.stats().tiers[0].up
            start()
            assert wait(lambda: all(m.stats().tiers[0].up for m in (writer, reader)))
        served(writer, prompts[9])
        assert writer.flush(5)
        reader._engine._pace = 1.0  # as if computing were slow: a tiny model may win the race
        assert reader.generate(prompts[9], max_new_tokens=4).usage.exact == 199
        reader.close()


def test_a_folder_that_vanishes_stops_nothing(tmp_path: Path) -> None:
    ids = [tokens(200, n) for n in range(4)]
    wanted = [boost("llama").generate(i, max_new_tokens=4).token_ids for i in ids]
    with boost("llama", disk=tmp_path / "kv") as made:
        for n, prompt in enumerate(ids):
            if n == 2:
                made.flush(5)
                shutil.rmtree(tmp_path / "kv")
                made.clear()
            assert made.generate(prompt, max_new_tokens=4).token_ids == wanted[n]
