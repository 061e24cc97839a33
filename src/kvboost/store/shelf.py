"""A tier in use: bounded in time, left alone while it fails, measured, checked, written behind.

Whatever goes wrong below is a miss here: counted, said once, never raised. Knows entries and bytes;
nothing of plans or prompts.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import NamedTuple, TypeVar

from xxhash import xxh3_128_digest

from kvboost.keys import DIGEST_BYTES, ChunkKey
from kvboost.plan import Entry
from kvboost.store.codec import PackedKV
from kvboost.store.entry import Codebook
from kvboost.store.frame import EntryError, Flaw, Frame, close_front
from kvboost.store.memory import CONSIDERED
from kvboost.store.tier import Record, Tier, TierError, TierUsage

T = TypeVar("T")
_log = logging.getLogger(__name__)

_TROUBLE = (TierError, multiprocessing.TimeoutError, RuntimeError, MemoryError, OSError)
"""Of the tier, and of what turns KV into bytes: a device that is out of memory, or gone."""

_PROBE_BYTES = 1 << 20
_PROBE_LIMIT = 5.0
_REST, _LONGEST_REST = 1.0, 60.0
_STALE = 60.0
"""Seconds after which the speed of a tier that lost the race is measured again."""
_BANDWIDTH = 1e8
"""Bytes per second that a tier is believed to give until something was read."""
_SMOOTH = 0.3
_THREADS = 16
"""Calls at a time; more wait, and their time is running."""
_READERS = 2
"""Threads that load: most of their time goes into the first touch of memory."""


class Found(NamedTuple):
    """An entry on a shelf, and how many bytes loading it takes."""

    entry: Entry
    bytes: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """A tier's counters since it was opened, and what it holds now (None: its server knows).

    hits, misses: entries asked for that came, or were gone or too late. flaws: entries refused, by
    reason. refused: the tier had no room, or had it already. dropped: not written because the
    queue was full or the tier was down. slow: lookups not taken because computing was faster.
    """

    name: str
    up: bool
    entries: int | None
    bytes: int | None
    max_bytes: int | None
    hits: int
    misses: int
    flaws: dict[str, int]
    written: int
    refused: int
    dropped: int
    outages: int
    slow: int
    latency: float
    bandwidth: float


class Shelf:
    """Wraps a tier for use by requests.

    A call that fails or takes longer than `limit` seconds takes the tier out of use; a thread in
    the background tries it again after 1 s, then 2, up to 60. The same thread writes, from a queue
    of at most `queue_bytes`.
    """

    def __init__(self, tier: Tier, limit: float, queue_bytes: int) -> None:
        """Writes, reads and deletes a little to see that what is written can be read back, and how
        fast. A tier that fails this is out of use for now, with a warning."""
        self.tier = tier
        self.latency, self.bandwidth = 0.0, _BANDWIDTH
        self._limit, self._queue_bytes = limit, queue_bytes
        self._pool = ThreadPool(_THREADS)
        self._lock = threading.RLock()  # the collector may close a stream in any thread
        self._count: Counter[str] = Counter()
        self._flaws: Counter[str] = Counter()
        self._up, self._rest, self._retry = True, _REST, 0.0
        self._recheck = 0.0
        self._queued = 0
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._closed = False
        self._call(self._measure, _PROBE_LIMIT)
        self._thread = threading.Thread(target=self._work, name=f"kvboost-{tier.name}", daemon=True)
        self._thread.start()

    # -- what requests ask

    @property
    def up(self) -> bool:
        return self._up and not self._closed

    def get(self, keys: Sequence[ChunkKey], book: Codebook) -> list[Found | None]:
        """The entries under these keys."""
        digests = [key.digest for key in keys]
        fronts = self._timed(lambda: self.tier.fronts(digests)) or [None] * len(keys)
        return [
            self._read(front, book, key) if front is not None else None
            for key, front in zip(digests, fronts, strict=True)
        ]

    def find(self, groups: Sequence[ChunkKey], book: Codebook) -> list[list[Found]]:
        """Entries that follow, or have the content, that each key names; newest first."""
        digests = [key.digest for key in groups]
        fronts = self._timed(lambda: self.tier.find(digests, CONSIDERED)) or [[]] * len(groups)
        found = [[self._read(front, book) for front in group] for group in fronts]
        return [[f for f in group if f is not None] for group in found]

    def load(
        self, entries: Sequence[Entry], book: Codebook, limit: float
    ) -> dict[ChunkKey, PackedKV]:
        """The KV of those entries that are there, sound, and arrive within `limit` seconds."""
        start = time.perf_counter()
        loaded: dict[ChunkKey, PackedKV] = {}

        def read(part: Sequence[Entry]) -> int:
            size, data = 0, self.tier.read([entry.key.digest for entry in part])
            for entry, item in zip(part, data, strict=True):
                kv = self._open(entry, item, book) if item is not None else None
                if item is not None and kv is not None:
                    size += len(item)
                    loaded[entry.key] = kv
                if time.perf_counter() - start > limit:
                    break
            return size

        parts = [entries[n::_READERS] for n in range(min(_READERS, len(entries)))]
        sizes = self._calls([partial(read, part) for part in parts], limit + self._limit)
        size, took = sum(size or 0 for size in sizes), time.perf_counter() - start
        arrived = loaded.copy()  # one that is late may still be writing
        if size >= _PROBE_BYTES:
            self.bandwidth += _SMOOTH * (size / took - self.bandwidth)
        self._note("hits", len(arrived))
        self._note("misses", len(entries) - len(arrived))
        if arrived:
            self._jobs.put(partial(self.tier.used, [key.digest for key in arrived]))
        return arrived

    def faster(self, size: int, seconds: float) -> bool:
        """Whether loading so many bytes takes less than `seconds`, by what was measured."""
        wins = self.latency + size / max(self.bandwidth, 1.0) < seconds
        if not wins:
            self._note("slow")
            self._recheck = self._recheck or time.monotonic() + _STALE
        return wins

    def store(self, entry: Entry, kv: PackedKV, book: Codebook, seconds: float) -> None:
        """Have it written in the background, if the queue has room."""
        with self._lock:
            fits = self.up and self._queued + kv.nbytes <= self._queue_bytes
            if fits:
                self._queued += kv.nbytes
                self._idle.clear()
                self._jobs.put(partial(self._write, entry, kv, book, seconds))
        if not fits:
            self._note("dropped")

    def stats(self) -> TierStats:
        usage = self._call(self.tier.usage, self._limit) or TierUsage(None, None, None)
        counted = ("hits", "misses", "written", "refused", "dropped", "outages", "slow")
        return TierStats(
            name=self.tier.name,
            up=self.up,
            entries=usage.entries,
            bytes=usage.bytes,
            max_bytes=usage.max_bytes,
            flaws=dict(self._flaws),
            latency=self.latency,
            bandwidth=self.bandwidth,
            **{name: self._count[name] for name in counted},
        )

    def flush(self, seconds: float) -> bool:
        """Wait until everything queued is written; False if that takes longer."""
        return self._idle.wait(seconds)

    def close(self, seconds: float = 10.0) -> None:
        """Write what is queued, for so many seconds at most, and let go of the tier."""
        if self._closed:
            return
        self.flush(seconds)
        self._closed = True
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)
        self._pool.terminate()
        self.tier.close()

    # -- reading

    def _read(self, front: bytes, book: Codebook, key: bytes | None = None) -> Found | None:
        try:
            header = book.read(front)
        except EntryError as error:
            self._refuse(error.flaw, key)
            return None
        return Found(header.entry, header.frame.front + header.frame.body)

    def _open(
        self, entry: Entry, data: bytes | bytearray | memoryview, book: Codebook
    ) -> PackedKV | None:
        try:
            there, kv = book.load(data)
            if there != entry:
                raise EntryError("foreign")
        except EntryError as error:
            self._refuse(error.flaw, entry.key.digest)
            return None
        return kv

    def _refuse(self, flaw: Flaw, key: bytes | None) -> None:
        with self._lock:
            self._flaws[flaw] += 1
        _log.warning("the %s tier holds an entry that can't be used: %s", self.tier.name, flaw)
        if key is not None and flaw != "locked":  # with another key it may be sound
            self._jobs.put(partial(self.tier.discard, key, flaw))

    # -- calling

    def _timed(self, ask: Callable[[], T]) -> T | None:
        start = time.perf_counter()
        answer = self._call(ask, self._limit)
        self.latency += _SMOOTH * (time.perf_counter() - start - self.latency)
        return answer

    def _call(self, ask: Callable[[], T], limit: float) -> T | None:
        """The tier's answer, or None if it is out of use, or is now."""
        return self._calls([ask], limit)[0]

    def _calls(self, asks: Sequence[Callable[[], T]], limit: float) -> list[T | None]:
        """The same for several at a time."""
        if not self.up:
            return [None] * len(asks)
        end = time.monotonic() + limit
        try:
            pending = [self._pool.apply_async(ask) for ask in asks]
        except ValueError:  # closed meanwhile
            return [None] * len(asks)
        answers: list[T | None] = []
        for each in pending:
            try:
                answers.append(each.get(max(0.0, end - time.monotonic())))
            except _TROUBLE as error:
                self._fail(str(error) or f"no answer within {limit:.2g} s")
                answers.append(None)
        return answers

    def _fail(self, why: str) -> None:
        with self._lock:
            was_up, self._up = self._up, False
            if was_up or time.monotonic() > self._retry:
                self._retry = time.monotonic() + self._rest
                self._rest = min(2 * self._rest, _LONGEST_REST)
        if was_up:
            self._note("outages")
            _log.warning(
                "the %s tier is out of use for now, requests go on without it: %s",
                self.tier.name,
                why,
            )

    def _note(self, what: str, times: int = 1) -> None:
        with self._lock:
            self._count[what] += times

    def _measure(self) -> None:
        """Round trip and speed, with a record that nobody looks for. Raises TierError."""
        body = os.urandom(_PROBE_BYTES)
        key, parent, content = (os.urandom(DIGEST_BYTES) for _ in range(3))
        frame = Frame(False, 0, len(body), key, parent, content, xxh3_128_digest(body))
        record = Record(key, parent, content, close_front(frame, b""), body, 0.0)
        try:
            written = self.tier.write(record)
            start = time.perf_counter()
            self.tier.fronts([key])
            self.latency = time.perf_counter() - start
            if self.latency > self._limit:
                raise TierError(f"an answer takes {self.latency:.2g} s, more than allowed")
            if written:  # else it has no room, or is for reading only
                self._measure_reading(record)
        finally:
            self.tier.discard(key, None)
            self.tier.find([parent, content], 1)  # lets it forget the groups

    def _measure_reading(self, record: Record) -> None:
        start = time.perf_counter()
        data = next(iter(self.tier.read([record.key])))
        if data is None or bytes(data[len(record.front) :]) != record.body:
            raise TierError("what was written can't be read back")
        self.bandwidth = len(data) / (time.perf_counter() - start)

    # -- the background

    def _work(self) -> None:
        while not self._closed:
            try:
                job = self._jobs.get(timeout=0.2)
            except queue.Empty:
                job = self._mend
            if job is None:
                break
            try:
                job()
            except _TROUBLE as error:
                self._fail(str(error))

    def _write(self, entry: Entry, kv: PackedKV, book: Codebook, seconds: float) -> None:
        outcome = "dropped"
        try:
            if self.up:
                written = self.tier.write(book.dump(entry, kv, seconds))
                outcome = "written" if written else "refused"
        finally:
            self._note(outcome)
            with self._lock:
                self._queued -= kv.nbytes
                if self._queued == 0:
                    self._idle.set()

    def _mend(self) -> None:
        """Try a tier that was out of use; measure again one that was too slow. Raises TierError."""
        now = time.monotonic()
        if (not self._up and now > self._retry) or 0 < self._recheck < now:
            self._measure()
            self._recheck, self._up, self._rest = 0.0, True, _REST
