"""The store under an engine: what one process stored another finds, never what is not its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from families import boost, tokens
from test_shelf import Moody, fail

from kvboost import KVBoost
from kvboost.keys import KeyKind
from kvboost.store import ChunkStore, Memory, MemoryTier, Shelf
from kvboost.store.eviction import eviction_policy


def below(made: KVBoost, *tiers: MemoryTier, limit: float = 1.0, size: int = 1 << 30) -> KVBoost:
    """The same, with a store of its own above these tiers."""
    shelves = [Shelf(tier, limit, 1 << 26) for tier in tiers]
    made._engine.store = ChunkStore(Memory(size, eviction_policy("value")), shelves)
    return made


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def make(tier: MemoryTier) -> Iterator[Callable[..., KVBoost]]:
    """Makes KVBoosts that share a tier, and closes them."""
    made: list[KVBoost] = []

    def make(family: str = "llama", **config: Any) -> KVBoost:
        made.append(below(boost(family, **config), tier))
        return made[-1]

    yield make
    for each in made:
        each._engine.store.close()


def stored(made: KVBoost, ids: list[int]) -> KVBoost:
    made.generate(ids, max_new_tokens=4)
    assert made.flush(5)
    return made


def test_what_one_stored_another_hits_exactly(make: Callable[..., KVBoost]) -> None:
    ids = tokens(300, 1)
    writer = stored(make(), ids)
    first = writer.generate(ids, max_new_tokens=8)
    assert writer.flush(5)
    reader = make()
    again = reader.generate(ids, max_new_tokens=8)
    assert again.token_ids == first.token_ids and again.exact
    assert again.usage.exact == len(ids) - 1
    assert reader.stats().tiers[0].hits > 5
    assert writer.stats().tiers[0].written == reader.stats().tiers[0].entries

    hits = reader.stats().tiers[0].hits
    assert reader.generate(ids, max_new_tokens=8).usage == again.usage
    assert reader.stats().tiers[0].hits == hits  # the second time from memory


@pytest.mark.parametrize("kv_format", ["raw", "k8v4"])
def test_from_a_tier_as_from_memory(make: Callable[..., KVBoost], kv_format: str) -> None:
    a, b, c = tokens(90, 1), tokens(150, 2), tokens(120, 3)
    prompts = [[*a, *c, *b, 7, 8], [*a, *b[:70], 9, *b[70:], 5], [*a, *b, *c, 1, 2, 3]]
    writer = make(kv_format=kv_format)
    stored(writer, [*a, *b, *c])
    for prompt in prompts:
        reader = make(kv_format=kv_format)  # knows nothing but the tier
        below_tier = reader.score(prompt, [1, 2, 3], recompute="selective")
        in_memory = writer.score(prompt, [1, 2, 3], recompute="selective")
        assert below_tier.usage == in_memory.usage
        assert below_tier.usage.exact + below_tier.usage.moved > 120
        torch.testing.assert_close(below_tier.logits, in_memory.logits)


def test_a_chat_goes_on_after_a_restart(make: Callable[..., KVBoost]) -> None:
    turn = tokens(200, 1)
    writer = make()
    answer = writer.generate(turn, max_new_tokens=12)
    assert writer.flush(5)
    longer = [*turn, *answer.token_ids, *tokens(40, 2)]
    usage = make().generate(longer, max_new_tokens=1).usage
    assert usage.exact >= 200


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen2", {}),
        ("llama", {"namespace": "theirs"}),
        ("llama", {"kv_format": "k8v8"}),
    ],
)
def test_others_find_nothing(
    make: Callable[..., KVBoost], family: str, config: dict[str, Any]
) -> None:
    ids = tokens(200, 1)
    stored(make(), ids)
    other = make(family, **config)
    assert other.generate(ids, max_new_tokens=1).usage.computed == len(ids)
    assert other.flush(5)
    again = make(family, **config).generate(ids, max_new_tokens=1)
    assert again.usage.computed == 1  # and both live in one tier
    assert make().generate(ids, max_new_tokens=1).usage.computed == 1


def test_approximate_kv_never_answers_an_exact_lookup_below(make: Callable[..., KVBoost]) -> None:
    a, b, c = tokens(90, 1), tokens(150, 2), tokens(120, 3)
    writer = make()
    stored(writer, [*a, *b, *c])
    stored(writer, [*a, *c, *b, *tokens(80, 4)])  # the last ones on moved KV
    kinds = {e.key.kind for e in writer._engine.store.memory._entries.values()}
    assert kinds == {KeyKind.PREFIX, KeyKind.CONTEXT}
    usage = make().generate([*a, *c, *b, *tokens(80, 4)], reuse="exact", max_new_tokens=1).usage
    assert usage.exact <= 90 + 33 and usage.moved == 0


def test_nothing_is_lost_or_wrong_while_a_tier_fails(caplog: pytest.LogCaptureFixture) -> None:
    tier, ids = Moody(), tokens(300, 1)
    writer = below(boost("llama"), tier)
    wanted = writer.generate(ids, max_new_tokens=8)
    assert writer.flush(5)
    reader = below(boost("llama"), tier, limit=0.1)
    tier.mood = fail
    assert reader.generate(ids, max_new_tokens=8).token_ids == wanted.token_ids
    assert len(caplog.records) == 1
    tier.mood = lambda: time.sleep(0.5)
    slow = below(boost("llama"), tier, limit=0.1)
    start = time.perf_counter()
    assert slow.generate(ids, max_new_tokens=8).token_ids == wanted.token_ids
    assert time.perf_counter() - start < 2.0
    tier.mood = lambda: None
    for made in (writer, reader, slow):
        made._engine.store.close()


def test_an_entry_that_goes_between_lookup_and_load_is_computed() -> None:
    class Fleeting(MemoryTier):
        """Knows of a record that can't be read any more."""

        def read(self, keys: Any) -> Iterator[bytes | bytearray | None]:
            for n, item in enumerate(super().read(keys)):
                yield None if n == 2 and self.vanish else item

    tier, ids = Fleeting(), tokens(300, 1)
    tier.vanish = False
    writer = below(boost("llama"), tier)
    wanted = writer.generate(ids, max_new_tokens=8)
    assert writer.flush(5)
    tier.vanish = True
    reader = below(boost("llama"), tier)
    got = reader.generate(ids, max_new_tokens=8)
    assert got.token_ids == wanted.token_ids
    assert 0 < got.usage.exact < 299
    for made in (writer, reader):
        made._engine.store.close()


