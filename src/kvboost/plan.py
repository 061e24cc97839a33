"""The reuse decision as a value: which stored chunks go where, and which rows must be computed.

Pure integers: this module knows nothing of tensors, models or where KV is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from kvboost.align import GRAM, Text, align, common, fit, grams
from kvboost.keys import ChunkKey, KeyKind, KeySpace, lineages
from kvboost.types import Chunk

MIN_MOVED_TOKENS = 16
"""Shorter isolated runs are computed: their repair costs what they save."""

SHIFT_RATIO = 0.25
"""A changed gap of at most this share of the run after it is a shift, whatever came before."""

SHIFT_GAP = 256
"""So is a gap of at most so many tokens, if twice as much of the run's old context is here, and
whatever lies between if of so many tokens before the run, there and here, half are the same."""

FAR = 2048
"""Tokens before a run, where it was computed, in which its old context is looked for."""

QUESTION = 128
"""Tokens at the end of a prompt that may be its question: new text before them is not asked what it
looks at, nor computed again behind a repair."""

FRESH = 32
"""Tokens at the end of a prompt that are not moved: the answer starts from them, and a question
that came before holds what it saw then. What 0, 32, 64 and 128 leave: docs/adr/0016."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What the index knows of one stored chunk.

    `key` is the chunk's lineage, the identity of its tokens *and* of all tokens before it when it
    was computed: of kind `prefix` if that context was exact, of kind `context` if it was not.
    `parent` is the lineage of the chunk before it, that of a moved one as it is stored; `position`
    is where its first token stood.
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

    def variants(self, content: ChunkKey) -> Iterable[Entry]:
        """Stored chunks with this content that may be moved, newest first."""


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
    """Splices are sorted and disjoint; splices and `rows` together cover [0, length). No moved one
    reaches into the last FRESH tokens.

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
        """What follows the last moved run: at most the last QUESTION tokens, at least one."""
        last = self.moved[-1].end if self.moved else 0
        return range(min(max(last, self.length - QUESTION), self.length - 1), self.length)


def make_plan(chunks: Sequence[Chunk], keys: KeySpace, index: Index, *, move: bool) -> ReusePlan:
    """Plan a prompt: the exact prefix chain first, then the longest runs, the rest is rows.

    `chunks` cover the prompt. With `move=False` only exact prefixes are used.
    """
    length = chunks[-1].end if chunks else 0
    prefix = _exact_prefix(chunks, keys, index)
    splices = [Splice(0, tuple(prefix), True, Seam.NONE)] if prefix else []
    if move and chunks:
        splices += _moved_runs(chunks, prefix, keys, index)
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
    rest = tuple(token for chunk in chunks[len(pieces) :] for token in chunk.ids)
    at = 0
    while at < len(rest):
        candidates = [e for e in index.children(parent) if e.exact]
        best = max(candidates, key=lambda e: common(e.ids, rest, 0, at), default=None)
        same = common(best.ids, rest, 0, at) if best else 0
        if best is None or same == 0:
            break
        pieces.append(Piece(best, 0, same))
        at += same
        if same < len(best.ids):
            break
        parent = best.key
    return pieces


def _moved_runs(
    chunks: Sequence[Chunk], prefix: list[Piece], keys: KeySpace, index: Index
) -> list[Splice]:
    start = sum(map(len, prefix))
    lineage = lineages(chunks, start, keys)
    variants = [
        [e for e in index.variants(keys.content(c.ids)) if e.ids == c.ids] if c.end > start else []
        for c in chunks
    ]
    found = _Found(tuple(token for chunk in chunks for token in chunk.ids), index)
    found.put(0, prefix, Seam.NONE)
    # The prompt's first chunk is never taken from elsewhere: everything after it leans on its
    # first token (the attention sink).
    found.at = max(start, chunks[0].end)
    i = 1
    while i < len(chunks):
        runs = [_run(v, i, variants, lineage) for v in variants[i]]
        run = max(runs, key=lambda r: sum(len(e.ids) for e in r), default=[])
        lo = max(0, found.at - chunks[i].start)
        if sum(len(e.ids) for e in run) - lo < MIN_MOVED_TOKENS:
            i += 1
            continue
        pieces = [Piece(run[0], lo, len(run[0].ids)), *(Piece(e, 0, len(e.ids)) for e in run[1:])]
        found.add(chunks[i].start + lo, pieces, same=run[0].parent == lineage[i - 1])
        i += len(run)
    found.grow(len(found.ids))
    fresh = chunks[-1].end - FRESH
    return _joined(
        (here, cut, seam)
        for here, piece, seam in found.placed[len(prefix) :]
        for cut in _cut([piece], 0, fresh - here)
    )


@dataclass
class _Found:
    """What has been found for a prompt, from left to right. What ends before `at` is settled.

    placed: where each piece stands, and what is before it. ends: where each chunk's last token that
    is here stands, and which one it is.
    """

    ids: tuple[int, ...]
    index: Index
    at: int = 0
    company: Seam = Seam.NONE
    placed: list[tuple[int, Piece, Seam]] = field(default_factory=list)
    ends: dict[ChunkKey, tuple[int, int]] = field(default_factory=dict)

    def put(self, here: int, pieces: Sequence[Piece], seam: Seam) -> None:
        for piece in pieces:
            self.placed.append((here, piece, seam))
            here, seam = here + len(piece), Seam.NONE
            self.ends[piece.entry.key] = here, piece.hi
            self.at = here

    def add(self, here: int, run: list[Piece], *, same: bool) -> None:
        """Add a run of whole chunks, and before it what edits left of the chunks that they cut."""
        if same or self._near(run[0], here, sum(map(len, run))) or self._alike(run[0], here):
            self._fill(here, self._before(run[0]) if here > self.at else [])
            self.company = Seam.NONE if same or self._follows(run[0], here) else Seam.SHIFT
        else:
            self.grow(here)
            self.company = Seam.COMPOSITION
        self.put(here, run, self.company)

    def grow(self, end: int) -> None:
        """Add what follows the last run both here and where it was computed. Not after a passage:
        what stands between those is better computed for its new neighbours."""
        if self.company is not Seam.COMPOSITION:
            self._fill(end, [])

    def _fill(self, end: int, before: list[Piece]) -> None:
        """Fill [at, end) with pieces of what stood before the run at `end`, and after the last."""
        gap, start, old = self.ids[self.at : end], self.at, [before]

        def texts() -> Iterator[Text]:
            yield self._text(before, tail=True)
            if self.placed:
                old.append(self._after(gap))
                yield self._text(old[-1], tail=False)

        for n, (at, place, length) in fit(gap, texts(), MIN_MOVED_TOKENS):
            here = start + at
            for piece in _cut(old[n], place, place + length):
                self.put(here, [piece], Seam.NONE if self._follows(piece, here) else Seam.SHIFT)
                here += len(piece)

    def _text(self, old: list[Piece], *, tail: bool) -> Text:
        ids = tuple(token for piece in old for token in piece.entry.ids[piece.lo : piece.hi])
        return Text(ids, head=bool(old) and self._follows(old[0], self.at), tail=tail)

    def _follows(self, piece: Piece, here: int) -> bool:
        """Whether the piece stands here right behind the last one, as it did when computed."""
        if not self.placed or here != self.at:
            return False
        last = self.placed[-1][1]
        if last.hi < len(last.entry.ids):
            return last.entry.key == piece.entry.key and last.hi == piece.lo
        return last.entry.key == piece.entry.parent and piece.lo == 0

    def _near(self, head: Piece, here: int, tokens: int) -> bool:
        """Whether a run has its old context near it, or is long for what changed before it.

        An edit leaves a small gap after text that is here; a retrieved passage among new
        neighbours finds nothing of its old context near.
        """
        kept, gap, far = 0, max(head.position, here), max(FAR, SHIFT_RATIO * tokens)
        entry = self.index.get(head.entry.parent)
        while entry is not None and (kept or head.position - entry.position <= far):
            if entry.key in self.ends:
                if kept == 0:
                    end, hi = self.ends[entry.key]
                    gap = max(head.position - entry.position - hi, here - end)
                kept += len(entry.ids)
                if gap <= kept / 2 or gap > SHIFT_GAP:
                    break
            entry = self.index.get(entry.parent)
        return gap <= max(SHIFT_RATIO * tokens, min(SHIFT_GAP, kept / 2))

    def _alike(self, head: Piece, here: int) -> bool:
        """Whether half of what stood before a run stands before it here."""
        old: tuple[int, ...] = ()
        entry = self.index.get(head.entry.parent)
        while entry is not None and len(old) < SHIFT_GAP:
            old = (*entry.ids, *old)
            entry = self.index.get(entry.parent)
        new, old = self.ids[max(0, here - SHIFT_GAP) : here], old[-SHIFT_GAP:]
        back = align(new[::-1], Text(old[::-1]), GRAM)  # what is near counts first
        same = sum(match.length for match in back)
        return 2 * same >= max(len(old), SHIFT_GAP // 2)

    def _before(self, head: Piece) -> list[Piece]:
        """What stood before a run, back to what of it is here already."""
        old: list[Piece] = []
        entry = self.index.get(head.entry.parent)
        while entry is not None and entry.position and head.position - entry.position <= FAR:
            _, hi = self.ends.get(entry.key, (0, 0))
            if hi < len(entry.ids):
                old.insert(0, Piece(entry, hi, len(entry.ids)))
            if hi:
                break
            entry = self.index.get(entry.parent)
        return old

    def _after(self, wanted: Sequence[int]) -> list[Piece]:
        """What followed the last piece, as long as it has something of what is wanted."""
        last, misses = self.placed[-1][1], 0
        old = [Piece(last.entry, last.hi, len(last.entry.ids))] if last.entry.position else []
        entry, tried, known = last.entry, {last.entry.key}, set(grams(wanted))
        while misses < 2 and sum(map(len, old)) < 2 * len(wanted) + MIN_MOVED_TOKENS:
            # What an edit made of a chunk may have no followers of its own: those of its siblings.
            found = self.index.children(entry.key) or self.index.children(entry.parent)
            fresh = [e for e in found if e.position and e.key not in tried]
            scores = [len(known.intersection(grams(e.ids))) for e in fresh]
            if not fresh:
                break
            entry = fresh[scores.index(max(scores))]
            misses = 0 if 4 * max(scores) > len(entry.ids) else misses + 1
            old.append(Piece(entry, 0, len(entry.ids)))
            tried.add(entry.key)
        return [piece for piece in old if len(piece)]


def _cut(pieces: Sequence[Piece], start: int, end: int) -> list[Piece]:
    """Tokens [start, end) of what the pieces are together."""
    parts: list[Piece] = []
    for piece in pieces:
        lo, hi = max(start, 0), min(end, len(piece))
        if lo < hi:
            parts.append(Piece(piece.entry, piece.lo + lo, piece.lo + hi))
        start, end = start - len(piece), end - len(piece)
    return parts


def _joined(placed: Iterable[tuple[int, Piece, Seam]]) -> list[Splice]:
    """One splice for neighbours that were neighbours: one shift moves all of it."""
    splices: list[Splice] = []
    for here, piece, seam in placed:
        last = splices[-1] if splices else None
        if last and seam is Seam.NONE and (last.end, last.shift) == (here, here - piece.position):
            splices[-1] = replace(last, pieces=(*last.pieces, piece))
        else:
            splices.append(Splice(here, (piece,), False, seam))
    return splices


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
