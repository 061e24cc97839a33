"""Plans, against an index in plain dictionaries and everything it was ever told."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvboost.chunking import Chunker, ChunkingConfig
from kvboost.keys import ChunkKey, KeySpace, lineages
from kvboost.plan import (
    FRESH,
    MIN_MOVED_TOKENS,
    QUESTION,
    Entry,
    Piece,
    ReusePlan,
    Seam,
    Splice,
    make_plan,
)
from kvboost.types import Chunk

KEYS, OTHERS = KeySpace("model", "tenant"), KeySpace("model", "another tenant")
CHUNKER = Chunker(ChunkingConfig(min_tokens=8, mean_tokens=20, max_tokens=40))


@dataclass
class Shelf:
    """An index that never forgets, and knows the true context of every entry."""

    entries: dict[ChunkKey, Entry] = field(default_factory=dict)
    context: dict[ChunkKey, tuple[int, ...]] = field(default_factory=dict)

    def get(self, key: ChunkKey) -> Entry | None:
        return self.entries.get(key)

    def children(self, parent: ChunkKey) -> Iterable[Entry]:
        return [e for e in reversed(self.entries.values()) if e.parent == parent]

    def variants(self, content: ChunkKey) -> Iterable[Entry]:
        return [
            e for e in reversed(self.entries.values()) if e.content == content and e.position > 0
        ]

    def store(self, chunks: Sequence[Chunk], exact_until: int, keys: KeySpace = KEYS) -> None:
        """All chunks of a prompt, those up to `exact_until` as exact ones."""
        parent, ids = keys.root, [token for chunk in chunks for token in chunk.ids]
        for chunk, key in zip(chunks, lineages(chunks, exact_until, keys), strict=True):
            self.entries[key] = Entry(key, parent, keys.content(chunk.ids), chunk.ids, chunk.start)
            self.context[key] = tuple(ids[: chunk.start])
            parent = key


def piece(seed: int, count: int) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(1000) for _ in range(count))


def chunked(*pieces: tuple[int, ...]) -> list[Chunk]:
    """One chunk for each piece."""
    ends = [0]
    for p in pieces:
        ends.append(ends[-1] + len(p))
    return [Chunk(a, b, p) for (a, b), p in zip(pairwise(ends), pieces, strict=True)]


PIECES = [piece(n, length) for n, length in enumerate([18, 25, 30, 44, 60, 90])]
A, B, C, D, E, F = PIECES
LAST = piece(30, FRESH)


@dataclass(frozen=True)
class Asked:
    """A prompt: pieces in some order and a tail of its own; borders marked or not."""

    pieces: tuple[int, ...]
    tail: tuple[int, ...]
    marked: bool
    full: bool

    @property
    def ids(self) -> tuple[int, ...]:
        return (*(token for n in self.pieces for token in PIECES[n]), *self.tail)

    @property
    def chunks(self) -> list[Chunk]:
        ends = [0]
        for n in self.pieces:
            ends.append(ends[-1] + len(PIECES[n]))
        return CHUNKER.split(self.ids, ends if self.marked else ())


asked = st.builds(
    Asked,
    pieces=st.lists(st.integers(0, 5), min_size=1, max_size=5).map(tuple),
    tail=st.lists(st.integers(0, 3), max_size=80).map(tuple),
    marked=st.booleans(),
    full=st.booleans(),
)


def told(requests: Iterable[Asked]) -> Shelf:
    """What is stored after these requests; `full` ones recomputed everything."""
    shelf = Shelf()
    for request in requests:
        plan = make_plan(request.chunks, KEYS, shelf, move=True)
        shelf.store(request.chunks, plan.length if request.full else plan.exact_until)
    return shelf


def spans(plan: ReusePlan) -> list[tuple[int, Piece]]:
    """Where each piece stands in the prompt."""
    found = []
    for splice in plan.splices:
        at = splice.start
        for p in splice.pieces:
            found.append((at, p))
            at += len(p)
    return found


@given(st.lists(asked, max_size=4), asked)
def test_splices_are_sorted_and_disjoint_and_with_rows_cover_the_prompt(
    before: list[Asked], request: Asked
) -> None:
    plan = make_plan(request.chunks, KEYS, told(before), move=True)
    bounds = [b for s in plan.splices for b in (s.start, s.end)]
    assert bounds == sorted(bounds) and all(s.start < s.end for s in plan.splices)
    assert plan.length == len(request.ids)
    assert all(0 <= b <= plan.length for b in bounds)
    spliced = {row for s in plan.splices for row in range(s.start, s.end)}
    assert plan.rows == sorted(set(plan.rows))
    assert spliced | set(plan.rows) == set(range(plan.length))
    assert spliced & set(plan.rows) <= {plan.length - 1}
    assert plan.rows[-1] == plan.length - 1
    assert plan.exact_until == min((s.start for s in plan.moved), default=plan.length)
    assert set(plan.question) and plan.question.stop == plan.length
    assert all(s.end <= plan.length - FRESH for s in plan.moved)


@given(st.lists(asked, max_size=4), asked)
def test_every_piece_has_the_tokens_of_its_place(before: list[Asked], request: Asked) -> None:
    plan = make_plan(request.chunks, KEYS, told(before), move=True)
    for at, p in spans(plan):
        assert p.entry.ids[p.lo : p.hi] == request.ids[at : at + len(p)] != ()
    for splice in plan.splices:
        assert all(a.position + len(a) == b.position for a, b in pairwise(splice.pieces))


@given(st.lists(asked, max_size=4), asked, st.booleans())
def test_exact_pieces_were_computed_after_exactly_these_tokens(
    before: list[Asked], request: Asked, move: bool
) -> None:
    shelf = told(before)
    plan = make_plan(request.chunks, KEYS, shelf, move=move)
    assert all(s.start == s.shift == 0 and s.seam is Seam.NONE for s in plan.splices if s.exact)
    assert not plan.moved or move
    exact_end = sum(s.end for s in plan.splices if s.exact)
    for at, p in spans(plan):
        if at < exact_end:
            assert p.entry.exact
            assert shelf.context[p.entry.key] + p.entry.ids[: p.hi] == request.ids[: at + len(p)]


@given(st.lists(asked, max_size=4), asked)
def test_the_top_of_a_prompt_is_never_moved(before: list[Asked], request: Asked) -> None:
    """Neither away from position 0 nor there: it is the attention sink."""
    plan = make_plan(request.chunks, KEYS, told(before), move=True)
    moved = [(at, p) for at, p in spans(plan) if at >= plan.exact_until]
    assert all(at > 0 and p.entry.position > 0 for at, p in moved)


@given(asked, asked)
def test_one_stored_prompt_is_found_to_the_token(stored: Asked, request: Asked) -> None:
    plan = make_plan(request.chunks, KEYS, told([replace(stored, full=True)]), move=True)
    same = zip(stored.ids, request.ids, strict=False)
    common = next((n for n, (a, b) in enumerate(same) if a != b), None)
    assert plan.exact_tokens == (
        min(len(stored.ids), len(request.ids)) if common is None else common
    )


@given(st.lists(asked, max_size=4), asked)
def test_a_prompt_recomputed_in_full_is_known_to_its_end(
    before: list[Asked], request: Asked
) -> None:
    shelf = told([*before, replace(request, full=True)])
    plan = make_plan(request.chunks, KEYS, shelf, move=True)
    assert plan.exact_tokens == plan.length
    assert plan.rows == [plan.length - 1]


@given(st.lists(asked, max_size=4), asked)
def test_nothing_is_found_across_namespaces(before: list[Asked], request: Asked) -> None:
    plan = make_plan(request.chunks, OTHERS, told(before), move=True)
    assert plan.splices == ()


@given(st.lists(asked, max_size=4), asked)
def test_a_run_is_at_least_as_long_as_any_stored_one_that_starts_there(
    before: list[Asked], request: Asked
) -> None:
    """The slow way: walk every stored chain of exact neighbours from the chunk on."""
    shelf, chunks = told(before), request.chunks
    plan = make_plan(chunks, KEYS, shelf, move=True)
    ends = {s.start: s.end for s in plan.moved}
    for start, end in ends.items():
        while end in ends:
            end = ends[end]
        here = [n for n, chunk in enumerate(chunks) if chunk.start == start]
        fresh = plan.length - FRESH
        for head in shelf.variants(KEYS.content(chunks[here[0]].ids)) if here else ():
            n, last = here[0] + 1, head
            while n < len(chunks):
                after = [e for e in shelf.children(last.key) if e.ids == chunks[n].ids]
                if not after:
                    break
                n, last = n + 1, after[0]
            assert end >= min(chunks[n - 1].end, fresh)


def test_the_longest_run_wins_over_newer_ones() -> None:
    shelf = Shelf()
    shelf.store(chunked(A, C, D), 200)
    shelf.store(chunked(B, C, D, E), 300)
    shelf.store(chunked(E, C, A), 200)
    plan = make_plan(chunked(F, C, D, E, LAST), KEYS, shelf, move=True)
    (run,) = plan.splices
    assert (run.start, run.end) == (90, 90 + 30 + 44 + 60)
    assert run.shift == 90 - len(B)
    assert [p.entry.ids for p in run.pieces] == [C, D, E]


def test_the_exact_prefix_is_taken_before_longer_runs() -> None:
    shelf = Shelf()
    shelf.store(chunked(A, B), 100)
    shelf.store(chunked(C, A, B, D, E), 300)
    plan = make_plan(chunked(A, B, D, E, LAST), KEYS, shelf, move=True)
    exact, run = plan.splices
    assert exact.exact and exact.end == len(A) + len(B)
    assert [p.entry.ids for p in run.pieces] == [D, E]


def test_a_prefix_may_end_within_a_chunk_and_the_rest_of_it_may_move() -> None:
    shelf = Shelf()
    shelf.store(chunked(A, F[:40]), 200)
    shelf.store(chunked(C, F), 200)
    exact, rest = make_plan(chunked(A, F, LAST), KEYS, shelf, move=True).splices
    assert (exact.start, exact.end) == (0, len(A) + 40)
    assert (rest.start, rest.end) == (len(A) + 40, len(A) + len(F))
    assert (rest.pieces[0].lo, rest.pieces[0].hi) == (40, len(F))
    assert rest.shift == len(A) - len(C)


def test_short_runs_are_computed() -> None:
    shelf, short = Shelf(), piece(9, MIN_MOVED_TOKENS - 1)
    shelf.store(chunked(A, short, B), 100)
    assert make_plan(chunked(C, short, D, LAST), KEYS, shelf, move=True).splices == ()
    assert len(make_plan(chunked(C, short, B, LAST), KEYS, shelf, move=True).splices) == 1


def test_approximate_kv_is_moved_but_never_exact() -> None:
    shelf = Shelf()
    shelf.store(chunked(A, B, C), len(A))
    plan = make_plan(chunked(A, B, C, LAST), KEYS, shelf, move=True)
    assert plan.exact_tokens == plan.exact_until == len(A)
    assert [p.entry.exact for s in plan.moved for p in s.pieces] == [False, False]
    assert make_plan(chunked(A, B, C), KEYS, shelf, move=False).exact_tokens == len(A)


def test_tokens_are_compared_when_keys_collide() -> None:
    """An index that answers every key with somebody else's chunk."""
    shelf = Shelf()
    shelf.store(chunked(A, B), 100)
    first, foreign = shelf.entries.values()

    class Colliding(Shelf):
        def get(self, key: ChunkKey) -> Entry | None:
            return replace(first, key=key)

        def variants(self, content: ChunkKey) -> Iterable[Entry]:
            return [replace(foreign, content=content)]

    assert make_plan(chunked(C, D, E, LAST), KEYS, Colliding(), move=True).splices == ()


