"""What a server allows. Imports nothing of ours but errors."""

from __future__ import annotations

from dataclasses import dataclass

from kvboost.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limits:
    """slots: answers decoded at the same time. queue: requests that may wait for one; more are
    refused with 429. seconds: that a request may take in all. prompt_tokens, answer_tokens: upper
    limits beyond the model's window (None: the window alone). body_bytes: of a request's body.
    drain: seconds that a stopping server gives the requests in hand."""

    slots: int = 8
    queue: int = 64
    seconds: float = 600.0
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    body_bytes: int = 8 << 20
    drain: float = 30.0

    def __post_init__(self) -> None:
        for name in ("slots", "queue", "body_bytes"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1")
        for name in ("seconds", "drain"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0")
        for name in ("prompt_tokens", "answer_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1")
