"""The rows of a disk tier's index: which records there are, and what they are worth.

Plain functions on an open SQLite database; those that change it want a transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from kvboost.store.folder import BLOCK
from kvboost.store.tier import Record

_BATCH = 250  # digests in one statement
_OURS = 0x4B564231  # the format of the tables: raise it and an older index is built anew
_MAX_HITS = 15  # more don't count: what was popular once must go one day

_DAMAGE = {
    *(sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_READONLY),
    *(sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH),
}
"""What SQLite says of a damaged database; the last ones of a damaged description of its tables."""

_TOTALS = """
CREATE TABLE totals (
    entries INTEGER NOT NULL, bytes INTEGER NOT NULL, peak INTEGER NOT NULL,
    quarantined INTEGER NOT NULL, age REAL NOT NULL, swept INTEGER NOT NULL
);
INSERT INTO totals VALUES (0, 0, 0, 0, 0, 0);
"""

_ENTRIES = """
CREATE TABLE entry (
    id INTEGER PRIMARY KEY,  -- in the order of writing
    key BLOB NOT NULL UNIQUE, parent BLOB NOT NULL, content BLOB NOT NULL,
    bytes INTEGER NOT NULL,  -- on disk
    seconds REAL NOT NULL, priority REAL NOT NULL, hits INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL, used REAL NOT NULL, front BLOB NOT NULL
);
CREATE INDEX entry_parent ON entry (parent);
CREATE INDEX entry_content ON entry (content);
CREATE INDEX entry_priority ON entry (priority, id DESC);
CREATE TRIGGER entry_stored AFTER INSERT ON entry BEGIN
    UPDATE totals SET entries = entries + 1, bytes = bytes + new.bytes,
        peak = max(peak, entries + 1);
END;
CREATE TRIGGER entry_removed AFTER DELETE ON entry BEGIN
    UPDATE totals SET entries = entries - 1, bytes = bytes - old.bytes;
END;
"""

# The newest record that follows each, down to the end of the chain.
_PATH = """
WITH RECURSIVE path (depth, id, key, priority) AS (
    SELECT 0, id, key, priority FROM entry WHERE id = ?
    UNION ALL
    SELECT path.depth + 1, next.id, next.key, next.priority FROM path
    JOIN entry AS next ON next.id = (SELECT max(id) FROM entry WHERE parent = path.key)
    WHERE path.depth < 4096
)
SELECT id, CAST(key AS BLOB), coalesce(CAST(priority AS REAL), 0.0) FROM path
"""


class Totals(NamedTuple):
    """peak: most entries there ever were. quarantined: bytes. age: priority of the last victim.
    swept: whether the files have been compared with this index since it was made."""

    entries: int
    bytes: int
    peak: int
    quarantined: int
    age: float
    swept: int


class Row(NamedTuple):
    """What the index knows of a record. bytes: on disk. created, last_used: seconds since 1970."""

    id: int
    key: bytes
    parent: bytes
    content: bytes
    bytes: int
    created: float
    last_used: float
    hits: int


class Step(NamedTuple):
    """A record of a chain."""

    id: int
    key: bytes
    priority: float


def is_damaged(error: sqlite3.DatabaseError | UnicodeDecodeError) -> bool:
    """Whether a new database would help. UnicodeDecodeError: the message quotes what is damaged."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)
    return isinstance(error, UnicodeDecodeError) or code & 0xFF in _DAMAGE


def _damaged(how: str) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(f"the index is {how}")
    error.sqlite_errorcode = sqlite3.SQLITE_NOTADB
    return error


def prepare(db: sqlite3.Connection, log_bytes: int) -> None:
    """Set up a connection that was just made, and a new database's tables."""
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("PRAGMA secure_delete = FAST")  # fronts hold what a prompt says
    db.execute(f"PRAGMA wal_autocheckpoint = {log_bytes // BLOCK}")
    db.execute(f"PRAGMA journal_size_limit = {log_bytes}")
    if _format(db) == _OURS:
        return
    db.execute(f"PRAGMA page_size = {BLOCK}")
    db.execute("PRAGMA auto_vacuum = INCREMENTAL")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("BEGIN IMMEDIATE")
    if _format(db) == 0 and not _one(db, "SELECT count(*) FROM sqlite_master"):
        _run(db, _TOTALS + _ENTRIES)
        db.execute(f"PRAGMA application_id = {_OURS}")
    db.execute("COMMIT")
    if _format(db) != _OURS:
        raise _damaged("not ours")


def _run(db: sqlite3.Connection, script: str) -> None:
    """Like executescript, which would end the transaction first."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            db.execute(statement)
            statement = ""


def _format(db: sqlite3.Connection) -> int:
    return _one(db, "PRAGMA application_id")


def _one(db: sqlite3.Connection, query: str) -> int:
    return int(db.execute(query).fetchone()[0])


# -- what is asked. CAST: a damaged database may hold values of any type.


def find(db: sqlite3.Connection, groups: Sequence[bytes], limit: int) -> list[list[bytes]]:
    """The fronts of each group's records, newest first."""
    query = (
        "SELECT CAST(front AS BLOB) FROM entry WHERE id IN ("
        "SELECT id FROM (SELECT id FROM entry WHERE parent = ?1 ORDER BY id DESC LIMIT ?2) UNION "
        "SELECT id FROM (SELECT id FROM entry WHERE content = ?1 ORDER BY id DESC LIMIT ?2)"
        ") ORDER BY id DESC LIMIT ?2"
    )
    return [[front or b"" for (front,) in db.execute(query, (group, limit))] for group in groups]


