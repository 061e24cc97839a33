"""Chat and completions over HTTP, by the official client, with a scheduler that plays a script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from server_fakes import STARTED, FakeScheduler, Script, app_of, listening, logprob, said, script

from kvboost.server.limits import Limits
from kvboost.server.work import Done, Ended, Piece
from kvboost.types import Timing, Usage

HELLO: Any = [{"role": "user", "content": "Hello!"}]


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


@pytest.fixture
def client(url: str, scheduler: FakeScheduler) -> Iterator[openai.OpenAI]:
    scheduler.plays = lambda _: script(*said("Hello", " you"))
    scheduler.works.clear()
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_chat_is_answered_and_accounted_for(client: Any, scheduler: FakeScheduler) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="tiny",
        messages=[{"role": "developer", "content": "Be kind."}, *HELLO],
        max_completion_tokens=20,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"5": -100},
        seed=3,
        stop=["END"],
        extra_body={
            "top_k": 4,
            "reuse": "exact",
            "recompute": "drift",
            "documents": ["one", {"title": "T", "text": "two"}],
        },
    )
    answer = raw.parse()
    assert answer.choices[0].message.content == "Hello you"
    assert answer.choices[0].finish_reason == "stop" and answer.model == "tiny"
    assert answer.usage.prompt_tokens == 17 and answer.usage.completion_tokens == 4
    details = answer.usage.prompt_tokens_details.to_dict()
    assert details == {
        "cached_tokens": 7,
        "moved_tokens": 5,
        "recomputed_tokens": 2,
        "computed_tokens": 3,
    }
    assert raw.headers["x-request-id"].startswith("req_")
    assert raw.headers["x-kvboost-ttft-ms"] == "200.00"
    assert raw.headers["x-kvboost-queued-ms"] == "30.00"
    assert raw.headers["x-kvboost-forward-ms"] == "150.00"
    assert raw.headers["x-kvboost-exact"] == "false" and raw.headers["x-kvboost-policy"] == "drift"
    work = scheduler.works[0]
    assert work.tenant.namespace == "default" and work.n == 1 and work.pin is None
    assert work.prompt[0] == {"role": "system", "content": "Be kind."}
    assert work.options == {
        "max_new_tokens": 20,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "logit_bias": {5: -100.0},
        "seed": 3,
        "stop": ["END"],
        "reuse": "exact",
        "recompute": "drift",
        "documents": ["one", {"title": "T", "text": "two"}],
    }


def test_a_stream_says_the_same_piece_by_piece(client: Any) -> None:
    stream = client.chat.completions.create(
        model="default", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello you"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 21
    assert all(c.usage is None for c in chunks[:-1]) and len({c.id for c in chunks}) == 1


def test_answers_of_one_request_keep_apart(client: Any, scheduler: FakeScheduler) -> None:
    mixed = [Piece(0, "a", 1), Piece(1, "x", 2), Piece(1, "y", 3), Ended(1, "", "length")]
    scheduler.plays = lambda _: script(*mixed, Piece(0, "b", 4), Ended(0, "c", "stop"))
    answer = client.chat.completions.create(model="tiny", messages=HELLO, n=2)
    assert [(c.message.content, c.finish_reason) for c in answer.choices] == [
        ("abc", "stop"),
        ("xy", "length"),
    ]
    texts = ["", ""]
    for chunk in client.chat.completions.create(model="tiny", messages=HELLO, n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["abc", "xy"]


def test_logprobs(client: Any, scheduler: FakeScheduler) -> None:
    scheduler.plays = lambda _: script(
        Piece(0, "", 99, logprob(99, (99, -0.5), (2, float("-inf")))),
        Piece(0, "w2 ", 2, logprob(2, (2, -0.1), (3, -2.5))),
        Ended(0, "", "stop"),
    )
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, top_logprobs=2
    )
    first, second = answer.choices[0].logprobs.content
    assert first.bytes is None and first.top_logprobs[1].logprob == -9999.0
    assert second.token == "w2 " and bytes(second.bytes) == b"w2 " and second.logprob == -0.5
    assert scheduler.works[-1].top_logprobs == 2
    plain = client.completions.create(model="tiny", prompt="x", logprobs=2).choices[0].logprobs
    assert plain.tokens == ["\ufffd", "w2 "] and plain.text_offset == [0, 1]
    assert plain.top_logprobs[1] == {"w2 ": -0.1, "w3 ": -2.5}
    chunks = client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, stream=True
    )
    entries = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [e.token for e in entries] == ["\ufffd", "w2 "] and scheduler.works[-1].top_logprobs == 0


def test_completions_of_texts_and_of_ids(client: Any, scheduler: FakeScheduler) -> None:
    answer = client.completions.create(model="tiny", prompt=["a", "b"], n=2, echo=True)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[2].text == "bHello you" and answer.choices[3].text == "b"
    assert answer.usage.prompt_tokens == 34 and [w.prompt for w in scheduler.works] == ["a", "b"]
    assert scheduler.works[0].options["max_new_tokens"] == 16
    client.completions.create(model="tiny", prompt=[4, 5])
    assert scheduler.works[-1].prompt == [4, 5]
    texts = ["", ""]
    for chunk in client.completions.create(model="tiny", prompt=["a", "b"], stream=True, echo=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["aHello you", "bHello you"]


def test_breakpoints_and_keys_pin_the_prompt(client: Any, scheduler: FakeScheduler) -> None:
    hour = {"type": "ephemeral", "ttl": "1h"}
    parts = [{"type": "text", "text": "long", "cache_control": hour}, {"type": "text", "text": "q"}]
    system = {"role": "system", "content": "Be kind."}
    user = {"role": "user", "content": parts}
    client.chat.completions.create(model="tiny", messages=[system, user])
    work = scheduler.works[-1]
    assert work.prompt[1]["content"] == "long\nq" and work.pin == 3600
    assert work.pinned == [system, {"role": "user", "content": "long"}]
    client.chat.completions.create(model="tiny", messages=HELLO, prompt_cache_key="k")
    assert scheduler.works[-1].pin == 300 and scheduler.works[-1].pinned is None
    client.chat.completions.create(
        model="tiny", messages=HELLO, prompt_cache_key="k", prompt_cache_retention="24h"
    )
    assert scheduler.works[-1].pin == 86400


def test_what_changes_nothing_is_taken(client: Any) -> None:
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    client.chat.completions.create(
        model="tiny", messages=HELLO, modalities=["text"], safety_identifier="s", **harmless
    )


def test_models_and_health(client: Any, url: str) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "kvboost"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
    assert httpx2.get(f"{url}/health").json()["running"] == 2


def test_the_stream_starts_with_the_first_token(url: str, scheduler: FakeScheduler) -> None:
    scheduler.plays = lambda _: Script(STARTED, 0.0, *said("x"), Done(Usage(), Timing()))
    body = {"model": "tiny", "messages": HELLO, "stream": True}
    with httpx2.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-kvboost-ttft-ms"] == "200.00"
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and json.loads(lines[0][6:])["choices"][0]["index"] == 0
