"""The nouns of a request: chunks, what a prompt cost, what came back.

Imports nothing of ours and no torch. Times are seconds of wall clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

FinishReason = Literal["stop", "length"]
Reuse = Literal["auto", "exact", "off"]
Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A span [start, end) of a prompt and its token ids: the unit of hashing and storage."""

    start: int
    end: int
    ids: tuple[int, ...]

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Document:
    """A piece of context whose borders become chunk borders."""

    text: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One run of the model: how many token rows entered it, and through how many layers."""

    rows: int
    layers: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Every prompt token, counted in exactly one class, and the tokens generated.

    exact:      KV of the same tokens after exactly the same history; identical to computing it
    moved:      KV of the same tokens from elsewhere, moved to its place here: approximate
    recomputed: had moved KV, and was computed again by the repair policy
    computed:   nothing stored covered it (the prompt's last token is always computed)
    """

    exact: int = 0
    moved: int = 0
    recomputed: int = 0
    computed: int = 0
    generated: int = 0

    @property
    def prompt(self) -> int:
        return self.exact + self.moved + self.recomputed + self.computed

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt} = exact {self.exact} + moved {self.moved}"
            f" + recomputed {self.recomputed} + computed {self.computed};"
            f" generated {self.generated}"
        )


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. `ttft` is wall time from the call to the first token, and the parts of it follow:
    tokenize + lookup + assemble + probe + forward + wait (+ sampling and bookkeeping, not listed).
    `wait` is for others' steps in between, in a server. `decode` and `store` come after the first
    token; `total` is the whole call."""

    ttft: float = 0.0
    tokenize: float = 0.0
    lookup: float = 0.0
    assemble: float = 0.0
    probe: float = 0.0
    forward: float = 0.0
    wait: float = 0.0
    decode: float = 0.0
    store: float = 0.0
    total: float = 0.0

    def __str__(self) -> str:
        return ", ".join(f"{f.name} {getattr(self, f.name) * 1e3:.1f} ms" for f in fields(self))


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer and what it cost.

    `exact` says that no approximate KV was used, neither moved nor quantised: the answer is the
    one full recompute gives, up to kernel noise. `passes` lists every forward pass before the
    first token.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    policy: str
    exact: bool
    passes: tuple[ForwardPass, ...] = ()
