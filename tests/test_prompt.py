"""Same text in, same ids as transformers; borders where the caller's pieces are; clear refusals."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from families import AUTO, VOCABULARY, boost, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvboost import ConfigError, Document, PromptError
from kvboost.prompt import Prompt, PromptBuilder

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
DOCUMENTS = [
    "The sky is blue.\nGrass is green.",
    {"title": "Snow", "text": "Snow is white, 雪は白い。"},
]
BLOCKS = [
    "Document:\nThe sky is blue.\nGrass is green.\n\n",
    "Document: Snow\nSnow is white, 雪は白い。\n\n",
]
PLAIN = "".join(BLOCKS)


@pytest.fixture
def real(default_model: Any) -> Any:
    return default_model[1]


def with_bos(template: str | None = None) -> Any:
    """A word tokenizer that puts <s> (id 1) before raw text."""
    words = {"<unk>": 0, "<s>": 1, **{f"w{n}": n for n in range(2, 60)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", unk_token="<unk>")
    fast.chat_template = template
    return fast


def pieces(prompt: Prompt) -> list[list[int]]:
    """The ids between borders."""
    ends = [0, *prompt.borders, len(prompt.ids)]
    return [list(prompt.ids[a:b]) for a, b in pairwise(ends)]


@pytest.mark.parametrize(
    "text", ["Hello there.", "你好, 👩‍👩‍👧‍👦!", "<|im_start|>user\nHi<|im_end|>", " "]
)
def test_text_has_the_ids_that_transformers_gives_it(real: Any, text: str) -> None:
    assert PromptBuilder(real).build(text) == Prompt(tuple(real(text).input_ids))


def test_messages_have_the_ids_of_the_chat_template(real: Any) -> None:
    text = real.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert PromptBuilder(real).build(CHAT).ids == tuple(real(text).input_ids)


def test_bos_is_there_once() -> None:
    """Raw text gets the tokenizer's; a chat template writes its own."""
    template = "<s> {{ messages[0]['content'] }}"
    builder = PromptBuilder(with_bos(template))
    assert builder.build("w5 w6").ids == (1, 5, 6)
    assert builder.build([{"role": "user", "content": "w5 w6"}]).ids == (1, 5, 6)


def test_documents_go_before_the_text_and_get_borders(real: Any) -> None:
    built = PromptBuilder(real).build("What is white?", documents=DOCUMENTS)
    assert built.ids == tuple(real(PLAIN + "What is white?").input_ids)
    assert [real.decode(p) for p in pieces(built)] == [*BLOCKS, "What is white?"]


def test_documents_go_before_the_last_user_message(real: Any) -> None:
    chat = [
        *CHAT,
        {"role": "assistant", "content": "A model."},
        {"role": "user", "content": "And?"},
    ]
    built = PromptBuilder(real).build(chat, documents=DOCUMENTS)
    expected = [*chat[:-1], {"role": "user", "content": PLAIN + "And?"}]
    assert built.ids == PromptBuilder(real).build(expected).ids
    found = [real.decode(p) for p in pieces(built)]
    assert found[1:3] == BLOCKS and found[3].startswith("And?")
    assert chat[-1] == {"role": "user", "content": "And?"}


def test_documents_go_to_a_template_that_takes_them() -> None:
    template = (
        "<s> {% for d in documents %}w50 {{ d['title'] }} w51 {{ d['text'] }} {% endfor %}"
        "{{ messages[0]['content'] }}"
    )
    documents = [{"title": "w9", "text": "w5 w6"}, "w7 w8"]
    built = PromptBuilder(with_bos(template)).build(
        [{"role": "user", "content": "w20"}], documents=documents
    )
    assert built.ids == (1, 50, 9, 51, 5, 6, 50, 51, 7, 8, 20)
    assert pieces(built) == [[1, 50, 9, 51], [5, 6], [50, 51], [7, 8], [20]]


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "Die Zeit, schön"}}


def test_tools_are_rendered_by_the_template_and_moved_as_pieces(real: Any) -> None:
    taught = deepcopy(real)
    taught.chat_template = (
        "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{{ messages[0]['content'] }}"
    )
    builder, chat = PromptBuilder(taught), [{"role": "user", "content": "What time is it?"}]
    one, other = (builder.build(chat, tools=t) for t in ([WEATHER, CLOCK], [CLOCK, WEATHER]))
    assert len(one.borders) == 3 or len(one.borders) == 4
    cuts = [[p.ids[a:b] for a, b in pairwise([0, *p.borders, len(p.ids)])] for p in (one, other)]
    assert {taught.decode(c) for c in cuts[0]} == {taught.decode(c) for c in cuts[1]}


