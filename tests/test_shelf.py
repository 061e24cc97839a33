"""A tier in use: whatever it does is at worst a miss, takes a bounded time, and is said once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from test_codec import one_group, random_kv
from test_entry import KEYS, SEALED, an_entry

from kvboost.plan import Entry
from kvboost.store import (
    Codebook,
    MemoryTier,
    PackedKV,
    Record,
    Shelf,
    TierError,
    TierUsage,
    encode,
)
from kvboost.store import shelf as shelves

LAYOUT = one_group(64)
BOOK = Codebook(KEYS, LAYOUT)
QUEUE = 1 << 24


class Moody(MemoryTier):
    """A tier that does to the next calls what it is told to: raise, or take its time."""

    name = "moody"

    def __init__(self) -> None:
        super().__init__()
        self.mood: Callable[[], None] = lambda: None
        self.calls = 0
        self.hits: list[bytes] = []

    def _called(self) -> None:
        self.calls += 1
        self.mood()

    def find(self, groups: Sequence[bytes], limit: int) -> list[list[bytes]]:
        self._called()
        return super().find(groups, limit)

    def fronts(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self._called()
        return super().fronts(keys)

    def read(self, keys: Sequence[bytes]) -> Iterator[bytes | bytearray | None]:
        for item in super().read(keys):
            self._called()
            yield item

    def write(self, record: Record) -> bool:
        self._called()
        return super().write(record)

    def used(self, keys: Sequence[bytes]) -> None:
        self.hits += keys

    def usage(self) -> TierUsage:
        self._called()
        return super().usage()


def fail() -> None:
    raise TierError("the folder is gone")


def wait(until: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        time.sleep(0.01)
    return until()


@pytest.fixture
def tier() -> Moody:
    return Moody()


@pytest.fixture
def shelf(tier: Moody, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    monkeypatch.setattr(shelves, "_REST", 0.05)
    made = Shelf(tier, 0.2, QUEUE)
    yield made
    tier.mood = lambda: None
    made.close()


def some(tokens: int = 20, position: int = 12, *, exact: bool = True) -> tuple[Entry, PackedKV]:
    entry = an_entry(tokens, position, exact=exact)
    return entry, encode(random_kv(LAYOUT, tokens, position), LAYOUT, position, "raw")


def store(shelf: Shelf, *items: tuple[Entry, PackedKV]) -> None:
    for entry, kv in items:
        shelf.store(entry, kv, BOOK, 0.5)
    assert shelf.flush(5)


def test_what_is_stored_is_found_and_loaded(shelf: Shelf, tier: Moody) -> None:
    one, two = some(20, 12), some(30, 40, exact=False)
    store(shelf, one, two)
    assert tier.records[one[0].key.digest].seconds == 0.5
    found = shelf.get([one[0].key, KEYS.root, two[0].key], BOOK)
    assert [f and f.entry for f in found] == [one[0], None, two[0]]
    assert found[0] and found[0].bytes == tier.records[one[0].key.digest].nbytes
    groups = shelf.find([one[0].content, two[0].parent, KEYS.root], BOOK)
    assert [[f.entry for f in group] for group in groups] == [[one[0]], [two[0]], []]

    loaded = shelf.load([two[0], one[0]], BOOK, 1.0)
    for entry, kv in (one, two):
        assert all(torch.equal(loaded[entry.key].tensors[n], t) for n, t in kv.tensors.items())
    assert wait(lambda: set(tier.hits) == {one[0].key.digest, two[0].key.digest})
    stats = shelf.stats()
    assert (stats.up, stats.entries, stats.hits, stats.misses, stats.written) == (True, 2, 2, 0, 2)
    assert stats.latency > 0 and stats.bandwidth > 0


def test_nothing_of_the_first_measurement_stays(shelf: Shelf, tier: Moody) -> None:
    assert not tier.records and not tier.discarded and tier.calls >= 3


def test_what_is_there_already_is_not_written_again(shelf: Shelf, tier: Moody) -> None:
    store(shelf, some())
    store(shelf, some())
    assert (shelf.stats().written, shelf.stats().refused) == (1, 1)


@pytest.mark.parametrize("mood", [fail, lambda: time.sleep(0.6)], ids=["fails", "hangs"])
def test_trouble_is_a_bounded_miss_said_once_and_mended(
    shelf: Shelf, tier: Moody, mood: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    item = some()
    store(shelf, item)
    tier.mood = mood
    start = time.perf_counter()
    for _ in range(20):
        assert shelf.get([item[0].key], BOOK) == [None]
        assert shelf.find([item[0].content], BOOK) == [[]]
        assert shelf.load([item[0]], BOOK, 0.1) == {}
        shelf.store(*some(20, 50), BOOK, 0.5)
    assert time.perf_counter() - start < 1.0
    said = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 1 and "moody" in said[0]
    assert not shelf.up and shelf.stats().outages == 1 and shelf.stats().dropped == 20

    tier.mood = lambda: None
    assert wait(lambda: shelf.up)
    assert shelf.get([item[0].key], BOOK)[0]
    assert item[0].key in shelf.load([item[0]], BOOK, 1.0)


def test_a_tier_that_is_down_at_the_start_is_used_when_it_is_up(
    tier: Moody, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelves, "_REST", 0.05)
    tier.mood = fail
    made = Shelf(tier, 0.2, QUEUE)
    assert not made.up
    tier.mood = lambda: None
    assert wait(lambda: made.up)
    store(made, some())
    assert made.stats().written == 1
    made.close()


def test_a_tier_that_forgets_what_is_written_is_not_used() -> None:
    class Forgetful(MemoryTier):
        def write(self, record: Record) -> bool:
            return True

    made = Shelf(Forgetful(), 0.2, QUEUE)
    assert not made.up
    made.close()


def test_an_unusable_entry_is_a_miss_and_taken_out(shelf: Shelf, tier: Moody) -> None:
    items = [some(20, p) for p in (12, 50, 90, 130)]
    store(shelf, *items)
    keys = [entry.key.digest for entry, _ in items]
    body = tier.records[keys[0]].body
    for key, changed in (
        (keys[0], body[:-1] + bytes([body[-1] ^ 1])),
        (keys[1], body[:-9]),
    ):
        old = tier.records[key]
        tier.records[key] = Record(key, old.parent, old.content, old.front, changed, 0.0)
    other = tier.records[keys[3]]  # a whole entry, but another's
    tier.records[keys[2]] = Record(keys[2], b"", b"", other.front, other.body, 0.0)
    loaded = shelf.load([entry for entry, _ in items], BOOK, 1.0)
    assert list(loaded) == [items[3][0].key]
    assert wait(lambda: len(tier.discarded) == 3)
    assert [tier.discarded[k] for k in keys[:3]] == ["checksum", "truncated", "foreign"]
    assert shelf.stats().flaws == {"checksum": 1, "truncated": 1, "foreign": 1}
    assert shelf.stats().misses == 3 and shelf.up


def test_a_broken_front_is_not_found(shelf: Shelf, tier: Moody) -> None:
    entry, kv = some()
    store(shelf, (entry, kv))
    old = tier.records[entry.key.digest]
    for front in (b"", old.front[:-1], old.front[:-1] + b"x", b"?" * len(old.front)):
        tier.records[entry.key.digest] = Record(
            old.key, old.parent, old.content, front, old.body, 0.0
        )
        assert shelf.find([entry.content], BOOK) == [[]]
        assert shelf.get([entry.key], BOOK) == [None]
    assert shelf.up


def test_an_entry_closed_with_another_key_is_left_alone(shelf: Shelf, tier: Moody) -> None:
    entry, kv = some()
    store(shelf, (entry, kv))
    locked = Codebook(KEYS, LAYOUT, SEALED.seal)
    assert shelf.load([entry], locked, 1.0) == {}
    assert shelf.stats().flaws == {"locked": 1}
    assert not tier.discarded and entry.key in shelf.load([entry], BOOK, 1.0)


def test_what_comes_too_late_is_a_miss(shelf: Shelf, tier: Moody) -> None:
    items = [some(20, 10 * n) for n in range(1, 9)]
    store(shelf, *items)
    tier.mood = lambda: time.sleep(0.06)
    loaded = shelf.load([entry for entry, _ in items], BOOK, 0.1)
    assert 2 <= len(loaded) <= 5 and shelf.up
    assert shelf.stats().misses == 8 - len(loaded)


def test_the_queue_is_bounded_and_close_empties_it(tier: Moody) -> None:
    items = [some(20, 10 * n) for n in range(1, 9)]
    made = Shelf(tier, 0.5, 3 * items[0][1].nbytes)
    tier.mood = lambda: time.sleep(0.03)
    for entry, kv in items:
        made.store(entry, kv, BOOK, 0.1)
    assert 3 <= 8 - made.stats().dropped <= 5
    made.close()
    assert len(tier.records) == 8 - made.stats().dropped
    made.store(*items[0], BOOK, 0.1)
    assert made.get([items[0][0].key], BOOK) == [None] and not made.up
    made.close()


def test_the_faster_of_loading_and_computing(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.latency, shelf.bandwidth = 0.01, 1e6
    assert shelf.faster(100_000, 0.12) and not shelf.faster(100_000, 0.10)
    assert shelf.stats().slow == 1
    shelf._recheck = time.monotonic() - 1
    assert wait(lambda: shelf.bandwidth > 2e6)  # measured again in the background


def test_many_threads_may_use_one_shelf(shelf: Shelf) -> None:
    items = [some(20, 10 * n) for n in range(1, 13)]
    wrong: list[str] = []

    def work(n: int) -> None:
        for turn in range(15):
            entry, kv = items[(n + turn) % len(items)]
            shelf.store(entry, kv, BOOK, 0.1)
            loaded = shelf.load([entry], BOOK, 1.0)
            if loaded and not torch.equal(loaded[entry.key].tensors["v0"], kv.tensors["v0"]):
                wrong.append(entry.key.hex)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shelf.flush(5) and not wrong
    assert shelf.stats().written == len(items)


def test_what_fails_while_writing_does_not_end_the_writing(
    shelf: Shelf, tier: Moody, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Codebook, "dump", fails)
    shelf.store(*some(), BOOK, 0.1)
    assert shelf.flush(5) and wait(lambda: not shelf.up)
    monkeypatch.undo()
    assert wait(lambda: shelf.up)
    store(shelf, some())
    assert shelf.stats().written == 1


def test_a_tier_for_reading_only_is_read(tier: Moody) -> None:
    entry, kv = some()
    record = BOOK.dump(entry, kv)
    tier.records[record.key] = record

    def refuses(record: Record) -> bool:
        return False

    tier.write = refuses  # type: ignore[method-assign]
    made = Shelf(tier, 0.2, QUEUE)
    assert made.up and entry.key in made.load([entry], BOOK, 1.0)
    store(made, some(20, 90))
    assert made.stats().refused == 1
    made.close()


def test_a_tier_slower_than_its_limit_is_not_tried_by_requests(tier: Moody) -> None:
    tier.mood = lambda: time.sleep(0.05)
    made = Shelf(tier, 0.02, QUEUE)
    assert not made.up and made.stats().outages == 1
    tier.mood = lambda: None
    made.close()


def test_a_front_that_is_broken_is_written_anew(shelf: Shelf, tier: Moody) -> None:
    entry, kv = some()
    store(shelf, (entry, kv))
    old = tier.records[entry.key.digest]
    front = old.front[:-1] + b"x"
    tier.records[old.key] = Record(old.key, old.parent, old.content, front, old.body, 0.0)
    assert shelf.get([entry.key], BOOK) == [None]
    assert wait(lambda: old.key in tier.discarded)
    store(shelf, (entry, kv))
    assert entry.key in shelf.load([entry], BOOK, 1.0)


def test_closing_does_not_wait_for_a_collector_in_its_own_thread(tier: Moody) -> None:
    made = Shelf(tier, 0.5, QUEUE)
    made._jobs.put(made.close)
    assert wait(lambda: not made._thread.is_alive())
