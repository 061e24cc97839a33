"""The reuse decision as a value: which stored chunks go where, and which rows must be computed.

Pure integers: this module knows nothing of tensors, models or where KV is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Protocol

from kvboost.keys import ChunkKey, KeyKind, KeySpace
from kvboost.types import Chunk

MIN_MOVED_TOKENS = 16
"""Shorter isolated runs are computed: their repair costs what they save."""

SHIFT_RATIO = 0.25
"""A changed gap of at most this share of the run after it is a shift, whatever came before."""

SHIFT_GAP = 256
"""So is a gap of at most so many tokens, if twice as much of the run's old context is here."""


QUESTION = 128
"""Tokens at the end of a prompt that may be its question: new text before them is not asked what it
looks at, nor computed again behind a repair."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What the index knows of one stored chunk.

    `key` is the chunk's lineage, the identity of its tokens *and* of all tokens before it when it
    was computed: of kind `prefix` if that context was exact, of kind `context` if it was not.
    `parent` is the lineage of the chunk before it; `position` is where its first token stood.
    """

    key: ChunkKey
    parent: ChunkKey
    content: ChunkKey
    ids: tuple[int, ...]
    position: int

    @property
    def exact(self) -> bool:
        return self.key.kind is KeyKind.PREFIX


class Index(Protocol):
    """What planning asks of a store: entries only, no tensors, valid until the next put."""

    def get(self, key: ChunkKey) -> Entry | None: ...
    def children(self, parent: ChunkKey) -> Iterable[Entry]:
        """Stored chunks that followed `parent`, newest first."""
        ...

    def variants(self, content: ChunkKey) -> Iterable[Entry]:
        """Stored chunks with this content that may be moved, newest first."""
        ...


class Seam(Enum):
    """What stands before a run here, against what stood before it when it was computed."""

    NONE = "none"
    SHIFT = "shift"
    COMPOSITION = "composition"


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [lo, hi) of a stored chunk."""

    entry: Entry
    lo: int
    hi: int

    def __len__(self) -> int:
        return self.hi - self.lo

    @property
    def position(self) -> int:
        """Where the piece's first token stood when it was computed."""
        return self.entry.position + self.lo


@dataclass(frozen=True, slots=True)
class Splice:
    """A run (neighbouring pieces that were neighbours when stored) placed at [start, end)."""

    start: int
    pieces: tuple[Piece, ...]
    exact: bool
    seam: Seam

    @property
    def end(self) -> int:
        return self.start + sum(map(len, self.pieces))

    @property
    def shift(self) -> int:
        """Positions that every token of the run moves by."""
        return self.start - self.pieces[0].position


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """Splices are sorted and disjoint; splices and `rows` together cover [0, length).

    KV in [0, exact_until) has exactly the context of this prompt once `rows` are computed.
    """

    length: int
    splices: tuple[Splice, ...]

    @property
    def moved(self) -> tuple[Splice, ...]:
        return tuple(s for s in self.splices if not s.exact)

    @property
    def exact_tokens(self) -> int:
        return sum(s.end - s.start for s in self.splices if s.exact)

    @property
    def exact_until(self) -> int:
        return next((s.start for s in self.splices if not s.exact), self.length)

    @property
    def rows(self) -> list[int]:
        """Rows that no splice covers, and always the last one: its logits are wanted."""
        bounds = [0, *(b for s in self.splices for b in (s.start, s.end)), self.length]
        gaps = zip(bounds[::2], bounds[1::2], strict=True)
        rows = [row for start, end in gaps for row in range(start, end)]
        if rows[-1:] != [self.length - 1]:
            rows.append(self.length - 1)
        return rows

    @property
    def question(self) -> range:
        """Whatever follows the last moved run, at most the last QUESTION tokens; if nothing does,
        the last few."""
        last = self.moved[-1].end if self.moved else 0
        start = max(last, self.length - QUESTION)
        return range(min(start, self.length - min(16, self.length)), self.length)


def make_plan(chunks: Sequence[Chunk], keys: KeySpace, index: Index, *, move: bool) -> ReusePlan:
    """Plan a prompt: the exact prefix chain first, then the longest runs, the rest is rows.

    `chunks` cover the prompt. With `move=False` only exact prefixes are used.
    """
    length = chunks[-1].end if chunks else 0
    prefix = _exact_prefix(chunks, keys, index)
    splices = [Splice(0, tuple(prefix), True, Seam.NONE)] if prefix else []
    if move:
        start = splices[0].end if splices else 0
        splices += _moved_runs(chunks, start, prefix, keys, index)
    return ReusePlan(length, tuple(splices))


def _exact_prefix(chunks: Sequence[Chunk], keys: KeySpace, index: Index) -> list[Piece]:
    """Walk the prefix chain by hash; where it breaks, compare with the stored successors.

    The comparison makes the match exact to the token: causal KV of the first n tokens of a chunk
    does not depend on the rest of it.
    """
    pieces: list[Piece] = []
    parent = keys.root
    for chunk in chunks:
        key = keys.prefix(parent, chunk.ids)
        entry = index.get(key)
        if entry is None or entry.ids != chunk.ids:
            break
        pieces.append(Piece(entry, 0, len(chunk)))
        parent = key
    rest = [token for chunk in chunks[len(pieces) :] for token in chunk.ids]
    at = 0
    while at < len(rest):
        candidates = [e for e in index.children(parent) if e.exact]
        best = max(candidates, key=lambda e: _common(e.ids, rest, at), default=None)
        common = _common(best.ids, rest, at) if best else 0
        if best is None or common == 0:
            break
        pieces.append(Piece(best, 0, common))
        at += common
        if common < len(best.ids):
            break
        parent = best.key
    return pieces


