"""Requests computed together, in pieces, and across namespaces: what each gets is what it would get
alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from families import MOVABLE, VARYING, WINDOW, boost, cases, tokens

from kvboost import KVBoost
from kvboost.generation import Generation
from kvboost.options import GenerateOptions
from kvboost.plan import FRESH, Seam

HEAD, ONE, TWO, ASKED = tokens(40, 1), tokens(200, 2), tokens(150, 3), tokens(FRESH, 4)
LIMIT = 1e-4


class Breaks:
    """Pauses a prefill every so many rows, and counts."""

    def __init__(self, most: int) -> None:
        self.most, self.times = most, 0

    def rows(self) -> int:
        return self.most

    def pause(self) -> None:
        self.times += 1


def begun(made: KVBoost, prompt: list[int], **options: Any) -> Generation:
    parsed = made.parse(GenerateOptions(**{"max_new_tokens": 12, **options}))
    clock = made._clock()
    return made.begin(made.build(prompt, parsed, clock), parsed, clock)


@pytest.mark.parametrize(("family", "attention"), cases({**MOVABLE, **VARYING}))
def test_a_step_of_several_is_the_step_of_each(family: str, attention: str) -> None:
    made = boost(family, attention)
    lengths = (3, WINDOW + 30, 90, 41)
    requests = [begun(made, tokens(length, n)) for n, length in enumerate(lengths)]
    for each in requests:
        each.take(each.prefilled.logits)
    for _ in range(3):
        together = made._engine.steps([(each.prefilled, each.ids) for each in requests])
        for n, each in enumerate(requests):
            alone = made._engine.step(each.prefilled, each.ids)
            torch.testing.assert_close(together[n : n + 1], alone, atol=LIMIT, rtol=0)
            each.take(alone)


def test_a_model_that_hides_its_attention_takes_its_steps_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = boost("llama")
    requests = [begun(made, tokens(30 + n, n)) for n in range(2)]
    for each in requests:
        each.take(each.prefilled.logits)
    alone = [made._engine.step(each.prefilled, each.ids) for each in requests]
    monkeypatch.setattr("kvboost.model._registered", lambda *_: "sdpa")
    together = made._engine.steps([(each.prefilled, each.ids) for each in requests])
    torch.testing.assert_close(together, torch.cat(alone), atol=LIMIT, rtol=0)


@pytest.mark.parametrize("most", [1, 17, 64, 512])
@pytest.mark.parametrize("policy", ["none", "selective", "drift", "query", "cacheblend", "full"])
def test_a_prefill_in_pieces_is_the_prefill_in_one(most: int, policy: str) -> None:
    """Up to the few tokens around a break that drift corrects from fewer samples."""
    prompt = [*HEAD, *TWO, *ONE, *ASKED]
    borders = {"segments": [40, 190]}
    whole, pieces = boost("llama"), boost("llama")
    for each in (whole, pieces):
        each.prefill([*HEAD, *ONE, *TWO], segments=[40, 240])
    pieces._engine.pauses = breaks = Breaks(most)
    expected = begun(whole, prompt, recompute=policy, **borders)
    got = begun(pieces, prompt, recompute=policy, **borders)
    assert got.usage == expected.usage
    rows = sum(done.rows for done in got.prefilled.passes)
    assert rows == sum(done.rows for done in expected.prefilled.passes)
    if policy not in ("cacheblend", "query"):  # these look at many rows at once
        assert all(done.rows <= most for done in got.prefilled.passes)
        assert breaks.times == len(got.prefilled.passes) - 1
    if policy not in ("drift", "query"):
        torch.testing.assert_close(
            got.prefilled.logits, expected.prefilled.logits, atol=LIMIT, rtol=0
        )


def test_whoever_pauses_may_end_a_prefill_and_the_next_one_works() -> None:
    class Enough(Breaks):
        def pause(self) -> None:
            raise KeyboardInterrupt

    made, prompt = boost("llama"), [*HEAD, *ONE]
    made._engine.pauses = Enough(16)
    with pytest.raises(KeyboardInterrupt):
        begun(made, prompt)
    made._engine.pauses = None
    assert begun(made, prompt).usage.computed == len(prompt)


def test_a_fork_goes_its_own_way() -> None:
    made = boost("llama")
    first = begun(made, HEAD)
    first.take(first.prefilled.logits)
    other = made.fork(first, first.options, made._clock())
    while not first.over:
        first.take(made._engine.step(first.prefilled, first.ids))
    answer = "".join(other.steps(made._engine))
    assert (answer, other.answer.ids) == (first.answer.text, first.answer.ids)
    assert other.prefilled.buffer is not first.prefilled.buffer


def test_a_long_answer_moves_to_a_larger_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = boost("llama").generate(HEAD, max_new_tokens=90)
    monkeypatch.setattr("kvboost.boost.ROOM", 3)
    made = boost("llama")
    got = begun(made, HEAD, max_new_tokens=90)
    assert got.prefilled.buffer.capacity == 43
    list(got.steps(made._engine))
    assert tuple(got.answer.ids) == expected.token_ids
    assert got.prefilled.buffer.capacity == 40 + 89
    made.store(got)
    assert made.generate([*HEAD, *got.answer.ids, 5], max_new_tokens=1).usage.exact == 129


# -- namespaces


def scopes(**config: Any) -> tuple[KVBoost, KVBoost, KVBoost]:
    """Two tenants, and the namespace that both may read."""
    made = boost("llama", **config)
    one, two = made.scoped("one", "common"), made.scoped("two", "common")
    return one, two, made.scoped("common")


def test_tenants_find_nothing_of_each_other() -> None:
    one, two, _ = scopes()
    one.generate([*HEAD, *ONE], max_new_tokens=1)
    assert two.generate([*HEAD, *ONE], max_new_tokens=1).usage.computed == 240
    assert one.generate([*HEAD, *ONE], max_new_tokens=1).usage.exact == 239


def test_tenants_find_what_is_common_and_leave_nothing_there() -> None:
    one, two, common = scopes()
    common.prefill([*HEAD, *ONE], segments=[40])
    got = one.generate([*HEAD, *ONE, *ASKED], segments=[40, 240], max_new_tokens=4)
    assert got.usage.exact == 240 and got.exact
    plain = one.generate([*HEAD, *ONE, *ASKED], reuse="off", max_new_tokens=4)
    assert got.token_ids == plain.token_ids
    assert one.generate([*HEAD, *ONE, *ASKED], segments=[40, 240]).usage.exact == 239 + FRESH
    for other in (two, common):
        usage = other.generate([*HEAD, *ONE, *ASKED], segments=[40, 240], max_new_tokens=1).usage
        assert usage.exact == 240


def test_what_is_common_is_not_stored_again() -> None:
    one, _, common = scopes()
    common.prefill([*HEAD, *ONE], segments=[40])
    before = one.stats().store.tokens
    one.prefill([*HEAD, *ONE, *ASKED], segments=[40, 240])
    assert one.stats().store.tokens == before + len(ASKED)


def test_common_pieces_are_moved_too_among_own_ones() -> None:
    one, two, common = scopes()
    common.prefill([*HEAD, *ONE], segments=[40])
    one.prefill([*tokens(50, 9), *TWO], segments=[50])
    prompt, borders = [*tokens(30, 8), *TWO, *ONE, *ASKED], {"segments": [30, 180, 380]}
    built = one.build(prompt, one.parse({**borders}), one._clock())
    plan = one._engine.lookup(built, "auto").plan()
    assert [(s.start, s.end, s.seam) for s in plan.moved] == [
        (30, 180, Seam.COMPOSITION),
        (180, 380, Seam.COMPOSITION),
    ]
    assert one.generate(prompt, **borders, max_new_tokens=1).usage.moved > 200
    assert two.generate(prompt, **borders, max_new_tokens=1).usage.moved < 200


@pytest.mark.parametrize("seed", range(5))
def test_an_answer_never_depends_on_where_its_prefix_was_stored(seed: int) -> None:
    chance = random.Random(seed)
    one, _, common = scopes()
    whole = [*HEAD, *ONE, *TWO, *ASKED]
    for place in (common, one, common):
        end = chance.randrange(60, len(whole))
        place.prefill(whole[:end])
    got = one.generate(whole, reuse="exact", max_new_tokens=4)
    plain = one.generate(whole, reuse="off", max_new_tokens=4)
    assert got.token_ids == plain.token_ids and got.exact and got.usage.exact >= 32


def test_common_entries_come_from_a_folder_as_well(tmp_path: Any) -> None:
    one, _, common = scopes(disk=tmp_path / "kv", max_bytes=1 << 28)
    common.prefill([*HEAD, *ONE], segments=[40])
    assert common.flush()
    one.clear()
    got = one.generate([*HEAD, *ONE, *ASKED], segments=[40, 240], max_new_tokens=1)
    assert got.usage.exact == 240
    one.close()
