"""Recompute policies: which rows are computed again, beyond those nothing stored covers.

A policy is an object with a few fields and one method. It may probe the request in hand; each
probe is a forward pass, and is paid for and reported. This module knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvboost.drift import Run
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

    def attention(self, rows: Sequence[int], look: Look) -> Tensor:
        """Compute `rows` through the first `look.depth` layers: the attention mass that the queries
        give each position, float32 `[length]`. What was computed stays."""

    def spread(self, runs: Sequence[Run]) -> None:
        """In the next pass, add to moved KV what the samples around it turn out to be off."""


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


def seamless(plan: ReusePlan) -> list[tuple[int, int]]:
    """Where moved tokens stand without a seam between them: [start, end) of each stretch."""
    stretches: list[tuple[int, int]] = []
    for s in plan.moved:
        if s.seam is Seam.NONE and stretches and stretches[-1][1] == s.start:
            stretches[-1] = (stretches[-1][0], s.end)
        else:
            stretches.append((s.start, s.end))
    return stretches


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
    """Computes every row, whatever was stored: plain transformers' answer, up to kernel noise."""

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
        tails = [row for s in plan.moved for row in range(max(s.start, s.end - self.tail), s.end)]
        return _union(plan.rows, head_rows(plan, self.head), tails)


@dataclass(frozen=True, slots=True)
class DriftRecompute:
    """Recomputes the head of every run and a sample of the rest, and moves what is left by what
    those turn out to be off (ours).

    Moved KV is most wrong at the head of a run: its first `head` tokens are recomputed, then tokens
    `nearest` apart, farther and farther up to `farthest`. One pass, no probe. `kvboost.drift` says
    why it works; measured in docs/adr/0011, docs/adr/0015 and docs/benchmarks.md.
    """

    head: int = 24
    nearest: int = 8
    farthest: int = 96
    name: str = field(default="drift", init=False)

    def __post_init__(self) -> None:
        _check("head", self.head, 0, 4096, int)
        _check("nearest", self.nearest, 1, 4096, int)
        _check("farthest", self.farthest, self.nearest, 4096, int)

    def rows(self, plan: ReusePlan, probe: Probe) -> list[int]:
        return _union(plan.rows, self.samples(plan, probe))

    def samples(self, plan: ReusePlan, probe: Probe) -> list[int]:
        """The recomputed rows of runs; the probe knows of them from now on."""
        runs = [Run(start, end, self._sample(start, end)) for start, end in seamless(plan)]
        probe.spread(runs)
        return [row for run in runs for row in run.samples]

    def _sample(self, start: int, end: int) -> tuple[int, ...]:
        rows, at = [], start
        while at < end:
            rows.append(at)
            behind = at - start
            at += 1 if behind < self.head else min(max(behind // 2, self.nearest), self.farthest)
        return tuple(rows)


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

    First pass: what `DriftRecompute` computes, the question among it, with the moved KV corrected.
    Each other moved token's score is the attention mass that the question gives it in the band of
    layers from `first` to `last` (shares of the depth), times the expected damage at its distance
    from the seam before it. Second pass: the question again, and the share `ratio` of moved tokens
    with the highest scores. Measured in docs/adr/0004, docs/adr/0015 and docs/benchmarks.md.
    """

    ratio: float = 0.08
    first: float = 0.5
    last: float = 0.8
    drift: DriftRecompute = field(default_factory=DriftRecompute)
    name: str = field(default="query", init=False)

    def __post_init__(self) -> None:
        _check("ratio", self.ratio, 0, 1)
        _check("last", self.last, 0, 1)
        _check("first", self.first, 0, self.last)

    def rows(self, plan: ReusePlan, probe: Probe) -> list[int]:
        moved = moved_rows(plan)
        if not moved:
            return plan.rows
        first = min(int(self.first * probe.layers), probe.layers - 1)
        band = range(first, max(first + 1, round(self.last * probe.layers)))
        sampled = self.drift.samples(plan, probe)
        asked = _union(plan.rows, plan.question, sampled)
        mass = probe.attention(asked, Look(plan.question, band, probe.layers))
        if not mass.any():  # the model hides its attention
            return CacheBlendRecompute(self.ratio).rows(plan, probe)
        rest = sorted(set(moved).difference(asked))
        score = mass[rest] * _damage(plan)[rest].to(mass.device)
        chosen = _top(score, rest, min(1.0, self.ratio * len(moved) / max(1, len(rest))))
        return _union(plan.question, chosen)


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


LADDER: dict[str, RecomputePolicy] = {
    "none": NoRecompute(),
    "drift": DriftRecompute(),
    "query-2": QueryRecompute(0.02),
    "query-4": QueryRecompute(0.04),
    "query-8": QueryRecompute(0.08),
    "query-16": QueryRecompute(0.16),
    "query-30": QueryRecompute(0.30),
}
"""Repairs of compositions, from the cheapest to the dearest."""

MEASURED_AT = (0.06, 0.1)
"""`damage` of prompts of pieces of 512 tokens, and of 200."""


def ladder(band: tuple[float, float]) -> dict[str, RecomputePolicy]:
    """LADDER, with the question's attention read in that band."""
    first, last = band
    return {
        name: replace(p, first=first, last=last) if isinstance(p, QueryRecompute) else p
        for name, p in LADDER.items()
    }


@dataclass(frozen=True, slots=True)
class Profile:
    """What `kvboost calibrate` measured for a model.

    divergence: for each step of `LADDER`, KL in nats per token that is left at the two damages of
    `MEASURED_AT`. band: where the question's attention is read, as shares of the depth. shift: the
    repair of text that only shifted. source: where it is from, in words.
    """

    divergence: Mapping[str, tuple[float, float]]
    band: tuple[float, float] = (0.5, 0.8)
    shift: SelectiveRecompute = field(default_factory=SelectiveRecompute)
    source: str = field(default="", compare=False)

    def expected(self, step: str, damage: float) -> float:
        """KL left. Per damage, it goes in a line from one that was measured to the other."""
        (little, much), (low, high) = MEASURED_AT, self.divergence[step]
        at = min(max((damage - little) / (much - little), 0), 1)
        return damage * ((1 - at) * low / little + at * high / much)

    def step(self, damage: float, limit: float) -> str | None:
        """The cheapest repair expected to stay under the limit; None if none does."""
        return next((name for name in LADDER if self.expected(name, damage) <= limit), None)


@dataclass(frozen=True, slots=True)
class AutoRecompute:
    """Nothing where reuse is exact, the cheapest repair that promises to be faithful enough where
    it is not.

    If every seam is a shift (same neighbours, something before them changed) the damage is small
    and local. If a run met new neighbours, it is expected to grow with the number of tokens near
    heads (`damage`); the profile tells which repair leaves less than `limit` of it (KL against full
    recompute, nats per token, on average). If none does, or the limit is 0, moved KV is not used.
    """

    profile: Profile
    limit: float
    name: str = field(default="auto", init=False)

    def __post_init__(self) -> None:
        _check("max_divergence", self.limit, 0, inf)

    def rows(self, plan: ReusePlan, probe: Probe) -> list[int]:
        seams = {s.seam for s in plan.moved}
        repair: RecomputePolicy | None = NoRecompute()
        if seams and self.limit == 0:
            repair = None
        elif Seam.COMPOSITION in seams:
            step = self.profile.step(damage(plan), self.limit)
            repair = ladder(self.profile.band)[step] if step else None
        elif Seam.SHIFT in seams:
            repair = self.profile.shift
        if repair is None:
            return _union(plan.rows, range(plan.exact_until, plan.length))
        return repair.rows(plan, probe)


def damage(plan: ReusePlan) -> float:
    """Expected deviation of the prompt's KV, up to a factor: its moved tokens' share in it, each
    counted by its distance from the seam before it."""
    return float(_damage(plan)[moved_rows(plan)].sum()) / plan.length


_POLICIES: dict[str, Callable[[], RecomputePolicy]] = {
    "none": NoRecompute,
    "full": FullRecompute,
    "selective": SelectiveRecompute,
    "drift": DriftRecompute,
    "cacheblend": CacheBlendRecompute,
    "query": QueryRecompute,
}


def policy(choice: str | RecomputePolicy) -> RecomputePolicy:
    """The policy of that name with its defaults, or the object itself.

    Raises ConfigError for anything else.
    """
    if not isinstance(choice, str | type) and callable(getattr(choice, "rows", None)):
        return choice
    if not isinstance(choice, str) or choice not in _POLICIES:
        names = ", ".join(["auto", *_POLICIES])
        raise ConfigError(f"unknown recompute policy {choice!r}: choose one of {names}")
    return _POLICIES[choice]()
