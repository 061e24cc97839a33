"""Whole requests: on the embedded model where text matters, on a tiny one where it does not."""

from __future__ import annotations

import gc
import inspect
import random
import shutil
import threading
import time
import weakref
from copy import deepcopy
from itertools import zip_longest
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from families import AUTO, boost, counted, tokenizer, tokens
from transformers import Cache

from kvboost import (
    CacheBlendRecompute,
    Completion,
    ConfigError,
    DriftRecompute,
    FullRecompute,
    KVBoost,
    NoRecompute,
    PromptError,
    QueryRecompute,
    SelectiveRecompute,
    Usage,
)
from kvboost.metrics import divergence
from kvboost.plan import FRESH
from kvboost.recompute import RecomputePolicy, damage
from kvboost.store.trace import read_trace

POLICIES = [
    NoRecompute(),
    FullRecompute(),
    SelectiveRecompute(),
    DriftRecompute(),
    CacheBlendRecompute(),
    QueryRecompute(),
    AUTO,
]
NAMES = ["Ada", "Boris", "Chen", "Dora", "Emil", "Fatima", "Goro", "Hilda", "Ivan", "Jorge"]
PLACES = ["Oslo", "Lima", "Cairo", "Delhi", "Quito", "Turin", "Osaka", "Perth", "Accra", "Minsk"]
THINGS = ["a red boat", "two clocks", "an old map", "some bread", "a black cat", "three books"]


def story(seed: int, sentences: int = 8) -> str:
    """About 15 tokens a sentence."""
    source = random.Random(seed)
    return " ".join(
        f"{source.choice(NAMES)} from {source.choice(PLACES)} saw {source.choice(THINGS)}"
        f" and gave {source.choice(NAMES)} {source.randrange(2, 90)} coins."
        for _ in range(sentences)
    )


STORIES = [story(n) for n in range(4)]
QUESTION = "Who gave coins to whom? Answer in one sentence."
CHAT = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def made(default_model: Any) -> KVBoost:
    return KVBoost(*default_model)


def ask(made: KVBoost, order: list[int], **options: Any) -> Completion:
    options = {"max_new_tokens": 12, **options}
    return made.generate(CHAT, documents=[STORIES[n] for n in order], **options)


def assert_adds_up(made: KVBoost, completion: Completion, ids: list[int]) -> None:
    usage = completion.usage
    assert usage.prompt == len(ids)
    assert usage.prompt == usage.exact + usage.moved + usage.recomputed + usage.computed
    assert usage.generated == len(completion.token_ids)
    assert completion.passes[-1].rows >= 1


def plain(model: Any, ids: list[int], count: int) -> tuple[int, ...]:
    """What transformers' own generate() answers, greedily."""
    prompt = torch.tensor([ids])
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=count
    )
    return tuple(out[0, len(ids) :].tolist())


def ids_of(made: KVBoost, order: list[int]) -> list[int]:
    """The ids of what `ask` asks."""
    text = "".join(f"Document:\n{STORIES[n]}\n\n" for n in order) + QUESTION
    rendered = made.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return made.tokenizer(rendered).input_ids


# -- the embedded model


def test_cold_and_exact_and_full_requests_answer_as_transformers(made: KVBoost) -> None:
    ids = ids_of(made, [0, 1])
    expected = plain(made.model, ids, 64)
    cold = ask(made, [0, 1], max_new_tokens=64)
    assert cold.token_ids == expected
    assert (cold.usage.computed, cold.exact) == (len(ids), True)
    assert_adds_up(made, cold, ids)
    again = ask(made, [0, 1], max_new_tokens=5)
    assert again.token_ids == expected[:5]
    assert again.usage == Usage(exact=len(ids) - 1, computed=1, generated=5)
    assert [p.rows for p in again.passes] == [1]
    other = ids_of(made, [1, 0])
    full = ask(made, [1, 0], recompute="full", max_new_tokens=5)
    assert full.exact and full.usage.recomputed > 200
    assert_adds_up(made, full, other)
    for order, prompt, options in (([0, 1], ids, {}), ([1, 0], other, {"recompute": "full"})):
        assert_predicts_as_transformers(made, order, prompt, **options)


