"""Where KV lives between requests."""

from kvboost.store.codec import PackedKV, encode, place_run
from kvboost.store.entry import Codebook, Seal
from kvboost.store.memory import Memory, StoreStats
from kvboost.store.shelf import Shelf, TierStats
from kvboost.store.store import ChunkStore, Lookup
from kvboost.store.tier import MemoryTier, Record, Tier, TierError, TierUsage

__all__ = [
    "ChunkStore",
    "Codebook",
    "Lookup",
    "Memory",
    "MemoryTier",
    "PackedKV",
    "Record",
    "Seal",
    "Shelf",
    "StoreStats",
    "Tier",
    "TierError",
    "TierStats",
    "TierUsage",
    "encode",
    "place_run",
]
