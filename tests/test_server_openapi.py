"""Whatever a client sends, a real server with a real scheduler answers as its document says."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from server_real import Real, serving, soon, tiny

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
]
QUICK = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    with serving(tiny(), slots=4, answer_tokens=20, seconds=20, body_bytes=1 << 20) as made:
        yield made
        assert soon(made.idle)
        assert not [one for one in made.over if one.outcome == "failed"]


@pytest.fixture(scope="module")
def api(real: Real) -> Any:
    return schemathesis.openapi.from_url(f"{real.url}/openapi.json")


OPERATIONS = [
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{name}", "GET"),
    ("/v1/cache/stats", "GET"),
    ("/v1/cache/explain", "POST"),
    ("/v1/cache/clear", "POST"),
    ("/v1/cache/pin", "POST"),
    ("/v1/cache/warm", "POST"),
    ("/health", "GET"),
]
WITHOUT_INPUT = [OPERATIONS[n] for n in (2, 3, 4, 6, 9)]  # that could be wrong: any name is one


def test_all_operations_are_tried(api: Any) -> None:
    found = [each.ok() for each in api.get_all_operations()]
    assert {(each.path, each.method.upper()) for each in found} - {("/tasks", "GET")} == {
        *OPERATIONS
    }


@pytest.mark.parametrize(
    ("path", "method", "mode"),
    [(*each, GenerationMode.POSITIVE) for each in OPERATIONS]
    + [(*each, GenerationMode.NEGATIVE) for each in OPERATIONS if each not in WITHOUT_INPUT],
)
@QUICK
@given(data=st.data())
def test_the_server_keeps_to_its_document(
    api: Any, path: str, method: str, mode: GenerationMode, data: Any
) -> None:
    case = data.draw(api[path][method].as_strategy(generation_mode=mode))
    case.call_and_validate(checks=CHECKS, timeout=20)


HELLO: Any = {"role": "user", "content": "w5 w6"}
BODIES: dict[str, Any] = {
    "chat/completions": {
        "model": "default",
        "messages": [{"role": "system", "content": "w7"}, HELLO],
        "max_tokens": 3,
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 5,
        "n": 2,
        "seed": 1,
        "stop": ["w9"],
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {"5": 1},
        "presence_penalty": 0.5,
        "documents": ["w8 w9", {"title": "w1", "text": "w2"}],
    },
    "completions": {"model": "default", "prompt": ["w5", "w6 w7"], "max_tokens": 3, "echo": True},
}
NUMBERS = (-1, 0, 1, 2**31, 2**63, 10**400, 1e308, 5e-324, -0.0, math.nan, math.inf)
TEXTS = ("", "w5 " * 2000, "\ud800", "\x00", "\u202e\U0001f469\u200d\U0001f469", "a\u0300" * 50)
LISTS: Any = ([], {}, [[]], [None], {"": ""}, {"\udfff": 1}, ["w5"] * 40, list(range(300)))
ODD: Any = st.sampled_from((None, True, *NUMBERS, *TEXTS, *LISTS))
DEEP = st.integers(2, 900).map(lambda depth: json.loads("[" * depth + "]" * depth))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything in a body."""
    if path:
        yield path
    inner = enumerate(value) if isinstance(value, list) else ()
    for key, item in value.items() if isinstance(value, dict) else inner:
        yield from places(item, (*path, key))


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The same body, but for one place."""
    made = json.loads(json.dumps(body))
    holder = made
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return made


@pytest.mark.parametrize("path", BODIES)
@settings(QUICK, max_examples=150)
@given(data=st.data())
def test_any_value_anywhere_is_answered_or_refused(real: Real, path: str, data: Any) -> None:
    body = BODIES[path]
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(list(places(body))))
        body = changed(body, place, data.draw(ODD | DEEP))
    content = json.dumps(body).encode()
    start = time.monotonic()
    answer = httpx2.post(
        f"{real.url}/v1/{path}", content=content, headers={"content-type": "application/json"}
    )
    assert answer.status_code in (200, 400, 404), (answer.text, content[:500])
    assert answer.status_code == 200 or answer.json()["error"]["message"]
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("status", "changes"),
    [
        (200, {"temperature": 5e-324}),
        (200, {"temperature": 1e-38, "n": 2}),
        (200, {"logit_bias": {str(n): 100 for n in range(512)}, "temperature": 1e-4}),
        (400, {"messages": [{**HELLO, "content": "\ud83d"}]}),
        (400, {"metadata": {"\udfff": "x"}}),
        (400, {"response_format": {"type": "json_object"}}),  # its tokenizer has no end
        (400, {"prompt_cache_key": None, "prompt_cache_retention": "24h"}),
        (400, {"seed": 2**63 - 1, "n": 2}),
    ],
)
def test_what_once_was_a_fault(real: Real, status: int, changes: Any) -> None:
    body = {"model": "default", "messages": [HELLO], "max_tokens": 3, **changes}
    for stream in (False, True):
        content = json.dumps({**body, "stream": stream}).encode()
        headers = {"content-type": "application/json"}
        answer = httpx2.post(f"{real.url}/v1/chat/completions", content=content, headers=headers)
        assert answer.status_code == status, answer.text
        assert '"error"' not in answer.text or status == 400


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_what_is_not_sent_as_json_is_refused(real: Real, kind: str | None) -> None:
    content, headers = json.dumps(BODIES["completions"]).encode(), {"content-type": kind}
    answer = httpx2.post(
        f"{real.url}/v1/completions", content=content, headers=headers if kind else None
    )
    assert answer.status_code == 400 and "Content-Type" in answer.json()["error"]["message"]
