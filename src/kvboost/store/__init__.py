"""Where KV lives between requests."""

from kvboost.store.memory import MemoryTier
from kvboost.store.store import ChunkStore, StoreStats
from kvboost.store.tier import Tier

__all__ = ["ChunkStore", "MemoryTier", "StoreStats", "Tier"]
