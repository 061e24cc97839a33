"""Recompute policies: which rows are computed again, beyond those nothing stored covers.

A policy is an object with a few fields and one method. It may probe the request in hand; each
probe is a forward pass, and is paid for and reported. This module knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvboost.errors import ConfigError
from kvboost.plan import ReusePlan, Seam


class Look(NamedTuple):
    """What an attention probe looks at: which rows ask (they are the last ones), in which layers;
    and through how many layers all rows are computed."""

    queries: range
    layers: range
    depth: int


class Probe(Protocol):
    """What a policy may ask. `layers` is the model's depth."""

    @property
    def layers(self) -> int: ...

    def deviation(self, rows: Sequence[int], layer: int) -> Tensor:
        """Compute `rows` up to `layer`: how far their fresh K and V there are from the moved ones,
        relative to their size, float32 `[rows]`. What was computed below `layer` stays."""
        ...

    def attention(self, rows: Sequence[int], look: Look) -> Tensor:
        """Compute `rows` through the first `look.depth` layers: the attention mass that the queries
        give each position, float32 `[length]`. What was computed stays."""
        ...


class RecomputePolicy(Protocol):
    """Chooses the rows of the final forward pass, sorted. Must contain `plan.rows`, except rows
    that a probe has computed through all layers; must contain the last row."""

    @property
    def name(self) -> str: ...

    def rows(self, plan: ReusePlan, probe: Probe) -> list[int]: ...


def _union(*parts: Sequence[int]) -> list[int]:
    return sorted(set().union(*parts))


def moved_rows(plan: ReusePlan) -> list[int]:
    """Every row that has moved KV."""
    return [row for s in plan.moved for row in range(s.start, s.end)]


def head_rows(plan: ReusePlan, k: int) -> list[int]:
    """The first k tokens of every run that has a seam before it."""
    runs = [s for s in plan.moved if s.seam is not Seam.NONE]
    return [row for s in runs for row in range(s.start, min(s.start + k, s.end))]


def _top(score: Tensor, rows: Sequence[int], ratio: float) -> list[int]:
    """The share `ratio` of `rows` with the highest score; `score[i]` belongs to `rows[i]`."""
    chosen = score.topk(round(ratio * len(rows))).indices.tolist()
    return [rows[i] for i in chosen]


def _check(name: str, value: float, low: float, high: float, kind: type = float) -> None:
    number = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        what = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{name} must be {what} between {low:g} and {high:g}, not {value!r}")


@dataclass(frozen=True, slots=True)
class NoRecompute:
    """Repairs nothing: the cheapest and the least faithful."""

    name: str = field(default="none", init=False)

    def rows(self, plan: ReusePlan, probe: Probe) -> list[int]:
        return plan.rows


@dataclass(frozen=True, slots=True)
class FullRecompute:
    """Computes every row: identical to plain transformers, whatever was stored."""

    name: str = field(default="full", init=False)

    def rows(self, plan: ReusePlan, probe: Probe) -> list[int]:
        return list(range(plan.length))


@dataclass(frozen=True, slots=True)
class SelectiveRecompute:
    """Recomputes tokens at the seams: the first `head` of every run, the last `tail` before one.

    The damage of a shift sits right after the edit (DESIGN.md section 5); repairing tails measured
    as useless there and is off by default.
    """

    head: int = 16
    tail: int = 0
    name: str = field(default="selective", init=False)

    def __post_init__(self) -> None:
        _check("head", self.head, 0, 4096, int)
        _check("tail", self.tail, 0, 4096, int)

    def rows(self, plan: ReusePlan, probe: Probe) -> list[int]:
        ends = [s for s in plan.moved if s.end < plan.length]
        tails = [row for s in ends for row in range(max(s.start, s.end - self.tail), s.end)]
        return _union(plan.rows, head_rows(plan, self.head), tails)


@dataclass(frozen=True, slots=True)
class CacheBlendRecompute:
    """Recomputes the moved tokens whose KV deviates most (CacheBlend, Yao et al., EuroSys 2025).

    All moved tokens are computed through the layers below `layer`; there their fresh K and V are
    compared with the moved ones, and the share `ratio` that deviates most is recomputed.
    """

    ratio: float = 0.15
    layer: int = 1
    name: str = field(default="cacheblend", init=False)

    def __post_init__(self) -> None:
        _check("ratio", self.ratio, 0, 1)
        _check("layer", self.layer, 1, 1000, int)

    def rows(self, plan: ReusePlan, probe: Probe) -> list[int]:
        moved = moved_rows(plan)
        if not moved:
            return plan.rows
        rows = _union(plan.rows, moved)
        deviation = probe.deviation(rows, min(self.layer, probe.layers - 1))
        place = {row: i for i, row in enumerate(rows)}
        return _union(plan.rows, _top(deviation[[place[r] for r in moved]], moved, self.ratio))


