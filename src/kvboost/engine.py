"""One request, straight: split, keys, lookup, plan, assemble, repair, forward; decode; harvest.

Knows token ids, not text. Locks step by step, so that several threads may have requests in hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from kvboost.chunking import Chunker
from kvboost.config import KVFormat
from kvboost.errors import ConfigError, PromptTooLongError
from kvboost.keys import ChunkKey, KeySpace, lineages
from kvboost.kv import KVBuffer
from kvboost.metrics import Stopwatch
from kvboost.passes import Passes, Pauses
from kvboost.plan import Entry, ReusePlan, Seam
from kvboost.prompt import Prompt
from kvboost.recompute import RecomputePolicy, moved_rows
from kvboost.runner import ModelRunner
from kvboost.store import (
    ChunkStore,
    Codebook,
    Lookup,
    PackedKV,
    Seal,
    encode,
    place_run,
)
from kvboost.store.store import PACE
from kvboost.store.trace import TraceRecorder
from kvboost.types import Chunk, ForwardPass, Reuse, Usage

_PACED = 64
"""Rows that a pass must have to tell how long a token takes."""


@dataclass(frozen=True)
class Prefilled:
    """A prompt whose KV is in its buffer. logits: the last token's, float32 `[1, vocab]`.

    KV in [0, exact_until) has exactly this prompt's context. `rounded`: some of what was used had
    been stored quantised. computed, mass: what `Passes` noted.
    """

    prompt: Prompt
    buffer: KVBuffer
    logits: Tensor
    plan: ReusePlan
    exact_until: int
    usage: Usage
    passes: tuple[ForwardPass, ...]
    computed: set[int]
    mass: Tensor | None
    rounded: bool = False

    @property
    def exact(self) -> bool:
        """Whether the logits are those of full recompute, up to kernel noise."""
        return self.exact_until == len(self.prompt.ids) and not self.rounded

    def copy(self, room: int) -> Prefilled:
        """The same, in a buffer of its own with `room` for more tokens."""
        tokens = len(self.prompt.ids)
        return replace(self, buffer=self.buffer.copy(tokens, tokens + room))


class Engine:
    """The straight line. Everything it needs is handed in; it owns nothing but the order.

    `fingerprint` is the caller's to set before the first request, and whenever weights change.
    `seal` encrypts what leaves this process, `trace` records what was asked for, `pauses` lets
    others run in between, `shared` is a namespace that is searched too: each may be set.
    """

    def __init__(
        self,
        runner: ModelRunner,
        store: ChunkStore,
        chunker: Chunker,
        namespace: str,
        kv_format: KVFormat,
    ) -> None:
        self.runner = runner
        self.store = store
        self.chunker = chunker
        self.namespace, self.kv_format = namespace, kv_format
        self.fingerprint = ""
        self.shared: str | None = None
        self.pauses: Pauses | None = None
        self.seal: Seal | None = None
        self.trace: TraceRecorder | None = None
        self._pace: float | None = None

    @torch.inference_mode()
    def prefill(
        self, prompt: Prompt, reuse: Reuse, policy: RecomputePolicy, room: int, clock: Stopwatch
    ) -> Prefilled:
        """Make the prompt's KV and its last logits; the buffer has `room` for more tokens.

        Raises PromptTooLongError if the prompt does not fit the model's window.
        """
        ids = prompt.ids
        self.room(len(ids), room)
        plan, stored = self._fetch(prompt, reuse)
        clock.lap("lookup")
        buffer = self.runner.new_buffer(len(ids) + room)
        for splice, kvs in zip(plan.splices, stored, strict=True):
            place_run(splice, kvs, buffer)
        clock.lap("assemble")
        with self.runner.lock:
            probe = Passes(self.runner, buffer, ids, clock, self.pauses)
            rows = policy.rows(plan, probe) if plan.moved or reuse != "exact" else plan.rows
            _check_rows(rows, plan, probe.computed, policy.name)
            clock.lap("probe")
            logits = probe.forward(rows)
            clock.lap("forward")
            self._note_pace(clock.parts["forward"], len(rows))
        made = _prefilled(prompt, plan, rows, probe, logits)
        reused = made.usage.exact + made.usage.moved > 0
        return replace(made, rounded=reused and self.kv_format != "raw")

    def _note_pace(self, seconds: float, rows: int) -> None:
        """Seconds to compute a token, smoothed; short passes say little about long ones."""
        if rows >= _PACED:
            last = seconds / rows if self._pace is None else self._pace
            self._pace = last + 0.3 * (seconds / rows - last)

    def seconds(self, tokens: int) -> float:
        """What computing so many tokens takes, by what was measured."""
        return (self._pace or PACE) * tokens

    def room(self, tokens: int, wanted: int) -> int:
        """How many of `wanted` tokens may follow a prompt of `tokens`: at least one. Raises
        PromptTooLongError if the prompt alone is over the model's window."""
        window = self.runner.support.max_tokens
        if window is None:
            return wanted
        if tokens > window:
            raise PromptTooLongError(
                f"the prompt has {tokens} tokens and the model's window is {window}: "
                f"shorten it by {tokens - window}"
            )
        return min(wanted, window - tokens + 1)

    def _fetch(self, prompt: Prompt, reuse: Reuse) -> tuple[ReusePlan, list[list[PackedKV]]]:
        if not self.reuses(prompt, reuse):
            return ReusePlan(len(prompt.ids), ()), []
        lookup = self.lookup(prompt, reuse)
        while True:
            plan = lookup.plan()
            stored = lookup.fetch(plan)
            if stored is not None:
                return plan, stored

    def reuses(self, prompt: Prompt, reuse: Reuse) -> bool:
        """Whether stored KV may be used for this prompt at all."""
        return reuse != "off" and self.runner.support.regime(len(prompt.ids)) is not None

    def lookup(self, prompt: Prompt, reuse: Reuse) -> Lookup:
        """What is stored of a prompt, and what of it would be reused."""
        length = len(prompt.ids)
        books = [self.book(length)]
        if self.shared is not None:
            books.append(books[0]._replace(keys=self.keys(length, self.shared)))
        return self.store.lookup(
            self.chunker.split(prompt.ids, prompt.borders),
            books,
            self._pace,
            move=reuse == "auto" and self.runner.support.movable(length),
        )

    def keys(self, length: int, namespace: str | None = None) -> KeySpace:
        """The key space of prompts of this length. Formats of stored KV don't mix: what is found
        is as precise as what was asked for. Nor do seals: what can't be opened isn't in the way."""
        regime = self.runner.support.regime(length) or ""
        if self.kv_format != "raw":
            regime = f"{regime} {self.kv_format}"
        if self.seal is not None:
            regime = f"{regime} sealed {self.seal.name}"
        return KeySpace(self.fingerprint, namespace or self.namespace, regime)

    def book(self, length: int) -> Codebook:
        """How entries of that key space are written and read."""
        return Codebook(self.keys(length), self.runner.layout, self.seal)

    def pin(self, prompt: Prompt, seconds: float) -> bool:
        """Keep what is stored of this prompt's own chain for so long; see `Memory.pin`."""
        chunks, length = self.chunker.split(prompt.ids, prompt.borders), len(prompt.ids)
        return self.store.memory.pin(lineages(chunks, length, self.keys(length)), seconds)

    def pin_used(self, made: Prefilled, tokens: int, seconds: float) -> bool:
        """Keep what is stored of the prompt's first `tokens`, and what they were moved from."""
        chunks = self.chunker.split(made.prompt.ids, made.prompt.borders)
        chain = _lineage(chunks, made.plan, made.exact_until, self.keys(len(made.prompt.ids)))
        keys = [k for c, k in zip(chunks, chain, strict=True) if c.end <= tokens]
        keys += [p.entry.key for s in made.plan.splices if s.start < tokens for p in s.pieces]
        return self.store.memory.pin([k for k in keys if self.store.memory.get(k)], seconds)

    @torch.inference_mode()
    def step(self, prefilled: Prefilled, ids: Sequence[int]) -> Tensor:
        """Compute the last of `ids` (the prompt and the answer so far): logits `[1, vocab]`."""
        length = len(ids)
        regime = self.runner.support.regime
        # Where LongRoPE changes its frequencies, all is computed again (transformers does so too).
        first = 0 if regime(length) == "long" != regime(length - 1) else length - 1
        with self.runner.lock:
            return self.runner.forward(prefilled.buffer, ids, range(first, length))

    @torch.inference_mode()
    def steps(self, requests: Sequence[tuple[Prefilled, Sequence[int]]]) -> Tensor:
        """`step` for several requests, in one pass as far as they rotate alike: logits
        `[requests, vocab]`."""
        alike = [
            n for n, (_, ids) in enumerate(requests) if self.runner.support.regime(len(ids)) == ""
        ]
        if not alike:
            return torch.cat([self.step(*request) for request in requests])
        with self.runner.lock:
            logits = self.runner.steps(
                [requests[n][0].buffer for n in alike], [requests[n][1] for n in alike]
            )
        found = {n: logits[i : i + 1] for i, n in enumerate(alike)}
        each = [found[n] if n in found else self.step(*r) for n, r in enumerate(requests)]
        return torch.cat(each)

    @torch.inference_mode()
    def score(self, prefilled: Prefilled, answer: Sequence[int]) -> Tensor:
        """Logits `[len(answer), vocab]` that predict each token of a given answer."""
        ids = [*prefilled.prompt.ids, *answer[:-1]]
        if len(answer) == 1:
            return prefilled.logits
        prompt, regime = len(prefilled.prompt.ids), self.runner.support.regime
        # Where the answer changes the rotation, one pass over all of it is the reference.
        again = regime(len(ids)) is None or regime(len(ids)) != regime(prompt)
        first = 0 if again else prompt
        keep = len(ids) - prompt + again
        with self.runner.lock:
            later = self.runner.forward(prefilled.buffer, ids, range(first, len(ids)), keep=keep)
        return later if again else torch.cat([prefilled.logits, later])

    @torch.inference_mode()
    def harvest(self, prefilled: Prefilled, ids: Sequence[int]) -> None:
        """Store what the request computed: the prompt's and the answer's chunks, cut out of its
        buffer. `ids` are the tokens whose KV is there.

        Only KV of exact context goes under prefix keys. Moved KV is not stored again, so that its
        error is not passed on under new names, but for chunks that an edit changed, where what was
        moved into them was repaired (docs/adr/0009). Nor is what the shared namespace has.
        """
        regime = self.runner.support.regime
        if regime(len(ids)) is None:
            ids = prefilled.prompt.ids
        if regime(len(ids)) is None:
            return
        until = prefilled.exact_until
        exact_until = len(ids) if until == len(prefilled.prompt.ids) else until
        book, chunks = self.book(len(ids)), self.chunker.split(ids, prefilled.prompt.borders)
        keys = book.keys
        lineage = _lineage(chunks, prefilled.plan, exact_until, keys)
        contents = [keys.content(chunk.ids) for chunk in chunks]
        if self.trace is not None:
            answer = sum(chunk.end > len(prefilled.prompt.ids) for chunk in chunks)
            self.trace.record(chunks, lineages(chunks, len(ids), keys), contents, answer)
        spared = {*lineage, *(p.entry.key for s in prefilled.plan.splices for p in s.pieces)}
        shared = self._shared_chunks(chunks, prefilled)
        for key, share in _shares(prefilled).items():
            self.store.memory.hit(key, share)
        parents, donors = [keys.root, *lineage], _donors(prefilled.plan)
        for chunk, key, parent, content in zip(chunks, lineage, parents, contents, strict=False):
            if chunk.start in shared:
                continue
            entry = Entry(key, parent, content, chunk.ids, chunk.start)
            moved = (chunk.start, chunk.end) in donors or _unrepaired(chunk, prefilled)
            wanted = entry.exact or not moved
            if wanted and self.store.memory.wants(entry):
                kv = prefilled.buffer.cut(chunk.start, chunk.end)
                packed = encode(kv, self.runner.layout, chunk.start, self.kv_format)
                self.store.put(entry, packed, self.seconds(len(chunk)), spared, book)

    def _shared_chunks(self, chunks: Sequence[Chunk], made: Prefilled) -> set[int]:
        """Where chunks start that were found, as they are, in the shared namespace."""
        if self.shared is None:
            return set()
        used = {p.entry.key for s in made.plan.splices if s.exact for p in s.pieces}
        chain = lineages(chunks, made.exact_until, self.keys(len(made.prompt.ids), self.shared))
        return {chunk.start for chunk, key in zip(chunks, chain, strict=True) if key in used}