def fronts(db: sqlite3.Connection, keys: Sequence[bytes]) -> list[bytes | None]:
    found: dict[bytes, bytes] = {}
    for at in range(0, len(keys), _BATCH):
        some = keys[at : at + _BATCH]
        marks = ",".join("?" * len(some))
        query = f"SELECT key, CAST(front AS BLOB) FROM entry WHERE key IN ({marks})"
        found.update(db.execute(query, some))
    return [found.get(key) for key in keys]


def has(db: sqlite3.Connection, key: bytes) -> bool:
    return db.execute("SELECT 1 FROM entry WHERE key = ?", (key,)).fetchone() is not None


def keys(db: sqlite3.Connection) -> set[bytes]:
    return {key for (key,) in db.execute("SELECT CAST(key AS BLOB) FROM entry")}


def rows(db: sqlite3.Connection, after: int, count: int) -> list[Row]:
    query = (
        "SELECT id, CAST(key AS BLOB), CAST(parent AS BLOB), CAST(content AS BLOB),"
        " CAST(bytes AS INTEGER), CAST(created AS REAL), CAST(used AS REAL), CAST(hits AS INTEGER)"
        " FROM entry WHERE id > ? ORDER BY id LIMIT ?"
    )
    return [Row(*row) for row in db.execute(query, (after, count))]


def totals(db: sqlite3.Connection) -> Totals:
    row = db.execute("SELECT * FROM totals").fetchone()
    if row is None or not all(isinstance(value, int | float) for value in row):
        raise _damaged("damaged")
    return Totals(*row)


def size(db: sqlite3.Connection) -> int:
    """Bytes of the database, the part included that is still in the log."""
    return _one(db, "PRAGMA page_count") * BLOCK


# -- what is changed


def insert(db: sqlite3.Connection, record: Record, nbytes: int, created: float) -> None:
    """Add a record that is not there."""
    db.execute(
        "INSERT INTO entry (key, parent, content, bytes, seconds, priority, created, used, front)"
        " SELECT ?1, ?2, ?3, ?4, ?5, age + ?5 / ?4, ?6, ?6, ?7 FROM totals",
        (
            *(record.key, record.parent, record.content, nbytes),
            *(_sane(record.seconds), created, record.front),
        ),
    )


def remove(db: sqlite3.Connection, key: bytes) -> None:
    db.execute("DELETE FROM entry WHERE key = ?", (key,))


def used(db: sqlite3.Connection, keys: Sequence[bytes], now: float) -> None:
    db.executemany(
        "UPDATE entry SET hits = hits + 1, used = ?1, priority = max(priority,"
        f" (SELECT age FROM totals) + seconds / bytes * (2 + min(hits, {_MAX_HITS - 1})))"
        " WHERE key = ?2",
        [(now, key) for key in keys],
    )


def protect(db: sqlite3.Connection, parent: bytes, seconds: float, nbytes: int) -> None:
    """Let the parent of a record that is about to be written be worth more than that will be."""
    db.execute(
        "UPDATE entry SET priority = max(priority, (SELECT age FROM totals) + ?) WHERE key = ?",
        (1.001 * _sane(seconds) / nbytes + 1e-12, parent),
    )


def cheapest(db: sqlite3.Connection, spared: bytes) -> list[Step]:
    """The record that is worth least, `spared` apart, and the newest ones that follow it."""
    query = "SELECT id FROM entry WHERE key != ? ORDER BY priority, id DESC LIMIT 1"
    first = db.execute(query, (spared,)).fetchone()
    return [Step(*row) for row in db.execute(_PATH, first)] if first else []


def lift(db: sqlite3.Connection, path: Sequence[Step]) -> bool:
    """Make records worth as much as those that follow them, which are of less use alone. False if
    they are already.

    Seen to when one would be evicted, not whenever one is used: most are never looked at.
    """
    top = max(step.priority for step in path)
    lower = [(top, step.id) for step in path if step.priority < top]
    db.executemany("UPDATE entry SET priority = ? WHERE id = ?", lower[:_BATCH])
    return bool(lower)


def grow_old(db: sqlite3.Connection, priority: float) -> None:
    """A record of this priority was evicted: what is written or used from now on is worth more."""
    db.execute("UPDATE totals SET age = max(age, ?)", (priority,))


def set_quarantined(db: sqlite3.Connection, nbytes: int) -> None:
    db.execute("UPDATE totals SET quarantined = ?", (nbytes,))


def set_swept(db: sqlite3.Connection) -> None:
    db.execute("UPDATE totals SET swept = 1")


def clear(db: sqlite3.Connection) -> None:
    db.execute("DROP TABLE entry")
    _run(db, _ENTRIES)
    db.execute("UPDATE totals SET entries = 0, bytes = 0")


def shrink(db: sqlite3.Connection, spare: float = 0.25) -> bool:
    """Give a few pages back to the file system if more than `spare` of them are empty."""
    if _one(db, "PRAGMA freelist_count") <= spare * max(256, _one(db, "PRAGMA page_count")):
        return False
    for _ in range(64):
        db.execute("PRAGMA incremental_vacuum")  # one page, in Python
    return True


def _sane(seconds: float) -> float:
    """A time that can be calculated with, whatever was measured."""
    return min(max(0.0, seconds), 1e6)
