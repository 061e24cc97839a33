"""Policies on plans of integers, with a probe that answers what the test says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from kvboost.errors import ConfigError
from kvboost.keys import KeySpace
from kvboost.plan import Entry, Piece, ReusePlan, Seam, Splice
from kvboost.recompute import (
    FALLBACK,
    AutoRecompute,
    CacheBlendRecompute,
    FullRecompute,
    Look,
    NoRecompute,
    Profile,
    QueryRecompute,
    RecomputePolicy,
    SelectiveRecompute,
    head_rows,
    moved_rows,
    policy,
)

KEY = KeySpace("model").root


@dataclass
class FakeProbe:
    """Every token matters as much as `score` says, or by its position; asks are kept."""

    layers: int = 30
    score: Tensor | None = None
    asked: list[tuple[list[int], object]] = field(default_factory=list)
    computed: set[int] = field(default_factory=set)

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


POLICIES = st.one_of(
    st.just(NoRecompute()),
    st.just(FullRecompute()),
    st.builds(SelectiveRecompute, head=st.integers(0, 90), tail=st.integers(0, 90)),
    st.builds(CacheBlendRecompute, ratio=st.floats(0, 1), layer=st.integers(1, 40)),
    st.builds(
        QueryRecompute,
        ratio=st.floats(0, 1),
        head=st.integers(0, 90),
        first=st.floats(0, 0.5),
        last=st.floats(0.5, 1),
    ),
    st.just(AutoRecompute()),
)


@given(plans(), POLICIES, st.integers(2, 30))
@example(PLAN, QueryRecompute(first=0.5, last=0.5), 2)
@example(PLAN, QueryRecompute(first=1.0, last=1.0), 30)
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


def test_query_repairs_what_the_question_looks_at() -> None:
    score = torch.zeros(200).index_fill(0, torch.tensor([25, 31, 90, 150, 190]), 1.0)
    probe = FakeProbe(score=score)
    rows = QueryRecompute(ratio=2 / 140, head=8, first=0.5, last=0.95).rows(PLAN, probe)
    heads = [*range(30, 38), *range(120, 128)]  # 31 is one, so the ratio goes to others
    assert rows == sorted({*GAPS, *heads, 90, 150})
    assert probe.asked == [(GAPS, Look(range(180, 200), range(15, 28), 28))]


def test_query_prefers_what_stands_near_a_seam() -> None:
    rows = QueryRecompute(ratio=2 / 140, head=0).rows(PLAN, FakeProbe(score=torch.ones(200)))
    assert rows == sorted({*GAPS, 30, 120})  # 80 has no seam before it


def test_query_computes_much_new_text_only_once() -> None:
    plan = ReusePlan(400, (splice(30, 50), splice(200, 100)))
    probe = FakeProbe()
    rows = QueryRecompute(ratio=0.1).rows(plan, probe)
    assert [look.depth for _, look in probe.asked] == [30]
    assert set(rows) & set(plan.rows) == set(plan.question) == set(range(300, 400))
    assert set(plan.rows) <= probe.computed


def test_query_falls_back_on_deviation_where_attention_is_hidden() -> None:
    probe = FakeProbe(score=torch.zeros(200))
    rows = QueryRecompute(ratio=0.1).rows(PLAN, probe)
    assert len(rows) == len(GAPS) + 14
    assert [what for _, what in probe.asked][1:] == [1]


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 1.0])
def test_query_keeps_its_ratio_beside_the_heads(ratio: float) -> None:
    rows = QueryRecompute(ratio=ratio, head=10).rows(PLAN, FakeProbe())
    assert len(rows) == len(GAPS) + 20 + min(round(ratio * 140), 120)


def test_auto_takes_the_repair_of_the_regime() -> None:
    chosen = AutoRecompute(Profile(SelectiveRecompute(head=3), FullRecompute()))
    shift = ReusePlan(200, (splice(0, 20, Seam.NONE, exact=True), splice(30, 50, Seam.SHIFT)))
    unbroken = ReusePlan(200, (splice(30, 50, Seam.NONE),))
    assert chosen.rows(EXACT, FakeProbe()) == EXACT.rows
    assert chosen.rows(shift, FakeProbe()) == sorted({*shift.rows, 30, 31, 32})
    assert chosen.rows(unbroken, FakeProbe()) == unbroken.rows
    assert chosen.rows(PLAN, FakeProbe()) == list(range(200))


@pytest.mark.parametrize("name", ["none", "full", "selective", "cacheblend", "query", "auto"])
def test_policies_are_found_by_name(name: str) -> None:
    assert policy(name, FALLBACK).name == name


def test_a_policy_object_is_taken_as_it_is() -> None:
    mine = SelectiveRecompute(head=5)
    assert policy(mine, FALLBACK) is mine


@pytest.mark.parametrize("choice", ["quary", "", 7, None, object(), SelectiveRecompute])
def test_unknown_policies_are_refused(choice: object) -> None:
    with pytest.raises(ConfigError, match="choose one of auto, none, full, selective"):
        policy(choice, FALLBACK)  # type: ignore[arg-type]


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
        (QueryRecompute, {"head": None}),
        (QueryRecompute, {"first": 0.6, "last": 0.5}),
        (QueryRecompute, {"last": 1.2}),
    ],
)
def test_parameters_are_checked(kind: type, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(options))}|first|last"):
        kind(**options)
