"""Explanations cover the prompt, and show what differs."""

from __future__ import annotations

from typing import Any

from families import boost, tokens

from kvboost import Explanation, KVBoost
from kvboost.plan import FRESH


def words(ids: list[int]) -> str:
    return " ".join(f"w{n}" for n in ids)


def assert_covers(explanation: Explanation, ids: list[int]) -> None:
    assert explanation.tokens == len(ids)
    ends = [0, *(s.end for s in explanation.spans)]
    assert [s.start for s in explanation.spans] == ends[:-1]
    assert ends[-1] == len(ids)


HEAD, ONE, TWO, THREE = tokens(20, 1), tokens(70, 2), tokens(70, 3), tokens(70, 4)


def primed() -> KVBoost:
    made = boost("llama")
    made.prefill([*HEAD, *ONE, *TWO, *THREE], segments=[20, 90, 160])
    return made


def test_nothing_is_known_of_a_cold_prompt() -> None:
    explanation = boost("llama").explain([*HEAD, *ONE])
    assert_covers(explanation, [*HEAD, *ONE])
    assert {s.kind for s in explanation.spans} == {"computed"}
    assert explanation.difference is None


def test_all_is_known_of_a_prompt_asked_before() -> None:
    made = primed()
    ids = [*HEAD, *ONE, *TWO, *THREE]
    explanation = made.explain(ids)
    assert_covers(explanation, ids)
    assert {s.kind for s in explanation.spans} == {"exact"}
    assert explanation.difference is None


def test_moved_pieces_are_named_with_shift_and_seam() -> None:
    ids = [*HEAD, *THREE, *ONE, *tokens(FRESH, 9)]
    explanation = primed().explain(ids, segments=[20, 90, 160])
    assert_covers(explanation, ids)
    kinds = {(s.kind, s.shift) for s in explanation.spans}
    assert kinds == {("exact", 0), ("moved", -140), ("moved", 70), ("computed", 0)}
    seams = {s.start: s.seam for s in explanation.spans}
    assert seams[20] == seams[90] == "composition"
    assert "moved by -140, composition seam" in str(explanation)


def test_the_first_difference_is_shown_from_both_sides() -> None:
    ids = [*HEAD, *ONE, *TWO, *THREE]
    changed = [*ids[:100], 7, *ids[101:]]
    made = primed()
    explanation = made.explain(changed, segments=[20, 90, 160])
    assert_covers(explanation, changed)
    difference = explanation.difference
    assert difference is not None
    assert difference.position == 100
    assert difference.same == words(ids[92:100])
    assert difference.prompt.split()[0] == "w7"
    assert difference.stored.split()[0] == f"w{ids[100]}"
    text = str(explanation)
    for part in ("first difference at token 100", difference.prompt, difference.stored):
        assert part in text


def test_an_explanation_tells_what_a_request_then_does() -> None:
    ids = [*HEAD, *TWO, 5, 6, 7, *ONE, 8]
    made = primed()
    before = made.stats()
    explanation = made.explain(ids, segments=[20, 90, 93, 163])
    assert made.stats() == before
    usage = made.generate(ids, segments=[20, 90, 93, 163], recompute="none", max_new_tokens=1).usage
    told = {
        kind: sum(s.end - s.start for s in explanation.spans if s.kind == kind)
        for kind in ("exact", "moved", "computed")
    }
    assert told == {"exact": usage.exact, "moved": usage.moved, "computed": usage.computed}


def test_reuse_decides_what_is_explained() -> None:
    made, ids = primed(), [*HEAD, *ONE, *THREE]
    assert {s.kind for s in made.explain(ids, reuse="exact").spans} == {"exact", "computed"}
    assert {s.kind for s in made.explain(ids, reuse="off").spans} == {"computed"}


def test_long_spans_are_shortened_and_stay_readable(default_model: Any) -> None:
    made = KVBoost(*default_model)
    explanation = made.explain("A long sentence about nothing in particular. " * 20)
    assert all(len(s.text) <= 48 for s in explanation.spans)
    assert str(explanation).startswith("     0 - ")
