"""Keys: stable everywhere, and different wherever any input differs."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import kvboost.keys
from kvboost.keys import DIGEST_BYTES, ChunkKey, KeyKind, KeySpace

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=20)
NAMES = st.text(st.characters(codec="utf-8"), max_size=8)
SPACE = KeySpace("weights:0", "tenant", "rope:10000")


def some_keys(space: KeySpace) -> dict[str, ChunkKey]:
    prefix = space.prefix(space.root, [1, 2, 3])
    context = space.approximate(prefix, [4, 5])
    return {
        "root": space.root,
        "content": space.content([1, 2, 3]),
        "prefix": prefix,
        "second prefix": space.prefix(prefix, [2**32 - 1]),
        "context": context,
        "second context": space.approximate(context, [6]),
    }


GOLDEN = {
    "root": "c111a0a3cf045e7ab71529416db66453c5069a3eaa2b8e4cc9f6114570750082",
    "content": "62587d20c641023a84c7f423bb95099dbb93f53179cba0df5fe5a52ab785eac4",
    "prefix": "8a329a4d063c2d1e0e8dfeee9f90c815aa75f70a99f5a8217cc32f4737005364",
    "second prefix": "0540591bb07f9714cfa0ce2c9f11d00cc9483168978c4e20bea6d4e52d5a12d3",
    "context": "de64130c0bd749a8d9d24c80bd4504346a303a61abfc0f43823f6b182331f2f1",
    "second context": "306d6333f41d68db1d15f78f58e4f2957390f509bbf22df9ae5a8a1b7fbe4282",
}


def test_digests_never_change() -> None:
    """If this fails, stored KV is lost to every user: raise FORMAT_VERSION, and mean it."""
    assert {name: key.digest.hex() for name, key in some_keys(SPACE).items()} == GOLDEN


def test_digests_are_the_same_in_another_process() -> None:
    program = (
        "from kvboost.keys import KeySpace\n"
        "space = KeySpace('weights:0', 'tenant', 'rope:10000')\n"
        "prefix = space.prefix(space.root, [1, 2, 3])\n"
        "print(prefix.digest.hex(), space.content([1, 2, 3]).digest.hex())\n"
    )
    source = str(Path(kvboost.keys.__file__).parents[1])
    for seed in ("0", "12345"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": source}
        printed = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert printed.split() == [GOLDEN["prefix"], GOLDEN["content"]]


@given(ids=IDS)
def test_kinds_never_collide(ids: list[int]) -> None:
    keys = [SPACE.content(ids), SPACE.prefix(SPACE.root, ids), SPACE.approximate(SPACE.root, ids)]
    assert [key.kind for key in keys] == [KeyKind.CONTENT, KeyKind.PREFIX, KeyKind.CONTEXT]
    assert len({key.digest for key in [*keys, SPACE.root]}) == 4
    assert ChunkKey(KeyKind.PREFIX, keys[0].digest) != keys[0]


@given(first=st.tuples(NAMES, NAMES, NAMES), second=st.tuples(NAMES, NAMES, NAMES), ids=IDS)
def test_spaces_share_no_key(
    first: tuple[str, str, str], second: tuple[str, str, str], ids: list[int]
) -> None:
    assume(first != second and first[0] and second[0])
    mine, theirs = KeySpace(*first), KeySpace(*second)
    assert not set(some_keys(mine).values()) & set(some_keys(theirs).values())
    assert mine.content(ids) != theirs.content(ids)
    # Even with the parent of another space, the space itself still counts.
    assert mine.prefix(mine.root, ids) != theirs.prefix(mine.root, ids)


def test_characters_that_move_between_fields_change_the_root() -> None:
    roots = [
        KeySpace("ab", "c").root,
        KeySpace("a", "bc").root,
        KeySpace("c", "ab").root,
        KeySpace("ab", "", "c").root,
        KeySpace("abc", "").root,
        KeySpace("abc").root,
        KeySpace("ab", "c", "\0").root,
    ]
    assert len(set(roots)) == len(roots)


@given(first=IDS, second=IDS)
def test_different_ids_have_different_keys(first: list[int], second: list[int]) -> None:
    same = first == second
    assert (SPACE.content(first) == SPACE.content(second)) is same
    assert (SPACE.prefix(SPACE.root, first) == SPACE.prefix(SPACE.root, second)) is same


@given(ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=12))
def test_a_chain_remembers_where_it_was_cut(ids: list[int]) -> None:
    """`[1, 2] + [3]`, `[1] + [2, 3]` and `[1, 2, 3]` are three chains with three keys."""
    cuts = range(len(ids))
    ends = [SPACE.prefix(SPACE.prefix(SPACE.root, ids[:cut]), ids[cut:]) for cut in cuts]
    assert len({*ends, SPACE.prefix(SPACE.root, ids)}) == len(ids) + 1


@given(before=IDS, other=IDS, ids=IDS)
def test_a_chain_depends_on_everything_before(
    before: list[int], other: list[int], ids: list[int]
) -> None:
    assume(before != other)
    for follow in (SPACE.prefix, SPACE.approximate):
        parents = [SPACE.prefix(SPACE.root, head) for head in (before, other)]
        assert follow(parents[0], ids) != follow(parents[1], ids)


@given(chain=st.lists(st.tuples(st.booleans(), IDS), min_size=1, max_size=6))
def test_approximate_lineage_never_becomes_exact(chain: list[tuple[bool, list[int]]]) -> None:
    keys = [SPACE.root]
    for approximate, ids in chain:
        if approximate or keys[-1].kind is KeyKind.CONTEXT:
            keys.append(SPACE.approximate(keys[-1], ids))
        else:
            keys.append(SPACE.prefix(keys[-1], ids))
    for parent, child in pairwise(keys):
        if parent.kind is KeyKind.CONTEXT:
            assert child.kind is KeyKind.CONTEXT
            with pytest.raises(AssertionError, match="prefix key cannot follow"):
                SPACE.prefix(parent, [1])
    assert len({key.digest for key in keys}) == len(keys)


def test_the_parents_kind_counts_even_if_its_digest_is_the_same() -> None:
    forged = ChunkKey(KeyKind.CONTEXT, SPACE.root.digest)
    assert SPACE.approximate(forged, [1]) != SPACE.approximate(SPACE.root, [1])


def test_a_content_key_is_nobodys_parent() -> None:
    content = SPACE.content([1])
    with pytest.raises(AssertionError):
        SPACE.prefix(content, [2])
    with pytest.raises(AssertionError):
        SPACE.approximate(content, [2])


@pytest.mark.parametrize("token", [-1, 2**32, 10**30])
def test_ids_that_do_not_fit_are_refused(token: int) -> None:
    with pytest.raises(ValueError, match="token ids must be"):
        SPACE.content([1, token])


def test_a_digest_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        ChunkKey(KeyKind.CONTENT, b"short")


def test_an_empty_fingerprint_is_refused() -> None:
    with pytest.raises(ValueError, match="fingerprint is empty"):
        KeySpace("")


def test_hex_is_the_beginning_of_the_digest() -> None:
    key = SPACE.content([1])
    assert len(key.digest) == DIGEST_BYTES
    assert key.digest.hex().startswith(key.hex)
    assert len(key.hex) == 16
