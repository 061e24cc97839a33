"""Any body at all is answered or refused: nothing is a fault of the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from server_fakes import FakeScheduler, app_of

from kvboost.explain import Explanation
from kvboost.server.schema import ChatAsk, Explain, Pin, TextAsk, Warm

HELLO: Any = {"role": "user", "content": "x"}
BODIES: dict[str, tuple[Any, Any]] = {
    "chat/completions": (ChatAsk, {"model": "tiny", "messages": [HELLO]}),
    "completions": (TextAsk, {"model": "tiny", "prompt": "x"}),
    "cache/warm": (Warm, {"documents": ["x"]}),
    "cache/explain": (Explain, {"prompt": "x"}),
    "cache/pin": (Pin, {"prompt": "x", "seconds": 1}),
}
NUMBERS = st.integers() | st.floats() | st.sampled_from([10**30, -1, 0, 1, 2**63])
TEXTS = st.text(st.characters(codec=None), max_size=8)
KEYS = st.sampled_from(
    [
        "type",
        "text",
        "role",
        "content",
        "name",
        "function",
        "json_schema",
        "schema",
        "parameters",
        "title",
        "tool_calls",
        "id",
        "arguments",
        "cache_control",
        "ttl",
        "strict",
        "include_usage",
    ]
)
VALUES = st.sampled_from(
    [
        "text",
        "user",
        "assistant",
        "tool",
        "function",
        "json_schema",
        "json_object",
        "required",
        "auto",
        "ephemeral",
        "1h",
        "{}",
        "object",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS | VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | TEXTS, inner, max_size=4),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def client(default_model: Any) -> Iterator[TestClient]:
    scheduler = FakeScheduler(tokenizer=default_model[1])
    scheduler.boost.model = default_model[0]
    scheduler.boost.explain = lambda prompt, **options: Explanation(0, (), None)
    app = app_of(scheduler)
    with TestClient(app, base_url="http://localhost", client=("127.0.0.1", 1)) as made:
        yield made


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_field_may_hold_anything(client: TestClient, path: str, data: Any) -> None:
    kind, body = BODIES[path]
    names = st.sampled_from([*kind.model_fields, "other"]) | TEXTS
    changed = data.draw(st.dictionaries(names, JSON, min_size=1, max_size=3))
    answer = send(client, path, json.dumps({**body, **changed}).encode())
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=40))
@example(content=b"[" * 100_000)
@example(content=b'{"messages": ' + b"[" * 3000)
@example(content=b"\xff")
@example(content=b"null")
def test_a_body_may_be_anything(client: TestClient, content: bytes) -> None:
    answer = send(client, "chat/completions", content)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def send(client: TestClient, path: str, content: bytes) -> Any:
    headers = {"content-type": "application/json"}
    return client.post(f"/v1/{path}", content=content, headers=headers)