def _lineage(
    chunks: Sequence[Chunk], plan: ReusePlan, exact_until: int, keys: KeySpace
) -> list[ChunkKey]:
    """What each chunk is stored under. A chunk that was moved whole keeps its own lineage, and what
    was computed behind it is found again behind it."""
    donors, lineage, parent = _donors(plan), [], keys.root
    for chunk in chunks:
        if chunk.end <= exact_until:
            parent = keys.prefix(parent, chunk.ids)
        else:
            donor = donors.get((chunk.start, chunk.end))
            parent = donor or keys.approximate(parent, chunk.ids)
        lineage.append(parent)
    return lineage


def _donors(plan: ReusePlan) -> dict[tuple[int, int], ChunkKey]:
    """Where whole chunks were moved to, and their lineage."""
    found: dict[tuple[int, int], ChunkKey] = {}
    for splice in plan.moved:
        at = splice.start
        for piece in splice.pieces:
            if len(piece) == len(piece.entry.ids):
                found[at, at + len(piece)] = piece.entry.key
            at += len(piece)
    return found


def _shares(prefilled: Prefilled) -> dict[ChunkKey, float]:
    """What each chunk used saved, as a share of computing it; of moved ones, weighed by how much
    the question looked at them against the others."""
    plan, mass = prefilled.plan, prefilled.mass
    mean = float(mass[moved_rows(plan)].mean()) if mass is not None and plan.moved else 0.0
    saved: dict[ChunkKey, float] = {}
    for splice in plan.splices:
        at = splice.start
        for piece in splice.pieces:
            rows = range(at, at + len(piece))
            at = rows.stop
            share = sum(row not in prefilled.computed for row in rows) / len(piece.entry.ids)
            if mass is not None and mean > 0 and not splice.exact:
                weight = float(mass[rows.start : rows.stop].mean()) / mean
                share *= min(max(weight, 0.5), 2.0)
            saved[piece.entry.key] = saved.get(piece.entry.key, 0.0) + share
    return saved


