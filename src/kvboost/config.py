"""What a user can set when making a KVBoost. Imports nothing of ours but errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvboost.errors import ConfigError

KVFormat = Literal["raw", "k8v8", "k8v4", "k4v4"]


@dataclass(frozen=True, slots=True)
class Config:
    """What KVBoost's constructor takes.

    namespace: nothing is found across namespaces. max_bytes: hard limit of stored KV, index
    included. chunk_tokens: mean chunk length that content-defined boundaries aim at. kv_format: how
    KV is kept: "raw" as the model made it, or quantised: "k8v8", "k8v4", "k4v4", in .54, .42, .32
    of bf16's bytes. Answers on quantised KV are never called exact (docs/entry-format.md).
    """

    namespace: str = "default"
    max_bytes: int = 4 << 30
    chunk_tokens: int = 80
    kv_format: KVFormat = "raw"

    def __post_init__(self) -> None:
        if not isinstance(self.namespace, str) or not self.namespace:
            raise ConfigError(f"namespace must be a text, not {self.namespace!r}")
        for name, least in (("max_bytes", 0), ("chunk_tokens", 16)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(
                    f"{name} must be a whole number of at least {least}, not {value!r}"
                )
        if self.kv_format not in get_args(KVFormat):
            known = ", ".join(get_args(KVFormat))
            raise ConfigError(f"kv_format must be one of {known}, not {self.kv_format!r}")