def assert_predicts_as_transformers(
    made: KVBoost, order: list[int], ids: list[int], **options: Any
) -> None:
    """Logits of 64 greedy tokens: had one not been the largest, greedy text would differ."""
    answer = plain(made.model, ids, 64)
    documents = [STORIES[n] for n in order]
    scores = made.score(CHAT, answer, documents=documents, **options).logits
    assert tuple(scores.argmax(-1).tolist()) == answer
    with torch.inference_mode():
        out = made.model(torch.tensor([[*ids, *answer[:-1]]])).logits[0, len(ids) - 1 :]
    torch.testing.assert_close(scores, out, atol=1e-4, rtol=0)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_pieces_in_another_order_are_moved(made: KVBoost, policy: Any) -> None:
    ask(made, [0, 1, 2], max_new_tokens=1)
    with counted(made.model) as rows:
        completion = ask(made, [2, 1, 0], recompute=policy, max_new_tokens=1)
    assert [p.rows for p in completion.passes] == rows
    assert_adds_up(made, completion, ids_of(made, [2, 1, 0]))
    assert completion.usage.computed < 80
    assert completion.policy == policy.name
    assert completion.exact == (policy.name == "full")


@pytest.mark.parametrize(
    ("kv_format", "size", "limit"),
    [("k8v8", 0.32, 5e-4), ("k8v4", 0.25, 0.01), ("k4v4", 0.21, 0.05)],
)
def test_quantised_kv_is_small_and_close_and_never_called_exact(
    default_model: Any, made: KVBoost, kv_format: str, size: float, limit: float
) -> None:
    small = KVBoost(*default_model, kv_format=kv_format)
    answer = ask(made, [0, 1]).token_ids
    assert ask(small, [0, 1]).exact
    again = ask(small, [0, 1], max_new_tokens=1)
    assert again.usage.exact == again.usage.prompt - 1 and not again.exact
    assert ask(small, [0, 1], recompute="full", reuse="off", max_new_tokens=1).exact
    assert small.stats().store.bytes < size * made.stats().store.bytes  # of float32
    documents = [STORIES[0], STORIES[1]]
    true, close = (
        one.score(CHAT, answer, documents=documents, reuse=reuse).logits
        for one, reuse in ((made, "off"), (small, "exact"))
    )
    assert 0 < divergence(true, close).kl_mean < limit


def test_the_same_composition_twice_moves_what_the_first_computed(made: KVBoost) -> None:
    ask(made, [0, 1], max_new_tokens=1)
    long = "List all the places, one on each line, without names. " * 12
    other = [{"role": "user", "content": long}]
    asked = {"documents": [STORIES[1], STORIES[0]], "recompute": "none", "max_new_tokens": 1}
    first, second = made.generate(other, **asked), made.generate(other, **asked)
    assert second.usage.prompt == first.usage.prompt
    assert first.usage.computed > 2 * FRESH and second.usage.computed == FRESH
    assert second.usage.moved > first.usage.moved
    assert not second.exact


def test_a_growing_chat_is_exact_up_to_the_new_message(made: KVBoost) -> None:
    chat = [{"role": "user", "content": STORIES[0] + " Who was in Oslo?"}]
    for question in ["And then?", "What did Ada see?"]:
        turn = made.generate(chat, max_new_tokens=20)
        seen = [*made._prompts.build(chat).ids, *turn.token_ids[:-1]]
        chat += [
            {"role": "assistant", "content": turn.text},
            {"role": "user", "content": question},
        ]
        now = made._prompts.build(chat).ids
        common = next(n for n, (a, b) in enumerate(zip_longest(seen, now)) if a != b)
        assert common > len(made._prompts.build(chat[:1]).ids)
        followed = made.generate(chat, max_new_tokens=1)
        assert followed.usage.exact == common
        assert followed.usage.moved == followed.usage.recomputed == 0
        assert followed.exact


def test_off_neither_looks_up_nor_stores(made: KVBoost) -> None:
    first = ask(made, [0], reuse="off", max_new_tokens=1)
    assert made.stats().store.entries == 0
    ask(made, [0], max_new_tokens=1)
    entries = made.stats().store.entries
    again = ask(made, [0], reuse="off", max_new_tokens=1)
    assert again.usage == first.usage
    assert again.usage.computed == again.usage.prompt
    assert made.stats().store.entries == entries


def test_exact_reuse_moves_nothing(made: KVBoost) -> None:
    ask(made, [0, 1], max_new_tokens=1)
    completion = ask(made, [0, 2, 1], reuse="exact", recompute="full", max_new_tokens=1)
    assert completion.usage.moved == completion.usage.recomputed == 0
    assert completion.usage.exact > 100
    assert completion.exact