def test_tools_without_a_place_for_them_are_refused(real: Any) -> None:
    chat = [{"role": "user", "content": "What time is it?"}]
    with pytest.raises(PromptError, match="knows no tools"):
        PromptBuilder(real).build(chat, tools=[CLOCK])
    with pytest.raises(PromptError, match="messages"):
        PromptBuilder(real).build("What time is it?", tools=[CLOCK])


@pytest.mark.parametrize(
    "documents",
    ["w5 w6", ["w5 w6"], {"text": "w5 w6"}, Document("w5 w6"), [Document("w5 w6")], ("w5 w6",)],
)
def test_one_document_may_come_alone(documents: Any) -> None:
    built = PromptBuilder(tokenizer()).build("w9", documents=documents)
    assert built.ids == PromptBuilder(tokenizer()).build("Document:\nw5 w6\n\nw9").ids


def test_segments_mark_pieces_of_raw_text() -> None:
    built = PromptBuilder(tokenizer()).build("w1 w2 w3 w4 w3 w5", segments=["w2 w3", "w3 w5"])
    assert built == Prompt((1, 2, 3, 4, 3, 5), (1, 3, 4))
    assert PromptBuilder(tokenizer()).build("w1 w2 w3", segments="w2 w3").borders == (1,)


def test_segments_are_positions_of_token_ids() -> None:
    assert PromptBuilder(tokenizer()).build([5, 6, 7, 8], segments=[4, 2, 0, 3, 2]).borders == (
        2,
        3,
    )


@settings(max_examples=50, deadline=None)
@given(
    texts=st.lists(
        st.text("ab \n.é雪👍", min_size=1, max_size=12).filter(str.strip), min_size=1, max_size=4
    )
)
def test_a_border_is_the_first_token_that_begins_in_the_piece(
    default_model: Any, texts: list[str]
) -> None:
    real = default_model[1]
    text = "".join(texts)
    built = PromptBuilder(real).build(text, segments=texts)
    assert built.ids == tuple(real(text).input_ids)
    starts = [a for a, _ in real(text, return_offsets_mapping=True)["offset_mapping"]]
    for place in {len("".join(texts[:n])) for n in range(len(texts))}:
        first = sum(start < place for start in starts)
        assert first in {0, len(starts), *built.borders}


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 6, 7],
        (5, 6, 7),
        torch.tensor([5, 6, 7]),
        torch.tensor([[5, 6, 7]]),
        np.array([5, 6, 7]),
        [[5, 6, 7]],
    ],
)
def test_token_ids_may_come_in_any_list(prompt: Any) -> None:
    assert PromptBuilder(tokenizer()).build(prompt).ids == (5, 6, 7)


def test_a_document_is_warmed_behind_the_top_of_a_prompt(real: Any) -> None:
    built = PromptBuilder(real).warm(DOCUMENTS[1])
    sink, document = pieces(built)
    assert real.decode(document) == BLOCKS[1]
    asked = PromptBuilder(real).build(CHAT, documents=DOCUMENTS)
    assert document in pieces(asked)
    top = real.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert top.startswith(real.decode(sink)) and len(sink) > 4
    assert PromptBuilder(with_bos()).warm("w5 w6") == Prompt((1, 0, 5, 6), (1,))
    titled = {"text": "w5 w6", "title": "w7"}
    assert PromptBuilder(tokenizer()).warm(titled) == Prompt((0, 0, 7, 5, 6), (1,))


def test_a_document_is_warmed_as_the_template_shows_it() -> None:
    template = (
        "<s> {% for d in documents or [] %}w50 {{ d['text'] }} {% endfor %}"
        "{{ messages[0]['content'] }}"
    )
    built = PromptBuilder(with_bos(template)).warm({"text": "w5 w6", "title": "w7"})
    assert built == Prompt((1, 5, 6), (1,))


