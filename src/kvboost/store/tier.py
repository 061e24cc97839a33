"""What a place outside this process's memory that keeps stored chunks must do.

A tier keeps bytes and finds them again. It knows nothing of tensors, models or prompts, and trusts
nobody: what it gives back is checked by whoever asked (`entry.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvboost.errors import KVBoostError

Data = bytes | bytearray | memoryview
"""A record as it comes back."""


class TierError(KVBoostError):
    """A tier's folder or server can't be used just now: full, gone, refused, too slow."""


@dataclass(frozen=True, slots=True)
class Record:
    """One stored chunk as bytes: `front` (small, all that a lookup needs) and `body` (tensors).

    key: its digest. parent: digest of the chunk before it. content: digest of its tokens. seconds:
    of prefill that one hit saves, for eviction.
    """

    key: bytes
    parent: bytes
    content: bytes
    front: bytes
    body: bytes
    seconds: float

    @property
    def nbytes(self) -> int:
        return len(self.front) + len(self.body)


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What a tier holds. None: not known to us (the server counts and limits for itself)."""

    entries: int | None
    bytes: int | None
    max_bytes: int | None


class Tier(Protocol):
    """Keeps records by key. All methods may be called from several threads.

    Each raises TierError, and nothing else, if its folder or server fails; a record that is not
    there, or no longer, is never an error. Opening one raises ConfigError for what the user can
    correct (a bad path or URL, a missing password).
    """

    @property
    def name(self) -> str:
        """Short, for messages and statistics: "disk", "valkey", "s3"."""

    def find(self, groups: Sequence[bytes], limit: int) -> list[list[bytes]]:
        """For each digest, the fronts of at most `limit` records that have it as their parent or
        as their content, newest first."""

    def fronts(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The fronts of these records, None for what is not there."""

    def read(self, keys: Sequence[bytes]) -> Iterator[Data | None]:
        """Front and body of each record in one piece, in this order, as they arrive. What can be
        written to becomes the caller's memory; bytes are copied."""

    def write(self, record: Record) -> bool:
        """Keep it, whole or not at all; False if it is there already or there is no room."""

    def used(self, keys: Sequence[bytes]) -> None:
        """These were hits: tell whoever evicts."""

    def discard(self, key: bytes, flaw: str | None) -> None:
        """Take a record out of use for everyone: unusable, and why, or (None) just not wanted."""

    def usage(self) -> TierUsage: ...

    def close(self) -> None: ...


class MemoryTier:
    """Keeps records in this process, without a limit: the double for tests of what takes a Tier."""

    name = "memory"

    def __init__(self) -> None:
        self.records: dict[bytes, Record] = {}
        self.discarded: dict[bytes, str] = {}

    def find(self, groups: Sequence[bytes], limit: int) -> list[list[bytes]]:
        newest = list(reversed(self.records.values()))
        return [
            [r.front for r in newest if group in (r.parent, r.content)][:limit] for group in groups
        ]

    def fronts(self, keys: Sequence[bytes]) -> list[bytes | None]:
        found = [self.records.get(key) for key in keys]
        return [record.front if record else None for record in found]

    def read(self, keys: Sequence[bytes]) -> Iterator[Data | None]:
        for key in keys:
            record = self.records.get(key)
            yield record.front + record.body if record else None

    def write(self, record: Record) -> bool:
        kept = replace(record)
        return self.records.setdefault(record.key, kept) is kept

    def used(self, keys: Sequence[bytes]) -> None: ...

    def discard(self, key: bytes, flaw: str | None) -> None:
        if self.records.pop(key, None) and flaw:
            self.discarded[key] = flaw

    def usage(self) -> TierUsage:
        records = list(self.records.values())
        return TierUsage(len(records), sum(r.nbytes for r in records), None)

    def close(self) -> None: ...