def test_warmed_texts_are_moved_to_their_first_question(made: KVBoost) -> None:
    texts = [STORIES[0], {"title": "Two", "text": STORIES[1]}]
    stored = made.warm(texts, progress=False)
    shown = f"Document:\n{STORIES[0]}\n\nDocument: Two\n{STORIES[1]}\n\n{QUESTION}"
    assert stored == len(made.tokenizer(shown).input_ids) - len(made.tokenizer(QUESTION).input_ids)
    usage = made.generate(CHAT, documents=texts[::-1], max_new_tokens=1).usage
    assert usage.exact + usage.moved + usage.recomputed > 0.9 * stored
    assert made.warm(STORIES[0]) > 0


def test_clear_forgets_everything(made: KVBoost) -> None:
    ask(made, [0], max_new_tokens=1)
    assert made.stats().store.bytes > 0
    made.clear()
    assert made.stats().store.bytes == made.stats().store.entries == 0
    assert ask(made, [0], max_new_tokens=1).usage.computed == len(ids_of(made, [0]))


def test_stats_count_all_requests(made: KVBoost) -> None:
    completions = [ask(made, [0], max_new_tokens=n) for n in (1, 3)]
    stats = made.stats()
    assert stats.requests == 2
    assert stats.tokens.prompt == sum(c.usage.prompt for c in completions)
    assert stats.tokens.generated == 4
    assert (stats.dtype, stats.device, stats.reuse) == ("float32", "cpu", "anywhere")


def test_timing_is_the_callers_clock(made: KVBoost) -> None:
    timing = ask(made, [0], max_new_tokens=4).timing
    parts = timing.tokenize + timing.lookup + timing.assemble + timing.probe + timing.forward
    assert 0 < parts <= timing.ttft
    assert timing.ttft - parts < 0.05
    assert timing.total >= timing.ttft + timing.decode + timing.store > timing.ttft


# -- streams


def test_time_that_the_caller_takes_is_nobodys() -> None:
    stream = boost("llama").stream(tokens(50, 1), max_new_tokens=6)
    for _ in stream:
        time.sleep(0.1)
    assert stream.completion
    timing = stream.completion.timing
    assert timing.ttft < 0.3 and timing.decode < 0.3 and timing.store < 0.3
    assert timing.total < 0.5


def test_pieces_of_a_stream_are_the_text(made: KVBoost) -> None:
    whole = ask(made, [0])
    stream = made.stream(CHAT, documents=STORIES[:1], max_new_tokens=12)
    assert stream.completion is None
    pieces = list(stream)
    assert "".join(pieces) == whole.text
    assert len(pieces) > 5 and all(pieces)
    assert stream.completion and stream.completion.token_ids == whole.token_ids
    assert list(stream) == []
    assert stream.completion.text == whole.text


def test_a_stop_string_ends_a_stream_and_is_not_shown(made: KVBoost) -> None:
    text = ask(made, [0]).text
    stop = text[8:14]
    stream = made.stream(CHAT, documents=STORIES[:1], max_new_tokens=12, stop=stop)
    assert "".join(stream) == text[: text.index(stop)]
    assert stream.completion and stream.completion.finish_reason == "stop"


def test_eos_ends_an_answer_without_showing(default_model: Any) -> None:
    """Whatever token ends answers: here the one that greedy decoding takes third."""
    made = KVBoost(*default_model)
    third = made.generate("The capital of France is", max_new_tokens=4).token_ids
    made._eos = frozenset({third[2]})
    completion = made.generate("The capital of France is", max_new_tokens=4)
    assert completion.token_ids == third[:3]
    assert completion.finish_reason == "stop"
    assert completion.text == made.tokenizer.decode(third[:2])


def test_a_closed_stream_stores_what_it_computed_and_frees_its_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, ids, buffers = boost("llama"), tokens(100, 1), []
    new_buffer = made._engine.runner.new_buffer

    def remembered(capacity: int) -> Any:
        buffer = new_buffer(capacity)
        buffers.append(weakref.ref(buffer))
        return buffer

    monkeypatch.setattr(made._engine.runner, "new_buffer", remembered)
    stream = made.stream(ids, max_new_tokens=500)
    text = "".join(next(stream) for _ in range(4))
    assert made.stats().store.entries == 0
    stream.close()
    assert stream.completion is None and list(stream) == []
    gc.collect()
    assert [ref() for ref in buffers] == [None]
    assert made.stats().tokens == Usage(computed=100, generated=4)
    answer = made.tokenizer(text).input_ids
    assert made.generate([*ids, *answer], max_new_tokens=1).usage.exact == 103