def _common(ids: tuple[int, ...], rest: list[int], at: int) -> int:
    window = rest[at : at + len(ids)]
    return next(
        (i for i, (a, b) in enumerate(zip(ids, window, strict=False)) if a != b), len(window)
    )


def _moved_runs(
    chunks: Sequence[Chunk], start: int, prefix: list[Piece], keys: KeySpace, index: Index
) -> Iterator[Splice]:
    ids = [token for chunk in chunks for token in chunk.ids]
    lineage = lineages(chunks, start, keys)
    variants = [
        [e for e in index.variants(keys.content(c.ids)) if e.ids == c.ids] if c.end > start else []
        for c in chunks
    ]
    ends: dict[ChunkKey, int] = {}
    _note_ends(ends, 0, prefix)
    i = 0
    while i < len(chunks):
        # The prompt's first chunk is never taken from elsewhere: everything after it leans on its
        # first token (the attention sink).
        fresh = chunks[i].start > 0 and chunks[i].end > start
        runs = [_run(v, i, variants, lineage) for v in variants[i]] if fresh else []
        run = max(runs, key=lambda r: sum(len(e.ids) for e in r), default=[])
        lo = max(0, start - chunks[i].start)
        here = chunks[i].start + lo
        tokens = sum(len(e.ids) for e in run) - lo
        if tokens < MIN_MOVED_TOKENS:
            i += 1
            continue
        pieces = [Piece(run[0], lo, len(run[0].ids)), *(Piece(e, 0, len(e.ids)) for e in run[1:])]
        same = run[0].parent == lineage[i - 1]
        seam = Seam.NONE if same else _seam(pieces[0], here, tokens, ends, index)
        if seam is not Seam.COMPOSITION:
            # Around an edit, what is left of the chunks that it cut. Not around passages: what
            # stands between those is better computed for its new neighbours.
            after = _after(run[-1], ids, here + tokens, index)
            floor = max(start, chunks[0].end)
            before = [] if same or lo else _before(run[0], ids[floor:here], index)
            here -= sum(map(len, before))
            pieces = [*before, *pieces, *after]
        yield from _contiguous(here, pieces, seam)
        _note_ends(ends, here, pieces)
        start = here + sum(map(len, pieces))
        i += len(run)


def _before(head: Entry, ids: list[int], index: Index) -> list[Piece]:
    """The end of the chunk that stood before a run, as far as `ids` end in the same tokens: what
    an edit in the middle of that chunk left of it."""
    entry = index.get(head.parent)
    if entry is None or entry.position == 0:
        return []
    common = _common(entry.ids[::-1], ids[: -len(entry.ids) - 1 : -1], 0)
    return [Piece(entry, len(entry.ids) - common, len(entry.ids))] if common else []


def _after(last: Entry, ids: list[int], at: int, index: Index) -> list[Piece]:
    """The beginning of a chunk that followed a run, as far as the prompt goes on in the same
    tokens."""
    found = [Piece(e, 0, _common(e.ids, ids, at)) for e in index.children(last.key)]
    best = max(found, key=len, default=None)
    return [best] if best else []


def _note_ends(ends: dict[ChunkKey, int], start: int, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        start += len(piece)
        ends[piece.entry.key] = start


def lineages(chunks: Sequence[Chunk], exact_until: int, keys: KeySpace) -> list[ChunkKey]:
    """The lineage that each chunk has in this prompt, were nothing after `exact_until` exact."""
    lineage: list[ChunkKey] = []
    parent = keys.root
    for chunk in chunks:
        exact = chunk.end <= exact_until
        parent = keys.prefix(parent, chunk.ids) if exact else keys.approximate(parent, chunk.ids)
        lineage.append(parent)
    return lineage


def _run(head: Entry, i: int, variants: list[list[Entry]], lineage: list[ChunkKey]) -> list[Entry]:
    """The longest run that starts with `head` as chunk i."""
    run = [head]
    for j in range(i + 1, len(variants)):
        wanted = (run[-1].key, lineage[j - 1])
        following = [e for e in variants[j] if e.parent in wanted]
        if not following:
            break
        run.append(min(following, key=lambda e: wanted.index(e.parent)))
    return run


def _seam(head: Piece, here: int, tokens: int, ends: dict[ChunkKey, int], index: Index) -> Seam:
    """Classify by what stood between the run and the nearest of its old context that is here.

    An edit leaves a small gap after text that is here; a retrieved passage among new neighbours
    finds nothing of its old context near. `ends` says where the chunks spliced so far end.
    """
    common, gap = 0, max(head.position, here)
    key = head.entry.parent
    while (entry := index.get(key)) is not None:
        if key in ends:
            if common == 0:
                stood = entry.position + len(entry.ids)
                gap = max(head.position - stood, here - ends[key])
            common += len(entry.ids)
        key = entry.parent
    near = gap <= min(SHIFT_GAP, common / 2)
    return Seam.SHIFT if near or gap <= SHIFT_RATIO * tokens else Seam.COMPOSITION


def _contiguous(start: int, pieces: Sequence[Piece], seam: Seam) -> Iterator[Splice]:
    """Split a run where its pieces did not stand at neighbouring positions (same tokens between,
    stored by different requests), so that one shift moves a whole splice."""
    cuts = [
        0,
        *(n + 1 for n, (a, b) in enumerate(pairwise(pieces)) if a.position + len(a) != b.position),
    ]
    for lo, hi in zip(cuts, [*cuts[1:], len(pieces)], strict=True):
        part = tuple(pieces[lo:hi])
        yield Splice(start, part, False, seam if lo == 0 else Seam.NONE)
        start += sum(map(len, part))
