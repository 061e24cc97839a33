"""Tool calls in all dialects, and answers that keep to grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from server_fakes import FakeScheduler, Words, app_of, listening, said, script

from kvboost.errors import ConfigError
from kvboost.server import tools
from kvboost.server.errors import ApiError
from kvboost.server.grammar import Grammars
from kvboost.server.schema import Schema, SchemaFormat, Tool

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
ASK: Any = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "1 + 1?"}],
    "tools": [WEATHER],
}


def told(parser: tools.Parser, text: str, size: int) -> tuple[str, list[tuple[str, str]]]:
    shown, calls = "", []
    for at in range(0, len(text), size):
        more, found = parser.push(text[at : at + size])
        shown, calls = shown + more, calls + found
    more, found = parser.end()
    return shown + more, [(c.name, c.arguments) for c in calls + found]


ONE = [("add", '{"a": 1}')]
CASES: list[tuple[tools.Dialect, str, str, list[tuple[str, str]]]] = [
    (tools.HERMES, "Just <b>text</b> <tool", "Just <b>text</b> <tool", []),
    (tools.HERMES, f"Let me see. {HERMES}\n{HERMES}", "Let me see.", ONE * 2),
    (tools.HERMES, HERMES.removesuffix("</tool_call>"), "", ONE),
    (tools.HERMES, HERMES.replace("add", "sub"), HERMES.replace("add", "sub"), []),
    (tools.HERMES, "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
    (tools.HERMES, "no: <tool_call>x", "no: <tool_call>x", []),
    (tools.HERMES, "ends  ", "ends  ", []),
    (tools.LLAMA, '{"name": "add", "parameters": {"a": 1}}', "", ONE),
    (tools.LLAMA, "<|python_tag|>" + '{"name":"add","parameters":{"a":1}}; ' * 2, "", ONE * 2),
    (tools.LLAMA, '{"name": "sub", "parameters": {}}', '{"name": "sub", "parameters": {}}', []),
    (tools.LLAMA, 'The JSON {"name": "add"}', 'The JSON {"name": "add"}', []),
    (tools.MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', "", ONE),
    (tools.MISTRAL, '[{"name": "add", "arguments": {"a": 1}}]', "", ONE),
    (tools.MISTRAL, 'add[ARGS]{"a": 1}', "", ONE),
    (tools.MISTRAL, '[TOOL_CALLS]add{"a": 1}', "", ONE),
    (tools.MISTRAL, "add them: 2", "add them: 2", []),
    (tools.MISTRAL, "[1] says so", "[1] says so", []),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("dialect", "text", "shown", "calls"), CASES)
def test_calls_are_found_in_pieces_of_any_size(
    dialect: tools.Dialect, text: str, shown: str, calls: Any, size: int
) -> None:
    assert told(dialect.parser(["add"]), text, size) == (shown, calls)


def test_the_dialect_is_the_templates() -> None:
    assert tools.dialect_of("no functions") is tools.TAUGHT
    assert tools.dialect_of("{% if tools %}<tool_call>") is tools.HERMES
    assert tools.dialect_of("{% if tools %}<tool_call><function=x>") is tools.TAUGHT
    assert tools.dialect_of("{% if tools %}[TOOL_CALLS]") is tools.MISTRAL
    assert tools.dialect_of("{% if tools is not none %}ipython") is tools.LLAMA


@pytest.fixture(scope="module")
def scheduler() -> FakeScheduler:
    return FakeScheduler()


@pytest.fixture(scope="module")
def client(scheduler: FakeScheduler) -> Iterator[openai.OpenAI]:
    with (
        listening(app_of(scheduler)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def test_a_template_without_tools_is_told_in_the_system_message(
    client: Any, scheduler: FakeScheduler
) -> None:
    scheduler.plays = lambda _: script(*said("I add. ", HERMES[:20], HERMES[20:]))
    answer = client.chat.completions.create(**ASK).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content == "I add."
    call = answer.message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    work = scheduler.works[-1]
    assert work.prompt[0]["role"] == "system" and '"description": "Adds."' in str(work.prompt[0])
    assert "tools" not in work.options
    later = [
        *ASK["messages"],
        answer.message,
        {"role": "tool", "tool_call_id": call.id, "content": "2"},
    ]
    client.chat.completions.create(**{**ASK, "messages": later})
    *_, asked, answered = scheduler.works[-1].prompt
    assert asked["content"].startswith("I add.\n<tool_call>") and answered["role"] == "user"


def test_calls_in_a_stream(client: Any, scheduler: FakeScheduler) -> None:
    scheduler.plays = lambda _: script(*said("I add. ", HERMES[:20], HERMES[20:] + HERMES))
    chunks = list(client.chat.completions.create(**ASK, stream=True))
    calls = [c for k in chunks for c in k.choices[0].delta.tool_calls or []]
    assert [c.index for c in calls] == [0, 1] and calls[0].function.arguments == '{"a": 1}'
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "I add."
    single = client.chat.completions.create(**ASK, parallel_tool_calls=False)
    assert len(single.choices[0].message.tool_calls) == 1


def test_a_template_that_knows_tools_gets_them() -> None:
    scheduler = FakeScheduler(tokenizer=Words("{% if tools %}<tool_call>{% endif %}"))
    with listening(app_of(scheduler)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        client.chat.completions.create(**ASK)
        past = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
        asked = {"role": "assistant", "tool_calls": [past]}
        result = {"role": "tool", "tool_call_id": "a", "content": "2"}
        client.chat.completions.create(**{**ASK, "messages": [*ASK["messages"], asked, result]})
        client.chat.completions.create(**ASK, tool_choice="none")
    first, second, third = scheduler.works
    assert first.options["tools"] == [WEATHER] and first.prompt == ASK["messages"]
    assert second.prompt[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert second.prompt[2] == {**result} and "tools" not in third.options


@pytest.fixture(scope="module")
def grammars(default_model: Any) -> Grammars:
    model, tokenizer = default_model
    return Grammars(SimpleNamespace(model=model, tokenizer=tokenizer))  # type: ignore[arg-type]


def schema(given: Any, strict: bool = True) -> SchemaFormat:
    inner = Schema(name="x", schema=given, strict=strict)
    return SchemaFormat(type="json_schema", json_schema=inner)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Of text inside an answer: what is added at the beginning of a text is left out."""
    before = tokenizer("\n").input_ids
    return tokenizer("\n" + text).input_ids[len(before) :]