REFUSED = [
    ("", {}, "the prompt is empty"),
    ([], {}, "the prompt is empty"),
    (torch.tensor([]).long(), {}, "the prompt is empty"),
    (None, {}, "a prompt is a text, a list of messages or a list of token ids, not None"),
    (b"bytes", {}, "a prompt is a text"),
    (7, {}, "a prompt is a text"),
    ([1.5], {}, "a prompt is a text"),
    ([True], {}, "a prompt is a text"),
    ([-1], {}, "a prompt is a text"),
    (["a", "b"], {}, "a prompt is a text"),
    ([[1, 2], [3, 4]], {}, "a prompt is a text"),
    ([{"role": "user", "content": "w1"}, "w2"], {}, "a prompt is a text"),
    ({"role": "user", "content": "w1"}, {}, "a prompt is a text"),
    ([{"role": "user", "content": "w1"}], {}, "no chat template.*pass the prompt as text"),
    ("w1", {"documents": [7]}, "a document is a text or"),
    ("w1", {"documents": 7}, "documents are a list"),
    ("w1", {"documents": [{"text": "w2", "name": "x"}]}, "unknown document field.*use title"),
    ("w1", {"documents": [{"title": "w2"}]}, "a document is a text or"),
    ([1, 2], {"documents": ["w2"]}, "documents need a text or messages prompt"),
    ("w1 w2", {"segments": ["w3"]}, "not in the prompt after the ones before: 'w3'"),
    ("w1 w2", {"segments": ["w2", "w1"]}, "not in the prompt after the ones before: 'w1'"),
    ("w1 w2", {"segments": [1]}, "segments of a text prompt are texts, not 1"),
    ("w1 w2", {"segments": 1}, "segments are a list"),
    ([1, 2], {"segments": ["w1"]}, "segments of a token id prompt are positions"),
    ([1, 2], {"segments": [3]}, "segments of a token id prompt are positions"),
    ([1, VOCABULARY], {}, "token id 512 is not in the model's 512 tokens"),
    ([1, 2**40], {}, "token id 1099511627776 is not in the model's 512 tokens"),
]


@pytest.mark.parametrize(("prompt", "options", "message"), REFUSED)
@pytest.mark.parametrize("method", ["generate", "prefill", "explain"])
def test_bad_prompts_are_refused_with_what_to_do(
    prompt: Any, options: dict[str, Any], message: str, method: str
) -> None:
    made = boost("llama")
    with pytest.raises(PromptError, match=f"(?s){message}"):
        getattr(made, method)(prompt, **options)
    assert made.stats().store.entries == 0
    assert made.generate("w1 w2", max_new_tokens=2).usage.prompt == 2


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"content": "x"},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
    ],
)
def test_messages_that_the_template_refuses_are_refused(real: Any, message: Any) -> None:
    with pytest.raises(PromptError, match="chat template"):
        PromptBuilder(real).build([message])


def test_documents_need_a_user_message(real: Any) -> None:
    with pytest.raises(PromptError, match="before the last user message"):
        PromptBuilder(real).build(CHAT[:1], documents=["x"])


def test_empty_documents_are_not_warmed() -> None:
    with pytest.raises(PromptError, match="a document to warm is empty"):
        boost("llama").warm(["w1 w2", ""])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_token": 5}, "unknown option max_token: known are .*max_new_tokens"),
        ({"reuse": "sometimes"}, "reuse must be one of auto, exact, off, not 'sometimes'"),
        ({"recompute": "some"}, "choose one of auto"),
        ({"recompute": 7}, "choose one of auto"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"max_divergence": -0.1}, "max_divergence must be a number between 0"),
        ({"max_divergence": float("nan")}, "max_divergence must be a number"),
        ({"max_divergence": "low"}, "max_divergence must be a number"),
        ({"max_divergence": None}, "max_divergence must be a number"),
        ({"max_divergence": 0.1, "recompute": "none"}, 'it needs recompute="auto"'),
        ({"max_divergence": 0.1, "recompute": AUTO}, 'it needs recompute="auto"'),
    ],
)
def test_bad_options_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    made = boost("llama")
    for method in (made.generate, made.stream):
        with pytest.raises(ConfigError, match=message):
            method("w1 w2", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunks": 5}, "unknown option chunks: known are namespace, max_bytes, chunk_tokens"),
        ({"chunk_tokens": 8}, "chunk_tokens must be a whole number of at least 16"),
        ({"max_bytes": -1}, "max_bytes must be a whole number of at least 0"),
        ({"max_bytes": 1e9}, "max_bytes must be a whole number"),
        ({"namespace": ""}, "namespace must be a text"),
        ({"namespace": None}, "namespace must be a text"),
    ],
)
def test_bad_configuration_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        boost("llama", **options)