def test_damaged_entries_are_computed_again(make: Callable[..., KVBoost], tier: MemoryTier) -> None:
    ids = tokens(300, 1)
    wanted = stored(make(), ids).generate(ids, max_new_tokens=8)
    for key, r in list(tier.records.items())[1::2]:
        hurt = bytes([r.body[len(r.body) // 2] ^ 4])
        half = len(r.body) // 2
        body = r.body[:half] + hurt + r.body[half + 1 :]
        tier.records[key] = type(r)(key, r.parent, r.content, r.front, body, 0.0)
    reader = make()
    got = reader.generate(ids, max_new_tokens=8)
    assert got.token_ids == wanted.token_ids and got.usage.exact > 0
    assert reader.stats().tiers[0].flaws["checksum"] >= 1
    assert reader.flush(5)


def test_a_tier_slower_than_computing_is_not_used() -> None:
    tier, ids = Moody(), tokens(300, 1)
    writer = stored(below(boost("llama"), tier), ids)
    reader = below(boost("llama"), tier)
    reader.generate(tokens(300, 9), max_new_tokens=1)  # now it knows its pace
    reader._engine.store.shelves[0].bandwidth = 1.0
    usage = reader.generate(ids, max_new_tokens=1).usage
    assert usage.computed == len(ids) and reader.stats().tiers[0].slow == 1
    for made in (writer, reader):
        made._engine.store.close()


def test_what_a_lower_tier_gives_is_kept_above() -> None:
    near, far, ids = MemoryTier(), MemoryTier(), tokens(300, 1)
    writer = stored(below(boost("llama"), far), ids)
    reader = below(boost("llama"), near, far)
    reader.generate(ids, max_new_tokens=1)
    assert reader.flush(5)
    assert near.records.keys() <= far.records.keys() and len(near.records) > 5
    small = below(boost("llama"), near, far, size=0)  # no memory at all
    assert small.generate(ids, max_new_tokens=1).usage.computed == 1
    assert small.stats().tiers[1].hits == 0
    for made in (writer, reader, small):
        made._engine.store.close()


def test_memory_answers_without_asking_below() -> None:
    tier, ids = Moody(), tokens(300, 1)
    made = stored(below(boost("llama"), tier), ids)
    before = tier.calls
    assert made.score(ids, [1]).usage.computed == 1
    assert tier.calls - before <= 3  # about the last chunk, which the prompt cuts short
    made._engine.store.close()


def test_a_tier_that_slows_down_is_waited_for_once() -> None:
    tier, docs = Moody(), [tokens(64, n) for n in range(8)]
    writer = below(boost("llama"), tier)
    for n in range(6):  # several variants of each
        stored(writer, [*tokens(40, 50 + n), *(t for doc in docs[n:] + docs[:n] for t in doc)])
    reader = below(boost("llama"), tier)
    reader.generate(tokens(400, 99), max_new_tokens=1)
    reader._engine._pace = 1e-3
    before = tier.calls
    reads = []
    tier.read = lambda keys: reads.append(time.perf_counter()) or _slowly(tier, keys)  # type: ignore
    start = time.perf_counter()
    reader.score([*tokens(40, 7), *(t for doc in docs for t in doc)], [1])
    assert time.perf_counter() - start < 2.5 and len(reads) <= 2 and tier.calls > before
    for made in (writer, reader):
        made._engine.store.close()


def _slowly(tier: Moody, keys: Any) -> Iterator[bytes | bytearray | None]:
    for item in MemoryTier.read(tier, keys):
        time.sleep(0.4)
        yield item
