"""A real scheduler with a tiny model behind a real socket, and clients that know no manners."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from families import model, tokenizer
from fastapi import APIRouter, Depends
from server_fakes import listening

from kvboost import KVBoost
from kvboost.server.app import create_app
from kvboost.server.auth import Door
from kvboost.server.border import admin
from kvboost.server.limits import Limits
from kvboost.server.metrics import Metrics
from kvboost.server.scheduler import Scheduler
from kvboost.server.work import Served

TEMPLATE = (
    "{% set marks = {'user': 'w1', 'assistant': 'w2', 'system': 'w3'} %}"
    "{% for m in messages %}{{ marks[m['role']] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}w2 {% endif %}"
)


def chatty() -> Any:
    """The tokenizer of words w0, w1, ..., with a chat template in which w1 to w3 are roles."""
    made = deepcopy(tokenizer())
    made.chat_template = TEMPLATE
    return made


def tiny(**config: Any) -> KVBoost:
    """A KVBoost around a tiny model that never ends an answer by itself."""
    return KVBoost(model("llama"), chatty(), **{"chunk_tokens": 32, **config})


def folder_of_tiny(folder: Path) -> Path:
    """The same model as files."""
    model("llama").save_pretrained(folder)
    chatty().save_pretrained(folder)
    return folder


@dataclass
class Real:
    """url: where it listens. over: the requests that are over."""

    url: str
    scheduler: Scheduler
    over: list[Served]

    def post(self, path: str, body: Any, key: str = "", timeout: float = 30) -> httpx2.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx2.post(f"{self.url}/v1/{path}", json=body, headers=headers, timeout=timeout)

    def ask(self, text: str, key: str = "", **options: Any) -> dict[str, Any]:
        """A chat of one message, answered greedily; the answer as it came."""
        answer = self.post("chat/completions", chat(text, **options), key)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def idle(self) -> bool:
        """Whether nothing at all is held for any request."""
        load = self.scheduler.load()
        return not (load.running or load.waiting or self.scheduler.boost._upgrades.traffic.open)

    def tasks(self) -> int:
        """Of the event loop: what is there besides the task that answers this."""
        return int(httpx2.get(f"{self.url}/tasks").json()) - 1

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


def chat(text: str, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "default", "temperature": 0, "max_tokens": 8, "messages": messages, **options}


def words(count: int, seed: int) -> str:
    """The same random words for the same seed."""
    return " ".join(f"w{10 + (seed * 7919 + n * (seed + 31)) % 490}" for n in range(count))


@contextmanager
def serving(
    boost: KVBoost, keys: Path | None = None, shared: str | None = None, **limits: Any
) -> Iterator[Real]:
    over: list[Served] = []
    metrics = Metrics(boost)

    def observe(served: Served) -> None:
        metrics.observe(served)
        over.append(served)

    scheduler = Scheduler(boost, Limits(**{"drain": 1.0, **limits}), observe)
    looking = APIRouter()

    @looking.get("/tasks")
    async def tasks() -> int:
        return len(asyncio.all_tasks())

    routers = [metrics.router(scheduler, [Depends(admin)]), looking]
    app = create_app(scheduler, "tiny", Door(keys, shared), routers, metrics.refused)
    with listening(app) as url:
        yield Real(url, scheduler, over)
    assert not scheduler._thread.is_alive()


def request(body: bytes, path: str = "chat/completions", length: int | None = None) -> bytes:
    """A request as it goes over the wire. length: what it says, whatever the body is."""
    head = (
        f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


@contextmanager
def connected(real: Real, sent: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", real.port), timeout=20) as link:
        link.sendall(sent)
        yield link


def streamed(text: str, **options: Any) -> bytes:
    return request(json.dumps(chat(text, stream=True, **options)).encode())


def until(link: socket.socket, mark: bytes) -> bytes:
    """What comes until there is `mark` in it."""
    read = b""
    while mark not in read:
        piece = link.recv(65536)
        assert piece, read
        read += piece
    return read


def soon(true: Callable[[], Any], seconds: float = 10.0) -> bool:
    """Whether that becomes true within so many seconds."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
