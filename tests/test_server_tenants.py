"""Tenants of one server: nobody finds, counts or manages what is another's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from server_real import Real, chat, serving, tiny, words

LISTED = [
    {"name": "alice", "key": "sk-alice"},
    {"name": "bob", "key": "sk-bob"},
    {"name": "carol", "key": "sk-carol", "namespace": "alice"},
    {"name": "librarian", "key": "sk-librarian", "namespace": "library", "admin": True},
]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    keys.write_text(json.dumps({"keys": LISTED}))
    with serving(tiny(), keys, shared="library") as made:
        yield made


def used(answer: dict[str, Any]) -> tuple[int, int]:
    details = answer["usage"]["prompt_tokens_details"]
    return details["cached_tokens"], details["moved_tokens"]


def test_the_same_document_is_computed_for_each_tenant(real: Real) -> None:
    options: dict[str, Any] = {"documents": [words(80, 1), words(80, 2)]}
    assert used(real.ask("w9", "sk-alice", **options)) == (0, 0)
    assert used(real.ask("w9", "sk-bob", **options)) == (0, 0)
    assert used(real.ask("w9", "sk-alice", **options))[0] > 100
    assert used(real.ask("w9", "sk-carol", **options))[0] > 100  # a second key of alice's


def test_what_the_library_has_is_found_by_all_and_changed_by_nobody(real: Real) -> None:
    text = words(200, 3)
    real.ask(text, "sk-alice")
    assert used(real.ask(text, "sk-librarian")) == (0, 0)  # a tenant stores nothing there
    body = {"messages": [{"role": "user", "content": words(200, 4)}], "pin": 60}
    warmed = real.post("cache/warm", body, "sk-librarian")
    assert json.loads(warmed.text.splitlines()[-1])["finished"]
    for key in ("sk-alice", "sk-bob"):
        assert used(real.ask(words(200, 4), key))[0] > 100


@pytest.mark.parametrize(
    "claim",
    [
        {"headers": {"x-namespace": "alice", "openai-organization": "alice", "x-tenant": "alice"}},
        {"body": {"user": "alice", "prompt_cache_key": "alice", "safety_identifier": "alice"}},
        {"body": {"metadata": {"namespace": "alice", "tenant": "alice"}}},
        {"query": "?namespace=alice&tenant=alice&key=sk-alice"},
    ],
)
def test_a_namespace_cannot_be_chosen(real: Real, claim: dict[str, Any]) -> None:
    body = chat(words(150, 10 + len(str(claim))), **claim.get("body", {}))
    for known in (False, True):
        answer = real.post("chat/completions", body, "sk-alice").json()
        assert (used(answer)[0] > 100) is known
    url = f"{real.url}/v1/chat/completions{claim.get('query', '')}"
    headers = {"authorization": "Bearer sk-bob", **claim.get("headers", {})}
    assert used(httpx2.post(url, json=body, headers=headers).json()) == (0, 0)


@pytest.mark.parametrize("field", ["namespace", "tenant", "shared", "cache_salt"])
def test_fields_that_would_choose_one_are_unknown(real: Real, field: str) -> None:
    answer = real.post("chat/completions", chat("w9", **{field: "alice"}), "sk-bob")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer sk-eve",
        "Bearer sk-alice sk-bob",
        "Basic sk-alice",
        "sk-alice",
        "Bearer SK-ALICE",
        "Bearer \xe9",
    ],
)
def test_without_a_right_key_there_is_nothing(real: Real, header: str | None) -> None:
    headers = {} if header is None else {b"authorization": header.encode("latin-1")}
    for path in ("chat/completions", "completions", "cache/warm", "nothing"):
        answer = httpx2.post(f"{real.url}/v1/{path}", json=chat("w9"), headers=headers)
        assert answer.status_code == 401, path
        assert answer.json()["error"]["code"] == "invalid_api_key"
    for path in ("v1/models", "v1/cache/stats", "metrics", "status.json"):
        assert httpx2.get(f"{real.url}/{path}", headers=headers).status_code == 401, path


@pytest.mark.parametrize("path", ["metrics", "status.json", "v1/cache/stats"])
def test_numbers_are_for_administrators(real: Real, path: str) -> None:
    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return httpx2.get(f"{real.url}/{path}", headers=headers).status_code

    assert status("sk-alice") == 403 and status("sk-librarian") == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("warm", {"documents": ["w5"]}),
        ("pin", {"prompt": "w5", "seconds": 5}),
        ("explain", {"prompt": "w5"}),
        ("clear", {}),
    ],
)
def test_tenants_do_not_manage_the_cache(real: Real, path: str, body: Any) -> None:
    real.ask(words(100, 6), "sk-alice")
    assert real.post(f"cache/{path}", body, "sk-alice").status_code == 403
    assert used(real.ask(words(100, 6), "sk-alice"))[0] > 0
    assert real.post(f"cache/{path}/", body, "sk-alice").status_code != 200
    assert real.post(f"cache//{path}", body, "sk-alice").status_code != 200


def test_the_library_explains_its_own_only(real: Real) -> None:
    """An administrator sees the namespace of the key, not what others asked."""
    real.ask(words(100, 7), "sk-alice")
    asked = {"messages": chat(words(100, 7))["messages"]}
    said = real.post("cache/explain", asked, "sk-librarian").json()
    assert {span["kind"] for span in said["spans"]} == {"computed"}
