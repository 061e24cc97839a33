"""Alignment, against texts that are known to have been edited and against difflib."""

from __future__ import annotations

import random
import time
from difflib import SequenceMatcher

from hypothesis import given
from hypothesis import strategies as st

from kvboost.align import GRAM, Match, Text, align, common, fit

LEAST = 16
few = st.lists(st.integers(0, 2), max_size=120).map(tuple)


def words(seed: int, count: int, vocabulary: int = 1000) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(vocabulary) for _ in range(count))


def edited(ids: tuple[int, ...], edits: int, rng: random.Random) -> tuple[int, ...]:
    """So many insertions, deletions and replacements of up to 8 tokens."""
    for _ in range(edits):
        at = rng.randrange(len(ids))
        cut, put = rng.choice([(0, 1), (1, 0), (1, 1)])
        inserted = tuple(rng.randrange(1000, 2000) for _ in range(put * rng.randint(1, 8)))
        ids = (*ids[:at], *inserted, *ids[at + cut * rng.randint(1, 8) :])
    return ids


@given(few, few, st.integers(0, 130), st.integers(0, 130))
def test_common_counts_token_by_token(
    a: tuple[int, ...], b: tuple[int, ...], i: int, j: int
) -> None:
    n = 0
    while i + n < len(a) and j + n < len(b) and a[i + n] == b[j + n]:
        n += 1
    assert common(a, b, i, j) == n


@given(few, few, st.booleans(), st.booleans())
def test_matches_are_the_same_tokens_in_the_same_order(
    new: tuple[int, ...], old: tuple[int, ...], head: bool, tail: bool
) -> None:
    at = place = 0
    for match in align(new, Text(old, head, tail), LEAST):
        assert match.at >= at and match.place >= place and match.length > 0
        at, place = match.at + match.length, match.place + match.length
        assert new[match.at : at] == old[match.place : place]
        short = match.length < LEAST
        assert not short or (head and match.at == match.place == 0) or (tail and at == len(new))


@given(few, st.lists(few, max_size=3))
def test_a_fit_is_sorted_and_disjoint_and_has_the_same_tokens(
    new: tuple[int, ...], olds: list[tuple[int, ...]]
) -> None:
    at = 0
    for n, match in fit(new, [Text(old, True, True) for old in olds], LEAST):
        assert match.at >= at
        at = match.at + match.length
        assert new[match.at : at] == olds[n][match.place : match.place + match.length]


@given(st.integers(0, 20), st.integers(0, 10_000))
def test_edits_leave_almost_all_of_what_difflib_finds(edits: int, seed: int) -> None:
    old = words(seed, 1500)
    new = edited(old, edits, random.Random(seed))
    found = sum(m.length for m in align(new, Text(old), LEAST))
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    assert found >= 0.99 * sum(b.size for b in blocks if b.size >= LEAST)
    assert found >= len(new) - (8 + 2 * LEAST) * edits


def test_the_second_text_fills_what_the_first_one_lacks() -> None:
    a, b, c, d = (words(n, 40) for n in range(4))
    new = (*a, *b, *c)
    found = fit(new, [Text((*d, *b)), Text((*a, *d, *c))], LEAST)
    assert found == [(1, Match(0, 0, 40)), (0, Match(40, 40, 40)), (1, Match(80, 80, 40))]


def test_short_ends_count_only_where_asked_for() -> None:
    a, b, c = words(1, 5), words(2, 30), words(3, 30)
    assert align((*a, *b, *a), Text((*a, *c, *a)), LEAST) == []
    assert align((*a, *b), Text((*a, *c), head=True), LEAST) == [Match(0, 0, 5)]
    assert align((*b, *a), Text((*c, *a), tail=True), LEAST) == [Match(30, 30, 5)]


def test_text_that_repeats_itself_costs_no_more_than_its_length() -> None:
    start = time.perf_counter()
    for period in (1, 2, GRAM, 50):
        new = words(1, period, 10) * (4000 // period)
        old = (*new[:1999], 77, *new[:2000])
        align(new, Text(old), LEAST)
        align(tuple(n % 15 for n in range(4000)), Text((*range(15), 99) * 250), LEAST)
    assert time.perf_counter() - start < 2
