"""Makes the store that a configuration asks for.

Tiers whose libraries are optional are imported when one is asked for.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from kvboost.config import Config
from kvboost.errors import ConfigError
from kvboost.store.disk import DiskTier
from kvboost.store.entry import Seal
from kvboost.store.eviction import eviction_policy
from kvboost.store.memory import Memory
from kvboost.store.shelf import Shelf
from kvboost.store.store import ChunkStore
from kvboost.store.tier import Tier

_DISK_LIMIT = 0.5
"""Seconds that a disk may take to look something up."""

_QUEUED = 8
"""Of the memory budget, one part in so many is for what each tier has yet to write."""

_LEAST = 64 << 20
"""Smallest memory with tiers below it: a queue must hold some chunks of a large model."""

_SERVERS = ("redis", "rediss", "valkey", "valkeys")


def open_store(config: Config) -> ChunkStore:
    """Memory and the tiers below it. Raises ConfigError for what the user can correct."""
    tiers: list[tuple[Tier, float]] = []
    if config.remote is not None:
        tiers.append((_remote(config, config.remote), config.remote_timeout))
    if config.disk is not None:  # asked first
        tiers.insert(0, (DiskTier(Path(config.disk), config.disk_bytes), _DISK_LIMIT))
    if tiers and config.max_bytes < _LEAST:
        raise ConfigError(
            f"max_bytes must be at least {_LEAST:,} with disk= or remote=, for what is to be "
            f"written waits in memory; it is {config.max_bytes:,}"
        )
    queue = config.max_bytes // _QUEUED
    budget = config.max_bytes - queue * len(tiers)
    memory = Memory(budget, eviction_policy(config.eviction))
    return ChunkStore(memory, [Shelf(tier, limit, queue) for tier, limit in tiers])


def open_seal() -> Seal | None:
    """What encrypts entries that leave this process, if $KVBOOST_CACHE_KEY is set."""
    secret = os.environ.get("KVBOOST_CACHE_KEY")
    if secret is None:
        return None
    return cast(Seal, _optional("seal", "encryption").AESSeal(secret))


def _remote(config: Config, url: str) -> Tier:
    if urlsplit(url).scheme in _SERVERS:
        kind = _optional("redis", "redis").RedisTier
        return cast(Tier, kind(url, config.remote_timeout, config.remote_ttl))
    return cast(Tier, _optional("objects", "objects").ObjectTier(url))


def _optional(module: str, extra: str) -> Any:
    try:
        return import_module(f"kvboost.store.{module}")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"this needs the package {error.name!r}: pip install 'kvboost[{extra}]'"
        ) from error