def test_a_stream_that_is_dropped_stores_too() -> None:
    made = boost("llama")
    next(made.stream(tokens(100, 1)))
    gc.collect()
    assert made.generate(tokens(100, 1), max_new_tokens=1).usage.computed == 1


def test_a_stream_that_never_began_costs_nothing() -> None:
    made = boost("llama")
    made.stream(tokens(100, 1)).close()
    assert made.stats().requests == 0


def alone(ids: list[int], count: int = 40) -> tuple[int, ...]:
    return boost("llama").generate(ids, max_new_tokens=count).token_ids


def test_streams_may_be_read_in_turns() -> None:
    made, prompts = boost("llama"), [tokens(80, 1), tokens(90, 2), tokens(80, 1)]
    streams = [made.stream(ids, max_new_tokens=40) for ids in prompts]
    for _ in zip_longest(*streams):
        pass
    assert [s.completion and s.completion.token_ids for s in streams] == list(map(alone, prompts))


def test_threads_get_what_each_gets_alone() -> None:
    made, found = boost("llama"), {}

    def work(seed: int) -> None:
        for _ in range(3):
            stream = made.stream(tokens(80 + seed, seed % 3), max_new_tokens=40)
            list(stream)
            assert stream.completion
            found[seed] = stream.completion.token_ids

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: alone(tokens(80 + n, n % 3)) for n in range(6)}


# -- edges


def test_the_model_window_is_the_limit() -> None:
    made = boost("llama")
    assert len(made.generate(tokens(1020, 1), max_new_tokens=10).token_ids) == 5
    exact = made.generate(tokens(1024, 1), max_new_tokens=10)
    assert len(exact.token_ids) == 1 and exact.finish_reason == "length"
    with pytest.raises(
        PromptError, match="has 1025 tokens and the model's window is 1024: shorten"
    ):
        made.generate(tokens(1025, 1), max_new_tokens=10)
    with pytest.raises(PromptError, match="shorten it by 1"):
        made.prefill(tokens(1025, 1))
    assert made.generate(tokens(1024, 1), max_new_tokens=1).usage.computed == 1


def test_one_token_is_a_prompt() -> None:
    made = boost("llama")
    first = made.generate([5], max_new_tokens=30)
    assert first.usage == Usage(computed=1, generated=30)
    assert first.token_ids == families.generated("llama", "sdpa", (5,), 30)
    assert made.generate([5], max_new_tokens=30).token_ids == first.token_ids


def test_any_script_is_a_prompt(made: KVBoost) -> None:
    text = "日本語のテキスト 👩‍👩‍👧‍👦 नमस्ते é\u0301 \u0000"
    first, again = (made.generate(text, max_new_tokens=6) for _ in range(2))
    assert first.token_ids == again.token_ids
    assert again.usage.computed == 1


def test_a_model_in_a_small_store_still_answers_right() -> None:
    """Room for nothing, for one chunk, for a few."""
    expected = alone(tokens(200, 1))
    for size in (0, 40_000, 150_000):
        made = boost("llama", max_bytes=size)
        for _ in range(3):
            assert made.generate(tokens(200, 1), max_new_tokens=40).token_ids == expected
        assert made.stats().store.bytes <= size


def test_new_weights_never_find_old_kv() -> None:
    model = deepcopy(families.model("llama"))
    made, ids = KVBoost(model, tokenizer(), chunk_tokens=32), tokens(100, 1)
    before = made.generate(ids, max_new_tokens=20)
    weight = model.model.layers[1].self_attn.k_proj.weight
    delta = torch.randn(weight.shape[0], 2) @ torch.randn(2, weight.shape[1])
    with torch.no_grad():
        weight += delta
    edited = made.generate(ids, max_new_tokens=20)
    assert edited.usage.computed == len(ids)
    assert edited.token_ids != before.token_ids
    assert made.generate(ids, max_new_tokens=20).usage.computed == 1


