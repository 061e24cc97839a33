"""Where KV lives between requests."""

from kvboost.store.codec import PackedKV, encode, place_run
from kvboost.store.memory import MemoryTier
from kvboost.store.store import ChunkStore, StoreStats
from kvboost.store.tier import Tier

__all__ = [
    "ChunkStore",
    "MemoryTier",
    "PackedKV",
    "StoreStats",
    "Tier",
    "encode",
    "place_run",
]
