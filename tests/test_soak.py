"""Long runs in a small budget: it is never exceeded, nothing is lost, mixed or wrong."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch
from families import boost, tokens
from test_memory import entry

from kvboost.plan import Entry
from kvboost.store import Memory, PackedKV
from kvboost.store.eviction import eviction_policy

THREADS, OPERATIONS, BUDGET = 8, 10_000, 150_000


def marked(e: Entry) -> PackedKV:
    """KV that tells whose it is."""
    mark = float(int.from_bytes(e.key.digest[:3], "little"))
    tensors = {name: torch.full((1, 1, len(e.ids), 4), mark) for name in ("k0", "v0")}
    return PackedKV("raw", e.position, len(e.ids), len(e.ids), tensors)


def chain(rng: random.Random) -> list[Entry]:
    made: list[Entry] = []
    for _ in range(rng.randint(1, 5)):
        ids = [rng.randrange(6)] * rng.randint(1, 12)
        made.append(entry(ids, made[-1] if made else None))
    return made


def step(store: Memory, rng: random.Random, check: Callable[[str, bool], None]) -> None:
    """A request over a chain: about ten operations, each followed by a look at the budget."""
    store.begin()
    entries = chain(rng)
    keys = {e.key for e in entries}
    for e in entries:
        there, kv = store.get(e.key), store.load(e.key)
        check("mixed entries", there is None or there == e)
        if kv is None:
            store.put(e, marked(e), 0.001 * len(e.ids), keys)
        else:
            check("mixed KV", torch.equal(kv.tensors["k0"], marked(e).tensors["k0"]))
            store.hit(e.key, rng.random())
        check("over budget", store._bytes <= BUDGET)
    if rng.random() < 0.02:
        store.pin(keys, 0.001)
    if rng.random() < 0.001:
        store.clear()
    for e in entries:
        check("mixed variants", all(v.content == e.content for v in store.variants(e.content)))


@pytest.mark.parametrize("policy", ["value", "lru", "gdsf"])
def test_eight_threads_in_one_memory(policy: str) -> None:
    store = Memory(BUDGET, eviction_policy(policy))
    wrong: list[str] = []

    def check(what: str, good: bool) -> None:
        if not good:
            wrong.append(what)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(OPERATIONS // 10):
            step(store, rng, check)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    assert not wrong
    stats = store.stats()
    assert stats.evicted > 100 and 0 < stats.bytes <= BUDGET
    assert stats.bytes == sum(store._cost.values())
    store.clear()
    assert store.stats().bytes == 0 and not store._kv and not store._children


def test_three_hundred_requests_in_a_tenth_of_what_they_need() -> None:
    """In exact mode what is stored changes no answer. `python -m benchmarks.memory` does the same
    with the real model."""
    rng = random.Random(5)
    texts = [tokens(120, n) for n in range(60)]
    plain = boost("llama")
    everything = 60 * 120 * plain._engine.runner.layout.bytes_per_token
    small = boost("llama", max_bytes=everything // 10)
    for n in range(300):
        prompt = [*texts[min(int(rng.expovariate(0.1)), 59)], *tokens(9, n)]
        wanted = plain.generate(prompt, max_new_tokens=4, reuse="off")
        got = small.generate(prompt, max_new_tokens=4, reuse="exact")
        assert got.token_ids == wanted.token_ids and got.exact
        assert small.stats().store.bytes <= everything // 10
    stats = small.stats()
    assert stats.store.evicted > 100 and stats.tokens.exact > 0.1 * stats.tokens.prompt
