"""Eviction: one contract for all policies, and what ours promises beyond it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from itertools import count
from random import Random
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.errors import ConfigError
from kvboost.keys import DIGEST_BYTES, ChunkKey, KeyKind
from kvboost.store.eviction import (
    EvictionPolicy,
    Ranking,
    ValueDensity,
    Worth,
    eviction_policy,
)
from kvboost.store.simulate import SIMULATED


def key(n: int, kind: KeyKind = KeyKind.PREFIX) -> ChunkKey:
    return ChunkKey(kind, n.to_bytes(DIGEST_BYTES, "big"))


def worth(n: int, position: int = 0, seconds: float = 1.0, size: int = 1000) -> Worth:
    return Worth(key(n, KeyKind.CONTENT), size, seconds, position)


class Cache:
    """As many chunks as `room`; a request is a list of numbers, each a chunk at its position."""

    def __init__(self, policy: EvictionPolicy, room: int) -> None:
        self.policy = policy
        self.room = room
        self.held: dict[int, None] = {}
        self.evicted: list[int] = []

    def request(self, chunks: Iterable[int]) -> int:
        """How many of them were there."""
        self.policy.tick()
        chunks = list(chunks)
        hits = [n for n in chunks if n in self.held]
        for n in hits:
            self.policy.hit(key(n), 1.0)
        spared = {key(n) for n in hits}
        for position, n in enumerate(chunks):
            if n not in self.held:
                self._store(n, position, spared)
                spared.add(key(n))
        return len(hits)

    def _store(self, n: int, position: int, spared: Container[ChunkKey]) -> None:
        if len(self.held) == self.room:
            victim = self.policy.victim(spared)
            assert victim is not None and victim not in spared
            gone = int.from_bytes(victim.digest, "big")
            del self.held[gone]
            self.evicted.append(gone)
            self.policy.remove(victim, evicted=True)
        self.policy.add(key(n), worth(n, position))
        self.held[n] = None


@pytest.fixture(params=SIMULATED)
def make(request: pytest.FixtureRequest) -> Callable[[], EvictionPolicy]:
    return SIMULATED[request.param]


# -- the contract

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["tick", "add", "hit", "victim", "drop"]),
        st.integers(0, 11),
        st.sets(st.integers(0, 11)),
    ),
    max_size=80,
)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
@pytest.mark.parametrize("name", SIMULATED)
def test_victims_are_held_and_not_spared(name: str, steps: list[tuple[str, int, set[int]]]) -> None:
    """Against the simplest model: the set of what is held."""
    policy, held = SIMULATED[name](), set[ChunkKey]()
    for what, n, others in steps:
        k, spared = key(n), {key(other) for other in others}
        if what == "tick":
            policy.tick()
        elif what == "add" and k not in held:
            policy.add(k, worth(n % 7, position=n % 3, seconds=n / 10))
            held.add(k)
        elif what == "hit" and k in held:
            policy.hit(k, 0.85)
        elif what == "drop" and k in held:
            policy.remove(k, evicted=False)
            held.remove(k)
        elif what == "victim":
            victim = policy.victim(spared)
            assert (victim is None) == (held <= spared)
            if victim is not None:
                assert victim in held - spared
                policy.remove(victim, evicted=True)
                held.remove(victim)
    while (victim := policy.victim(())) is not None:
        policy.remove(victim, evicted=True)
        held.remove(victim)
    assert not held


def test_asking_for_a_victim_changes_nothing(make: Callable[[], EvictionPolicy]) -> None:
    policy = make()
    for n in range(10):
        policy.tick()
        policy.add(key(n), worth(n))
    spared = {key(n) for n in range(9)}
    assert policy.victim(spared) == policy.victim(spared) == key(9)
    policy.tick()
    assert policy.victim(()) == policy.victim(()) == key(0)


def test_the_same_history_has_the_same_victims(make: Callable[[], EvictionPolicy]) -> None:
    def victims() -> list[int]:
        cache = Cache(make(), 20)
        for n in range(200):
            cache.request([0, 1, n % 17 + 10, n + 100])
        return cache.evicted

    assert victims() == victims()


def test_a_chain_loses_its_end_first(make: Callable[[], EvictionPolicy]) -> None:
    chain, policy = range(8), make()
    policy.tick()
    for n in chain:
        policy.add(key(n), worth(n, position=n))
    policy.tick()
    for n in chain:
        policy.hit(key(n), 1.0)
    policy.tick()
    gone = []
    while (victim := policy.victim(())) is not None:
        gone.append(victim)
        policy.remove(victim, evicted=True)
    assert gone == [key(n) for n in reversed(chain)]


@pytest.mark.parametrize("name", ["value", "lfu", "s3-fifo"])
def test_a_flood_of_strangers_leaves_what_is_used(name: str) -> None:
    cache, strangers = Cache(SIMULATED[name](), 60), count(1000)
    hot = range(30)
    for n in range(120):  # two of the hot ones, and two that nobody asks for again
        cache.request([n % 30, (7 * n + 3) % 30, next(strangers), next(strangers)])
    for _ in range(20):
        cache.request(next(strangers) for _ in range(10))
    assert len(cache.held.keys() & set(hot)) >= 27


def test_a_hundred_thousand_chunks() -> None:
    """A tenth of them is pinned, and would go first."""
    policy = ValueDensity()
    start = process_time()
    for n in range(100_000):
        if n % 50 == 0:
            policy.tick()
        policy.add(key(n), worth(n, position=n % 50))
    spared = {key(n) for n in range(10_000)}
    for _ in range(10_000):
        victim = policy.victim(spared)
        assert victim is not None
        policy.remove(victim, evicted=True)
    assert process_time() - start < 10  # about 1; a scan per victim would take hours


def test_names() -> None:
    for name in ("value", "lru", "gdsf"):
        assert eviction_policy(name).name == name
    with pytest.raises(ConfigError, match="value, lru, gdsf"):
        eviction_policy("belady")


# -- the heap


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 5)),
        max_size=120,
    )
)
def test_ranking_is_a_sorted_list(steps: list[tuple[bool, int, int]]) -> None:
    ranking, model = Ranking(), dict[ChunkKey, tuple[float, ...]]()
    for put, n, step in steps:
        k = key(n)
        if put:
            model[k] = (model.get(k, (0.0,))[0] + step, n)
            ranking.put(k, model[k])
        elif k in model:
            del model[k]
            ranking.drop(k)
        spared = {key(n)}
        left = {k: rank for k, rank in model.items() if k not in spared}
        ranking.recall()
        assert ranking.least(spared) == min(left, key=lambda k: left[k], default=None)
    assert len(ranking) == len(model)


def test_ranking_forgets_what_was_dropped() -> None:
    ranking = Ranking()
    ranking.put(key(0), (0,))
    for n in range(1, 10_000):
        ranking.put(key(n), (n,))
        ranking.drop(key(n))
    assert len(ranking._heap) < 100


# -- ours


def test_ghosts_are_never_more_than_chunks() -> None:
    policy = ValueDensity()
    cache = Cache(policy, 50)
    for n in range(2000):
        cache.request([n])
        assert len(policy._ghosts) <= 50
    for n in list(cache.held):
        policy.remove(key(n), evicted=False)
    assert not policy._ghosts


def test_what_comes_back_is_no_stranger() -> None:
    """Content that was evicted and asked for again outlives content that was not."""
    policy = ValueDensity()
    cache, strangers, rng = Cache(policy, 20), count(100), Random(0)
    for _ in range(400):
        cache.request([rng.randrange(30), next(strangers)])  # 30 wanted ones, 20 places
    known = [n for n in cache.held if n < 30]
    assert len(known) >= 15


@pytest.mark.parametrize("seconds, goes", [(16.0, 1), (1 / 16, 0)])
def test_of_equals_the_cheaper_one_goes(seconds: float, goes: int) -> None:
    """Chunk 0 saves `seconds`, chunk 1 one; both are used alike, chunk 1 later."""
    policy = ValueDensity()
    policy.tick()
    policy.add(key(0), worth(0, seconds=seconds))
    policy.add(key(1), worth(1))
    for n in range(2, 42):  # both habits' heads are asked; experience says that both come back
        policy.tick()
        policy.hit(key(0), 1.0)
        if n > 39:
            policy.hit(key(1), 1.0)
    policy.tick()
    assert policy.victim(()) == key(goes)


def test_hits_that_save_little_are_no_use() -> None:
    """A chunk that is moved and repaired as a whole stays on probation."""
    policy = ValueDensity()
    for n in (0, 1):
        policy.add(key(n), worth(n))
    for _ in range(12):
        policy.tick()
        policy.hit(key(0), 1.0)
        policy.hit(key(1), 0.0)
    policy.tick()
    assert policy.victim(()) == key(1)