def test_fingerprints_of_equal_weights_are_equal_again() -> None:
    model = deepcopy(families.model("llama"))
    made, ids = KVBoost(model, tokenizer(), chunk_tokens=32), tokens(100, 1)
    made.prefill(ids)
    weight = model.model.layers[1].self_attn.k_proj.weight
    kept = weight.clone()
    with torch.no_grad():
        weight += 1
    assert made.generate(ids, max_new_tokens=1).usage.computed == len(ids)
    with torch.no_grad():
        weight.copy_(kept)
    assert made.generate(ids, max_new_tokens=1).usage.computed == 1


def test_a_policy_that_forgets_rows_is_refused() -> None:
    class Forgets:
        name = "forgets"

        def rows(self, plan: Any, probe: Any) -> list[int]:
            return plan.rows[:-1]

    made = boost("llama")
    with pytest.raises(ConfigError, match="policy 'forgets' must return sorted rows"):
        made.generate(tokens(100, 1), recompute=Forgets())
    assert made.generate(tokens(100, 1), max_new_tokens=1).usage.computed == 100


def test_a_long_suffix_behind_a_short_prefix_runs_in_blocks() -> None:
    """One masked pass over it would cost more than computing the prefix again."""
    made, ids = boost("llama"), tokens(960, 7)
    made.prefill(ids[:150])
    with counted(made.model) as rows:
        completion = made.generate(ids, max_new_tokens=1)
    assert rows == [p.rows for p in completion.passes] == [405, 405]
    assert completion.usage.exact == 150 and completion.exact
    answer = tokens(4, 8)
    with torch.inference_mode():
        plain = made.model(torch.tensor([[*ids, *answer[:-1]]])).logits[0, 959:]
    made.clear()
    made.prefill(ids[:150])
    torch.testing.assert_close(made.score(ids, answer).logits, plain, atol=1e-4, rtol=0)


def test_a_prefix_too_short_to_save_anything_is_computed_again() -> None:
    made, ids = boost("llama"), tokens(960, 7)
    made.prefill(ids[:100])
    assert {s.kind for s in made.explain(ids).spans} == {"computed"}
    completion = made.generate(ids, max_new_tokens=1)
    assert [p.rows for p in completion.passes] == [960] and completion.exact
    assert made.generate(ids, max_new_tokens=1).usage.computed == 1


def test_moved_kv_is_not_stored_again() -> None:
    """Its error would be passed on under a new name; what was computed behind it is stored once."""
    head, one, two, three = (tokens(60, n) for n in range(4))
    made = boost("llama")
    made.prefill([*head, *one, *two], segments=[60, 120])
    made.prefill([*head, *two, *three], segments=[60, 120], recompute="none")
    stored = made.stats().store.tokens
    assert stored == 4 * 60
    asked = [*head, *one, *three, *tokens(FRESH, 9)]
    moved = made.generate(asked, segments=[60, 120, 180], recompute="none", max_new_tokens=1)
    assert moved.usage.moved == 60
    assert made.stats().store.tokens == stored + FRESH


# -- transformers' cache


def continued(model: Any, ids: list[int], cache: Cache | None, **options: Any) -> tuple[int, ...]:
    """What generate() makes of a cache of ours, under the name that this transformers gives it."""
    known = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in known else "past_key_values"
    prompt = torch.tensor([ids])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=30,
        do_sample=False,
        **({} if cache is None else {name: cache}),
        **options,
    )
    return tuple(out[0, len(ids) :].tolist())


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral-sliding"])
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_goes_on_from_a_prefilled_cache(family: str, beams: int) -> None:
    made, ids = boost(family), tokens(100, 1)
    expected = continued(made.model, ids, None, num_beams=beams)
    for _ in range(2):
        cache = made.prefill(ids)
        assert isinstance(cache, Cache)
        assert cache.get_seq_length() == 99
        cache.batch_repeat_interleave(beams)
        assert continued(made.model, ids, cache, num_beams=beams) == expected
    assert made.generate(ids, max_new_tokens=30).usage.computed == 1


def test_assisted_decoding_does_with_our_cache_what_it_does_with_its_own() -> None:
    """Which is wrong in transformers 5.24, and right in 4.56."""
    made, ids = boost("llama"), tokens(100, 1)
    made.prefill(ids)
    with torch.inference_mode():
        out = made.model(torch.tensor([ids[:-1]]), use_cache=True)
    theirs = out["cache"] if "cache" in out else out["past_key_values"]
    options = {"prompt_lookup_num_tokens": 3, "eos_token_id": 511}
    expected = continued(made.model, ids, theirs, **options)
    assert continued(made.model, ids, made.prefill(ids), **options) == expected


