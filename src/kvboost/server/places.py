"""The store's places (memory, and the tiers below it) in one shape, for metrics and the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from kvboost.boost import Stats


@dataclass(frozen=True, slots=True)
class Place:
    """What a place holds now and has done since the start. None: this place doesn't count that.

    written, refused, dropped: entries stored; those there was no room for, or that it had already;
    those that couldn't wait to be written. For the rest see `StoreStats` and `TierStats`.
    """

    name: str
    up: bool
    entries: int | None
    bytes: int | None
    max_bytes: int | None
    written: int
    refused: int
    evicted: int | None = None
    hits: int | None = None
    misses: int | None = None
    dropped: int | None = None
    outages: int | None = None
    slow: int | None = None
    latency: float | None = None
    bandwidth: float | None = None
    flaws: Mapping[str, int] = field(default_factory=dict)


def places(stats: Stats) -> list[Place]:
    """Memory first, then the tiers in order of speed."""
    memory = Place(
        name="memory",
        up=True,
        entries=stats.store.entries,
        bytes=stats.store.bytes,
        max_bytes=stats.store.max_bytes,
        written=stats.store.stored,
        refused=stats.store.rejected,
        evicted=stats.store.evicted,
    )
    return [memory, *(Place(**asdict(tier)) for tier in stats.tiers)]