def seams(shelf: Shelf, *pieces: tuple[int, ...]) -> list[Seam]:
    return [s.seam for s in make_plan(chunked(*pieces, LAST), KEYS, shelf, move=True).moved]


def test_seams_say_what_changed_before_a_run() -> None:
    shelf = Shelf()
    shelf.store(chunked(A, B, C, D, E, F), 1000)
    inserted = piece(8, 20)
    assert seams(shelf, A, B, inserted, C, D, E, F) == [Seam.SHIFT]
    assert seams(shelf, A, C, D, E, F) == [Seam.SHIFT]
    assert seams(shelf, A, E, D) == [Seam.COMPOSITION, Seam.COMPOSITION]
    assert seams(shelf, piece(8, 70), C) == [Seam.COMPOSITION]


def test_a_run_whose_context_was_evicted_counts_as_new_company() -> None:
    shelf = Shelf()
    shelf.store(chunked(A, B, C, F), 1000)
    assert seams(shelf, A, B, piece(8, 20), C, F) == [Seam.SHIFT]
    gone = next(e for e in shelf.entries.values() if e.ids == B)
    del shelf.entries[gone.key]
    assert Seam.COMPOSITION in seams(shelf, A, B, piece(8, 20), C, F)


def test_what_was_computed_after_a_moved_run_follows_it_without_a_seam() -> None:
    """The same composition again: the run, and the answer that was computed behind it."""
    shelf = Shelf()
    shelf.store(chunked(A, B), 100)
    shelf.store(chunked(D), 100)
    composed = chunked(D, B, E, LAST)
    keys = lineages(composed, len(D), KEYS)
    answer = composed[2]
    shelf.entries[keys[2]] = Entry(
        keys[2], keys[1], KEYS.content(answer.ids), answer.ids, answer.start
    )
    _, run, after = make_plan(composed, KEYS, shelf, move=True).splices
    assert (run.seam, run.shift) == (Seam.COMPOSITION, len(D) - len(A))
    assert (after.seam, after.shift) == (Seam.NONE, 0)