def test_a_prefilled_cache_is_the_callers() -> None:
    made, ids = boost("llama"), tokens(100, 1)
    expected = made.generate(ids, max_new_tokens=20).token_ids
    cache = made.prefill(ids)
    for layer in cache.layers:
        layer.keys.zero_()
        layer.values.zero_()
    assert made.generate(ids, max_new_tokens=20).token_ids == expected


def test_score_is_a_forward_pass() -> None:
    made, ids, answer = boost("llama"), tokens(100, 1), tokens(9, 2)
    expected = families.logits("llama", "sdpa", ids, answer)
    for reuse in ("off", "auto", "auto"):
        scores = made.score(ids, answer, reuse=reuse).logits
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=0)
        one = made.score(ids, answer[:1], reuse=reuse).logits
        torch.testing.assert_close(one, expected[:1], atol=1e-4, rtol=0)
    with pytest.raises(PromptError, match="the answer is empty"):
        made.score(ids, [])


# -- how far an answer may be from full recompute


@pytest.mark.parametrize("order", ["composition", "shift", "nothing new"])
@pytest.mark.parametrize("kv_format", ["raw", "k8v8"])
def test_without_a_divergence_allowed_nothing_moved_is_used(order: str, kv_format: str) -> None:
    head, one, two = tokens(60, 1), tokens(120, 2), tokens(120, 3)
    made = boost("llama", kv_format=kv_format)
    made.prefill([*head, *one, *two], segments=[60, 180])
    pieces = {"composition": [tokens(20, 4), two, one], "shift": [tokens(3, 4), one, two]}
    ids = [*head, *(token for piece in pieces.get(order, [one, two]) for token in piece)]
    asked = {"segments": [60, 60 + len(pieces.get(order, [[]])[0])], "max_new_tokens": 1}
    exact = made.generate(ids, max_divergence=0, **asked)
    assert exact.exact == (kv_format == "raw")
    assert exact.usage.moved == 0 and exact.usage.exact >= 60
    close = made.score(ids, tokens(5, 9), max_divergence=0, segments=asked["segments"]).logits
    true = families.logits("llama", "sdpa", ids, tokens(5, 9))
    assert divergence(true, close).kl_mean < (1e-6 if kv_format == "raw" else 0.1)


def test_a_divergence_is_allowed_for_all_requests_or_for_one(default_model: Any) -> None:
    made = KVBoost(*default_model, max_divergence=1e-9)
    ask(made, [0, 1, 2], max_new_tokens=1)
    documents = [STORIES[n] for n in [2, 0, 1]]
    built = made.build(CHAT, made.parse({"documents": documents}), made._clock())
    plan = made._engine.lookup(built, "auto").plan()
    some = 0.99 * made._auto.profile.expected("none", damage(plan))
    free, repaired = (
        ask(made, [2, 0, 1], max_divergence=limit, max_new_tokens=1).usage for limit in (1e9, some)
    )
    exact = ask(made, [1, 2, 0], max_new_tokens=1)
    assert exact.exact and exact.usage.moved == 0 < exact.usage.recomputed
    assert free.recomputed == 0 < free.moved
    assert 0 < repaired.recomputed < exact.usage.recomputed / 2 and repaired.moved > 0


# -- what eviction is told


def shares(
    made: KVBoost, prompt: list[int], recompute: str | RecomputePolicy, monkeypatch: Any
) -> list[float]:
    told: list[float] = []
    monkeypatch.setattr(made._engine.store.memory, "hit", lambda key, share: told.append(share))
    made.generate(prompt, max_new_tokens=1, recompute=recompute, segments=[60, 180, 210, 330])
    return told


def test_eviction_is_told_what_each_chunk_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = tokens(60, 1), tokens(150, 2), tokens(120, 3)
    made, prompt = boost("llama"), [*a, *c, *b, *tokens(FRESH, 9)]
    made.generate([*a, *b, *c], max_new_tokens=1, segments=[60, 180, 210])
    exact = shares(made, [*a, *b, *c], "auto", monkeypatch)
    assert exact[:-1] == [1.0] * (len(exact) - 1) and 0.9 < exact[-1] < 1  # but the last token
    assert max(shares(made, prompt, "none", monkeypatch)) == 1.0
    repaired = shares(made, prompt, "selective", monkeypatch)
    assert 0 <= min(repaired) < 1
    drift = DriftRecompute(head=0, nearest=4, farthest=48)
    drifted = shares(made, prompt, drift, monkeypatch)
    looked = shares(made, prompt, QueryRecompute(drift=drift), monkeypatch)
    # More than its time, for what was looked at, though more of it was computed; less for others.
    assert any(more > less for more, less in zip(looked, drifted, strict=True))
    assert min(looked) < 0.6 < min(drifted) and max(looked) <= 2.0


