"""The official client against `kvboost serve` with the embedded model, as users run it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from servers import free_port

HELLO: Any = [{"role": "user", "content": "Say hello."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 10}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time", "description": "The time."}}
SHORT: Any = {"model": "default", "temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    options = ["--port", str(port), "--dtype", "float32", "--answer-tokens", "2000"]
    command = [sys.executable, "-c", "from kvboost.cli import main; main()", "serve", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and "serves" in process.stdout.readline()
            yield f"http://127.0.0.1:{port}"
            process.terminate()
            assert process.wait(40) == 0
        finally:
            process.kill()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, messages: Any = HELLO, **options: Any) -> Any:
    return client.chat.completions.create(messages=messages, **{**SHORT, **options})


def documents(*numbers: int) -> list[dict[str, str]]:
    topics = ["tides", "bridges", "maps", "bees"]
    return [
        {"title": topics[n], "text": f"The book of {topics[n]}, chapter {n}. " * 12}
        for n in numbers
    ]


def details(answer: Any) -> dict[str, int]:
    found: dict[str, int] = answer.usage.prompt_tokens_details.to_dict()
    assert sum(found.values()) == answer.usage.prompt_tokens
    return found


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "default" and client.models.retrieve("default").id == model.id


def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(messages=HELLO, **SHORT)
    answer = raw.parse()
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length" and choice.logprobs is None
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6
    assert raw.headers["x-request-id"].startswith("req_")
    parts = ["queued", "tokenize", "lookup", "assemble", "probe", "forward"]
    times = [float(raw.headers[f"x-kvboost-{part}-ms"]) for part in parts]
    assert 0 < sum(times) <= float(raw.headers["x-kvboost-ttft-ms"]) * 1.01
    assert raw.headers["x-kvboost-exact"] == "true" and raw.headers["x-kvboost-policy"]
    assert answer._request_id == raw.headers["x-request-id"]


def test_a_stream_is_the_same_answer(client: openai.OpenAI) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == ask(client).choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + [
        "length"
    ]
    assert chunks[-1].usage.completion_tokens == 6 and len(chunks) >= 8
    assert all(c.usage is None for c in chunks[:-1])


def test_the_client_s_own_helpers_put_a_stream_together(client: openai.OpenAI) -> None:
    said = ask(client).choices[0].message.content
    with client.chat.completions.stream(messages=HELLO, stop=said[-4:], **SHORT) as stream:
        whole = stream.get_final_completion()
    assert whole.choices[0].message.content == said[: said.find(said[-4:])]


@pytest.mark.parametrize(
    ("choice", "offered"),
    [("required", ["get_weather", "get_time"]), ("named", ["get_weather"])],
)
def test_a_tool_is_called_as_demanded(client: Any, choice: str, offered: list[str]) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = ask(
        client,
        [{"role": "user", "content": "How is the weather in Paris?"}],
        tools=[WEATHER, TIME],
        tool_choice=named if choice == "named" else choice,
        parallel_tool_calls=False,
        max_tokens=60,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.type == "function" and call.id and call.function.name in offered
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == ({"city"} if call.function.name == "get_weather" else set())
    followed: Any = [
        {"role": "user", "content": "How is the weather in Paris?"},
        answer.choices[0].message.to_dict(),
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny."},
    ]
    assert ask(client, followed, tools=[WEATHER, TIME]).choices[0].message.content is not None


def test_a_called_tool_is_streamed(client: openai.OpenAI) -> None:
    chunks = list(ask(client, tools=[TIME], tool_choice="required", stream=True, max_tokens=40))
    calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
    assert calls[0].index == 0 and calls[0].function.name == "get_time"
    assert "".join(call.function.arguments for call in calls if call.index == 0) == "{}"
    assert not any(c.choices[0].delta.content for c in chunks)


def test_tools_that_need_not_be_called_leave_an_answer(client: openai.OpenAI) -> None:
    answer = ask(client, tools=[WEATHER], tool_choice="auto", max_tokens=12)
    message = answer.choices[0].message
    assert message.content or message.tool_calls
    plain = ask(client, tools=[WEATHER], tool_choice="none")
    assert plain.choices[0].message.content == ask(client).choices[0].message.content


@pytest.mark.parametrize("n", [1, 3])
def test_answers_keep_to_a_json_schema(client: openai.OpenAI, n: int) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [1, 2, 3]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    answer = ask(client, response_format=form, n=n, temperature=1, seed=4, max_tokens=40)
    assert len(answer.choices) == n
    for choice in answer.choices:
        found = json.loads(choice.message.content)
        assert set(found) == {"name", "age"} and found["age"] in (1, 2, 3)
        assert choice.finish_reason == "stop"


def test_log_probabilities_come_with_their_tokens(client: openai.OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=3)
    listed = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in listed) == answer.choices[0].message.content
    for entry in listed:
        assert len(entry.top_logprobs) == 3 and entry.bytes == list(entry.token.encode())
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert 0 >= entry.logprob == entry.top_logprobs[0].logprob
    streamed = list(ask(client, logprobs=True, top_logprobs=3, stream=True))
    pieces = [e for c in streamed if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [entry.token for entry in pieces] == [entry.token for entry in listed]


def test_several_answers_and_seeds(client: openai.OpenAI) -> None:
    def texts(seed: int, n: int) -> list[str]:
        answer = ask(client, n=n, seed=seed, temperature=1.5, max_tokens=8)
        assert [choice.index for choice in answer.choices] == list(range(n))
        assert answer.usage.completion_tokens <= 8 * n
        return [choice.message.content for choice in answer.choices]

    three = texts(5, 3)
    assert len(set(three)) == 3 and texts(5, 3) == three
    assert texts(5, 1) == three[:1] != texts(6, 1)


def test_stop_strings_end_answers_before_them(client: openai.OpenAI) -> None:
    whole = ask(client, max_tokens=10).choices[0].message.content
    for stop in (whole[3:7], [whole[4:6], "never said"]):
        answer = ask(client, max_tokens=10, stop=stop)
        first = min(
            at for s in ([stop] if isinstance(stop, str) else stop) if (at := whole.find(s)) >= 0
        )
        assert answer.choices[0].message.content == whole[:first]
        assert answer.choices[0].finish_reason == "stop"
        chunks = list(ask(client, max_tokens=10, stop=stop, stream=True))
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole[:first]


def test_plain_completions_echo_and_take_several_prompts(client: openai.OpenAI) -> None:
    def complete(prompt: Any, **options: Any) -> list[str]:
        made = client.completions.create(prompt=prompt, **{**SHORT, **options})
        return [choice.text for choice in made.choices]

    (one,) = complete("One, two, three,")
    assert complete("One, two, three,", echo=True) == ["One, two, three," + one]
    both = complete(["One, two, three,", "A, b, c,"])
    assert both == [one, *complete("A, b, c,")]
    made = client.completions.create(prompt="One, two,", logprobs=2, **SHORT)
    listed = made.choices[0].logprobs
    assert "".join(listed.tokens) == made.choices[0].text and len(listed.top_logprobs[0]) == 2
    chunks = client.completions.create(prompt="One, two, three,", stream=True, **SHORT)
    assert "".join(c.choices[0].text for c in chunks) == one


def test_a_bias_is_added(client: openai.OpenAI) -> None:
    token = ask(client, logprobs=True).choices[0].logprobs.content[0].token
    words = ask(client, logit_bias={"28": 100}, max_tokens=3).choices[0].message.content
    assert words == 3 * words[: len(words) // 3] and not words.startswith(token)


@pytest.mark.parametrize(
    ("changes", "error", "param"),
    [
        ({"model": "gpt-4o"}, openai.NotFoundError, "model"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"extra_body": {"surprise": 1}}, openai.BadRequestError, "surprise"),
        ({"extra_body": {"recompute": "x"}}, openai.BadRequestError, "recompute"),
        ({"reasoning_effort": "low"}, openai.BadRequestError, "reasoning_effort"),
        ({"n": 9}, openai.BadRequestError, "n"),
        ({"max_tokens": 2001}, openai.BadRequestError, "max_tokens"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, openai.BadRequestError, None),
        ({"stream": True, "n": 9}, openai.BadRequestError, "n"),
    ],
)
def test_refusals_are_the_right_exceptions(
    client: openai.OpenAI, changes: Any, error: type[openai.APIStatusError], param: str | None
) -> None:
    with pytest.raises(error) as refused:
        ask(client, **changes)
    assert refused.value.param == param and refused.value.body["message"]
    assert refused.value.request_id and refused.value.type == "invalid_request_error"
    if changes.get("messages"):
        assert refused.value.code == "context_length_exceeded"


def test_a_client_that_stops_waiting_frees_its_slot(client: openai.OpenAI, url: str) -> None:
    endless: Any = {"max_tokens": 2000, "logit_bias": {"0": -100, "2": -100}}
    with pytest.raises(openai.APITimeoutError):
        ask(client.with_options(timeout=0.7), **endless)
    end = time.monotonic() + 3
    while httpx2.get(f"{url}/health").json()["running"] and time.monotonic() < end:
        time.sleep(0.05)
    load = httpx2.get(f"{url}/status.json").json()["load"]
    assert load["running"] == load["waiting"] == 0
    assert 'outcome="cancelled"' in httpx2.get(f"{url}/metrics").text


def test_the_second_call_is_cached(client: openai.OpenAI) -> None:
    talk: Any = [{"role": "system", "content": "You are kind. " * 20}, *HELLO]
    first, second = (details(ask(client, talk)) for _ in range(2))
    assert first["cached_tokens"] == 0 < first["computed_tokens"]
    assert second["cached_tokens"] == sum(second.values()) - 1
    off = details(ask(client, talk, extra_body={"reuse": "off"}))
    assert off["computed_tokens"] == sum(off.values())


def test_documents_are_reused_in_another_order(client: openai.OpenAI) -> None:
    ask(client, extra_body={"documents": documents(0, 1, 2)})
    raw = client.chat.completions.with_raw_response.create(
        messages=HELLO, **SHORT, extra_body={"documents": documents(2, 0, 1)}
    )
    assert details(raw.parse())["moved_tokens"] > 100
    assert raw.headers["x-kvboost-exact"] == "false"
    exact = {"documents": documents(1, 0, 2), "reuse": "exact"}
    assert details(ask(client, extra_body=exact))["moved_tokens"] == 0


def test_what_is_marked_stays_in_memory(client: openai.OpenAI) -> None:
    part = {
        "type": "text",
        "text": "A long preface. " * 20,
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
    }
    talk: Any = [{"role": "user", "content": [part, {"type": "text", "text": "Go on."}]}]
    ask(client, talk)
    assert details(ask(client, talk))["cached_tokens"] > 60
    answer = ask(client, HELLO, prompt_cache_key="me", prompt_cache_retention="24h")
    assert answer.choices[0].message.content