def test_a_question_that_came_before_is_computed_behind_its_new_context() -> None:
    shelf, question = Shelf(), piece(31, 40)
    shelf.store(chunked(A, B, F, question), 1000)
    (run,) = make_plan(chunked(C, B, F, question), KEYS, shelf, move=True).splices
    assert (run.start, run.end) == (30, 30 + 25 + 90 + 40 - FRESH)


def edited(ids: tuple[int, ...], edits: int, rng: random.Random) -> tuple[int, ...]:
    """So many insertions, deletions and replacements of up to 8 tokens."""
    for _ in range(edits):
        at = rng.randrange(len(ids))
        cut, put = rng.choice([(0, 1), (1, 0), (1, 1)])
        inserted = tuple(rng.randrange(1000, 2000) for _ in range(put * rng.randint(1, 8)))
        ids = (*ids[:at], *inserted, *ids[at + cut * rng.randint(1, 8) :])
    return ids


SIZES = Chunker(ChunkingConfig())
TOP, DOCUMENT, BESIDE = piece(20, 60), piece(21, 1500), piece(22, 400)


def seen(plan: ReusePlan, ids: tuple[int, ...]) -> set[int]:
    """The rows that splices cover, once it is sure that they are sorted and hold these tokens."""
    bounds = [b for s in plan.splices for b in (s.start, s.end)]
    assert bounds == sorted(bounds) and all(s.start < s.end for s in plan.splices)
    for at, p in spans(plan):
        assert p.entry.ids[p.lo : p.hi] == ids[at : at + len(p)] != ()
    return {row for s in plan.splices for row in range(s.start, s.end)}


