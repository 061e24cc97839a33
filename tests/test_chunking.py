"""Chunk boundaries: bounded, local, and found again after an edit. The reference implementation
below states the rules the slow obvious way."""

from __future__ import annotations

import argparse
import inspect
import random
import re
import subprocess
import tarfile
import textwrap
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost import chunking
from kvboost.chunking import STRUCTURE_GAP, WINDOW, Chunker, ChunkingConfig

DEFAULT = ChunkingConfig()
SPECIAL = frozenset({0, 1, 2})
CONFIGS = [DEFAULT, ChunkingConfig(1, 2, 2), ChunkingConfig(8, 20, 31), ChunkingConfig(16, 64, 64)]


def boundaries(
    ids: Sequence[int], borders: Iterable[int] = (), chunker: Chunker | None = None
) -> set[int]:
    return {chunk.start for chunk in (chunker or Chunker(DEFAULT)).split(ids, borders)} | {len(ids)}


# The reference -----------------------------------------------------------------------------


def window_hashes(ids: Sequence[int]) -> list[int]:
    """The hash of the last WINDOW tokens up to and with each position, computed afresh."""
    bits = 64 // WINDOW
    return [
        sum(chunking._mix(ids[i - j]) << (bits * j) for j in range(min(i + 1, WINDOW))) % 2**64
        for i in range(len(ids))
    ]


def natural_boundaries(ids: Sequence[int], config: ChunkingConfig) -> list[int]:
    """Those of one segment without borders inside."""
    hashes, found = window_hashes(ids), []
    for i in range(config.min_tokens - 1, len(ids) - config.min_tokens):
        others = hashes[max(0, i - config.radius) : i] + hashes[i + 1 : i + config.radius + 1]
        if all(hashes[i] > other for other in others):
            found.append(i + 1)
    return found


def structure_borders(segment: Sequence[int], special: frozenset[int]) -> list[int]:
    return [
        i
        for i, token in enumerate(segment)
        if token in special
        and i > STRUCTURE_GAP
        and not special.intersection(segment[i - STRUCTURE_GAP : i])
    ]


def reference(
    ids: Sequence[int], borders: Iterable[int], config: ChunkingConfig, special: frozenset[int]
) -> list[int]:
    edges = sorted({0, len(ids), *borders})
    starts = {
        left + start
        for left, right in pairwise(edges)
        for start in structure_borders(ids[left:right], special)
    }
    edges = sorted(starts.union(edges))
    result = {0, *edges}
    for left, right in pairwise(edges):
        segment = ids[left:right]
        hashes, start = window_hashes(segment), 0
        for end in [*natural_boundaries(segment, config), len(segment)]:
            while end - start > config.max_tokens:
                last = min(start + config.max_tokens, end - config.min_tokens)
                allowed = range(start + config.min_tokens, last + 1)
                start = max(allowed, key=lambda cut: hashes[cut - 1])  # the first of equals
                result.add(left + start)
            result.add(left + end)
            start = end
    return sorted(result)


# Material ----------------------------------------------------------------------------------


