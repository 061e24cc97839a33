"""What a place that keeps ChunkKV must do."""

from __future__ import annotations

from typing import Protocol

from kvboost.keys import ChunkKey
from kvboost.kv import ChunkKV


class Tier(Protocol):
    """Keeps KV by key. Decides nothing: budgets and eviction are the store's."""

    def load(self, key: ChunkKey) -> ChunkKV | None:
        """The KV, valid as long as the caller holds it, or None: a miss is never an error."""
        ...

    def save(self, key: ChunkKey, kv: ChunkKV) -> None: ...

    def drop(self, key: ChunkKey) -> None:
        """Forget it; unknown keys are fine."""
        ...
