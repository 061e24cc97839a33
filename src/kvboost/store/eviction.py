"""Which stored chunk goes first when room is needed.

Knows keys, sizes and times saved; nothing of tensors or prompts. Called under its owner's lock.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from kvboost.errors import ConfigError
from kvboost.keys import ChunkKey

_HABITS = 4
"""Chunks never used, used once, two or three times, more often."""

_BINS = 24
"""Of ages in requests: 1, 2-3, 4-7, ... and 2**23 or more."""

_GUESS, _GUESSED = 0.1, 20.0
"""Hits per request of a chunk never used, before anything was learned; worth so many requests of
experience."""

_KEEP = 0.9975
"""Of what was learned, per request: half of it is forgotten in 277 requests."""


@dataclass(frozen=True, slots=True)
class Worth:
    """What keeping a chunk is about. seconds: of prefill that one hit saves. position: of its
    first token; of two chunks of one chain the later one is useless without the earlier."""

    content: ChunkKey
    bytes: int
    seconds: float
    position: int


class EvictionPolicy(Protocol):
    """Keeps its own account of the chunks that are stored: told of every change, asked for victims.

    Time is counted in requests.
    """

    @property
    def name(self) -> str: ...

    def tick(self) -> None:
        """Another request begins."""

    def add(self, key: ChunkKey, worth: Worth) -> None:
        """A chunk is stored now."""

    def hit(self, key: ChunkKey, share: float) -> None:
        """A stored chunk was used. share: how much of `Worth.seconds` that saved, 0 to 1 (less than
        1 where part of it had to be repaired); more than 1 if the question looked at it a lot."""

    def victim(self, spared: Container[ChunkKey]) -> ChunkKey | None:
        """The chunk to give up next, none of `spared`; None if there is no other."""

    def remove(self, key: ChunkKey, *, evicted: bool) -> None:
        """A chunk is stored no more: given up for room, or for another reason."""


class Ranking:
    """Keys in the order of ranks, which may rise and never fall. A heap that looks at a key's rank
    again only when the key comes up: O(1) to raise, amortised O(log n) to find the least.

    Keys that were spared are laid aside until `recall`, so that many pinned ones do not slow down
    every search; before that they are found only if there is no other.
    """

    def __init__(self) -> None:
        self._ranks: dict[ChunkKey, tuple[float, ...]] = {}
        self._heap: list[tuple[tuple[float, ...], int, ChunkKey]] = []
        self._aside: list[tuple[tuple[float, ...], int, ChunkKey]] = []
        self._serial = count()

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, key: ChunkKey) -> tuple[float, ...]:
        return self._ranks[key]

    def put(self, key: ChunkKey, rank: tuple[float, ...]) -> None:
        if key not in self._ranks:
            heapq.heappush(self._heap, (rank, next(self._serial), key))
        self._ranks[key] = rank

    def drop(self, key: ChunkKey) -> None:
        del self._ranks[key]
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [(rank, next(self._serial), key) for key, rank in self._ranks.items()]
            heapq.heapify(self._heap)
            self._aside.clear()

    def least(self, spared: Container[ChunkKey]) -> ChunkKey | None:
        """The key with the smallest rank, of equals the one that came first; none of `spared`."""
        found = self._search(spared)
        if found is None and self._aside:
            self.recall()
            found = self._search(spared)
        return found

    def recall(self) -> None:
        """Consider all keys again."""
        for item in self._aside:
            heapq.heappush(self._heap, item)
        self._aside.clear()

    def _search(self, spared: Container[ChunkKey]) -> ChunkKey | None:
        while self._heap:
            rank, serial, key = self._heap[0]
            now = self._ranks.get(key)
            if now is None:
                heapq.heappop(self._heap)
            elif now != rank:
                heapq.heapreplace(self._heap, (now, serial, key))
            elif key in spared:
                self._aside.append(heapq.heappop(self._heap))
            else:
                return key
        return None


@dataclass(slots=True)
class _Life:
    """uses: the shares of all hits. last: when it was used or stored."""

    worth: Worth
    uses: float
    last: int

    @property
    def habit(self) -> int:
        return min(round(self.uses).bit_length(), _HABITS - 1)


class _Returns:
    """How likely chunks of one habit come back, by the number of requests since their last use.

    A life table: waits that ended, with a hit or without one, by bins of age.
    """

    def __init__(self, habit: int) -> None:
        """Begins with a guess: the more often used, the likelier it comes back. Bins without
        experience take the rate of those before them."""
        self._returned = [_GUESSED * _GUESS * (habit + 1)] + [0.0] * (_BINS - 1)
        self._waited = [_GUESSED] + [0.0] * (_BINS - 1)
        self._rates = _falling(self._returned, self._waited)

    def ended(self, age: int, share: float) -> None:
        """A wait ended, with a hit that saved `share` or (0) without one."""
        last = _bin(age)
        for b in range(last):
            self._waited[b] += 2**b
        self._waited[last] += 2**last / 2
        self._returned[last] += share

    def rate(self, age: int) -> float:
        """Expected hits in one more request."""
        return self._rates[_bin(age)]

    def learn(self) -> None:
        """Fit the rates, and fade what they were learned from."""
        self._rates = _falling(self._returned, self._waited)
        self._returned = [_KEEP * x for x in self._returned]
        self._waited = [_KEEP * x for x in self._waited]


def _bin(age: int) -> int:
    """0 for one request or less, 1 for 2 to 3, 2 for 4 to 7, ..."""
    return min(max(1, age).bit_length(), _BINS) - 1


def _falling(returned: Sequence[float], waited: Sequence[float]) -> list[float]:
    """Rates that never rise with age: neighbours that would are pooled (isotonic regression)."""
    blocks: list[tuple[float, float, int]] = []
    for r, w in zip(returned, waited, strict=True):
        block = (r, w, 1)
        while blocks and blocks[-1][0] * block[1] <= block[0] * blocks[-1][1]:
            before = blocks.pop()
            block = (before[0] + block[0], before[1] + block[1], before[2] + block[2])
        blocks.append(block)
    return [r / w if w else 0.0 for r, w, size in blocks for _ in range(size)]


class ValueDensity:
    """Gives up what is expected to save the fewest seconds per byte and request.

    The expectation is learned. Chunks are classed by habit, which is how often they have been used
    so far; of each habit it is counted how many come back after how long. A habit's queue is in
    order of last use, and what was used longest ago goes first. Between the heads of the queues
    rate x seconds / bytes decides, to a factor of two: finer differences are noise, and would tear
    chains. Of equals the one used longest ago goes, of those used by one request the one deepest
    in the prompt, so that a chain loses its end first.

    New chunks are on probation by this alone: they go early where few of their kind come back, and
    stay where most do. Evicted content keeps its record for as many evictions as there are chunks:
    what comes back is no stranger, and a wait that was cut short by eviction is counted too.
    """

    name = "value"

    def __init__(self) -> None:
        self._now = 0
        self._lives: dict[ChunkKey, _Life] = {}
        self._queues = [Ranking() for _ in range(_HABITS)]
        self._returns = [_Returns(habit) for habit in range(_HABITS)]
        self._ghosts: OrderedDict[ChunkKey, _Life] = OrderedDict()  # by content, oldest first

    def tick(self) -> None:
        self._now += 1
        for queue in self._queues:
            queue.recall()
        for returns in self._returns:
            returns.learn()

    def add(self, key: ChunkKey, worth: Worth) -> None:
        life = self._lives[key] = _Life(worth, 0.0, self._now)
        ghost = self._ghosts.pop(worth.content, None)
        if ghost is not None:
            self._ended(ghost, 1.0)
            life.uses = ghost.uses + 1.0
        self._enqueue(key, life)

    def hit(self, key: ChunkKey, share: float) -> None:
        life = self._lives[key]
        self._ended(life, share)
        self._queues[life.habit].drop(key)
        life.uses += share
        life.last = self._now
        self._enqueue(key, life)

    def victim(self, spared: Container[ChunkKey]) -> ChunkKey | None:
        heads = (queue.least(spared) for queue in self._queues)
        return min((key for key in heads if key is not None), key=self._value, default=None)

    def remove(self, key: ChunkKey, *, evicted: bool) -> None:
        life = self._lives.pop(key)
        self._queues[life.habit].drop(key)
        if evicted:
            self._ghosts[life.worth.content] = life
            self._ghosts.move_to_end(life.worth.content)
        while len(self._ghosts) > len(self._lives):
            _, forgotten = self._ghosts.popitem(last=False)
            self._ended(forgotten, 0.0)

    def _enqueue(self, key: ChunkKey, life: _Life) -> None:
        self._queues[life.habit].put(key, (life.last, -life.worth.position))

    def _ended(self, life: _Life, share: float) -> None:
        self._returns[life.habit].ended(self._now - life.last, share)

    def _value(self, key: ChunkKey) -> tuple[float, int, int]:
        life = self._lives[key]
        worth = life.worth
        rate = self._returns[life.habit].rate(self._now - life.last)
        value = rate * worth.seconds / worth.bytes
        octave = math.floor(math.log2(value)) if value > 0 else -math.inf
        return octave, life.last, -worth.position


class LRU:
    """The chunk used longest ago goes first; of one request's, the deepest in the prompt."""

    name = "lru"

    def __init__(self) -> None:
        self._now = 0
        self._positions: dict[ChunkKey, int] = {}
        self._ranking = Ranking()

    def tick(self) -> None:
        self._now += 1
        self._ranking.recall()

    def add(self, key: ChunkKey, worth: Worth) -> None:
        self._positions[key] = worth.position
        self.hit(key, 1.0)

    def hit(self, key: ChunkKey, share: float) -> None:
        self._ranking.put(key, (self._now, -self._positions[key]))

    def victim(self, spared: Container[ChunkKey]) -> ChunkKey | None:
        return self._ranking.least(spared)

    def remove(self, key: ChunkKey, *, evicted: bool) -> None:
        del self._positions[key]
        self._ranking.drop(key)