def follows(processor: Any, tokenizer: Any, text: str) -> bool:
    """Whether a grammar lets this text through, token by token, and may end there."""
    prompt, ids = [5, 6], ids_of(tokenizer, text)
    for n, token in enumerate(ids):
        scores = processor(torch.tensor([[*prompt, *ids[:n]]]), torch.zeros(1, 49152))
        if scores[0, token] != 0:
            return False
    scores = processor(torch.tensor([[*prompt, *ids]]), torch.zeros(1, 49152))
    return bool(scores[0, tokenizer.eos_token_id] == 0)


def test_grammars_allow_what_they_say(grammars: Grammars, default_model: Any) -> None:
    tokenizer = default_model[1]

    def allows(grammar: str, text: str) -> bool:
        return follows(grammars.processor(grammar, 1), tokenizer, text)

    number = grammars.answer(schema(WEATHER["function"]["parameters"]))
    assert allows(number, '{"a": 12}') and not allows(number, '{"a": "x"}')
    assert not allows(number, '{"a": 1') and not allows(number, "a")
    tool = Tool.model_validate(WEATHER)
    one, many = grammars.calls([tool], once=True), grammars.calls([tool], once=False)
    call = '{"name": "add", "arguments": {"a": 1}}'
    assert allows(one, f"[{call}]") and not allows(one, f"[{call}, {call}]")
    assert allows(many, f"[{call}, {call}]") and not allows(many, "[]")
    free = grammars.tagged([tool])
    assert allows(free, "Nothing to add.") and allows(free, f"I add. {HERMES} Done.")
    assert not allows(free, HERMES.replace("1", '"x"'))


def test_answers_that_take_turns_keep_to_the_grammar(
    grammars: Grammars, default_model: Any
) -> None:
    tokenizer = default_model[1]
    wanted = schema({"type": "array", "items": {"type": "integer"}})
    processor = grammars.processor(grammars.answer(wanted), 2)
    texts = ["[1, 2, 33]", "[1, 9]", "[1, 2, 4]"]  # one more than it was told
    ids = [ids_of(tokenizer, text) for text in texts]
    for n in range(max(map(len, ids))):
        for sequence in ids:
            if n < len(sequence):
                context = torch.tensor([[7, 8, *sequence[:n]]])
                scores = processor(context, torch.zeros(1, 49152))
                assert scores[0, sequence[n]] == 0


def test_what_a_grammar_cant_keep_is_refused(grammars: Grammars) -> None:
    unique = {"type": "array", "uniqueItems": True}
    with pytest.raises(ApiError) as refused:
        grammars.answer(schema(unique))
    assert refused.value.body.param == "response_format.json_schema.schema"
    assert "uniqueItems" in refused.value.body.message
    grammars.answer(schema(unique, strict=False))
    lenient = {**unique, "x-guidance": {"lenient": True}}
    with pytest.raises(ApiError):
        grammars.answer(schema(lenient))
    bad = Tool.model_validate(
        {"type": "function", "function": {"name": "f", "parameters": {"type": "foo"}}}
    )
    with pytest.raises(ApiError) as refused:
        grammars.calls([bad], once=True)
    assert refused.value.body.param == "tools[0].function.parameters"


def test_a_slow_tokenizer_has_no_grammars(default_model: Any) -> None:
    boost: Any = SimpleNamespace(model=default_model[0], tokenizer=Words())
    with pytest.raises(ConfigError, match="tokenizer"):
        Grammars(boost).answer(schema({"type": "object"}))


def test_forced_calls_and_json_reach_the_scheduler(default_model: Any) -> None:
    scheduler = FakeScheduler(tokenizer=default_model[1])
    scheduler.boost.model = default_model[0]
    forced = '[{"name": "add", "arguments": {"a": 1}}]'
    scheduler.plays = lambda _: script(*said(forced[:9], forced[9:]))
    named = {"type": "function", "function": {"name": "add"}}
    with listening(app_of(scheduler)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        for choice in ("required", named):
            answer = client.chat.completions.create(**ASK, tool_choice=choice).choices[0]
            assert answer.finish_reason == "tool_calls" and answer.message.content is None
            assert answer.message.tool_calls[0].function.arguments == '{"a": 1}'
        plain = {**ASK, "tools": openai.omit, "response_format": {"type": "json_object"}}
        client.chat.completions.create(**plain)
    assert all(len(work.options["processors"]) == 1 for work in scheduler.works)