def _check_rows(rows: Sequence[int], plan: ReusePlan, computed: set[int], name: str) -> None:
    """A policy may be the user's own: rows that nobody computes would be garbage, silently."""
    ordered = all(a < b for a, b in pairwise(rows)) and rows[-1:] == [plan.length - 1]
    if not ordered or not computed.union(rows).issuperset(plan.rows):
        raise ConfigError(
            f"recompute policy {name!r} must return sorted rows, the last one and all that neither "
            "the plan covers nor a probe has computed among them"
        )


def _unrepaired(chunk: Chunk, made: Prefilled) -> bool:
    """Whether some of a chunk was moved among new neighbours, or moved and nothing repaired."""
    seam = Seam.NONE
    for splice in made.plan.moved:
        seam = seam if splice.seam is Seam.NONE else splice.seam
        touched = splice.start < chunk.end and chunk.start < splice.end
        if touched and (seam is Seam.COMPOSITION or made.usage.recomputed == 0):
            return True
    return False


def _prefilled(
    prompt: Prompt, plan: ReusePlan, rows: Sequence[int], probe: Passes, logits: Tensor
) -> Prefilled:
    """The account: each token in one class, and how far the KV is exact."""
    length, until = plan.length, plan.exact_until
    # A last pass over everything from the first moved token on leaves nothing approximate.
    exact_until = length if set(range(until, length)) <= set(rows) else until
    spliced = {row for s in plan.splices for row in range(s.start, s.end)} - {length - 1}
    moved = set(moved_rows(plan))
    recomputed = spliced & probe.computed
    usage = Usage(
        exact=len(spliced - moved - recomputed),
        moved=len(moved - recomputed),
        recomputed=len(recomputed),
        computed=length - len(spliced),
    )
    passes = tuple(probe.passes)
    return Prefilled(
        prompt, probe.buffer, logits, plan, exact_until, usage, passes, probe.computed, probe.mass
    )
