"""The disk tier: a folder with a file for each record, an index, and a hard limit of bytes.

Several processes may use one folder. What is on disk never exceeds the limit: records in whole
blocks, folders, index, its log and the quarantine. Room is made before a record is written, also
where the disk has less left than the limit. Killing a process at any moment loses at most the
record it was writing. Nothing is synced: after a power loss a record may be torn, which whoever
reads it sees by its checksums and reports (`discard`); a torn index is put away, and a new one made
from the files.

What goes first is worth least: seconds of prefill saved * times used / bytes, plus the priority of
the last one that went (GreedyDual-Size-Frequency), so that what was popular once grows old. A
record never goes before those that follow it: a chain is lost from its end.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvboost.errors import ConfigError
from kvboost.store import disk_rows as rows
from kvboost.store.disk_index import Index, tier_errors
from kvboost.store.folder import BLOCK, FAN_OUT, FORMAT, Folder, charge
from kvboost.store.frame import outline
from kvboost.store.tier import Record, TierError, TierUsage

MIN_BYTES = 32 << 20
"""A smaller limit is refused: index and folders alone may take a good part of it."""

_LEAST_LOG, _MOST_LOG = 2 << 20, 16 << 20  # bytes; a longer log is seldom waited for
_NAME_BYTES = 160  # of a file's name in its folder; a folder never shrinks
_ROW_LOG = 5 * BLOCK  # bytes in the log that a change of one row takes
_AHEAD = 4  # records that the kernel reads while one is taken: 1.4 to 2 times faster from an SSD
_DENSITY = 5e-8  # seconds a byte saves, where nobody knows


class DiskTier:
    """Keeps records in a folder of a local disk. Made before a fork, it is no use after it."""

    name = "disk"

    def __init__(self, path: Path, max_bytes: int) -> None:
        if type(max_bytes) is not int or max_bytes < MIN_BYTES:
            raise ConfigError(
                f"the disk tier needs at least {MIN_BYTES:,} bytes, not {max_bytes!r}; "
                "give it more, or none"
            )
        self._max_bytes = max_bytes
        self.max_record_bytes = max_bytes // 4
        self.folder = Folder(Path(path).absolute(), max_bytes // 16)
        self._log_bytes = min(max(max_bytes // 256, _LEAST_LOG), _MOST_LOG)
        self._changes = self._log_bytes // _ROW_LOG
        self.index = Index(self.folder, self._log_bytes)
        try:
            self._begin()
        except (TierError, ValueError) as error:  # ValueError: no path at all
            self.close()
            raise ConfigError(
                f"{error}; choose a folder on a local disk that you may write to, with some space"
            ) from error

    def _begin(self) -> None:
        with tier_errors(self.folder):
            self.folder.create()
            written = self.folder.format()
        if written != FORMAT:
            raise ConfigError(
                f"{self.folder.root} holds {written!r}, and this KVBoost writes {FORMAT!r}: "
                "choose another folder, or remove this one"
            )
        try:
            self.sweep()
        except TierError:  # a damaged index has been put away, or the second try tells the same
            self.sweep()

    # -- the Tier protocol

    def find(self, groups: Sequence[bytes], limit: int) -> list[list[bytes]]:
        with self.index.reading() as db:
            return rows.find(db, groups, limit)

    def fronts(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with self.index.reading() as db:
            return rows.fronts(db, keys)

    def read(self, keys: Sequence[bytes]) -> Iterator[memoryview | None]:
        for at, key in enumerate(keys):
            with tier_errors(self.folder):
                for soon in keys[at and at + _AHEAD : at + _AHEAD + 1]:
                    self.folder.expect(soon)
                data = self.folder.read(key)
            if data is None:
                self._forget(key)
            yield data

    def _forget(self, key: bytes) -> None:
        """A record has no file: if it has a row, that is wrong."""
        with self.index.reading() as db:
            if not rows.has(db, key):
                return
        with self.index.writing() as db:
            if not self.folder.has(key):
                rows.remove(db, key)

    def write(self, record: Record) -> bool:
        if record.nbytes > self.max_record_bytes:
            return False
        with self.index.reading() as db:
            if rows.has(db, record.key):
                return False
            swept = rows.totals(db).swept
        if not swept:  # another process lost the index
            self.sweep()
        stored = None
        while stored is None:
            with self.index.writing() as db:
                stored = self._attempt(db, record)
        return stored

    def _attempt(self, db: sqlite3.Connection, record: Record) -> bool | None:
        """Store a record, or make room for it; None if that is not done yet."""
        if rows.has(db, record.key):
            return False
        nbytes, held = charge(record.nbytes), rows.totals(db).bytes
        free = self.folder.free() - 2 * self._log_bytes
        room = min(self._room(db), held + free) - nbytes - 2 * len(record.front)
        if held > room:
            rows.protect(db, record.parent, record.seconds, nbytes)
            return None if self._evict(db, room, record.parent) else False
        self.folder.write(record.key, record.front, record.body)
        try:
            rows.insert(db, record, nbytes, time.time())
            db.execute("COMMIT")
        except BaseException:
            self.folder.remove(record.key)
            raise
        return True

    def used(self, keys: Sequence[bytes]) -> None:
        for at in range(0, len(keys), self._changes):
            with self.index.writing() as db:
                rows.used(db, keys[at : at + self._changes], time.time())

    def discard(self, key: bytes, flaw: str | None) -> None:
        with self.index.writing() as db:
            rows.remove(db, key)
            if flaw is None:
                self.folder.remove(key)
                return
            label = re.sub(r"[^a-z0-9]+", "-", flaw.lower())[:40]
            self.folder.quarantine(self.folder.path(key), f"{label}-{key.hex()}.kv")
            rows.set_quarantined(db, self.folder.quarantined())

    def usage(self) -> TierUsage:
        with self.index.reading() as db:
            totals, index = rows.totals(db), rows.size(db)
        with tier_errors(self.folder):
            index += self.folder.log_bytes()
        return TierUsage(totals.entries, totals.bytes + totals.quarantined + index, self._max_bytes)

    def close(self) -> None:
        self.index.close()

    # -- the budget

    def _room(self, db: sqlite3.Connection) -> int:
        """Bytes that records may take: the limit without what else is on disk, or may soon be."""
        totals = rows.totals(db)
        log = max(2 * self._log_bytes, self.folder.log_bytes()) + 2 * self._log_bytes
        index = rows.size(db) * 5 // 4 + log
        folders = FAN_OUT * BLOCK + totals.peak * _NAME_BYTES
        return self._max_bytes - index - folders - totals.quarantined

    def _evict(self, db: sqlite3.Connection, room: int, spared: bytes = b"") -> bool:
        """Evict until records take no more than `room`, or enough has changed for one transaction.
        False if nothing can be done."""
        before = db.total_changes
        while rows.totals(db).bytes > room and db.total_changes - before < self._changes:
            path = rows.cheapest(db, spared)
            if path and rows.lift(db, path):
                continue
            if not path or path[-1].key == spared:
                break
            self.folder.remove(path[-1].key)
            rows.remove(db, path[-1].key)
            rows.grow_old(db, path[-1].priority)
        return rows.shrink(db) or db.total_changes > before

    # -- files and index agree

    def sweep(self) -> None:
        """Remove what killed processes left, forget records without a file, and take files that
        the index doesn't know into it."""
        with self.index.writing() as db:
            self.folder.probe()
            self.folder.clean()
            stored, known = set(self.folder.stored()), rows.keys(db)
            for key in known - stored:
                rows.remove(db, key)
        unknown = sorted(stored - known, key=lambda key: self.folder.status(key)[1])
        for at in range(0, len(unknown), self._changes):
            with self.index.writing() as db:
                for key in unknown[at : at + self._changes]:
                    self._adopt(db, key)
        with self.index.writing() as db:
            rows.set_quarantined(db, self.folder.quarantined())
            rows.set_swept(db)
        self._trim()

    def _adopt(self, db: sqlite3.Connection, key: bytes) -> None:
        """Take a file into the index; remove it if it is no record, or not the one in its name."""
        if rows.has(db, key):
            return
        head = self.folder.head(key)
        size, written = self.folder.status(key)
        record = recognise(key, head, size)
        if record is None:
            self.folder.remove(key)
        else:
            rows.insert(db, record, charge(size), written)

    def _trim(self) -> None:
        """Evict what is over the limit, which may have been higher when it was stored."""
        busy = True
        while busy:
            with self.index.writing() as db:
                room = self._room(db)
                busy = rows.totals(db).bytes > room and self._evict(db, room)


def recognise(key: bytes, data: bytes, size: int) -> Record | None:
    """The record that these bytes of a file of `size` begin with; None if it is not `key`'s."""
    frame = outline(data)
    if frame is None or frame.key != key:
        return None
    front, body = data[: frame.front], data[frame.front :]
    return Record(key, frame.parent, frame.content, front, body, size * _DENSITY)
