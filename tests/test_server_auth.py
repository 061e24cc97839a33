"""Keys, namespaces, and what only administrators may do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from server_fakes import FakeScheduler, app_of, listening, script
from starlette.requests import HTTPConnection

from kvboost.errors import ConfigError
from kvboost.explain import Explanation
from kvboost.server.address import Address
from kvboost.server.auth import Door
from kvboost.server.work import BusyError, Tenant

ASK: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hello!"}]}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    listed = [
        {"name": "alice", "key": "sk-alice"},
        {"name": "bob", "sha256": hashlib.sha256(b"sk-bob").hexdigest(), "namespace": "team"},
        {"name": "corpus", "key": "sk-corpus", "namespace": "common", "admin": True},
    ]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": listed}))
    return tmp_path / "keys.json"


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler()


@pytest.fixture
def url(scheduler: FakeScheduler, keys: Path) -> Iterator[str]:
    with listening(app_of(scheduler, keys, shared="common")) as address:
        yield address


def post(url: str, path: str, key: str, body: Any) -> httpx2.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx2.post(f"{url}/v1/{path}", json=body, headers=headers, timeout=10)


def test_the_namespace_is_the_keys(url: str, scheduler: FakeScheduler) -> None:
    for key in ("sk-alice", "sk-bob", "sk-corpus"):
        assert post(url, "chat/completions", key, ASK).status_code == 200
    assert [work.tenant for work in scheduler.works] == [
        Tenant("alice", "alice", "common"),
        Tenant("bob", "team", "common"),
        Tenant("corpus", "common"),
    ]


@pytest.mark.parametrize("key", ["", "sk-eve", "sk-alic"])
def test_without_the_right_key_nothing_is_read(url: str, key: str) -> None:
    answer = post(url, "chat/completions", key, "no chat at all")
    assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert httpx2.get(f"{url}/v1/models").status_code == 401
    assert httpx2.get(f"{url}/health").status_code == 200


def test_the_cache_is_for_administrators(url: str, scheduler: FakeScheduler) -> None:
    explanation = Explanation(3, (), None)
    scheduler.boost.explain = lambda prompt, **options: explanation
    scheduler.boost.clear = lambda: scheduler.closed.append(-1.0)
    for path, body in (("explain", {"prompt": "x"}), ("clear", {}), ("warm", {"documents": ["d"]})):
        assert post(url, f"cache/{path}", "sk-alice", body).status_code == 403
    said = post(url, "cache/explain", "sk-corpus", {"prompt": "x", "reuse": "exact"})
    assert said.json() == {"tokens": 3, "spans": [], "difference": None}
    assert post(url, "cache/clear", "sk-corpus", {}).json() == {"cleared": True}
    assert scheduler.closed == [-1.0] and scheduler.seen[0].namespace == "common"


def test_warming_tells_how_far_it_is(url: str, scheduler: FakeScheduler) -> None:
    scheduler.plays = lambda _: script(generated=0)
    body = {"documents": ["one two", {"title": "T", "text": "three"}], "pin": 60, **messages("Hi")}
    said = post(url, "cache/warm", "sk-corpus", body)
    lines = [json.loads(line) for line in said.text.splitlines()]
    assert [line.get("done") for line in lines] == [1, 2, 3, None] and lines[-1]["finished"]
    assert lines[-1]["tokens"] == 51
    assert all(w.n == 0 and w.pin == 60 and w.tenant.namespace == "common" for w in scheduler.works)
    scheduler.plays = lambda _: BusyError("full", 1.0)
    said = post(url, "cache/warm", "sk-corpus", {"documents": ["one"]})
    assert json.loads(said.text)["error"]["code"] == "rate_limit_exceeded"
    assert post(url, "cache/warm", "sk-corpus", {}).status_code == 400


def test_pinning(url: str, scheduler: FakeScheduler) -> None:
    scheduler.plays = lambda _: script(generated=0)
    said = post(url, "cache/pin", "sk-corpus", {**messages("Hi"), "seconds": 9})
    assert said.json() == {"tokens": 17, "seconds": 9}
    assert scheduler.works[0].pin == 9 and scheduler.works[0].n == 0
    scheduler.plays = lambda _: BusyError("full", 1.0)
    assert post(url, "cache/pin", "sk-corpus", {"prompt": "x", "seconds": 9}).status_code == 429


def messages(text: str) -> Any:
    return {"messages": [{"role": "user", "content": text}]}


def connection(client: str, host: str) -> HTTPConnection:
    headers = [(b"host", host.encode())]
    return HTTPConnection(
        {
            "type": "http",
            "client": (client, 1),
            "headers": headers,
            "path": "/",
            "scheme": "http",
            "server": ("127.0.0.1", 8000),
        }
    )


@pytest.mark.parametrize(
    ("client", "host", "admin"),
    [
        ("127.0.0.1", "localhost:8000", True),
        ("::1", "[::1]:8000", True),
        ("10.0.0.9", "localhost:8000", False),
        ("127.0.0.1", "evil.example", False),
        ("testclient", "localhost", False),
    ],
)
def test_without_keys_admins_are_on_this_machine(client: str, host: str, admin: bool) -> None:
    caller = Door().caller(connection(client, host))
    assert caller.admin is admin and caller.tenant == Tenant("default", "default")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "JSON"),
        ('{"keys": []}', "keys"),
        ('{"keys": [{"name": "a"}]}', "either key or sha256"),
        ('{"keys": [{"name": "a", "key": "k", "role": "x"}]}', "role"),
        ('{"keys": [{"name": "a", "key": "k"}, {"name": "b", "key": "k"}]}', "the same"),
        ('{"keys": [{"name": "a", "sha256": "12"}]}', "sha256"),
    ],
)
def test_a_bad_file_of_keys_is_explained(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "keys.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        Door(tmp_path / "keys.json")
    with pytest.raises(ConfigError, match="can't read"):
        Door(tmp_path / "none.json")


def test_a_public_address_needs_keys() -> None:
    with pytest.raises(ConfigError, match="--api-keys"):
        Address("0.0.0.0")
    assert Address("0.0.0.0", insecure=True).url == "http://0.0.0.0:8000"
    assert Address("::1", 1).url == "http://[::1]:1" and not Address("::", keys=Path("x")).local
