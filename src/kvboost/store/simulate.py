"""Replays a trace against a store with a budget and an eviction policy, without a model.

The store is a small model of the real one: the exact prefix is followed from the front to the
first chunk that is missing; of the rest, what is there by content is moved; what is not there is
computed, and stored after the request. Edits inside a chunk, seams and pins are left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvboost.errors import ConfigError
from kvboost.keys import ChunkKey, KeyKind
from kvboost.store.baselines import LFU, S3FIFO
from kvboost.store.eviction import POLICIES, EvictionPolicy, Worth
from kvboost.store.trace import Cost, Trace, TraceChunk, TraceRequest

SIMULATED: dict[str, Callable[[], EvictionPolicy]] = POLICIES | {
    policy.name: policy for policy in (LFU, S3FIFO)
}
"""All policies that can be replayed, by name."""

MOVED_SHARE = 0.85
"""Of a chunk's prefill, what moving it saves; repair costs the rest."""


@dataclass
class Result:
    """The account of a replay. seconds: prefill without a store; saved: what the store saved of it.
    bytes: what the store holds at the end."""

    tokens: int = 0
    exact_tokens: int = 0
    moved_tokens: int = 0
    seconds: float = 0.0
    saved: float = 0.0
    stored: int = 0
    evicted: int = 0
    bytes: int = 0

    @property
    def hit_share(self) -> float:
        """Of the tokens looked up."""
        return (self.exact_tokens + self.moved_tokens) / max(1, self.tokens)


class _Store:
    def __init__(self, policy: EvictionPolicy, budget: float, cost: Cost) -> None:
        self.result = Result()
        self._policy = policy
        self._budget = budget
        self._cost = cost
        self._stored: dict[ChunkKey, TraceChunk] = {}
        self._movable: defaultdict[ChunkKey, dict[ChunkKey, None]] = defaultdict(dict)
        self._in_hand: set[ChunkKey] = set()

    def serve(self, request: TraceRequest) -> None:
        self._policy.tick()
        self._in_hand.clear()
        asked = len(request.chunks) - request.answer
        hits, exact = self._plan(request.chunks[:asked])
        self._count(request.chunks, hits, exact)
        hits += [None] * request.answer
        moved = next((n for n in range(exact, asked) if hits[n]), len(hits))
        position = 0
        for n, (chunk, hit) in enumerate(zip(request.chunks, hits, strict=True)):
            if hit is None:
                kind = KeyKind.PREFIX if n < moved else KeyKind.CONTEXT
                self._put(ChunkKey(kind, chunk.lineage.digest), chunk, position)
            position += chunk.tokens

    def _plan(self, chunks: Sequence[TraceChunk]) -> tuple[list[ChunkKey | None], int]:
        """The stored chunk that each one is taken from, and how many at the front are exact."""
        hits: list[ChunkKey | None] = []
        exact = 0
        for n, chunk in enumerate(chunks):
            if exact == n and chunk.lineage in self._stored:
                exact += 1
                hits.append(chunk.lineage)
            elif n > 0:
                hits.append(next(reversed(self._movable.get(chunk.content, {})), None))
            else:
                hits.append(None)  # the prompt's first chunk is its attention sink: never moved
        return hits, exact

    def _count(
        self, chunks: Sequence[TraceChunk], hits: Sequence[ChunkKey | None], exact: int
    ) -> None:
        result, position = self.result, 0
        for n, hit in enumerate(hits):
            tokens = chunks[n].tokens
            seconds = self._cost.seconds(position, tokens)
            result.tokens += tokens
            result.seconds += seconds
            position += tokens
            if hit is None:
                continue
            self._in_hand.add(hit)
            share = 1.0 if n < exact else MOVED_SHARE
            self._policy.hit(hit, share)
            result.saved += share * seconds
            if n < exact:
                result.exact_tokens += tokens
            else:
                result.moved_tokens += tokens

    def _put(self, key: ChunkKey, chunk: TraceChunk, position: int) -> None:
        variants = self._movable.get(chunk.content, {})
        exact = any(other.kind is KeyKind.PREFIX for other in variants)
        if key in self._stored or (exact and key.kind is KeyKind.CONTEXT):
            return
        cost = self._cost.bytes(chunk.tokens)
        if cost > self._budget:
            return
        while self.result.bytes + cost > self._budget:
            victim = self._policy.victim(self._in_hand)
            if victim is None:
                return
            self._drop(victim)
        self._stored[key] = chunk
        if position > 0:
            self._movable[chunk.content][key] = None
        self._in_hand.add(key)
        self.result.bytes += cost
        self.result.stored += 1
        seconds = self._cost.seconds(position, chunk.tokens)
        self._policy.add(key, Worth(chunk.content, cost, seconds, position))

    def _drop(self, key: ChunkKey) -> None:
        chunk = self._stored.pop(key)
        variants = self._movable[chunk.content]
        variants.pop(key, None)
        if not variants:
            del self._movable[chunk.content]
        self.result.bytes -= self._cost.bytes(chunk.tokens)
        self.result.evicted += 1
        self._policy.remove(key, evicted=True)


def simulate(trace: Trace, policy: str, budget: float) -> Result:
    """Replay the whole trace against a store of `budget` bytes that starts empty. Raises
    ConfigError if no policy has that name."""
    if policy not in SIMULATED:
        raise ConfigError(f"policy must be one of {', '.join(SIMULATED)}, not {policy!r}")
    store = _Store(SIMULATED[policy](), budget, trace.cost)
    for request in trace.requests:
        store.serve(request)
    return store.result


def unlimited(trace: Trace) -> Result:
    """With room for everything: `bytes` is the working set, `saved` the most that can be saved."""
    return simulate(trace, "lru", math.inf)