class GDSF:
    """Greedy-Dual-Size-Frequency: H = L + uses x seconds / bytes, the smallest goes, L becomes its
    H. Uses are counted whole, and forgotten with the chunk."""

    name = "gdsf"

    def __init__(self) -> None:
        self._age = 0.0
        self._uses: dict[ChunkKey, int] = {}
        self._worths: dict[ChunkKey, Worth] = {}
        self._ranking = Ranking()

    def tick(self) -> None:
        self._ranking.recall()

    def add(self, key: ChunkKey, worth: Worth) -> None:
        self._uses[key] = 0
        self._worths[key] = worth
        self.hit(key, 1.0)

    def hit(self, key: ChunkKey, share: float) -> None:
        self._uses[key] += 1
        worth = self._worths[key]
        h = self._age + self._uses[key] * worth.seconds / worth.bytes
        self._ranking.put(key, (h, -worth.position))

    def victim(self, spared: Container[ChunkKey]) -> ChunkKey | None:
        key = self._ranking.least(spared)
        if key is not None:
            self._age = max(self._age, self._ranking[key][0])
        return key

    def remove(self, key: ChunkKey, *, evicted: bool) -> None:
        del self._uses[key], self._worths[key]
        self._ranking.drop(key)


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    policy.name: policy for policy in (ValueDensity, LRU, GDSF)
}


def eviction_policy(name: str) -> EvictionPolicy:
    """A fresh policy by its name. Raises ConfigError if there is none of that name."""
    if name not in POLICIES:
        raise ConfigError(f"eviction must be one of {', '.join(POLICIES)}, not {name!r}")
    return POLICIES[name]()
