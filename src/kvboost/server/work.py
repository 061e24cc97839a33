"""The nouns of the server: what a client wants computed, and what it is told while that happens.

Knows nothing of HTTP. Times are seconds of wall clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvboost.errors import KVBoostError
from kvboost.options import GenerateOptions
from kvboost.prompt import PromptLike
from kvboost.types import FinishReason, Timing, Usage


class BusyError(KVBoostError):
    """The queue is full, or the server is shutting down. retry_after: seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineError(KVBoostError):
    """The request took longer than the server allows."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks: `namespace` is where what is computed for it is stored and found; `shared`, if
    any, is another where things are found, never stored. `name` is for logs and metrics."""

    name: str
    namespace: str
    shared: str | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """One request, as the scheduler takes it.

    options: as for `KVBoost.stream`. n: answers to sample; 0 computes and stores the prompt, no
    more. top_logprobs: how many alternatives are reported beside each token (0: the token's own
    only; None: no log probabilities at all). pin: seconds for which the prompt stays in memory, or
    as much of it as begins like `pinned`.
    """

    id: str
    tenant: Tenant
    prompt: PromptLike
    options: GenerateOptions
    n: int = 1
    top_logprobs: int | None = None
    pin: float | None = None
    pinned: PromptLike | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probabilities (natural, of the model's own distribution, before temperature) of the
    token that was taken and of the most likely ones, likeliest first: (token id, logprob)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The first token is there. `usage.generated` is 0 still; timing's `decode` and `store` too.
    queued: seconds before the worker took the request up, part of `ttft` (seconds from submission
    to the first token)."""

    usage: Usage
    timing: Timing
    queued: float
    ttft: float
    policy: str
    exact: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """The next token of answer number `choice`: its text as far as it may be shown now (may be
    empty), and its log probabilities if they were asked for."""

    choice: int
    text: str
    token: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """Answer number `choice` is complete. text: what was still held back. stopped_by: the stop
    string that ended it, if one did."""

    choice: int
    text: str
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Done:
    """All answers are complete and stored; nothing follows. `usage.generated`: in all answers.
    pinned: whether what was to be pinned is; None if nothing was."""

    usage: Usage
    timing: Timing
    pinned: bool | None = None


Event = Started | Piece | Ended | Done


@dataclass(frozen=True, slots=True)
class Served:
    """What a request was, for metrics and logs, once it is over, however it ended.

    outcome: "done", "cancelled" (the client left), "deadline", or "failed". misses: tokens that
    were computed, by reason ("new", "little", "short", "sink", "off", "unmovable"). gaps: seconds
    between successive tokens of an answer. prompt: how long it is, also if nothing was computed.
    seconds: from submission to the end, queue included. error: its kind, never its words, which may
    be the client's.
    """

    id: str
    tenant: str
    outcome: str
    prompt: int
    queued: float
    ttft: float | None
    usage: Usage
    timing: Timing
    policy: str
    exact: bool
    seconds: float = 0.0
    misses: Mapping[str, int] = field(default_factory=dict)
    gaps: tuple[float, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the scheduler is right now: requests waiting, answers being decoded, and slots."""

    waiting: int
    running: int
    slots: int