@given(st.integers(0, 20), st.integers(0, 1000))
def test_edits_cost_no_more_than_what_is_near_them(edits: int, seed: int) -> None:
    """Between two that are MIN_MOVED_TOKENS apart something is found, and all of it is a shift."""
    shelf, chunks = Shelf(), SIZES.split((*TOP, *DOCUMENT, *BESIDE), [60, 1560])
    shelf.store(chunks, 2000)
    new = edited(DOCUMENT, edits, random.Random(seed))
    known = (*TOP, *new, *BESIDE)
    ids = (*known, *LAST)
    plan = make_plan(SIZES.split(ids, [60, 60 + len(new), len(known)]), KEYS, shelf, move=True)
    assert len(seen(plan, ids)) >= len(known) - edits * (8 + 2 * MIN_MOVED_TOKENS)
    assert Seam.COMPOSITION not in {s.seam for s in plan.moved}


@given(st.integers(1, 20), st.integers(0, 1000))
def test_an_edited_text_in_new_company_has_one_new_neighbour(edits: int, seed: int) -> None:
    shelf, chunks = Shelf(), SIZES.split((*TOP, *BESIDE, *DOCUMENT), [60, 460])
    shelf.store(chunks, 2000)
    middle = edited(DOCUMENT[300:1200], edits, random.Random(seed))
    new = (*DOCUMENT[:300], *middle, *DOCUMENT[1200:])
    ids = (*piece(23, 700), *new, *LAST)
    plan = make_plan(SIZES.split(ids, [700, 700 + len(new)]), KEYS, shelf, move=True)
    assert len(seen(plan, ids)) >= len(new) - edits * (8 + 2 * MIN_MOVED_TOKENS)
    assert [s.start for s in plan.moved if s.seam is Seam.COMPOSITION] == [700]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(0, 1000))
