"""Chunks in this process's memory: the index over them, their KV, and one hard byte budget.

Knows nothing of models, prompts or other tiers. Safe to use from several threads.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass
from itertools import islice

from kvboost.keys import ChunkKey
from kvboost.plan import Entry
from kvboost.store.codec import PackedKV
from kvboost.store.eviction import EvictionPolicy, Worth

CONSIDERED = 64
"""Successors or variants of one key that a lookup looks at, newest first."""

ENTRY_BYTES, TOKEN_BYTES = 3072, 40
"""Charged for each entry and each token id besides tensors: index, eviction's records and ghosts.
Measured: 1.8 to 2.2 KB (and what PyTorch keeps for 2 to 6 tensors), and 36 bytes."""

_PINNABLE = 0.5
"""Share of the budget that may be pinned: the rest must be able to move."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters since the store was made, and what it holds now."""

    entries: int
    tokens: int
    bytes: int
    max_bytes: int
    stored: int
    evicted: int
    rejected: int


class Memory:
    """Stored chunks by lineage, by parent and by content.

    The budget is never exceeded: room is made before a chunk is stored, and a chunk that can't fit
    is not stored. What goes first is the policy's choice.
    """

    def __init__(self, max_bytes: int, policy: EvictionPolicy) -> None:
        self._max_bytes = max_bytes
        self._policy = policy
        self._lock = threading.RLock()
        self._kv: dict[ChunkKey, PackedKV] = {}
        self._entries: dict[ChunkKey, Entry] = {}
        self._cost: dict[ChunkKey, int] = {}
        self._children: defaultdict[ChunkKey, dict[ChunkKey, Entry]] = defaultdict(dict)
        self._variants: defaultdict[ChunkKey, dict[ChunkKey, Entry]] = defaultdict(dict)
        self._pinned: dict[ChunkKey, float] = {}
        self._bytes = self._stored = self._evicted = self._rejected = 0

    # -- plan.Index

    def get(self, key: ChunkKey) -> Entry | None:
        with self._lock:
            return self._entries.get(key)

    def children(self, parent: ChunkKey) -> Iterable[Entry]:
        with self._lock:
            return list(islice(reversed(self._children.get(parent, {}).values()), CONSIDERED))

    def variants(self, content: ChunkKey) -> Iterable[Entry]:
        """Newest first, and so exact ones first: `wants` lets no approximate one follow them."""
        with self._lock:
            return list(islice(reversed(self._variants.get(content, {}).values()), CONSIDERED))

    # -- KV

    def load(self, key: ChunkKey) -> PackedKV | None:
        """The KV, valid as long as the caller holds it, whatever is evicted meanwhile."""
        with self._lock:
            return self._kv.get(key)

    def begin(self) -> None:
        """Another request begins: eviction counts time in requests."""
        with self._lock:
            self._policy.tick()

    def hit(self, key: ChunkKey, share: float) -> None:
        """The chunk was used, and saved `share` of the time that computing it takes."""
        with self._lock:
            if key in self._entries:
                self._policy.hit(key, share)

    def wants(self, entry: Entry) -> bool:
        """Whether `put` would add anything: a chunk that is there already, or KV from approximate
        context where KV from exact context is there, is not stored."""
        with self._lock:
            if entry.key in self._entries:
                return False
            variants = self._variants.get(entry.content, {}).values()
            return entry.exact or not any(e.exact for e in variants)

    def put(self, entry: Entry, kv: PackedKV, seconds: float, spared: Container[ChunkKey]) -> bool:
        """Store a chunk, if it is wanted and fits; whether it is stored now.

        seconds: of prefill that a hit saves. Evicts nothing in `spared`: those who store a chain
        spare what they have stored of it, so that one longer than the budget keeps its beginning.
        """
        cost = kv.nbytes + TOKEN_BYTES * len(entry.ids) + ENTRY_BYTES
        with self._lock:
            if not self.wants(entry):
                return False
            self._drop_outgrown(entry)
            if cost > self._max_bytes or not self._make_room(cost, spared):
                self._rejected += 1
                return False
            self._kv[entry.key] = kv
            self._entries[entry.key] = entry
            self._cost[entry.key] = cost
            self._bytes += cost
            self._stored += 1
            self._policy.add(entry.key, Worth(entry.content, cost, seconds, entry.position))
            self._children[entry.parent][entry.key] = entry
            if entry.position > 0:
                # A prompt's first tokens are its attention sink; elsewhere they would be a second.
                self._variants[entry.content][entry.key] = entry
            return True

    def pin(self, keys: Collection[ChunkKey], seconds: float) -> bool:
        """Evict none of these for so many seconds. False, and none is pinned, if one is not here or
        that would pin more than half of the budget."""
        with self._lock:
            now = time.monotonic()
            self._pinned = {k: t for k, t in self._pinned.items() if t > now and k in self._cost}
            pins = dict.fromkeys(keys, now + seconds)
            if not pins.keys() <= self._cost.keys():
                return False
            if sum(self._cost[k] for k in {*pins, *self._pinned}) > _PINNABLE * self._max_bytes:
                return False
            self._pinned |= pins
            return True

    def _make_room(self, cost: int, spared: Container[ChunkKey]) -> bool:
        keep = _Either(spared, self._pinned)
        while self._bytes + cost > self._max_bytes:
            victim = self._policy.victim(keep)
            if victim is None:
                return False
            self._forget(victim, evicted=True)
            self._evicted += 1
        return True

    def _drop_outgrown(self, entry: Entry) -> None:
        """The end of a chat's last turn, cut short where the prompt ended, is now stored longer."""
        for old in list(self._children.get(entry.parent, {}).values()):
            n = len(old.ids)
            shorter = n < len(entry.ids) and entry.ids[:n] == old.ids
            if shorter and old.exact == entry.exact and not self._children.get(old.key):
                self._forget(old.key)

    def _forget(self, key: ChunkKey, *, evicted: bool = False) -> None:
        entry = self._entries.pop(key)
        self._bytes -= self._cost.pop(key)
        self._kv.pop(key)
        self._policy.remove(key, evicted=evicted)
        for table, under in ((self._children, entry.parent), (self._variants, entry.content)):
            table[under].pop(key, None)
            if not table[under]:
                del table[under]

    def clear(self) -> None:
        """Forget everything, pins too."""
        with self._lock:
            for key in list(self._entries):
                self._forget(key)
            self._pinned.clear()

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                entries=len(self._entries),
                tokens=sum(len(e.ids) for e in self._entries.values()),
                bytes=self._bytes,
                max_bytes=self._max_bytes,
                stored=self._stored,
                evicted=self._evicted,
                rejected=self._rejected,
            )


class _Either:
    """What a request needs, and what is pinned and not yet due."""

    def __init__(self, spared: Container[ChunkKey], pinned: dict[ChunkKey, float]) -> None:
        self._spared, self._pinned, self._now = spared, pinned, time.monotonic()

    def __contains__(self, key: object) -> bool:
        if key in self._spared:
            return True
        return isinstance(key, ChunkKey) and self._pinned.get(key, 0.0) > self._now
