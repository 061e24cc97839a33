"""Draws that workloads share: what is popular, names that say nothing, options of a question."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

LETTERS = ("A", "B", "C", "D")
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
T = TypeVar("T")


def zipf_sample(items: Sequence[T], k: int, rng: Random) -> list[T]:
    """`k` different ones in any order; the one at place r has weight 1 / (r + 1)."""
    assert k <= len(items)
    weights = [1 / (r + 1) for r in range(len(items))]
    found: dict[int, None] = {}
    while len(found) < k:
        found[rng.choices(range(len(items)), weights)[0]] = None
    drawn = [items[r] for r in found]
    rng.shuffle(drawn)
    return drawn


def module_names(k: int, rng: Random) -> list[str]:
    """`k` different file names that say nothing of what is in the file."""
    found: dict[str, None] = {}
    while len(found) < k:
        found["module_" + "".join(rng.choices(_ALPHABET, k=3)) + ".py"] = None
    return list(found)


def lettered(
    question: str, gold: str, shown: Sequence[str], kind: str, rng: Random
) -> tuple[str, str]:
    """The question with four options out of what is shown, in any order, and the letter of the
    right one. `kind` says what the options are: a file, a passage."""
    names = [gold, *rng.sample([name for name in shown if name != gold], len(LETTERS) - 1)]
    rng.shuffle(names)
    options = "\n".join(f"{letter}) {name}" for letter, name in zip(LETTERS, names, strict=True))
    text = f"{question}\n\n{options}\n\nAnswer with the letter of the {kind}."
    return text, LETTERS[names.index(gold)]
