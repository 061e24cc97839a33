"""What a user can set when making a KVBoost. Imports nothing of ours but errors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import inf
from os import PathLike
from typing import Literal, cast, get_args

from kvboost.errors import ConfigError

KVFormat = Literal["raw", "k8v8", "k8v4", "k4v4"]
Eviction = Literal["value", "lru", "gdsf"]


@dataclass(frozen=True, slots=True)
class Config:
    """What KVBoost's constructor takes.

    namespace: nothing is found across namespaces.
    max_bytes: hard limit of stored KV in memory, index and what waits to be written included.
    chunk_tokens: mean chunk length that content-defined boundaries aim at.
    kv_format: how KV is kept: "raw" as the model made it, or quantised: "k8v8", "k8v4", "k4v4", in
      .54, .42, .32 of bf16's bytes. "auto" takes the smallest that costs less than a thirtieth of
      `max_divergence` on this model. Answers on quantised KV are never called exact.
    max_divergence: how far from full recompute an answer on moved KV may be: KL of the next-token
      distribution in nats per token, on average. Repairs are chosen by it.
    eviction: what goes first when memory is full: the least value ("value"), "lru", or "gdsf".
    disk: a folder that keeps what was stored, for the next start and for other processes, up to
      `disk_bytes`. With $KVBOOST_CACHE_KEY set (32 bytes in base64) what is written is encrypted.
    remote: a server to share with other machines: redis:// or valkey://, or any URL that fsspec
      knows (s3://, gs://, file://). It gets `remote_timeout` seconds to answer a lookup, then is
      left alone for a while; `remote_ttl`: seconds after which it may forget an entry.
    upgrade: seconds of idle computing that may wait; 0 is off. While no request runs, what was
      answered on moved KV is computed again, exactly, so that the conversation's next turn finds
      it. The newest comes first, and a request waits for a tenth of a second of it at most. Nobody
      else may use the model meanwhile.
    trace: a file to which every request is added, as hashes and sizes, for `kvboost simulate`.
    """

    namespace: str = "default"
    max_bytes: int = 4 << 30
    chunk_tokens: int = 80
    kv_format: KVFormat | Literal["auto"] = "raw"
    max_divergence: float = 0.03
    eviction: Eviction = "value"
    disk: str | PathLike[str] | None = None
    disk_bytes: int = 20 << 30
    remote: str | None = None
    remote_timeout: float = 0.05
    remote_ttl: float | None = None
    upgrade: float = 0.0
    trace: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.namespace, str) or not self.namespace:
            raise ConfigError(f"namespace must be a text, not {self.namespace!r}")
        for name, least in (("max_bytes", 0), ("chunk_tokens", 16), ("disk_bytes", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(
                    f"{name} must be a whole number of at least {least}, not {value!r}"
                )
        ttl = () if self.remote_ttl is None else ("remote_ttl",)
        idle = ("upgrade",) if self.upgrade != 0 else ()
        for name in ("max_divergence", "remote_timeout", *ttl, *idle):
            if not _positive(getattr(self, name)):
                raise ConfigError(f"{name} must be a number above 0, not {getattr(self, name)!r}")
        formats = (*get_args(KVFormat), "auto")
        for name, known in (("kv_format", formats), ("eviction", get_args(Eviction))):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}"
                )
        if self.disk is not None and not os.fspath(self.disk):
            raise ConfigError("disk must name a folder; leave it out to have none")
        if self.remote is not None and "://" not in str(self.remote):
            raise ConfigError(
                f"remote must be a URL such as valkey://localhost:6379, not {self.remote!r}"
            )


def _positive(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < float(cast(float, value)) < inf
