"""The store: its budget is never exceeded, a chain never loses its root first, a miss is a miss."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from families import boost, tokens
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvboost.keys import ChunkKey, KeyKind, KeySpace
from kvboost.plan import Entry, Piece, ReusePlan, Seam, Splice
from kvboost.store import ChunkStore, MemoryTier, PackedKV

KEYS = KeySpace("model", "tenant")


def some_kv(count: int) -> PackedKV:
    zeros = {name: torch.zeros(2, 1, count, 8) for name in ("k0", "v0")}
    return PackedKV("raw", 0, count, count, zeros)


def entry(ids: Sequence[int], parent: Entry | None = None, *, exact: bool = True) -> Entry:
    before = parent.key if parent else KEYS.root
    key = KEYS.prefix(before, ids) if exact else KEYS.approximate(before, ids)
    at = parent.position + len(parent.ids) if parent else 0
    return Entry(key, before, KEYS.content(ids), tuple(ids), at)


def put(store: ChunkStore, *entries: Entry) -> None:
    for e in entries:
        store.put(e, some_kv(len(e.ids)))


def plan(*entries: Entry) -> ReusePlan:
    pieces = tuple(Piece(e, 0, len(e.ids)) for e in entries)
    return ReusePlan(1000, (Splice(0, pieces, exact=True, seam=Seam.NONE),))


def cost(count: int) -> int:
    """What a chunk of so many tokens is charged, found by storing one."""
    store = ChunkStore(MemoryTier(), 1 << 30)
    put(store, entry(range(count)))
    return store.stats().bytes


class Forgetful(MemoryTier):
    """A tier that loses what it is told to lose, and knows what it holds."""

    def lose(self, key: ChunkKey) -> None:
        self._kv.pop(key)

    @property
    def kept(self) -> dict[ChunkKey, PackedKV]:
        return self._kv


class Chats(RuleBasedStateMachine):
    """Chains that branch, in a store with room for few of them, read and written as engines do."""

    BUDGET = 40_000

    def __init__(self) -> None:
        super().__init__()
        self.tier = Forgetful()
        self.store = ChunkStore(self.tier, self.BUDGET)
        self.lossless = True

    def stored(self) -> list[Entry]:
        return list(self.store._entries.values())

    @rule(
        path=st.lists(st.integers(0, 2), min_size=1, max_size=6), size=st.sampled_from([4, 20, 60])
    )
    def chat(self, path: list[int], size: int) -> None:
        """Read what is there of a chain, then store the rest and touch it whole."""
        chain: list[Entry] = []
        for step in path:
            chain.append(entry([step] * size, chain[-1] if chain else None))
        known = 0
        while known < len(chain) and self.store.get(chain[known].key):
            known += 1
        if known:
            self.store.fetch(plan(*chain[:known]))
        put(self.store, *chain)
        self.store.touch([e.key for e in chain])

    @rule(size=st.sampled_from([1, 200, 600]))
    def oversized(self, size: int) -> None:
        put(self.store, entry([9] * size))

    @precondition(lambda self: self.stored())
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(self.stored()))
        self.tier.lose(victim.key)
        lost = self.store.stats().lost
        assert self.store.fetch(plan(victim)) is None
        assert self.store.get(victim.key) is None
        assert self.store.stats().lost == lost + 1
        self.lossless = False

    @rule()
    def clear(self) -> None:
        self.store.clear()
        assert self.store.stats().entries == self.store.stats().bytes == 0
        self.lossless = True

    @invariant()
    def the_budget_holds(self) -> None:
        stats = self.store.stats()
        assert stats.bytes <= self.BUDGET
        assert stats.bytes == sum(cost(len(e.ids)) for e in self.stored())
        assert stats.entries == len(self.tier.kept)
        assert stats.tokens == sum(len(e.ids) for e in self.stored())

    @invariant()
    def no_chunk_outlives_its_parent(self) -> None:
        if self.lossless:
            for e in self.stored():
                assert e.parent == KEYS.root or self.store.get(e.parent)

    @invariant()
    def all_indices_agree(self) -> None:
        for e in self.stored():
            assert self.store.get(e.key) is e
            assert e in self.store.children(e.parent)
            assert (e in self.store.variants(e.content)) == (e.position > 0)


TestChats = Chats.TestCase
TestChats.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_chain_longer_than_the_budget_keeps_its_beginning() -> None:
    store = ChunkStore(MemoryTier(), 3 * cost(10))
    chain = [entry([0] * 10)]
    for n in range(1, 8):
        chain.append(entry([n] * 10, chain[-1]))
    for _ in range(2):
        put(store, *chain)
        store.touch([e.key for e in chain])
        assert [store.get(e.key) is e for e in chain] == [True] * 3 + [False] * 5


def test_the_least_recently_used_chain_goes_first() -> None:
    store = ChunkStore(MemoryTier(), 3 * cost(10))
    old, used, new = entry([1] * 10), entry([2] * 10), entry([3] * 10)
    put(store, old, used)
    store.fetch(plan(old))
    put(store, new)
    put(store, entry([4] * 10))
    assert store.get(used.key) is None
    assert store.get(old.key) and store.get(new.key)
    assert store.stats().evicted == 1


def test_what_can_never_fit_is_rejected_and_costs_nothing_else() -> None:
    store = ChunkStore(MemoryTier(), cost(10))
    small, large = entry([1] * 10), entry([2] * 11)
    put(store, small, large)
    assert store.get(small.key) and not store.get(large.key)
    assert (store.stats().rejected, store.stats().evicted) == (1, 0)


def test_kv_in_hand_survives_its_eviction() -> None:
    store = ChunkStore(MemoryTier(), cost(10))
    first = entry([1] * 10)
    put(store, first)
    fetched = store.fetch(plan(first))
    put(store, entry([2] * 10))
    assert store.get(first.key) is None
    assert fetched and fetched[0][0].tokens == 10


def test_a_lost_chunk_is_a_counted_miss_and_the_request_goes_on() -> None:
    made, ids = boost("llama"), tokens(150, 1)
    tier = Forgetful()
    made._engine.store = ChunkStore(tier, 1 << 30)
    first = made.generate(ids, max_new_tokens=8)
    lost = list(tier.kept)[1]
    tier.lose(lost)
    again = made.generate(ids, max_new_tokens=8)
    assert again.token_ids == first.token_ids
    assert again.usage.computed > 1
    assert made.stats().store.lost == 1
    assert made.generate(ids, max_new_tokens=8).usage.computed == 1


def test_approximate_kv_never_replaces_exact_kv() -> None:
    store = ChunkStore(MemoryTier(), 1 << 30)
    head, other = entry([1] * 5), entry([2] * 5)
    exact = entry([7] * 9, head)
    approximate = entry([7] * 9, other, exact=False)
    put(store, head, exact)
    assert not store.wants(approximate)
    put(store, approximate)
    assert store.variants(exact.content) == [exact]


def test_exact_kv_is_stored_beside_approximate_and_preferred() -> None:
    store = ChunkStore(MemoryTier(), 1 << 30)
    head, other = entry([1] * 5), entry([2] * 5)
    exact = entry([7] * 9, head)
    approximate = entry([7] * 9, other, exact=False)
    newest = entry([7] * 9, entry([3] * 5, head, exact=False), exact=False)
    put(store, approximate, newest)
    assert store.variants(exact.content) == [newest, approximate]
    put(store, head, exact)
    assert store.variants(exact.content) == [exact, newest, approximate]


def test_a_tail_that_has_grown_is_replaced() -> None:
    store = ChunkStore(MemoryTier(), 1 << 30)
    head = entry([1] * 5)
    short, long = entry([2] * 5, head), entry([2] * 9, head)
    put(store, head, short, long)
    assert store.get(short.key) is None
    assert store.children(head.key) == [long]


def test_a_tail_that_something_follows_stays() -> None:
    store = ChunkStore(MemoryTier(), 1 << 30)
    head = entry([1] * 5)
    short, long = entry([2] * 5, head), entry([2] * 9, head)
    put(store, head, short, entry([3] * 5, short), long)
    assert store.get(short.key) and store.get(long.key)


def test_storing_twice_stores_once() -> None:
    store = ChunkStore(MemoryTier(), 1 << 30)
    one = entry([1] * 5)
    put(store, one, one)
    assert (store.stats().stored, store.stats().entries) == (1, 1)
    assert not store.wants(one)


def test_many_threads_may_use_one_store() -> None:
    store, errors = ChunkStore(MemoryTier(), 12 * cost(10)), []

    def hammer(seed: int) -> None:
        try:
            for n in range(150):
                chain = [entry([seed % 3] * 10)]
                for step in range(1, 4):
                    chain.append(entry([(seed * n + step) % 5] * 10, chain[-1]))
                put(store, *chain)
                store.touch([e.key for e in chain])
                fetched = store.fetch(plan(*chain))
                assert fetched is None or [kv.tokens for kv in fetched[0]] == [10] * 4
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
