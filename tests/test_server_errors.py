"""What is refused, in what words, and what happens to clients that leave."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from server_fakes import STARTED, FakeScheduler, Script, app_of, listening, said, script

from kvboost.errors import ConfigError, PromptError, PromptTooLongError
from kvboost.server.limits import Limits
from kvboost.server.work import BusyError, DeadlineError, Piece

HELLO: Any = [{"role": "user", "content": "Hello!"}]
TOOL: Any = {"type": "function", "function": {"name": "f"}}
OTHER: Any = {"type": "function", "function": {"name": "g"}}
IMAGE: Any = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.fixture(scope="module")
def scheduler() -> FakeScheduler:
    return FakeScheduler(Limits(body_bytes=20_000, queue=4, answer_tokens=500))


@pytest.fixture(scope="module")
def app(scheduler: FakeScheduler) -> Any:
    return app_of(scheduler)


@pytest.fixture(scope="module")
def url(app: Any) -> Iterator[str]:
    with listening(app) as address:
        yield address


@pytest.fixture(autouse=True)
def usual(scheduler: FakeScheduler, app: Any) -> None:
    scheduler.plays = lambda _: script(*said("Hello", " you"))
    scheduler.works.clear()
    scheduler.tickets.clear()
    app.state.refused.clear()


def asked(url: str, path: str = "chat/completions", **body: Any) -> httpx2.Response:
    start: Any = {"messages": HELLO} if path.startswith("chat") else {"prompt": "x"}
    return httpx2.post(f"{url}/v1/{path}", json={"model": "tiny", **start, **body}, timeout=10)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"best": 1}, "best"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "", "name": "Al"}]}, "messages[0].name"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].tool_call_id"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 501}, "max_tokens"),
        ({"max_completion_tokens": 501}, "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"logit_bias": {"100": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": ""}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"store": True}, "store"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": OTHER}, "tool_choice"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"reuse": "all"}, "reuse"),
        ({"documents": [{"text": "a", "page": 1}]}, "documents[0].page"),
        ({"documents": [5]}, "documents[0]"),
        ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
    ],
)
def test_what_cant_be_honoured_is_named(url: str, body: Any, param: str, app: Any) -> None:
    answer = asked(url, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error", error
    assert error["param"] == param and error["message"]
    assert app.state.refused == [400]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"logprobs": 6}, "logprobs"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt[0]"),
        ({"prompt": ["a"] * 5}, "prompt"),
        ({"messages": HELLO}, "messages"),
    ],
)
def test_completions_name_it_too(url: str, body: Any, param: str) -> None:
    answer = asked(url, "completions", **body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_null_is_like_leaving_it_out(url: str) -> None:
    names = ("max_tokens", "temperature", "stop", "tools", "audio", "functions", "n", "user")
    assert asked(url, **dict.fromkeys(names)).status_code == 200
    assert asked(url, "completions", best_of=None, suffix=None, echo=None).status_code == 200


@pytest.mark.parametrize(
    ("error", "expected", "kind"),
    [
        (
            PromptTooLongError("the prompt has 9 tokens: shorten it"),
            (400, "context_length_exceeded"),
            0,
        ),
        (PromptError("the prompt is empty"), (400, None), openai.BadRequestError),
        (ConfigError("n is 9: too many"), (400, None), openai.BadRequestError),
        (BusyError("full", 2.5), (429, "rate_limit_exceeded"), openai.RateLimitError),
        (DeadlineError("late"), (504, "deadline_exceeded"), openai.InternalServerError),
        (RuntimeError("secret"), (500, None), openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("when", ["submitted", "before the first token"])
def test_errors_before_the_first_token_have_a_status(
    url: str,
    scheduler: FakeScheduler,
    error: Exception,
    expected: Any,
    kind: Any,
    when: str,
) -> None:
    status, code = expected
    scheduler.plays = lambda _: error if when == "submitted" else Script(error)
    for stream in (False, True):
        answer = asked(url, stream=stream)
        assert answer.status_code == status and answer.json()["error"]["code"] == code
        assert "secret" not in answer.text
    if status == 429:
        assert answer.headers["retry-after"] == "3"
    if kind:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        with client, pytest.raises(kind):
            client.chat.completions.create(model="tiny", messages=HELLO)


def test_errors_after_it_are_events(url: str, scheduler: FakeScheduler) -> None:
    for error, words in ((DeadlineError("late"), "late"), (RuntimeError("secret"), "req_")):
        scheduler.plays = lambda _, e=error: Script(STARTED, Piece(0, "Hel", 1), e)
        said = asked(url, stream=True)
        assert said.status_code == 200 and "secret" not in said.text
        assert said.text.endswith("data: [DONE]\n\n") and words in said.text
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            stream = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
            with pytest.raises(openai.APIError, match=words):
                list(stream)


def test_a_stopping_server_says_so(url: str, scheduler: FakeScheduler) -> None:
    scheduler.plays = lambda _: BusyError("shutting down", 5.0)
    scheduler.alive = False
    try:
        assert asked(url).status_code == 503 and asked(url).headers["retry-after"] == "5"
        assert httpx2.get(f"{url}/health").status_code == 503
    finally:
        scheduler.alive = True


def test_what_the_framework_refuses_has_the_same_shape(url: str, app: Any) -> None:
    chat = f"{url}/v1/chat/completions"
    answers = {
        404: httpx2.get(f"{url}/v1/nothing"),
        405: httpx2.get(chat),
        400: httpx2.post(chat, content=b"{", headers={"content-type": "application/json"}),
        413: asked(url, user="x" * 30_000),
    }
    for status, answer in answers.items():
        error = answer.json()["error"]
        assert answer.status_code == status and error["type"] == "invalid_request_error"
        assert error["message"] and answer.headers["x-request-id"]
    assert app.state.refused == list(answers)
    assert asked(url, model="gpt").json()["error"]["code"] == "model_not_found"


def test_a_body_is_measured_while_it_is_read(url: str) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    answer = httpx2.post(
        f"{url}/v1/chat/completions",
        content=endless(),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 413 and answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_a_client_that_leaves_is_noticed(
    url: str, scheduler: FakeScheduler, stream: bool, started: bool, caplog: Any
) -> None:
    """Also while it waits for the first token."""
    first = [STARTED, Piece(0, "Hel", 1)] if started else []
    scheduler.plays = lambda _: Script(*first, 10.0, *said("x"))
    host, port = url.removeprefix("http://").split(":")
    body = b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"stream":%s}'
    content = body % (b"true" if stream else b"false")
    with socket.create_connection((host, int(port))) as link:
        link.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
        )
        wait = time.monotonic() + 5
        while not scheduler.tickets and time.monotonic() < wait:
            time.sleep(0.005)
        time.sleep(0.05)
    left = time.monotonic()
    assert scheduler.tickets[0].cancelled.wait(5)
    assert time.monotonic() - left < 0.5
    assert "failed" not in caplog.text


def test_of_several_prompts_all_are_taken_or_none(url: str, scheduler: FakeScheduler) -> None:
    scheduler.plays = lambda work: BusyError("full", 1.0) if work.prompt == "b" else script()
    assert asked(url, "completions", prompt=["a", "b"]).status_code == 429
    assert scheduler.tickets[0].cancelled.is_set()
