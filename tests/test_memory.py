"""Memory: its budget is never exceeded, a chain loses its end first, pins hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch
from families import boost, tokens
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvboost.keys import ChunkKey, KeyKind, KeySpace
from kvboost.plan import Entry
from kvboost.store import Memory, PackedKV
from kvboost.store.eviction import eviction_policy

KEYS = KeySpace("model", "tenant")


def some_kv(count: int) -> PackedKV:
    zeros = {name: torch.zeros(2, 1, count, 8) for name in ("k0", "v0")}
    return PackedKV("raw", 0, count, count, zeros)


def entry(ids: Sequence[int], parent: Entry | None = None, *, exact: bool = True) -> Entry:
    before = parent.key if parent else KEYS.root
    key = KEYS.prefix(before, ids) if exact else KEYS.approximate(before, ids)
    at = parent.position + len(parent.ids) if parent else 0
    return Entry(key, before, KEYS.content(ids), tuple(ids), at)


def memory(max_bytes: int) -> Memory:
    return Memory(max_bytes, eviction_policy("value"))


def put(store: Memory, *entries: Entry) -> None:
    """As a request that computed a chain does: the store is told, and spares the whole chain."""
    store.begin()
    for e in entries:
        store.put(e, some_kv(len(e.ids)), 0.001 * len(e.ids), {e.key for e in entries})


def use(store: Memory, *entries: Entry) -> None:
    store.begin()
    for e in entries:
        store.hit(e.key, 1.0)


def cost(count: int) -> int:
    """What a chunk of so many tokens is charged, found by storing one."""
    store = memory(1 << 30)
    put(store, entry(range(count)))
    return store.stats().bytes


class Chats(RuleBasedStateMachine):
    """Chains that branch, in a store with room for few of them, read and written as engines do."""

    BUDGET = 40_000

    def __init__(self) -> None:
        super().__init__()
        self.store = memory(self.BUDGET)

    def stored(self) -> list[Entry]:
        return list(self.store._entries.values())

    @rule(
        path=st.lists(st.integers(0, 2), min_size=1, max_size=6), size=st.sampled_from([4, 20, 60])
    )
    def chat(self, path: list[int], size: int) -> None:
        """Read what is there of a chain, then store the rest."""
        chain: list[Entry] = []
        for step in path:
            chain.append(entry([step] * size, chain[-1] if chain else None))
        known = 0
        while known < len(chain) and self.store.get(chain[known].key):
            known += 1
        use(self.store, *chain[:known])
        put(self.store, *chain)

    @rule(size=st.sampled_from([1, 200, 600]))
    def oversized(self, size: int) -> None:
        put(self.store, entry([9] * size))

    @rule()
    def clear(self) -> None:
        self.store.clear()
        assert self.store.stats().entries == self.store.stats().bytes == 0

    @invariant()
    def the_budget_holds(self) -> None:
        stats = self.store.stats()
        assert stats.bytes <= self.BUDGET
        assert stats.bytes == sum(cost(len(e.ids)) for e in self.stored())
        assert stats.entries == len(self.store._kv)
        assert stats.tokens == sum(len(e.ids) for e in self.stored())

    @invariant()
    def all_indices_agree(self) -> None:
        for e in self.stored():
            assert self.store.get(e.key) is e
            assert e in self.store.children(e.parent)
            assert (e in self.store.variants(e.content)) == (e.position > 0)


TestChats = Chats.TestCase
TestChats.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_chain_longer_than_the_budget_keeps_its_beginning() -> None:
    store = memory(3 * cost(10))
    chain = [entry([0] * 10)]
    for n in range(1, 8):
        chain.append(entry([n] * 10, chain[-1]))
    for _ in range(2):
        put(store, *chain)
        assert [store.get(e.key) is e for e in chain] == [True] * 3 + [False] * 5


def test_what_was_used_stays() -> None:
    store = memory(3 * cost(10))
    old, used, new = entry([1] * 10), entry([2] * 10), entry([3] * 10)
    put(store, old, used)
    use(store, old)
    put(store, new)
    put(store, entry([4] * 10))
    assert store.get(used.key) is None
    assert store.get(old.key) and store.get(new.key)
    assert store.stats().evicted == 1


def test_a_hot_chunk_does_not_keep_its_cold_ancestors() -> None:
    store = memory(3 * cost(10))
    cold = entry([1] * 10)
    hot = entry([2] * 10, cold)
    put(store, cold, hot)
    for n in range(3, 9):
        use(store, hot)
        put(store, entry([n] * 10))
    assert store.get(hot.key) and not store.get(cold.key)


def test_pins_hold_until_they_are_due() -> None:
    store = memory(4 * cost(10))
    pinned, other = entry([1] * 10), entry([2] * 10)
    put(store, pinned)
    assert not store.pin([pinned.key, entry([99]).key], 0.2)
    assert store.pin([pinned.key], 1.0)
    for n in range(3, 12):
        put(store, other, entry([n] * 10))
        use(store, other)
    assert store.get(pinned.key)
    time.sleep(1.05)
    for n in range(12, 24):
        put(store, entry([n] * 10))
        use(store, other)
    assert not store.get(pinned.key)


def test_half_of_the_budget_can_be_pinned_at_most() -> None:
    store = memory(4 * cost(10))
    chains = [entry([n] * 10) for n in range(4)]
    put(store, *chains)
    assert not store.pin([e.key for e in chains[:3]], 60)
    assert store.pin([e.key for e in chains[:2]], 60)
    assert store.pin([chains[0].key], 60) and not store.pin([chains[2].key], 60)
    store.clear()
    put(store, *chains)
    assert store.pin([chains[2].key], 60)


def test_what_can_never_fit_is_rejected_and_costs_nothing_else() -> None:
    store = memory(cost(10))
    small, large = entry([1] * 10), entry([2] * 11)
    put(store, small, large)
    assert store.get(small.key) and not store.get(large.key)
    assert (store.stats().rejected, store.stats().evicted) == (1, 0)


def test_kv_in_hand_survives_its_eviction() -> None:
    store = memory(cost(10))
    first = entry([1] * 10)
    put(store, first)
    loaded = store.load(first.key)
    put(store, entry([2] * 10))
    assert store.get(first.key) is store.load(first.key) is None
    assert loaded and loaded.tokens == 10


def test_approximate_kv_never_replaces_exact_kv() -> None:
    store = memory(1 << 30)
    head, other = entry([1] * 5), entry([2] * 5)
    exact = entry([7] * 9, head)
    approximate = entry([7] * 9, other, exact=False)
    put(store, head, exact)
    assert not store.wants(approximate)
    put(store, approximate)
    assert store.variants(exact.content) == [exact]


def test_exact_kv_is_stored_beside_approximate_and_preferred() -> None:
    store = memory(1 << 30)
    head, other = entry([1] * 5), entry([2] * 5)
    exact = entry([7] * 9, head)
    approximate = entry([7] * 9, other, exact=False)
    newest = entry([7] * 9, entry([3] * 5, head, exact=False), exact=False)
    put(store, approximate, newest)
    assert store.variants(exact.content) == [newest, approximate]
    put(store, head, exact)
    assert store.variants(exact.content) == [exact, newest, approximate]


def test_a_tail_that_has_grown_is_replaced() -> None:
    store = memory(1 << 30)
    head = entry([1] * 5)
    short, long = entry([2] * 5, head), entry([2] * 9, head)
    put(store, head, short, long)
    assert store.get(short.key) is None
    assert store.children(head.key) == [long]


def test_a_tail_that_something_follows_stays() -> None:
    store = memory(1 << 30)
    head = entry([1] * 5)
    short, long = entry([2] * 5, head), entry([2] * 9, head)
    put(store, head, short, entry([3] * 5, short), long)
    assert store.get(short.key) and store.get(long.key)


def test_storing_twice_stores_once() -> None:
    store = memory(1 << 30)
    one = entry([1] * 5)
    put(store, one, one)
    assert (store.stats().stored, store.stats().entries) == (1, 1)
    assert not store.wants(one)


def test_many_threads_may_use_one_store() -> None:
    store, errors = memory(12 * cost(10)), []

    def hammer(seed: int) -> None:
        try:
            for n in range(150):
                chain = [entry([seed % 3] * 10)]
                for step in range(1, 4):
                    chain.append(entry([(seed * n + step) % 5] * 10, chain[-1]))
                put(store, *chain)
                use(store, *chain)
                loaded = [store.load(e.key) for e in chain]
                assert all(kv is None or kv.tokens == 10 for kv in loaded)
                store.children(chain[0].key)
                store.variants(chain[1].content)
                assert store.stats().bytes <= 12 * cost(10)
                if n % 50 == 49:
                    store.clear()
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            errors.append(error)

    threads = [threading.Thread(target=hammer, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    store.clear()
    assert store.stats().bytes == 0


@pytest.mark.parametrize("change", ["namespace", "weights"])
def test_engines_that_share_a_store_never_share_kv(change: str) -> None:
    ours = boost("llama")
    theirs = boost("llama" if change == "namespace" else "qwen2", namespace="theirs")
    theirs._engine.store = ours._engine.store
    ids = tokens(200, 1)
    ours.prefill(ids)
    foreign = theirs.generate(ids, max_new_tokens=1)
    assert foreign.usage.computed == len(ids)
    assert ours.generate(ids, max_new_tokens=1).usage.computed == 1
    assert theirs.generate(ids, max_new_tokens=1).usage.computed == 1


def test_equal_fingerprints_and_namespaces_do_share() -> None:
    ours, same = boost("llama"), boost("llama")
    same._engine.store = ours._engine.store
    ours.prefill(tokens(200, 1))
    assert same.generate(tokens(200, 1), max_new_tokens=1).usage.computed == 1


def test_a_key_kind_is_part_of_the_identity() -> None:
    digest = bytes(32)
    assert len({ChunkKey(kind, digest) for kind in KeyKind}) == 3
