"""Every family, policy and attention through one matrix: equal to transformers."""

from __future__ import annotations

import functools
import threading
from typing import Any

import families
import pytest
import torch
from families import (
    AUTO,
    FIXED,
    MOVABLE,
    VARYING,
    WINDOW,
    boost,
    cases,
    counted,
    generated,
    logits,
    tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache

from kvboost import (
    CacheBlendRecompute,
    DriftRecompute,
    FullRecompute,
    KVBoost,
    NoRecompute,
    QueryRecompute,
    RecomputePolicy,
    SelectiveRecompute,
    UnsupportedModelError,
)
from kvboost.kv import KVBuffer
from kvboost.model import observed_attention
from kvboost.plan import FRESH
from kvboost.recompute import Look
from kvboost.runner import ModelRunner
from kvboost.store.codec import encode, place

# A new policy joins every test here by one line.
POLICIES: dict[str, RecomputePolicy] = {
    "none": NoRecompute(),
    "full": FullRecompute(),
    "selective": SelectiveRecompute(head=8, tail=2),
    "cacheblend": CacheBlendRecompute(ratio=0.2, layer=2),
    "drift": DriftRecompute(head=4, nearest=3, farthest=20),
    "query": QueryRecompute(ratio=0.2),
    "auto": AUTO,
}

HEAD, QUESTION = tokens(20, 1), tokens(FRESH, 2)
PIECES = [tokens(60, 10 + n) for n in range(4)]
LIMIT = 1e-4

each_movable = pytest.mark.parametrize(("family", "attention"), cases(MOVABLE))
each_policy = pytest.mark.parametrize("name", POLICIES)


def prompt(*order: int) -> list[int]:
    """The head, pieces in this order, and the question."""
    return [*HEAD, *(token for n in order for token in PIECES[n]), *QUESTION]


def borders(*order: int) -> list[int]:
    return [len(HEAD) + 60 * n for n in range(len(order) + 1)]


def primed(family: str, attention: str) -> KVBoost:
    """One that has read all pieces in order."""
    made = boost(family, attention)
    made.prefill(prompt(0, 1, 2, 3), segments=borders(0, 1, 2, 3))
    return made


def assert_as_transformers(
    made: KVBoost, case: tuple[str, str], ids: list[int], **options: Any
) -> Any:
    """64 greedy tokens and the logits that predict them; returns the completion."""
    expected = generated(*case, tuple(ids))
    completion = made.generate(ids, max_new_tokens=len(expected), **options)
    assert completion.token_ids == expected
    assert completion.usage.prompt == len(ids)
    scores = made.score(ids, expected, **options).logits
    torch.testing.assert_close(scores, logits(*case, ids, list(expected)), atol=LIMIT, rtol=0)
    return completion


@each_movable
def test_kv_of_every_rotary_family_can_be_moved(family: str, attention: str) -> None:
    assert boost(family, attention).stats().reuse == "anywhere"


@each_movable
@pytest.mark.parametrize("reuse", ["auto", "off"])
def test_a_cold_prompt_is_as_transformers_computes_it(
    family: str, attention: str, reuse: str
) -> None:
    made = boost(family, attention)
    completion = assert_as_transformers(made, (family, attention), prompt(0, 1), reuse=reuse)
    assert completion.exact
    assert completion.usage.computed == len(prompt(0, 1))


@each_movable
def test_exact_hits_are_as_transformers_computes_them(family: str, attention: str) -> None:
    """The same prompt again, a part of it, a longer one: prefixes to the token."""
    made, case = primed(family, attention), (family, attention)
    whole = prompt(0, 1, 2, 3)
    again = assert_as_transformers(made, case, whole)
    assert again.usage.computed == 1
    part = assert_as_transformers(made, case, whole[:230])
    assert part.usage.computed == 1
    longer = assert_as_transformers(made, case, [*whole, *again.token_ids, *tokens(9, 3)])
    assert longer.usage.computed == 10
    assert again.exact and part.exact and longer.exact


@each_movable
def test_full_recompute_is_as_transformers_computes_it_in_any_order(
    family: str, attention: str
) -> None:
    ids, marks = prompt(2, 3, 0), borders(2, 3, 0)
    made = primed(family, attention)
    completion = assert_as_transformers(
        made, (family, attention), ids, segments=marks, recompute="full"
    )
    assert completion.usage.recomputed == 20 + 180
    assert completion.exact


@each_movable
@each_policy
def test_rows_reported_are_rows_counted(family: str, attention: str, name: str) -> None:
    made = primed(family, attention)
    for order in [(2, 0, 3), (0, 1, 3), (2, 0, 3), (1,)]:
        with counted(made.model) as rows:
            completion = made.generate(
                prompt(*order), segments=borders(*order), recompute=POLICIES[name], max_new_tokens=1
            )
        assert [p.rows for p in completion.passes] == rows
        assert all(0 < p.layers <= made.model.config.num_hidden_layers for p in completion.passes)
        assert completion.usage.prompt == len(prompt(*order))
        assert completion.policy == name
        assert completion.usage.moved + completion.usage.recomputed > 0 or completion.exact


@each_movable
@each_policy
def test_every_policy_answers_all_hits_in_any_order(family: str, attention: str, name: str) -> None:
    """What the answer starts from is computed, though all of it is known."""
    made = primed(family, attention)
    ids = [*HEAD, *PIECES[1], *PIECES[0]]
    completion = made.generate(ids, segments=[20, 80], recompute=POLICIES[name], max_new_tokens=3)
    assert completion.usage.computed == FRESH
    assert completion.usage.exact == (0 if name == "full" else len(HEAD))
    assert len(completion.token_ids) == 3


def test_passes_say_how_many_layers_ran() -> None:
    made, layers = primed("llama", "sdpa"), []
    hooks = [
        layer.mlp.register_forward_hook(lambda *_, n=n: layers.append(n))
        for n, layer in enumerate(made.model.model.layers)
    ]
    completion = made.generate(
        prompt(2, 0), segments=borders(2, 0), recompute=POLICIES["cacheblend"], max_new_tokens=1
    )
    for hook in hooks:
        hook.remove()
    assert [p.layers for p in completion.passes] == [2, 4]
    assert layers == [0, 1, 0, 1, 2, 3]


def kv_at(model: Any, ids: list[int], position: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of each layer as the model computes them for tokens that start at a position."""
    cache = DynamicCache()
    rows = torch.arange(position, position + len(ids))[None]
    with torch.inference_mode():
        model(input_ids=torch.tensor([ids]), position_ids=rows, past_key_values=cache)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


@each_movable
@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
@pytest.mark.parametrize(("old", "new"), [(0, 7), (3, 400), (300, 1)])
def test_moved_keys_are_as_the_model_computes_them_there(
    family: str, attention: str, old: int, new: int
) -> None:
    """All layers, since under a uniform shift nothing but the rotation changes."""
    runner, ids = ModelRunner(families.model(family, attention)), tokens(WINDOW - 4, 5)
    here, there = kv_at(runner.model, ids, old), kv_at(runner.model, ids, new)
    buffer = runner.new_buffer(len(ids))
    for layer, (k, v) in enumerate(here):
        buffer.layer(layer)[0].copy_(k)
        buffer.layer(layer)[1].copy_(v)
    moved = shifted(buffer, old, new, len(ids))
    for layer, (k, v) in enumerate(there):
        for mine, computed in zip(moved.layer(layer), (k, v), strict=True):
            assert (mine - computed).norm() <= LIMIT * computed.norm()


def shifted(buffer: KVBuffer, old: int, new: int, length: int) -> KVBuffer:
    """A buffer whose first tokens, computed at position `old`, are placed as if at `new`."""
    packed = encode(buffer.cut(0, length), buffer.layout, old - new, "raw")
    target = KVBuffer(buffer.layout, length)
    place(packed, 0, length, 0, target)
    return target


@functools.cache
def filled(family: str, attention: str) -> tuple[ModelRunner, KVBuffer, torch.Tensor]:
    """A correct buffer of 90 tokens and the last logits."""
    runner = ModelRunner(families.model(family, attention))
    buffer = runner.new_buffer(100)
    with torch.inference_mode():
        scores = runner.forward(buffer, tokens(90, 7), range(90))
    return runner, buffer, scores


@pytest.mark.parametrize(
    ("family", "attention"), cases(["llama", "gemma3", "cohere2", "mistral-sliding"])
)
@settings(max_examples=25, deadline=None)
@given(rows=st.sets(st.integers(0, 88), max_size=89))
def test_any_rows_over_a_correct_buffer_agree_with_a_full_prefill(
    family: str, attention: str, rows: set[int]
) -> None:
    runner, correct, scores = filled(family, attention)
    chosen = [*sorted(rows), 89]
    buffer = runner.new_buffer(100)
    for mine, theirs in zip((*buffer.k, *buffer.v), (*correct.k, *correct.v), strict=True):
        mine.copy_(theirs)
        mine[:, :, [*chosen, *range(90, 100)]] = 1e4
    with torch.inference_mode():
        again = runner.forward(buffer, tokens(90, 7), chosen)
    torch.testing.assert_close(again, scores, atol=LIMIT, rtol=0)
    for mine, theirs in zip((*buffer.k, *buffer.v), (*correct.k, *correct.v), strict=True):
        torch.testing.assert_close(mine[:, :, :90], theirs[:, :, :90], atol=LIMIT, rtol=0)


@pytest.mark.parametrize(("family", "attention"), cases(["llama", "gemma3", "cohere2"]))
@pytest.mark.parametrize("layer", [1, 3])
def test_the_probe_sees_how_far_moved_kv_is_from_fresh_kv(
    family: str, attention: str, layer: int
) -> None:
    """All rows behind an exact prefix are computed, so that what is fresh is true."""
    runner, correct, _ = filled(family, attention)
    buffer, rows = runner.new_buffer(90), list(range(30, 90))
    for mine, theirs in zip((*buffer.k, *buffer.v), (*correct.k, *correct.v), strict=True):
        mine.copy_(theirs[:, :, :90])
        mine[:, :, 30:].mul_(torch.linspace(0, 1, 60)[:, None])
    moved = [tensor[:, 30:90].clone() for tensor in buffer.layer(layer)]
    with torch.inference_mode():
        found = runner.deviation(buffer, tokens(90, 7), rows, layer)
    expected = torch.zeros(60)
    for true, old in zip(correct.layer(layer), moved, strict=True):
        fresh = true[:, 30:90]
        expected += (fresh - old).square().sum((0, 2)) / fresh.square().sum((0, 2)).mean()
    torch.testing.assert_close(found, expected, atol=LIMIT, rtol=LIMIT)
    for mine, old in zip(buffer.layer(layer), moved, strict=True):
        assert torch.equal(mine[:, 30:], old)


@each_movable
def test_the_probe_sees_the_attention_that_the_model_gives(family: str, attention: str) -> None:
    runner, ids = ModelRunner(families.model(family, attention)), tokens(60, 8)
    with torch.inference_mode():
        look = Look(range(55, 60), range(1, 4), 4)
        mass = runner.attention(runner.new_buffer(60), ids, range(60), look)
        plain = families.model(family, "eager")(torch.tensor([ids]), output_attentions=True)
    expected = sum(a[0, :, 55:].sum((0, 1)) for a in plain.attentions[1:4])
    torch.testing.assert_close(mass, expected, atol=1e-3, rtol=0)


def tiny(kind: Any, model_type: str, **options: Any) -> Any:
    config = AutoConfig.for_model(model_type, vocab_size=families.VOCABULARY, **options)
    return kind.from_config(config).eval()


def test_a_model_that_hides_its_attention_is_repaired_by_deviation() -> None:
    """Falcon computes it without transformers' registry of attention functions."""
    options = {"new_decoder_architecture": True, "num_kv_heads": 2, "num_attention_heads": 4}
    falcon = tiny(AutoModelForCausalLM, "falcon", hidden_size=64, num_hidden_layers=3, **options)
    made = KVBoost(falcon, families.tokenizer(), chunk_tokens=32)
    made.prefill(prompt(0, 1), segments=borders(0, 1))
    asked = {"segments": borders(1, 0), "recompute": "query", "max_new_tokens": 1}
    completion = made.generate(prompt(1, 0), **asked)
    assert [p.layers for p in completion.passes] == [3, 1, 3]


@pytest.mark.parametrize(("family", "attention"), cases(["mistral-sliding", "gemma3", "cohere2"]))
def test_decoding_goes_on_beyond_the_sliding_window(family: str, attention: str) -> None:
    made = boost(family, attention)
    completion = assert_as_transformers(made, (family, attention), tokens(WINDOW - 10, 9))
    assert len(completion.token_ids) > 2 * WINDOW


@pytest.mark.parametrize(("family", "attention"), cases(FIXED))
def test_models_without_rotary_positions_reuse_exact_prefixes(family: str, attention: str) -> None:
    with pytest.warns(UserWarning, match="only exact prefixes") as caught:
        made = boost(family, attention)
    assert len(caught) == 1
    assert made.stats().reuse.startswith("exact prefixes only: ")
    case = (family, attention)
    assert_as_transformers(made, case, prompt(0, 1), segments=borders(0, 1))
    again = assert_as_transformers(made, case, prompt(0, 1), segments=borders(0, 1))
    assert again.usage.computed == 1
    longer = assert_as_transformers(made, case, [*prompt(0, 1), *tokens(9, 3)])
    assert longer.usage.exact == len(prompt(0, 1))
    other = assert_as_transformers(made, case, prompt(0, 2, 1), segments=borders(0, 2, 1))
    assert other.usage.exact == len(HEAD) + 60 and other.usage.moved == 0


@pytest.mark.filterwarnings("ignore")
def test_models_without_a_kv_cache_are_refused() -> None:
    mamba = tiny(AutoModelForCausalLM, "mamba", hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(UnsupportedModelError, match="keeps no keys and values"):
        KVBoost(mamba, families.tokenizer())


def test_encoder_decoders_are_refused() -> None:
    t5 = tiny(AutoModelForSeq2SeqLM, "t5", d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        KVBoost(t5, families.tokenizer())


def fresh(family: str, attention: str) -> tuple[KVBoost, tuple[str, str]]:
    """Dynamic NTK remembers the longest prompt that a model has run: start from none."""
    families.model.cache_clear()
    families.generated.cache_clear()
    return boost(family, attention), (family, attention)


def uncached(family: str, attention: str, ids: tuple[int, ...]) -> tuple[int, ...]:
    """64 greedy tokens, each from a forward pass over everything before it."""
    answer: list[int] = []
    for _ in range(64):
        scores = logits(family, attention, list(ids), [*answer, 0])
        answer.append(int(scores[-1].argmax()))
    return tuple(answer)


@pytest.mark.parametrize(("family", "attention"), cases(VARYING))
@pytest.mark.parametrize("length", [60, 110, 127, 128, 129, 200])
def test_rotation_that_varies_with_length_is_as_in_transformers(
    family: str, attention: str, length: int
) -> None:
    """Below, above and across the length of 128 from which frequencies are others."""
    made, case = fresh(family, attention)
    ids = tokens(length, 3)
    # generate() of transformers 4.56 goes wrong where LongRoPE changes under eager attention.
    reference = uncached if family == "phi3-longrope" else generated
    expected = reference(*case, tuple(ids))
    for _ in range(2):
        made.model(torch.tensor([tokens(5, 0)]))  # resets dynamic NTK
        assert made.generate(ids, max_new_tokens=64).token_ids == expected


@pytest.mark.parametrize(("family", "attention"), cases(VARYING))
@pytest.mark.parametrize("length", [60, 120, 200])
def test_scores_are_those_of_one_pass_where_rotation_varies(
    family: str, attention: str, length: int
) -> None:
    made, case = fresh(family, attention)
    ids, answer = tokens(length, 3), tokens(30, 4)
    scores = made.score(ids, answer).logits
    torch.testing.assert_close(scores, logits(*case, ids, answer), atol=LIMIT, rtol=0)


@pytest.mark.parametrize(("family", "attention"), cases(VARYING))
def test_nothing_is_shared_between_rotary_regimes(family: str, attention: str) -> None:
    made, case = fresh(family, attention)
    short, long = prompt(0)[:60], prompt(0, 1, 2)
    assert_as_transformers(made, case, short)
    assert assert_as_transformers(made, case, short).usage.computed == 1
    assert made.generate(long, max_new_tokens=2).usage.computed == len(long)
    again = made.generate([*long, *QUESTION], max_new_tokens=2)
    assert again.usage.exact == (len(long) if family == "phi3-longrope" else 0)
    moved = made.generate([*tokens(30, 4), *PIECES[1], *QUESTION], segments=[30, 90])
    assert moved.usage.computed == moved.usage.prompt
    assert assert_as_transformers(made, case, short).usage.computed == 1


def test_an_answer_that_crosses_into_the_long_regime_is_stored_there() -> None:
    """LongRoPE: everything was computed again when it crossed."""
    made, case = fresh("phi3-longrope", "sdpa")
    ids = tokens(110, 3)
    answer = made.generate(ids, max_new_tokens=64).token_ids
    short = assert_as_transformers(made, case, [*ids, *answer[:5]])
    assert short.usage.exact == 0
    longer = assert_as_transformers(made, case, [*ids, *answer, *QUESTION])
    assert longer.usage.exact >= 110 + 63


def test_a_prompt_as_long_as_the_static_range_may_follow_a_longer_one() -> None:
    """Dynamic NTK keeps the longer one's frequencies there: nothing is shared."""
    made, case = fresh("llama-ntk", "sdpa")
    made.generate(tokens(200, 3), max_new_tokens=2)
    for _ in range(2):
        assert made.generate(tokens(128, 3), max_new_tokens=2).usage.computed == 128
    assert_as_transformers(made, case, tokens(60, 3))


@pytest.mark.parametrize(("family", "attention"), cases(MOVABLE))
def test_a_thread_that_runs_the_model_itself_gets_its_own_attention(
    family: str, attention: str
) -> None:
    """And its own masks: of two prompts in a batch, the shorter one is padded."""
    model, threads, seen = families.model(family, attention), [], []
    rows = [tokens(40, 1), [0] * 25 + tokens(15, 2)]
    padding = torch.tensor([[1] * 40, [0] * 25 + [1] * 15])

    @torch.inference_mode()
    def run() -> None:
        seen.append(model(torch.tensor(rows), attention_mask=padding).logits[:, 25:])

    def meanwhile(*_: object) -> None:
        threads.append(threading.Thread(target=run))
        threads[-1].start()
        threads[-1].join()

    run()
    with observed_attention(model, meanwhile):
        logits(family, attention, tokens(30, 3), tokens(2, 4))
    assert len(seen) == 1 + model.config.num_hidden_layers == 1 + len(threads)
    for got in seen[1:]:
        torch.testing.assert_close(got, seen[0], atol=0, rtol=0)