def test_the_trace_has_hashes_and_sizes_only(tmp_path: Path) -> None:
    made = boost("llama", trace=tmp_path / "trace.jsonl")
    ids = tokens(200, 1)
    made.generate(ids, max_new_tokens=40)
    made.generate([*ids, *tokens(30, 2)], max_new_tokens=1)
    made.generate(ids, max_new_tokens=1, reuse="off")
    first, second = read_trace(tmp_path / "trace.jsonl").requests
    assert sum(chunk.tokens for chunk in first.chunks) == 239 and first.answer >= 1
    assert sum(chunk.tokens for chunk in second.chunks) == 230 and second.answer == 0
    assert first.chunks[:3] == second.chunks[:3]


def test_a_trace_that_can_no_longer_be_written_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    made = boost("llama", trace=folder / "trace.jsonl")
    shutil.rmtree(folder)
    for _ in range(2):
        assert made.generate(tokens(100, 1), max_new_tokens=1).usage.prompt == 100
    assert len(caplog.records) == 1


def test_a_pace_is_learned_from_long_passes() -> None:
    made = boost("llama")
    made.generate(tokens(40, 1), max_new_tokens=1)
    assert made._engine._pace is None
    made.generate(tokens(300, 2), max_new_tokens=1)
    pace = made._engine._pace
    assert pace and 0 < pace < 0.1
    made.generate(tokens(300, 2), max_new_tokens=1)  # one row: says nothing
    assert made._engine._pace == pace


# -- what must not be stored


def test_blocks_never_end_in_another_rope_regime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.passes._BLOCK", 32)
    made, prefix = boost("phi3-longrope"), tokens(60, 1)  # long from 128 tokens on
    made.generate([*prefix, *tokens(200, 2)], max_new_tokens=1)
    asked = [*prefix, *tokens(180, 3)]
    wanted = made.score(asked, [1, 2, 3], reuse="off")
    got = made.score(asked, [1, 2, 3], reuse="exact")
    assert got.usage.exact == 60
    torch.testing.assert_close(got.logits, wanted.logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("notice", [True, False])
def test_weights_that_change_while_a_stream_is_open(notice: bool) -> None:
    model = deepcopy(families.model("llama"))
    made, ids = KVBoost(model, tokenizer(), chunk_tokens=32), tokens(200, 1)
    old = {name: weight.clone() for name, weight in model.state_dict().items()}
    stream = made.stream(ids, max_new_tokens=20)
    next(stream)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.3)
    if notice:
        made.generate(tokens(50, 9), max_new_tokens=1)
    list(stream)
    if not notice:
        model.load_state_dict(old)
    assert made.generate(ids, max_new_tokens=1).usage.computed == len(ids)


def test_a_step_that_fails_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ids = boost("phi3-longrope"), tokens(126, 1)
    forward = made._engine.runner.forward

    def broken(buffer: Any, ids: list[int], *rest: Any, **more: Any) -> torch.Tensor:
        logits = forward(buffer, ids, *rest, **more)
        if len(ids) == 129:  # all is computed again: after the layers wrote their KV
            raise RuntimeError("out of memory")
        return logits

    monkeypatch.setattr(made._engine.runner, "forward", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        made.generate(ids, max_new_tokens=10)
    assert made.stats().store.entries == 0


def test_two_tenants_in_two_threads_share_a_model() -> None:
    docs, errors = [tokens(70, n) for n in range(6)], []
    tenants = [boost("llama", namespace=name) for name in ("ours", "theirs")]

    def work(made: KVBoost, seed: int) -> None:
        rng = random.Random(seed)
        for n in range(20):
            order = rng.sample(docs, len(docs))
            prompt = [*tokens(40, 77), *(t for doc in order for t in doc), *tokens(12, n)]
            try:
                made.generate(prompt, max_new_tokens=2, recompute="query")
            except (RuntimeError, LookupError) as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=(m, n)) for n, m in enumerate(tenants)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert families.model("llama").config._attn_implementation == "sdpa"
