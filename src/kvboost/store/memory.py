"""The RAM tier. Also the double for tests of anything that takes a Tier."""

from __future__ import annotations

from kvboost.keys import ChunkKey
from kvboost.store.codec import PackedKV


class MemoryTier:
    """Keeps KV in this process, as it is. Dropping frees it once no request holds it."""

    def __init__(self) -> None:
        self._kv: dict[ChunkKey, PackedKV] = {}

    def load(self, key: ChunkKey) -> PackedKV | None:
        return self._kv.get(key)

    def save(self, key: ChunkKey, kv: PackedKV) -> None:
        self._kv[key] = kv

    def drop(self, key: ChunkKey) -> None:
        self._kv.pop(key, None)
