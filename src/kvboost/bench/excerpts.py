"""Excerpts of Python sources of a given length, to be shown side by side.

Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from kvboost.bench.material import Material, clip
from kvboost.bench.sources import Fact, Source, parse
from kvboost.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The lines from the start of a definition, and what they state."""

    source: str
    text: str
    facts: tuple[Fact, ...]

    def answers(self, fact: Fact) -> bool:
        return fact in self.facts or fact.trace in self.text


class Excerpts:
    """Draws excerpts; no source has a second turn before all have had one."""

    def __init__(self, material: Material, rng: Random) -> None:
        self._material = material
        self._rng = rng
        self._queue = [file for file in material.files if file[0].endswith(".py")]
        self._parsed: dict[str, Source] = {}
        rng.shuffle(self._queue)

    def draw(self, tokens: int) -> Excerpt:
        """About this many tokens: at most 4 % more and 15 % less. Raises ConfigError if no source
        has them."""
        for _ in range(len(self._queue)):
            name, text = self._queue.pop(0)
            self._queue.append((name, text))
            if name not in self._parsed:
                self._parsed[name] = parse(text)
            if excerpt := self._cut(name, self._parsed[name], tokens):
                return excerpt
        raise _too_few(1, tokens)

    def pool(self, count: int, tokens: int) -> list[Excerpt]:
        """Excerpts of different sources; each has facts that none of the others answers, and only
        those."""
        found: list[Excerpt] = []
        while len(found) < count:
            one = self.draw(tokens)
            if any(one.source == other.source for other in found):
                raise _too_few(count, tokens)
            if all(excerpt.facts for excerpt in _distinct([*found, one])):
                found.append(one)
        return _distinct(found)

    def _cut(self, name: str, source: Source, tokens: int) -> Excerpt | None:
        for start in self._rng.sample(source.starts, min(3, len(source.starts))):
            rest = "\n".join(source.lines[start:])
            text = clip(rest, round(1.04 * tokens), self._material).rstrip()
            if len(self._material.tokens(text)) < 0.85 * tokens:
                continue
            end = start + text.count("\n") + 1
            inside = [f for first, last, f in source.facts if start <= first and last < end]
            facts = [f for f in inside if (f.trace in text) == (f.kind != "describes")]
            if facts:
                return Excerpt(name, text, tuple(dict.fromkeys(facts)))
        return None


def _distinct(excerpts: Sequence[Excerpt]) -> list[Excerpt]:
    """The same, with only those facts that none of the others answers."""
    distinct = []
    for one in excerpts:
        others = [other for other in excerpts if other is not one]
        facts = (fact for fact in one.facts if not any(o.answers(fact) for o in others))
        distinct.append(replace(one, facts=tuple(facts)))
    return distinct


def _too_few(count: int, tokens: int) -> ConfigError:
    return ConfigError(
        f"too few Python files to cut {count} different excerpts of {tokens} tokens out of them: "
        "give a folder with more, or none to take the standard library"
    )