@st.composite
def random_ids(draw: st.DrawFn, max_size: int = 3000) -> list[int]:
    """Tokens without structure. Drawn from a seed: shrinking single ids would teach nothing."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    alphabet = draw(st.sampled_from([1000, 50_000, 250_000]))
    return [3 + rng.randrange(alphabet) for _ in range(draw(st.integers(0, max_size)))]


@st.composite
def any_ids(draw: st.DrawFn) -> list[int]:
    """Random, constant, periodic and special-token material, in any mixture."""
    ids: list[int] = []
    for _ in range(draw(st.integers(0, 5))):
        rng = random.Random(draw(st.integers(0, 2**32)))
        length = draw(st.integers(1, 500))
        alphabet = draw(st.sampled_from([1, 4, 40, 5000]))
        pattern = [rng.randrange(alphabet) for _ in range(draw(st.integers(1, 100)))]
        if draw(st.booleans()):
            ids += [pattern[i % len(pattern)] for i in range(length)]
        else:
            ids += [rng.randrange(alphabet) for _ in range(length)]
    return ids


def fractions() -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(0, 1), max_size=6)


# Tests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
@given(ids=any_ids(), where=fractions(), special=st.sampled_from([frozenset[int](), SPECIAL]))
@settings(max_examples=40, deadline=None)
def test_equals_the_reference_and_keeps_the_contract(
    config: ChunkingConfig, ids: list[int], where: list[float], special: frozenset[int]
) -> None:
    borders = [round(share * len(ids)) for share in where]
    chunker = Chunker(config, special)
    chunks = chunker.split(ids, borders)

    expected = reference(ids, borders, config, special)
    assert [(c.start, c.end) for c in chunks] == list(pairwise(expected))
    assert chunker.split(tuple(ids), reversed(borders)) == chunks

    assert [token for chunk in chunks for token in chunk.ids] == ids
    assert all(0 < len(c.ids) == len(c) <= config.max_tokens for c in chunks)
    assert set(borders) <= boundaries(ids, borders, chunker)


@pytest.mark.parametrize("config", CONFIGS)
@given(ids=any_ids(), where=fractions())
@settings(max_examples=40, deadline=None)
def test_only_a_whole_segment_is_shorter_than_the_minimum(
    config: ChunkingConfig, ids: list[int], where: list[float]
) -> None:
    edges = {0, len(ids), *(round(share * len(ids)) for share in where)}
    for chunk in Chunker(config).split(ids, edges):
        whole_segment = chunk.start in edges and chunk.end in edges
        assert len(chunk) >= config.min_tokens or whole_segment


@given(parts=st.lists(any_ids(), max_size=3))
@settings(max_examples=40, deadline=None)
def test_a_segment_is_split_as_if_it_were_alone(parts: list[list[int]]) -> None:
    chunker = Chunker(DEFAULT, SPECIAL)
    ids = [token for part in parts for token in part]
    borders = [sum(map(len, parts[:i])) for i in range(len(parts))]
    apart = [chunk.ids for part in parts for chunk in chunker.split(part)]
    assert [chunk.ids for chunk in chunker.split(ids, borders)] == apart


@st.composite
def edited(draw: st.DrawFn, material: st.SearchStrategy[list[int]]) -> tuple[list[int], ...]:
    """head, removed, inserted, tail."""
    ids = draw(material)
    at = draw(st.integers(0, len(ids)))
    removed = draw(st.integers(0, 300))
    inserted = draw(random_ids(max_size=300))
    return ids[:at], ids[at : at + removed], inserted, ids[at + removed :]


@pytest.mark.parametrize("special", [frozenset[int](), SPECIAL])
@given(edit=st.one_of(edited(random_ids()), edited(any_ids())))
@settings(max_examples=150, deadline=None)
def test_boundaries_resynchronise_after_an_edit(
    special: frozenset[int], edit: tuple[list[int], ...]
) -> None:
    """Every boundary more than max + radius before the edit stays; from the first natural one
    that lies radius + WINDOW + STRUCTURE_GAP or more behind it, all are the same, shifted."""
    head, removed, inserted, tail = edit
    old_ids, new_ids = head + removed + tail, head + inserted + tail
    chunker = Chunker(DEFAULT, special)
    old, new = boundaries(old_ids, (), chunker), boundaries(new_ids, (), chunker)

    before = len(head) - DEFAULT.max_tokens - DEFAULT.radius
    assert {b for b in old if b <= before} == {b for b in new if b <= before}

    old_tail, new_tail = len(head) + len(removed), len(head) + len(inserted)
    synchronised = min(
        (b for b in old_natural(old_ids, special) if b >= old_tail + BEHIND), default=len(old_ids)
    )
    moved = {b - old_tail for b in old if b >= synchronised}
    assert moved == {b - new_tail for b in new if b >= synchronised - old_tail + new_tail}


BEHIND = DEFAULT.radius + WINDOW + STRUCTURE_GAP


def old_natural(ids: list[int], special: frozenset[int]) -> list[int]:
    edges = [0, *structure_borders(ids, special), len(ids)]
    return [
        left + cut
        for left, right in pairwise(edges)
        for cut in natural_boundaries(ids[left:right], DEFAULT)
    ]


@given(edit=edited(random_ids()))
@settings(max_examples=100, deadline=None)
def test_every_natural_boundary_outside_the_reach_of_an_edit_stays(
    edit: tuple[list[int], ...],
) -> None:
    """The local guarantee, with no exception for where the first natural boundary lies."""
    head, removed, inserted, tail = edit
    old = {b - len(head + removed) for b in natural_boundaries(head + removed + tail, DEFAULT)}
    new = {b - len(head + inserted) for b in boundaries(head + inserted + tail)}
    assert {b for b in old if b >= DEFAULT.radius + WINDOW} <= new


def real_texts() -> list[list[int]]:
    """Source files of the standard library as word ids."""
    vocabulary: dict[str, int] = {}
    texts = []
    for module in (argparse, inspect, random, re, subprocess, tarfile, textwrap):
        words = re.findall(r"\s+|\w+|[^\w\s]", inspect.getsource(module))
        texts.append([vocabulary.setdefault(word, len(vocabulary)) for word in words])
    return texts


def test_on_real_text_an_edit_is_over_within_one_maximum_chunk() -> None:
    rng = random.Random(1)
    edits = resynchronised = moved = found = 0
    for ids in real_texts() * 6:
        at, removed, added = rng.randrange(len(ids)), rng.choice([0, 32, 64]), rng.choice([8, 48])
        tail = ids[at + removed :]
        new_ids = ids[:at] + [10**6 + rng.randrange(1000) for _ in range(added)] + tail
        old = {b - len(ids) for b in boundaries(ids)}
        new = {b - len(new_ids) for b in boundaries(new_ids)}
        edits += 1
        resynchronised += all(b < DEFAULT.max_tokens - len(tail) for b in old ^ new)
        known = {chunk.ids for chunk in Chunker(DEFAULT).split(ids)}
        for chunk in Chunker(DEFAULT).split(new_ids):
            inside = max(0, chunk.end - max(chunk.start, len(new_ids) - len(tail)))
            moved += inside
            found += inside * (chunk.ids in known)
    assert resynchronised / edits >= 0.97
    assert found / moved >= 0.95


def test_on_random_tokens_the_mean_length_is_the_one_asked_for() -> None:
    rng = random.Random(3)
    ids = [rng.randrange(50_000) for _ in range(100_000)]
    assert 76 <= len(ids) / len(Chunker(DEFAULT).split(ids)) <= 84


@pytest.mark.parametrize("period", [1, 2, 3, 40, 81, 300])
@pytest.mark.parametrize("length", [1, 31, 32, 63, 64, 256, 257, 288, 1000, 10_000])
def test_degenerate_sequences_stay_within_the_bounds(period: int, length: int) -> None:
    ids = [i % period for i in range(length)]
    lengths = [len(chunk) for chunk in Chunker(DEFAULT).split(ids)]
    assert sum(lengths) == length
    assert max(lengths) <= DEFAULT.max_tokens
    assert min(lengths) >= min(length, DEFAULT.min_tokens)


@pytest.mark.parametrize("config", [DEFAULT, ChunkingConfig(1, 2, 20_000)])
def test_time_is_linear_on_constant_input(config: ChunkingConfig) -> None:
    began = time.perf_counter()
    Chunker(config).split([7] * 100_000)
    assert time.perf_counter() - began < 5  # a quadratic sweep takes minutes


def test_nothing_to_split() -> None:
    assert Chunker(DEFAULT).split([]) == []
    assert Chunker(DEFAULT, SPECIAL).split([], [0]) == []


def test_chatml_message_borders_are_one_border_each() -> None:
    system, user, end = [0, 7, 8], [0, 9, 8], [1, 8]
    ids = [*system, *range(100, 120), *end, *user, *range(200, 220), *end, 0, 11, 8]
    first, second = 23, 23 + 5 + 20
    assert [c.start for c in Chunker(DEFAULT, SPECIAL).split(ids)] == [0, first, second]


def test_borders_outside_the_prompt_are_refused() -> None:
    for borders in ([-1], [5, 11]):
        with pytest.raises(ValueError, match="from 0 to its length"):
            Chunker(DEFAULT).split(range(10), borders)


@pytest.mark.parametrize(
    ("lengths", "named"),
    [((0, 80, 256), "min_tokens"), ((41, 80, 256), "mean_tokens"), ((32, 80, 79), "max_tokens")],
)
def test_impossible_lengths_are_refused(lengths: tuple[int, int, int], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} is .* set it to"):
        ChunkingConfig(*lengths)


def test_boundaries_never_drift_between_versions() -> None:
    """Stored chunks are found only where a newer release cuts as this one does."""
    mixed = [(i * 2654435761) % 49152 for i in range(300)]
    ids = [*mixed, *[7] * 300, *reversed(mixed)]
    assert sorted(boundaries(ids)) == [0, 78, 127, 265, 297, 329, 361, 393, 618, 740, 784, 900]
