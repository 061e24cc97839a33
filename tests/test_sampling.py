"""Tokens are picked as transformers picks them; text is shown whole or not yet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import boost, model, tokens
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvboost.errors import ConfigError
from kvboost.model import logits_processors
from kvboost.sampling import Answer, Sampling, TextStream

UNICODE = st.text(max_size=30) | st.lists(
    st.sampled_from(
        ["👩‍👩‍👧‍👦", "🇫🇷", "é", "e\u0301", "你好", "ạ̈", "\u200d", "\ufffd", "a", "\n", "नमस्ते"]
    )
).map("".join)


def letters(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def shown(stream: TextStream, ids: list[int]) -> list[str]:
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()]


@settings(max_examples=200, deadline=None)
@given(text=UNICODE)
@example(text="👩‍👩‍👧‍👦 et 你好")
def test_text_comes_whole_and_in_whole_characters(default_model: Any, text: str) -> None:
    tokenizer = default_model[1]
    stream, ids = TextStream(tokenizer.decode, ()), tokenizer(text).input_ids
    pieces = shown(stream, ids)
    whole = tokenizer.decode(ids)  # the text, but for rare characters that the tokenizer lacks
    assert "".join(pieces) == stream.text == whole
    assert "\ufffd" in whole or not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 300) | st.integers(0, 49151), max_size=25))
def test_any_tokens_come_as_they_decode_at_once(default_model: Any, ids: list[int]) -> None:
    decode = default_model[1].decode
    assert "".join(shown(TextStream(decode, ()), ids)) == decode(ids)


@given(
    text=st.text("ab<>", max_size=30),
    stops=st.lists(st.text("ab<>", min_size=1, max_size=4), min_size=1, max_size=3),
)
@example(text="abab<", stops=["ab<b"])
def test_nothing_of_a_stop_string_is_ever_shown(text: str, stops: list[str]) -> None:
    stream = TextStream(letters, stops)
    pieces = shown(stream, [ord(c) for c in text])
    # Stops are looked for as letters come: the one that is complete first ends the text.
    ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stops)]
    whole = text[: ends[0]] if ends else text
    expected = min((whole[: whole.find(s)] for s in stops if s in whole), key=len, default=text)
    assert "".join(pieces) == stream.text == expected
    assert stream.stopped == bool(ends)


def test_text_that_only_began_like_a_stop_string_is_shown_late_but_shown() -> None:
    stream = TextStream(letters, ["END."])
    assert [stream.push(ord(c)) for c in "xENDx EN"] == ["x", "", "", "", "ENDx", " ", "", ""]
    assert stream.finish() == "EN"


def test_a_stop_string_may_begin_within_a_token_and_end_within_another() -> None:
    words = {0: "Hello <", 1: "/an", 2: "swer> more"}
    stream = TextStream(lambda ids: "".join(words[i] for i in ids), ["</answer>"])
    assert shown(stream, [0, 1, 2]) == ["Hello ", "", "", ""]
    assert stream.stopped


def answer(eos: set[int] = frozenset(), **options: Any) -> Answer:  # type: ignore[assignment]
    sampling = Sampling(**options)
    processors = logits_processors(
        sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty
    )
    return Answer(sampling, processors, letters, frozenset(eos), torch.device("cpu"))


def test_greedy_takes_the_largest_and_eos_ends_without_text() -> None:
    one, ids = answer(eos={66}), [7]
    assert one.take(torch.tensor([[0.0] * 65 + [2.0, 1.0]]), ids) == "A"
    assert not one.finished
    assert one.take(torch.tensor([[0.0] * 65 + [1.0, 2.0]]), ids) == ""
    assert one.finished and one.finish_reason == "stop"
    assert (one.ids, one.text) == ([65, 66], "A")


def test_penalties_and_bias_are_those_of_openais_api() -> None:
    """Less frequency for each time in the answer, and presence for having been there."""
    options = {"presence_penalty": 0.5, "frequency_penalty": 0.75, "logit_bias": {3: 1.0}}
    one = answer(**options)
    scores = torch.tensor([[0.0, 0.0, 1.0, 0.5]])
    seen: list[int] = []
    for _ in range(6):
        expected = scores[0].clone() + torch.tensor([0.0, 0.0, 0.0, 1.0])
        for token in set(seen):
            expected[token] -= 0.5 + 0.75 * seen.count(token)
        seen.append(int(expected.argmax()))
        one.take(scores, [2, 2, 2, 3])  # the prompt's tokens are not counted
    assert one.ids == seen and len(set(seen)) == 4
    assert scores.tolist() == [[0.0, 0.0, 1.0, 0.5]]


def test_processors_see_the_tokens_so_far_and_have_their_way() -> None:
    told: list[list[int]] = []

    def only(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        told.append(ids[0].tolist())
        return scores.masked_fill(torch.arange(4) != len(told), float("-inf"))

    one = answer(processors=[only], temperature=1.0)
    for _ in range(2):
        one.take(torch.zeros(1, 4), [3])
    assert one.ids == [1, 2] and told == [[3], [3, 1]]


@pytest.mark.parametrize(
    "bad",
    [{"presence_penalty": 2.1}, {"frequency_penalty": "x"}, {"logit_bias": {-1: 1.0}}],
)
def test_penalties_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Sampling(**bad)


def test_a_stop_string_ends_the_answer() -> None:
    one, ids = answer(stop="AA"), []
    for _ in range(2):
        assert one.take(torch.tensor([[0.0] * 65 + [2.0]]), ids) == ""
    assert one.finished and one.text == one.end() == ""


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 20},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.2},
        {"repetition_penalty": 1.3},
    ],
)
def test_sampling_is_transformers_own(options: dict[str, float]) -> None:
    """The same draws from the global generator give the tokens that generate() gives."""
    ids, greedy = tokens(60, 1), "temperature" not in options
    theirs = {"temperature": None, "top_p": None, "top_k": None} if greedy else {"top_k": 0}
    prompt, ours = torch.tensor([ids]), boost("llama")
    torch.manual_seed(5)
    out = model("llama").generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=not greedy,
        max_new_tokens=20,
        **theirs | options,
    )
    torch.manual_seed(5)
    made = ours.generate(ids, max_new_tokens=20, reuse="off", **options)
    assert made.token_ids == tuple(out[0, 60:].tolist())


def test_a_seed_repeats_and_leaves_the_global_generator_alone() -> None:
    made, options = boost("llama"), {"temperature": 2.0, "max_new_tokens": 20}
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    first = made.generate(tokens(50, 1), seed=3, **options)
    assert torch.equal(torch.rand(1), expected)
    assert made.generate(tokens(50, 1), seed=3, **options).token_ids == first.token_ids
    assert made.generate(tokens(50, 1), seed=4, **options).token_ids != first.token_ids


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", True),
        ("max_new_tokens", "many"),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", None),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("top_k", 2.0),
        ("repetition_penalty", 0),
        ("seed", -1),
        ("seed", 1.0),
        ("seed", 2**64),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 7),
        ("stop", None),
    ],
)
def test_bad_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be"):
        Sampling(**{name: value})  # type: ignore[arg-type]
