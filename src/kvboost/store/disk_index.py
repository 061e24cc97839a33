"""The connections to a disk tier's index, an SQLite database.

Lookups and changes have one each, so that a lookup never waits for a record being written. A change
holds SQLite's write lock, which is the one lock between processes. A connection belongs to the
process that made the tier: none survives a fork.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kvboost.store.disk_rows import is_damaged, prepare
from kvboost.store.folder import Folder
from kvboost.store.tier import TierError

_PATIENCE = 5.0  # seconds that one process waits for another's change
_GOODBYE = 1.0  # seconds that closing waits for a call


class Index:
    """The database's two connections: made when needed, closed by a failure, then made again.

    Failures become TierError here. A database that is damaged or not ours goes to quarantine.
    """

    def __init__(self, folder: Folder, log_bytes: int) -> None:
        """log_bytes: from which size on the write-ahead log is copied to the database."""
        self._lookups = _Connection(folder, log_bytes)
        self._changes = _Connection(folder, log_bytes)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with self._lookups.transaction("BEGIN") as db:
            yield db

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        with self._changes.transaction("BEGIN IMMEDIATE") as db:
            yield db

    def compact(self) -> None:
        """Make the files as small as can be, and leave nothing in them of what was removed."""
        for statement in ("VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)"):
            with self._changes.transaction(statement):
                pass

    def close(self) -> None:
        self._lookups.end()
        self._changes.end()


class _Connection:
    """Used by one thread at a time."""

    def __init__(self, folder: Folder, log_bytes: int) -> None:
        self._folder, self._log_bytes = folder, log_bytes
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._ended = False

    @contextmanager
    def transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with self._lock, tier_errors(self._folder):
            done = False
            try:
                db = self._opened()
                db.execute(begin)
                yield db
                if db.in_transaction:
                    db.execute("COMMIT")
                done = True
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                if is_damaged(error):
                    self._give_up()
                raise
            finally:
                if not done:
                    self._close()

    def end(self) -> None:
        """A call that hangs keeps its connection: nobody waits for it."""
        self._ended = True
        if self._lock.acquire(timeout=_GOODBYE):
            try:
                self._close()
            finally:
                self._lock.release()

    def _opened(self) -> sqlite3.Connection:
        if self._ended:
            raise TierError("the disk tier is closed")
        if self._db is not None and self._file != self._file_now():
            self._close()  # another process replaced the index, or removed the folder
        if self._db is None:
            try:
                return self._connected()
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                if not is_damaged(error):
                    raise
                self._give_up()
                self._close()
        return self._db or self._connected()

    def _connected(self) -> sqlite3.Connection:
        self._folder.create()
        self._db = sqlite3.connect(
            self._folder.index, _PATIENCE, isolation_level=None, check_same_thread=False
        )
        self._db.text_factory = bytes
        self._file = self._file_now()
        prepare(self._db, self._log_bytes)
        return self._db

    def _file_now(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self._folder.index)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def _give_up(self) -> None:
        """Move the database away, unless another process has done so."""
        index = self._folder.index
        if self._file is not None and self._file == self._file_now():
            for log in ("-wal", "-shm"):
                index.with_name(index.name + log).unlink(missing_ok=True)
            self._folder.quarantine(index, f"index-{time.time_ns()}.sqlite3")

    def _close(self) -> None:
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.rollback()  # a cursor in somebody's traceback would keep the lock
            self._db.close()
            self._db = None


@contextmanager
def tier_errors(folder: Folder) -> Iterator[None]:
    """The border: what the file system or SQLite raises becomes TierError."""
    try:
        yield
    except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
        raise TierError(f"the disk tier in {folder.root} failed: {error}") from error
