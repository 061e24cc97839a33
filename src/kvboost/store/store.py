"""The index over stored chunks, and one hard byte budget.

Knows nothing of models or prompts. Safe to use from several threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvboost.keys import ChunkKey
from kvboost.plan import Entry, ReusePlan
from kvboost.store.codec import PackedKV
from kvboost.store.tier import Tier

_CONSIDERED = 64
"""Successors or variants of one key that a lookup looks at, newest first."""

_ENTRY_BYTES = 1024
"""Index overhead charged per entry, besides 8 bytes per token id (measured: about 900)."""


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
    lost: int


class ChunkStore:
    """Stored chunks by lineage, by parent and by content.

    The budget is never exceeded: room is made before a chunk is stored, and a chunk that can't fit
    is not stored. Of chunks that no other one follows, the least recently used goes first: a chain
    is lost from its end, and a chain that is longer than the budget keeps its beginning.
    """

    def __init__(self, tier: Tier, max_bytes: int) -> None:
        self._tier = tier
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self._entries: OrderedDict[ChunkKey, Entry] = OrderedDict()  # least recently used first
        self._cost: dict[ChunkKey, int] = {}
        self._children: defaultdict[ChunkKey, dict[ChunkKey, Entry]] = defaultdict(dict)
        self._variants: defaultdict[ChunkKey, dict[ChunkKey, Entry]] = defaultdict(dict)
        self._bytes = self._stored = self._evicted = self._rejected = self._lost = 0

    # -- plan.Index

    def get(self, key: ChunkKey) -> Entry | None:
        with self._lock:
            return self._entries.get(key)

    def children(self, parent: ChunkKey) -> Iterable[Entry]:
        with self._lock:
            return list(islice(reversed(self._children.get(parent, {}).values()), _CONSIDERED))

    def variants(self, content: ChunkKey) -> Iterable[Entry]:
        """Newest first, and so exact ones first: `wants` lets no approximate one follow them."""
        with self._lock:
            return list(islice(reversed(self._variants.get(content, {}).values()), _CONSIDERED))

    # -- tensors

    def fetch(self, plan: ReusePlan) -> list[list[PackedKV]] | None:
        """The KV of every piece of every splice, and mark them used. The caller's references keep
        them alive, whatever is evicted meanwhile.

        None if one is gone: it is forgotten, and a new plan won't name it.
        """
        with self._lock:
            found = []
            for splice in plan.splices:
                kvs = [self._load(piece.entry.key) for piece in splice.pieces]
                found.append([kv for kv in kvs if kv is not None])
                if len(found[-1]) < len(kvs):
                    return None
            for splice in plan.splices:
                self.touch([piece.entry.key for piece in splice.pieces])
            return found

    def _load(self, key: ChunkKey) -> PackedKV | None:
        kv = self._tier.load(key)
        if kv is None and key in self._entries:
            self._forget(key)
            self._lost += 1
        return kv

    def touch(self, chain: Sequence[ChunkKey]) -> None:
        """Mark a chain (root first) used."""
        with self._lock:
            for key in reversed(chain):
                if key in self._entries:
                    self._entries.move_to_end(key)

    def wants(self, entry: Entry) -> bool:
        """Whether `put` would add anything: a chunk that is there already, or KV from approximate
        context where KV from exact context is there, is not stored."""
        with self._lock:
            if entry.key in self._entries:
                return False
            variants = self._variants.get(entry.content, {}).values()
            return entry.exact or not any(e.exact for e in variants)

    def put(self, entry: Entry, kv: PackedKV) -> None:
        """Store a chunk, if it is wanted and fits."""
        cost = kv.nbytes + 8 * len(entry.ids) + _ENTRY_BYTES
        with self._lock:
            if not self.wants(entry):
                return
            orphan = entry.exact and entry.position > 0 and entry.parent not in self._entries
            if orphan or cost > self._max_bytes:
                self._rejected += 1
                return
            self._drop_outgrown(entry)
            while self._bytes + cost > self._max_bytes:
                victim = self._victim(entry.parent)
                if victim is None:
                    self._rejected += 1
                    return
                self._forget(victim)
                self._evicted += 1
            self._tier.save(entry.key, kv)
            self._entries[entry.key] = entry
            self._cost[entry.key] = cost
            self._bytes += cost
            self._stored += 1
            self._children[entry.parent][entry.key] = entry
            if entry.position > 0:
                # A prompt's first tokens are its attention sink; elsewhere they would be a second.
                self._variants[entry.content][entry.key] = entry

    def _victim(self, parent: ChunkKey) -> ChunkKey | None:
        """The chunk to evict for one that follows `parent`."""
        ends = (key for key in self._entries if key != parent and not self._children.get(key))
        return next(ends, None)

    def _drop_outgrown(self, entry: Entry) -> None:
        """The end of a chat's last turn, cut short where the prompt ended, is now stored longer."""
        for old in list(self._children.get(entry.parent, {}).values()):
            n = len(old.ids)
            shorter = n < len(entry.ids) and entry.ids[:n] == old.ids
            if shorter and old.exact == entry.exact and not self._children.get(old.key):
                self._forget(old.key)

    def _forget(self, key: ChunkKey) -> None:
        entry = self._entries.pop(key)
        self._bytes -= self._cost.pop(key)
        self._tier.drop(key)
        for table, under in ((self._children, entry.parent), (self._variants, entry.content)):
            table[under].pop(key, None)
            if not table[under]:
                del table[under]

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            for key in list(self._entries):
                self._forget(key)

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
                lost=self._lost,
            )