@dataclass(frozen=True, slots=True)
class QueryRecompute:
    """Recomputes what the question looks at, weighed by how stale it is likely to be (ours).

    First pass: the rows that nothing covers, the question among them, up to the end of the band of
    layers from `first` to `last` (shares of the depth). Each moved token's score is the attention
    mass that the question gives it there, times the expected damage at its distance from the seam
    before it. Second pass: those rows, the first `head` tokens of every run, and the share `ratio`
    of moved tokens with the highest scores. Measured in docs/adr/0004 and docs/benchmarks.md.
    """

    ratio: float = 0.12
    head: int = 0
    first: float = 0.5
    last: float = 0.8
    name: str = field(default="query", init=False)

    def __post_init__(self) -> None:
        _check("ratio", self.ratio, 0, 1)
        _check("head", self.head, 0, 4096, int)
        _check("last", self.last, 0, 1)
        _check("first", self.first, 0, self.last)

    def rows(self, plan: ReusePlan, probe: Probe) -> list[int]:
        moved = moved_rows(plan)
        if not moved:
            return plan.rows
        first = min(int(self.first * probe.layers), probe.layers - 1)
        band = range(first, max(first + 1, round(self.last * probe.layers)))
        asked = _union(plan.rows, plan.question)
        # Much new text before the question is computed once, through all layers, not twice.
        once = len(asked) - len(plan.question) > _TWICE
        mass = probe.attention(
            asked, Look(plan.question, band, probe.layers if once else band.stop)
        )
        if not mass.any():  # the model hides its attention
            return CacheBlendRecompute(self.ratio).rows(plan, probe)
        heads = head_rows(plan, self.head)
        rest = sorted(set(moved).difference(heads))
        score = mass[rest] * _damage(plan)[rest].to(mass.device)
        chosen = _top(score, rest, min(1.0, self.ratio * len(moved) / max(1, len(rest))))
        return _union(plan.question if once else asked, heads, chosen)


_TWICE = 64
"""So many uncovered rows before the question may be computed twice, to end the probe early."""


def _damage(plan: ReusePlan) -> Tensor:
    """Expected deviation of moved KV, up to a factor, `[length]`: it falls with the distance d to
    the seam before as (d + 2)^-0.6 (fitted on SmolLM2-135M, docs/adr/0004)."""
    distance = torch.zeros(plan.length)
    seam = 0
    for splice in plan.moved:
        if splice.seam is not Seam.NONE:
            seam = splice.start
        distance[splice.start : splice.end] = torch.arange(splice.start, splice.end) - seam
    return (distance + 2) ** -0.6


@dataclass(frozen=True, slots=True)
class Profile:
    """What measured best for a model: repairs for the two regimes of approximate reuse."""

    shift: RecomputePolicy
    composition: RecomputePolicy


FALLBACK = Profile(SelectiveRecompute(head=32), QueryRecompute(ratio=0.2, head=8))
"""For models nobody has measured: dearer than the measured ones."""

PROFILES = {
    # SmolLM2-135M: docs/benchmarks.md
    "llama-30x576": Profile(SelectiveRecompute(head=16), QueryRecompute()),
    # Qwen2.5 0.5B and 1.5B: DESIGN.md section 10, and docs/adr/0004
    "qwen2-24x896": Profile(SelectiveRecompute(head=16), QueryRecompute(head=16, last=0.95)),
    "qwen2-28x1536": Profile(SelectiveRecompute(head=16), QueryRecompute(head=8, last=0.95)),
}
"""By `ModelRunner.shape`."""


@dataclass(frozen=True, slots=True)
class AutoRecompute:
    """Nothing where reuse is exact, the profile's repairs where it is not.

    If every seam is a shift (same neighbours, something before them changed) the damage is small
    and local. If a run met new neighbours, what the question looks at has to be repaired.
    """

    profile: Profile = FALLBACK
    name: str = field(default="auto", init=False)

    def rows(self, plan: ReusePlan, probe: Probe) -> list[int]:
        seams = {s.seam for s in plan.moved}
        if Seam.COMPOSITION in seams:
            return self.profile.composition.rows(plan, probe)
        if Seam.SHIFT in seams:
            return self.profile.shift.rows(plan, probe)
        return plan.rows


_POLICIES: dict[str, Callable[[], RecomputePolicy]] = {
    "none": NoRecompute,
    "full": FullRecompute,
    "selective": SelectiveRecompute,
    "cacheblend": CacheBlendRecompute,
    "query": QueryRecompute,
}


def policy(choice: str | RecomputePolicy, profile: Profile) -> RecomputePolicy:
    """The policy of that name with its defaults, or the object itself.

    Raises ConfigError for anything else.
    """
    if not isinstance(choice, str | type) and callable(getattr(choice, "rows", None)):
        return choice
    if choice == "auto":
        return AutoRecompute(profile)
    if not isinstance(choice, str) or choice not in _POLICIES:
        names = ", ".join(["auto", *_POLICIES])
        raise ConfigError(f"unknown recompute policy {choice!r}: choose one of {names}")
    return _POLICIES[choice]()