def test_versions_may_be_stored_in_parts(edits: list[int], seed: int) -> None:
    """Of each version only the chunks that no older one has, behind those it was found behind."""
    shelf, rng, text = Shelf(), random.Random(seed), DOCUMENT
    for version, count in enumerate([0, *edits]):
        text = edited(text, count, rng)
        known = (*TOP, *text, *BESIDE)
        ids = (*known, *LAST)
        chunks = SIZES.split(ids, [60, 60 + len(text), len(known)])
        plan = make_plan(chunks, KEYS, shelf, move=True)
        if version:
            assert len(seen(plan, ids)) >= len(known) - count * (8 + 2 * MIN_MOVED_TOKENS)
            assert Seam.COMPOSITION not in {s.seam for s in plan.moved}
        whole = {(at, len(p.entry.ids)): p.entry for at, p in spans(plan)}
        parent = KEYS.root
        for chunk in chunks:
            donor = whole.get((chunk.start, len(chunk)))
            if donor is None or donor.ids != chunk.ids:
                key = (KEYS.approximate if version else KEYS.prefix)(parent, chunk.ids)
                donor = Entry(key, parent, KEYS.content(chunk.ids), chunk.ids, chunk.start)
                shelf.entries[key] = donor
            parent = donor.key


def test_between_passages_nothing_is_taken_for_being_alike() -> None:
    shelf, header, (p, q, r) = Shelf(), piece(24, 40), (piece(n, 250) for n in (25, 26, 27))
    shelf.store(chunked(A, p, header, q), 1000)
    shelf.store(chunked(B, r, header, p, header, q), 1000)
    other = (*header[:20], 7, *header[21:])
    plan = make_plan(chunked(C, p, other, r, other, q, LAST), KEYS, shelf, move=True)
    assert [(s.start, s.end, s.seam) for s in plan.moved] == [
        (at, at + 250, Seam.COMPOSITION) for at in (30, 320, 610)
    ]


def test_the_question_is_what_follows_the_last_moved_run() -> None:
    key = KEYS.root
    entry = Entry(key, key, key, piece(1, 50), 10)
    moved = Splice(20, (Piece(entry, 0, 50),), exact=False, seam=Seam.COMPOSITION)
    assert ReusePlan(100, (moved,)).question == range(70, 100)
    assert ReusePlan(300, (moved,)).question == range(300 - QUESTION, 300)
    assert ReusePlan(70, (moved,)).question == range(69, 70)
    assert ReusePlan(9, ()).question == range(9)


def test_nothing_is_planned_for_no_chunks() -> None:
    assert make_plan([], KEYS, Shelf(), move=True) == ReusePlan(0, ())
