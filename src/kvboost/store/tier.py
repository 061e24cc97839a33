"""What a place that keeps PackedKV must do."""

from __future__ import annotations

from typing import Protocol

from kvboost.keys import ChunkKey
from kvboost.store.codec import PackedKV


class Tier(Protocol):
    """Keeps KV by key. Decides nothing: budgets and eviction are the store's."""

    def load(self, key: ChunkKey) -> PackedKV | None:
        """The KV, valid as long as the caller holds it, or None: a miss is never an error."""
        ...

    def save(self, key: ChunkKey, kv: PackedKV) -> None: ...

    def drop(self, key: ChunkKey) -> None:
        """Forget it; unknown keys are fine."""
        ...
