"""What a user can set when making a KVBoost. Imports nothing of ours but errors."""

from __future__ import annotations

from dataclasses import dataclass

from kvboost.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Config:
    """namespace: nothing is found across namespaces. max_bytes: hard limit of stored KV, index
    included. chunk_tokens: mean chunk length that content-defined boundaries aim at."""

    namespace: str = "default"
    max_bytes: int = 4 << 30
    chunk_tokens: int = 80

    def __post_init__(self) -> None:
        if not isinstance(self.namespace, str) or not self.namespace:
            raise ConfigError(f"namespace must be a text, not {self.namespace!r}")
        for name, least in (("max_bytes", 0), ("chunk_tokens", 16)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(
                    f"{name} must be a whole number of at least {least}, not {value!r}"
                )
