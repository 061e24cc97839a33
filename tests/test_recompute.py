"""Policies on plans of integers, with a probe that answers what the test says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from families import PROFILE
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from kvboost.drift import Run
from kvboost.errors import ConfigError
from kvboost.keys import KeySpace
from kvboost.plan import Entry, Piece, ReusePlan, Seam, Splice
from kvboost.recompute import (
    LADDER,
    MEASURED_AT,
    AutoRecompute,
    CacheBlendRecompute,
    DriftRecompute,
    FullRecompute,
    Look,
    NoRecompute,
    Profile,
    QueryRecompute,
    RecomputePolicy,
    SelectiveRecompute,
    damage,
    head_rows,
    moved_rows,
    policy,
    seamless,
)

KEY = KeySpace("model").root


@dataclass
class FakeProbe:
    """Every token matters as much as `score` says, or by its position; asks and runs are kept."""

    layers: int = 30
    score: Tensor | None = None
    asked: list[tuple[list[int], object]] = field(default_factory=list)
    computed: set[int] = field(default_factory=set)
    runs: Sequence[Run] = ()

    def deviation(self, rows: Sequence[int], layer: int) -> Tensor:
        assert 0 < layer < self.layers
        self.asked.append((list(rows), layer))
        return self._scores(max(rows) + 1)[list(rows)]

    def attention(self, rows: Sequence[int], look: Look) -> Tensor:
        assert list(look.queries) == list(rows)[-len(look.queries) :]
        assert 0 <= look.layers.start < look.layers.stop <= look.depth <= self.layers
        self.asked.append((list(rows), look))
        if look.depth == self.layers:
            self.computed.update(rows)
        return self._scores(max(rows) + 1)

    def spread(self, runs: Sequence[Run]) -> None:
        self.runs = runs

    def _scores(self, count: int) -> Tensor:
        return torch.arange(count).float() if self.score is None else self.score


def splice(start: int, count: int, seam: Seam = Seam.COMPOSITION, *, exact: bool = False) -> Splice:
    entry = Entry(KEY, KEY, KEY, tuple(range(count)), 7)
    return Splice(start, (Piece(entry, 0, count),), exact=exact, seam=seam)


# exact 0-20, gap, moved 30-80 and 80-110 (no seam between), gap, moved 120-180, question.
PLAN = ReusePlan(
    200,
    (
        splice(0, 20, Seam.NONE, exact=True),
        splice(30, 50),
        splice(80, 30, Seam.NONE),
        splice(120, 60, Seam.SHIFT),
    ),
)
# What is sampled of it, unless told otherwise.
SAMPLES = [*range(30, 55), 66, 84, *range(120, 145), 156, 174]
GAPS = [*range(20, 30), *range(110, 120), *range(180, 200)]
EXACT = ReusePlan(200, (splice(0, 120, Seam.NONE, exact=True),))


@st.composite
def plans(draw: st.DrawFn) -> ReusePlan:
    """An exact prefix perhaps, then runs with gaps or none between them."""
    splices, at = [], draw(st.integers(0, 30))
    if at:
        splices.append(splice(0, at, Seam.NONE, exact=True))
    at += 0 if at else 1
    for _ in range(draw(st.integers(0, 5))):
        at += draw(st.sampled_from([0, 0, 1, 9]))
        count = draw(st.integers(1, 60))
        splices.append(splice(at, count, draw(st.sampled_from(list(Seam)))))
        at += count
    return ReusePlan(max(1, at + draw(st.sampled_from([0, 1, 12, 40]))), tuple(splices))


DRIFTS = st.builds(
    DriftRecompute,
    head=st.integers(0, 70),
    nearest=st.integers(1, 9),
    farthest=st.integers(9, 90),
)
POLICIES = st.one_of(
    st.just(NoRecompute()),
    st.just(FullRecompute()),
    st.builds(SelectiveRecompute, head=st.integers(0, 90), tail=st.integers(0, 90)),
    st.builds(CacheBlendRecompute, ratio=st.floats(0, 1), layer=st.integers(1, 40)),
    DRIFTS,
    st.builds(
        QueryRecompute,
        ratio=st.floats(0, 1),
        first=st.floats(0, 0.5),
        last=st.floats(0.5, 1),
        drift=DRIFTS,
    ),
    st.builds(AutoRecompute, st.just(PROFILE), st.floats(0, 0.5)),
)


@given(plans(), POLICIES, st.integers(2, 30))
@example(PLAN, QueryRecompute(first=0.5, last=0.5), 2)
@example(PLAN, QueryRecompute(first=1.0, last=1.0), 30)
@example(PLAN, AutoRecompute(PROFILE, 0), 30)
def test_rows_of_every_policy_are_sorted_and_leave_nothing_uncomputed(
    plan: ReusePlan, chosen: RecomputePolicy, layers: int
) -> None:
    probe = FakeProbe(layers)
    rows = chosen.rows(plan, probe)
    assert rows == sorted(set(rows))
    assert rows[-1] == plan.length - 1 and rows[0] >= 0
    assert set(plan.rows) <= set(rows) | probe.computed
    for asked, _ in probe.asked:
        assert asked == sorted(set(asked))
        assert set(asked) <= set(range(plan.length))


@given(plans(), POLICIES)
def test_exact_reuse_is_never_probed(plan: ReusePlan, chosen: RecomputePolicy) -> None:
    probe, exact = FakeProbe(), ReusePlan(plan.length, plan.splices[:1])
    if exact.moved or isinstance(chosen, FullRecompute):
        return
    assert chosen.rows(exact, probe) == exact.rows
    assert not probe.asked


def test_nothing_is_repaired_by_none_and_all_by_full() -> None:
    assert NoRecompute().rows(PLAN, FakeProbe()) == PLAN.rows == GAPS
    assert FullRecompute().rows(PLAN, FakeProbe()) == list(range(200))


def test_heads_are_those_of_runs_behind_a_seam() -> None:
    assert head_rows(PLAN, 8) == [*range(30, 38), *range(120, 128)]
    assert head_rows(PLAN, 55) == [*range(30, 80), *range(120, 175)]
    assert moved_rows(PLAN) == [*range(30, 110), *range(120, 180)]


def test_selective_repairs_heads_and_tails() -> None:
    rows = SelectiveRecompute(head=4, tail=3).rows(PLAN, FakeProbe())
    tails = [*range(77, 80), *range(107, 110), *range(177, 180)]
    assert rows == sorted({*GAPS, *range(30, 34), *range(120, 124), *tails})


def test_cacheblend_probes_all_moved_rows_and_keeps_the_most_deviating() -> None:
    probe = FakeProbe(score=torch.zeros(200).index_fill(0, torch.tensor([31, 90, 150, 25]), 1.0))
    rows = CacheBlendRecompute(ratio=3 / 140, layer=2).rows(PLAN, probe)
    assert rows == sorted({*GAPS, 31, 90, 150})
    assert probe.asked == [(list(range(20, 200)), 2)]


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 1.0])
def test_cacheblend_keeps_its_ratio(ratio: float) -> None:
    rows = CacheBlendRecompute(ratio=ratio).rows(PLAN, FakeProbe())
    assert len(rows) == len(GAPS) + round(ratio * 140)


def test_seamless_stretches_are_those_that_stood_together() -> None:
    assert seamless(PLAN) == [(30, 110), (120, 180)]
    apart = ReusePlan(200, (splice(30, 50), splice(90, 30, Seam.NONE), splice(120, 9)))
    assert seamless(apart) == [(30, 80), (90, 120), (120, 129)]
    assert seamless(EXACT) == []


def test_drift_samples_are_dense_at_heads() -> None:
    probe = FakeProbe()
    assert DriftRecompute().rows(PLAN, probe) == sorted({*GAPS, *SAMPLES})
    assert list(probe.runs) == [
        Run(30, 110, tuple(SAMPLES[:27])),
        Run(120, 180, tuple(SAMPLES[27:])),
    ]
    assert not probe.asked


@given(plans(), DRIFTS)
def test_every_moved_token_is_in_one_run_with_a_sample_near(
    plan: ReusePlan, drift: DriftRecompute
) -> None:
    probe = FakeProbe()
    rows = drift.rows(plan, probe)
    assert moved_rows(plan) == [row for run in probe.runs for row in range(run.start, run.end)]
    for run in probe.runs:
        assert run.samples[0] == run.start and set(run.samples) <= set(rows)
        ends = [*run.samples[1:], run.end]
        steps = [b - a for a, b in zip(run.samples, ends, strict=True)]
        assert all(0 < step <= drift.farthest for step in steps)
        assert all(step == 1 for step in steps[: drift.head])
        assert all(step >= drift.nearest for step in steps[drift.head : -1])
        assert steps[:-1] == sorted(steps[:-1])


def test_query_repairs_what_the_question_looks_at() -> None:
    score = torch.zeros(200).index_fill(0, torch.tensor([25, 30, 91, 165, 190]), 1.0)
    probe = FakeProbe(score=score)
    rows = QueryRecompute(ratio=2 / 140, first=0.5, last=0.95).rows(PLAN, probe)
    assert rows == sorted({*range(180, 200), 91, 165})  # 30 is in the head
    asked = sorted({*GAPS, *SAMPLES})
    assert probe.asked == [(asked, Look(range(180, 200), range(15, 28), 30))]
    assert [row for run in probe.runs for row in run.samples] == SAMPLES


def test_query_prefers_what_stands_near_a_seam() -> None:
    rows = QueryRecompute(ratio=2 / 140).rows(PLAN, FakeProbe(score=torch.ones(200)))
    assert rows == sorted({*range(180, 200), 55, 145})  # 80 has no seam before it


def test_query_computes_all_but_the_question_only_once() -> None:
    plan = ReusePlan(400, (splice(30, 50), splice(200, 100)))
    probe = FakeProbe()
    rows = QueryRecompute(ratio=0.1).rows(plan, probe)
    assert set(rows) & probe.computed == set(plan.question) == set(range(300, 400))
    assert set(plan.rows) <= probe.computed


def test_query_falls_back_on_deviation_where_attention_is_hidden() -> None:
    probe = FakeProbe(score=torch.zeros(200))
    rows = QueryRecompute(ratio=0.1).rows(PLAN, probe)
    assert len(rows) == len(GAPS) + 14
    assert [what for _, what in probe.asked][1:] == [1]


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 1.0])
def test_query_keeps_its_ratio_beside_the_samples(ratio: float) -> None:
    rows = QueryRecompute(ratio=ratio).rows(PLAN, FakeProbe())
    assert len(rows) == 20 + min(round(ratio * 140), 140 - len(SAMPLES))


def everything(plan: ReusePlan) -> list[int]:
    """But what is exact."""
    return list(range(plan.exact_tokens, plan.length))


def test_auto_takes_the_repair_of_the_regime() -> None:
    chosen = AutoRecompute(replace(PROFILE, shift=SelectiveRecompute(head=3)), 1e-6)
    shift = ReusePlan(200, (splice(0, 20, Seam.NONE, exact=True), splice(30, 50, Seam.SHIFT)))
    unbroken = ReusePlan(200, (splice(30, 50, Seam.NONE),))
    assert chosen.rows(EXACT, FakeProbe()) == EXACT.rows
    assert chosen.rows(shift, FakeProbe()) == sorted({*shift.rows, 30, 31, 32})
    assert chosen.rows(unbroken, FakeProbe()) == unbroken.rows
    assert chosen.rows(PLAN, FakeProbe()) == everything(PLAN)
    nothing = replace(chosen, limit=0)
    assert nothing.rows(EXACT, FakeProbe()) == EXACT.rows
    for plan in (shift, unbroken, PLAN):
        assert nothing.rows(plan, FakeProbe()) == everything(plan)


@pytest.mark.parametrize("step", LADDER)
def test_auto_takes_the_cheapest_repair_that_is_good_enough(step: str) -> None:
    chosen = AutoRecompute(PROFILE, 1.01 * PROFILE.expected(step, damage(PLAN)))
    probe, expected = FakeProbe(), FakeProbe()
    assert chosen.rows(PLAN, probe) == LADDER[step].rows(PLAN, expected)
    assert probe == expected


def test_a_profile_reads_the_question_where_it_was_measured() -> None:
    chosen = AutoRecompute(replace(PROFILE, band=(0.25, 0.6)), 1.01 * 0.5**5 * damage(PLAN))
    probe = FakeProbe()
    chosen.rows(PLAN, probe)
    assert [look for _, look in probe.asked] == [Look(PLAN.question, range(7, 18), 30)]


def test_a_step_is_expected_to_leave_what_was_measured_at_about_that_damage() -> None:
    little, much = MEASURED_AT
    profile = Profile(dict.fromkeys(LADDER, (1.0, 9.0)) | {"none": (2.0, 1.0)})
    assert profile.expected("drift", little) == 1 and profile.expected("drift", much) == 9
    per_damage = (1 / little + 9 / much) / 2
    half = (little + much) / 2
    assert profile.expected("drift", half) == pytest.approx(half * per_damage)
    assert profile.expected("drift", little / 2) == pytest.approx(0.5)
    assert profile.expected("drift", 3 * much) == pytest.approx(27)
    assert profile.expected("none", 0) == 0 and profile.expected("none", 2 * much) == 2
    assert profile.step(little, 1.5) == "drift" and profile.step(much, 1.5) == "none"
    assert profile.step(little, 0.9) is None
    unknown = replace(profile, divergence=dict.fromkeys(LADDER, (float("nan"),) * 2))
    assert unknown.step(little, 1.0) is unknown.step(much, 1.0) is None


def test_the_ladder_goes_from_the_cheapest_to_the_dearest() -> None:
    counts = []
    for step in LADDER.values():
        probe = FakeProbe()
        rows = step.rows(PLAN, probe)
        counts.append(len(rows) + sum(len(asked) for asked, _ in probe.asked))
    assert counts == sorted(counts) and counts[0] == len(GAPS)


def test_damage_is_the_share_of_moved_tokens_near_heads() -> None:
    head = [(d + 2) ** -0.6 for d in range(80)]
    assert damage(PLAN) == pytest.approx((sum(head) + sum(head[:60])) / 200)
    assert damage(EXACT) == 0
    broken = ReusePlan(200, (PLAN.splices[1], splice(80, 30), *PLAN.splices[3:]))
    assert damage(broken) > damage(PLAN)


@pytest.mark.parametrize("name", ["none", "full", "selective", "drift", "cacheblend", "query"])
def test_policies_are_found_by_name(name: str) -> None:
    assert policy(name).name == name


def test_a_policy_object_is_taken_as_it_is() -> None:
    mine = SelectiveRecompute(head=5)
    assert policy(mine) is mine


@pytest.mark.parametrize("choice", ["quary", "", 7, None, object(), SelectiveRecompute])
def test_unknown_policies_are_refused(choice: object) -> None:
    with pytest.raises(ConfigError, match="choose one of auto, none, full, selective"):
        policy(choice)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SelectiveRecompute, {"head": -1}),
        (SelectiveRecompute, {"tail": 5000}),
        (SelectiveRecompute, {"head": 1.5}),
        (SelectiveRecompute, {"head": "16"}),
        (CacheBlendRecompute, {"ratio": 1.1}),
        (CacheBlendRecompute, {"ratio": float("nan")}),
        (CacheBlendRecompute, {"ratio": "0.1"}),
        (CacheBlendRecompute, {"layer": 0}),
        (CacheBlendRecompute, {"layer": 1.5}),
        (QueryRecompute, {"ratio": -0.1}),
        (DriftRecompute, {"nearest": 0}),
        (DriftRecompute, {"nearest": 1.5}),
        (DriftRecompute, {"farthest": 3}),
        (DriftRecompute, {"farthest": True}),
        (QueryRecompute, {"ratio": None}),
        (QueryRecompute, {"first": 0.6, "last": 0.5}),
        (QueryRecompute, {"last": 1.2}),
    ],
)
def test_parameters_are_checked(kind: type, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(options))}|first|last"):
        kind(**options)


@pytest.mark.parametrize("limit", [-1e-9, float("nan"), "0.1", None, True])
def test_the_limit_is_checked(limit: Any) -> None:
    with pytest.raises(ConfigError, match="max_divergence must be a number"):
        AutoRecompute(PROFILE, limit)
