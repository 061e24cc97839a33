"""What samples tell of their neighbours: against a slow loop, and in whole prompts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pydoc_data.topics import topics
from typing import Any

import families
import pytest
import torch
from families import boost, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvboost import Completion, DriftRecompute, KVBoost, QueryRecompute
from kvboost.drift import Run, patches
from kvboost.kv import KVBuffer
from kvboost.metrics import Stopwatch, divergence
from kvboost.passes import Passes
from kvboost.plan import FRESH
from kvboost.recompute import Look
from kvboost.runner import ModelRunner

HEAD, ONE, TWO, THREE = tokens(40, 1), *(tokens(110, n) for n in (2, 3, 4))
ASKED = tokens(FRESH, 5)
KNOWN = [*HEAD, *ONE, *TWO, *THREE]
OTHER = [*HEAD, *THREE, *ONE, *ASKED]
BORDERS = {"segments": [40, 150, 260]}
EVERY = DriftRecompute(nearest=1, farthest=1)


def corrected(
    run: Run, rows: Sequence[int], fresh_HRD: Tensor, old_HTD: Tensor, after: int = 0
) -> Tensor:
    """Position by position, in float64; the slow obvious way."""
    new = old_HTD.double().clone()
    samples = [s for s in run.samples if s in rows and s >= after]
    span = range(max(run.start, after), min(run.end, rows[-1] + 1))
    ends = [span.start - 1, *samples, span.stop]
    around = [min(32, (ends[n + 2] - ends[n]) / 2) for n in range(len(samples))]
    for at in span:
        weights = [n / (1 + abs(at - s) / 48) ** 2 for s, n in zip(samples, around, strict=True)]
        for s, weight in zip(samples, weights, strict=True):
            change = fresh_HRD[:, list(rows).index(s)].double() - old_HTD[:, s].double()
            new[:, at] += weight / (16 + sum(weights)) * change
    return new


@st.composite
def passes(draw: st.DrawFn) -> tuple[list[Run], list[int]]:
    """Runs with samples, and rows that need not be all of these."""
    runs, at = [], 0
    for _ in range(draw(st.integers(1, 6))):
        start = at + draw(st.integers(0, 9))
        at = start + draw(st.integers(1, 40))
        inside = st.integers(start, at - 1)
        runs.append(Run(start, at, tuple(sorted(draw(st.sets(inside, max_size=6))))))
    samples = [s for run in runs for s in run.samples]
    rows = draw(st.sets(st.sampled_from(samples))) if samples else set()
    return runs, sorted(rows | draw(st.sets(st.integers(0, at + 9), min_size=1, max_size=9)))


def spread(runs: list[Run], rows: list[int], fresh: Tensor, old: Tensor, after: int = 0) -> Tensor:
    new = old.clone()
    for patch in patches(runs, rows, after, old):
        patch.spread(fresh, new)
    return new


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 0.06)])
@settings(max_examples=40, deadline=None)
@given(case=passes(), after=st.integers(0, 60))
def test_each_run_is_corrected_as_position_by_position(
    dtype: torch.dtype, limit: float, case: tuple[list[Run], list[int]], after: int
) -> None:
    runs, rows = case
    source = torch.Generator().manual_seed(len(rows))
    fresh = torch.randn(2, len(rows), 8, generator=source).to(dtype)
    old = torch.randn(2, 320, 8, generator=source).to(dtype)
    expected = old
    for run in runs:
        expected = corrected(run, rows, fresh, expected, after)
    new = spread(runs, rows, fresh, old, after)
    assert new.dtype == dtype
    torch.testing.assert_close(new.double(), expected.double(), atol=limit, rtol=0)


@settings(max_examples=60, deadline=None)
@given(case=passes(), cuts=st.sets(st.integers(1, 20), max_size=4))
def test_passes_after_one_another_correct_each_position_once(
    case: tuple[list[Run], list[int]], cuts: set[int]
) -> None:
    runs, rows = case
    bounds = [0, *sorted(c for c in cuts if c < len(rows)), len(rows)]
    seen, after = torch.zeros(320), 0
    for lo, hi in pairwise(bounds):
        block = rows[lo:hi]
        for patch in patches(runs, block, after, seen):
            assert after <= patch.span.start < patch.span.stop <= block[-1] + 1
            seen[patch.span] += (patch.weights_NS > 0).any(1)
        after = block[-1] + 1
    assert seen.max() <= 1
    inside = [at for run in runs for at in range(run.start, run.end)]
    assert set(seen.nonzero().flatten().tolist()) <= set(inside)
    assert all(seen[s] for run in runs for s in run.samples if s in rows)


def test_what_is_not_computed_in_a_pass_tells_nothing() -> None:
    runs = [Run(0, 50, (0, 20)), Run(60, 90, (60, 75))]
    assert not list(patches(runs, [95, 96], 0, torch.zeros(1)))
    assert not list(patches(runs, [5, 21, 80], 0, torch.zeros(1)))
    (one,) = patches(runs, [10, 75, 80], 0, torch.zeros(1))
    assert one.span == slice(60, 81) and one.take_S.tolist() == [1]


def test_equal_changes_are_handed_on_but_for_a_doubt() -> None:
    """The more tokens are spoken for, the more of what the samples agree on is believed."""
    old = torch.zeros(1, 100, 4)
    few = spread([Run(0, 100, (0,))], [0, 99], torch.ones(1, 2, 4), old)
    dense = list(range(0, 100, 4))
    many = spread([Run(0, 100, tuple(dense))], [*dense, 99], torch.ones(1, 26, 4), old)
    assert (few[0, :-1, 0] > few[0, 1:, 0]).all()
    assert (few < many).all() and 0.6 < many.min() < many.max() < 0.9


def test_a_dense_head_does_not_outvote_the_samples_behind_it() -> None:
    """Heads are off in their own way (docs/adr/0015)."""
    samples = [*range(24), 100, 160]
    fresh = torch.cat((torch.ones(1, 24, 1), -torch.ones(1, 2, 1)), 1)
    new = spread([Run(0, 200, tuple(samples))], samples, fresh, torch.zeros(1, 200, 1))[0, :, 0]
    assert new[26] > 0.3 and (new[70:161] < 0).all()


# -- one pass of a model


@functools.cache
def moved(family: str) -> tuple[ModelRunner, KVBuffer]:
    """A buffer of KNOWN, whose tokens 40 to 150 come from another prompt."""
    runner = ModelRunner(families.model(family))
    with torch.inference_mode():
        buffer, other = runner.new_buffer(len(KNOWN)), runner.new_buffer(150)
        runner.forward(buffer, KNOWN, range(len(KNOWN)))
        runner.forward(other, [*tokens(40, 9), *ONE], range(150))
        for mine, theirs in zip((*buffer.k, *buffer.v), (*other.k, *other.v), strict=True):
            mine[:, :, 40:150] = theirs[:, :, 40:150]
    return runner, buffer


def copied(buffer: KVBuffer) -> KVBuffer:
    made = KVBuffer(buffer.layout, buffer.capacity)
    for mine, theirs in zip((*made.k, *made.v), (*buffer.k, *buffer.v), strict=True):
        mine.copy_(theirs)
    return made


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "mistral-sliding"])
def test_every_layer_is_corrected_by_its_own_fresh_kv(family: str) -> None:
    runner, old = moved(family)
    new, run = copied(old), Run(40, 150, (40, 44, 60, 100, 149))
    rows = sorted({*run.samples, 41, *range(200, len(KNOWN))})
    probe = Passes(runner, new, KNOWN, Stopwatch(torch.device("cpu")))
    probe.spread([run])
    with torch.inference_mode():
        probe.forward(rows)
    for layer in range(runner.layers):
        for before, now in zip(old.layer(layer), new.layer(layer), strict=True):
            expected = corrected(run, rows, now[:, rows], before)
            expected[:, rows] = now[:, rows].double()
            torch.testing.assert_close(now.double(), expected, atol=1e-4, rtol=0)
            assert torch.equal(now[:, :40], before[:, :40])
            assert torch.equal(now[:, 150:200], before[:, 150:200])
    assert not torch.equal(new.layer(1)[0][:, 42], old.layer(1)[0][:, 42])


def test_a_probe_corrects_and_the_pass_after_it_does_not_again() -> None:
    runner, old = moved("llama")
    buffer, run = copied(old), Run(40, 150, (40, 50, 90))
    asked = [*run.samples, *range(320, len(KNOWN))]
    probe = Passes(runner, buffer, KNOWN, Stopwatch(torch.device("cpu")))
    probe.spread([run])
    with torch.inference_mode():
        look = Look(range(len(KNOWN) - 5, len(KNOWN)), range(1, 3), runner.layers)
        probe.attention(asked, look)
        first = copied(buffer)
        probe.forward([45, 50, *range(320, len(KNOWN))])
    once = [n for n in range(320) if n not in (45, 50)]
    for k, before, untouched in zip(buffer.k, first.k, old.k, strict=True):
        assert torch.equal(k[:, :, once], before[:, :, once])
        assert not torch.equal(before[:, :, 60:80], untouched[:, :, 60:80])


# -- whole prompts


def primed(family: str) -> KVBoost:
    made = boost(family)
    made.prefill(KNOWN, segments=[40, 150, 260])
    return made


def cached(made: KVBoost, ids: list[int], **options: Any) -> list[tuple[Tensor, Tensor]]:
    return [(layer.keys, layer.values) for layer in made.prefill(ids, **options).layers]


def tell(made: KVBoost, drift: Any, **options: Any) -> Completion:
    return made.generate(OTHER, recompute=drift, max_new_tokens=1, **BORDERS, **options)


@pytest.mark.parametrize("block", [512, 64])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_where_every_token_is_a_sample_all_is_computed(
    family: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvboost.passes._BLOCK", block)
    made = primed(family)
    answer = tokens(5, 6)
    full, every = (
        made.score(OTHER, answer, recompute=policy, **BORDERS).logits for policy in ("full", EVERY)
    )
    torch.testing.assert_close(every, full, atol=1e-4, rtol=0)
    completion = tell(made, EVERY)
    assert completion.exact and completion.usage.moved == 0
    wanted = cached(primed(family), OTHER, recompute="full", **BORDERS)
    got = cached(primed(family), OTHER, recompute=EVERY, **BORDERS)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
@pytest.mark.parametrize("policy", [DriftRecompute(), QueryRecompute()], ids=lambda p: p.name)
def test_what_nobody_computed_is_never_looked_at(
    family: str, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stood in the buffer's memory before."""
    monkeypatch.setattr("kvboost.passes._BLOCK", 16)
    made, found = primed(family), []
    runner, new_buffer = made._engine.runner, made._engine.runner.new_buffer
    for garbage in (0.0, float("nan")):

        def filled(capacity: int, garbage: float = garbage) -> KVBuffer:
            buffer = new_buffer(capacity)
            for tensor in (*buffer.k, *buffer.v):
                tensor.fill_(garbage)
            return buffer

        monkeypatch.setattr(runner, "new_buffer", filled)
        found.append(made.score(OTHER, tokens(5, 6), recompute=policy, **BORDERS).logits)
    assert torch.equal(*found) and found[0].isfinite().all()


