"""Says what would be reused of a prompt, and why the rest would not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvboost.engine import Engine
from kvboost.keys import ChunkKey
from kvboost.plan import ReusePlan
from kvboost.prompt import Prompt
from kvboost.store import Lookup
from kvboost.types import Reuse

_WINDOW = 8
"""Tokens shown before and after a difference."""


@dataclass(frozen=True, slots=True)
class SpanReport:
    """A span [start, end) of the prompt: reused exactly, moved (by how far, over which seam), or
    computed."""

    start: int
    end: int
    kind: Literal["exact", "moved", "computed"]
    shift: int
    seam: str
    text: str


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a prompt leaves the stored one that is most like it: the text around that place."""

    position: int
    same: str
    prompt: str
    stored: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Spans cover the prompt. `difference` is None if nothing stored starts like this prompt, or
    all of it is known."""

    tokens: int
    spans: tuple[SpanReport, ...]
    difference: Difference | None

    def __str__(self) -> str:
        lines = []
        for s in self.spans:
            how = f"moved by {s.shift:+d}, {s.seam} seam" if s.kind == "moved" else s.kind
            lines.append(f"{s.start:>6} - {s.end:<6} {how:<34} {s.text!r}")
        if d := self.difference:
            lines += [
                f"first difference at token {d.position}, after {d.same!r}:",
                f"  this prompt  {d.prompt!r}",
                f"  stored       {d.stored!r}",
            ]
        return "\n".join(lines)


def explain(
    engine: Engine, prompt: Prompt, reuse: Reuse, decode: Callable[[list[int]], str]
) -> Explanation:
    """Plan the prompt by the index alone and put the plan into words."""
    if not engine.reuses(prompt, reuse):
        text = _snippet(decode(list(prompt.ids)))
        span = SpanReport(0, len(prompt.ids), "computed", 0, "", text)
        return Explanation(len(prompt.ids), (span,), None)
    lookup = engine.lookup(prompt, reuse)
    plan = lookup.plan()
    spans: list[SpanReport] = []
    for splice in plan.splices:
        at = splice.start
        for n, piece in enumerate(splice.pieces):
            kind: Literal["exact", "moved"] = "exact" if splice.exact else "moved"
            seam = splice.seam.value if n == 0 else "no"
            text = _snippet(decode(list(prompt.ids[at : at + len(piece)])))
            spans.append(SpanReport(at, at + len(piece), kind, splice.shift, seam, text))
            at += len(piece)
    covered = [(s.start, s.end) for s in spans]
    for chunk in lookup.chunks:
        for start, end in _gaps(chunk.start, chunk.end, covered):
            text = _snippet(decode(list(prompt.ids[start:end])))
            spans.append(SpanReport(start, end, "computed", 0, "", text))
    spans.sort(key=lambda s: s.start)
    return Explanation(plan.length, tuple(spans), _difference(lookup, prompt, plan, decode))


def _gaps(start: int, end: int, covered: list[tuple[int, int]]) -> list[tuple[int, int]]:
    gaps = []
    for lo, hi in sorted(covered):
        if lo < end and hi > start:
            if lo > start:
                gaps.append((start, lo))
            start = max(start, hi)
    if start < end:
        gaps.append((start, end))
    return gaps


def _snippet(text: str) -> str:
    return text if len(text) <= 48 else f"{text[:28]}...{text[-17:]}"


def _difference(
    lookup: Lookup, prompt: Prompt, plan: ReusePlan, decode: Callable[[list[int]], str]
) -> Difference | None:
    """Compare with the stored chunk that goes on where the exact prefix ends."""
    at = plan.exact_tokens
    pieces = plan.splices[0].pieces if at else ()
    if not pieces or at >= plan.length:
        return None
    last = pieces[-1]
    stored = list(last.entry.ids[last.hi :]) or _successor(lookup, last.entry.key)
    if not stored:
        return None
    return Difference(
        position=at,
        same=decode(list(prompt.ids[max(0, at - _WINDOW) : at])),
        prompt=decode(list(prompt.ids[at : at + _WINDOW])),
        stored=decode(stored[:_WINDOW]),
    )


def _successor(lookup: Lookup, key: ChunkKey) -> list[int]:
    newest = next(iter(lookup.children(key)), None)
    return list(newest.ids) if newest else []