def test_exact_prefixes_are_untouched() -> None:
    made = primed("llama")
    before = cached(made, KNOWN)
    with_drift = cached(made, OTHER, recompute=DriftRecompute(), **BORDERS)
    usage = tell(made, DriftRecompute()).usage
    assert usage.exact == 40 and usage.moved > 100
    for mine, theirs in zip(with_drift, before, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a[:, :, :40], b[:, :, :40])
    assert not torch.equal(with_drift[2][1][:, :, 42:44], before[2][1][:, :, 262:264])


def test_stored_kv_is_untouched() -> None:
    made = primed("llama")
    before = cached(made, KNOWN)
    stored = made.stats().store.tokens
    for policy in (DriftRecompute(), QueryRecompute()):
        assert tell(made, policy).usage.moved > 100
    assert made.generate(KNOWN, max_new_tokens=1).usage.computed == 1
    for mine, theirs in zip(cached(made, KNOWN), before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    spans = [s for s in made.explain(OTHER, **BORDERS).spans if 40 <= s.start < 260]
    assert {s.kind for s in spans} == {"moved"}  # what was corrected is not stored
    assert made.stats().store.tokens == stored + len(ASKED)  # the question is


def passages(*names: str) -> list[str]:
    """Of Python's reference, about 90 tokens each."""
    bodies = [topics[name].partition("\n\n")[2] for name in names]
    return [" ".join(body.split())[:320] for body in bodies]


# What is read first, and in which other order it comes then.
SETS = [passages("integers", "attribute-access", "global", "strings")]
SETS += [passages("slicings", "del", "with", "yield")]
ORDERS = [(2, 0, 3, 1), (3, 1, 2, 0)]
ASKS = [{"role": "user", "content": "What is said about names? Answer in one sentence."}]


@dataclass(frozen=True)
class Case:
    """Passages, which a KVBoost has read in another order; an answer and its true logits."""

    made: KVBoost
    documents: list[str]
    answer: list[int]
    true: Tensor

    def apart(self, policy: Any) -> float:
        score = self.made.score(ASKS, self.answer, documents=self.documents, recompute=policy)
        return divergence(self.true, score.logits).kl_mean


@pytest.fixture(scope="module")
def read(default_model: Any) -> list[Case]:
    answer = default_model[1]("The document discusses how names refer to objects.").input_ids
    found = []
    for documents in SETS:
        made = KVBoost(*default_model)
        made.prefill(ASKS, documents=documents)
        for order in ORDERS:
            now = [documents[n] for n in order]
            true = made.score(ASKS, answer, documents=now, reuse="off").logits
            found.append(Case(made, now, answer, true))
    return found


def test_repairs_bring_answers_closer_to_full_recompute(read: list[Case]) -> None:
    none, drift, query, auto = (
        sum(case.apart(policy) for case in read) for policy in ("none", "drift", "query", "auto")
    )
    assert auto <= drift < 0.25 * none  # auto's step here is drift
    assert query < min(drift, 0.15 * none)
    assert 0 <= read[0].apart(EVERY) < 1e-6


def test_correcting_beats_computing_the_same_rows(
    read: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    drift = sum(case.apart("drift") for case in read)
    monkeypatch.setattr(Passes, "spread", lambda probe, runs: None)
    assert drift < sum(case.apart("drift") for case in read)
