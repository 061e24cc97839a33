"""A scheduler that plays what it is told to, and a server around it, for tests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from servers import free_port

from kvboost.server.app import create_app
from kvboost.server.auth import Door
from kvboost.server.job import Cancelled
from kvboost.server.limits import Limits
from kvboost.server.work import (
    Done,
    Ended,
    Event,
    Load,
    Piece,
    Started,
    Tenant,
    TokenLogprob,
    Work,
)
from kvboost.types import Timing, Usage

USAGE = Usage(exact=7, moved=5, recomputed=2, computed=3)
STARTED = Started(USAGE, Timing(ttft=0.2, lookup=0.01, forward=0.15), 0.03, 0.2, "drift", False)


class Words:
    """A tokenizer of which token n is `w<n> `, with a template that knows no tools."""

    chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    eos_token_id = 0
    all_special_ids = (0,)
    is_fast = False

    def __init__(self, template: str = chat_template) -> None:
        self.chat_template = template

    def __len__(self) -> int:
        return 100

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [1 + len(word) % 99 for word in text.split()]}

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> str:
        return "\n".join(f"{m['role']}: {m['content']}" for m in messages)

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join("\ufffd" if n == 99 else f"w{n} " for n in ids)


class Script:
    """One work's events. A number is seconds to wait, an error is raised."""

    def __init__(self, *events: Event | Exception | float) -> None:
        self.events = events


def said(*pieces: str, reason: Any = "stop", choice: int = 0) -> list[Event]:
    """An answer in these pieces."""
    return [*(Piece(choice, text, n) for n, text in enumerate(pieces)), Ended(choice, "", reason)]


def script(*events: Any, generated: int = 4) -> Script:
    usage = Usage(7, 5, 2, 3, generated)
    return Script(STARTED, *events, Done(usage, Timing(total=1.0), pinned=True))


class FakeTicket:
    def __init__(self, script: Script) -> None:
        self.prompt_ids = (1, 2, 3)
        self._script = script
        self.cancelled = threading.Event()

    async def __aiter__(self) -> AsyncIterator[Event]:
        for event in self._script.events:
            if isinstance(event, int | float):
                end = time.monotonic() + event
                while time.monotonic() < end and not self.cancelled.is_set():
                    await asyncio.sleep(0.005)
            if self.cancelled.is_set():
                raise Cancelled("the client is gone")
            if isinstance(event, Exception):
                raise event
            if not isinstance(event, int | float):
                yield event

    def cancel(self) -> None:
        self.cancelled.set()


class FakeScheduler:
    """`plays` says what to answer a work with: a Script, or an error to raise on submission."""

    def __init__(self, limits: Limits | None = None, tokenizer: Any = None) -> None:
        self.limits = limits or Limits()
        self.plays: Callable[[Work], Script | Exception] = lambda _: script(*said("Hello", " you"))
        self.works: list[Work] = []
        self.tickets: list[FakeTicket] = []
        self.alive = True
        self.closed: list[float] = []
        self.boost = SimpleNamespace(
            tokenizer=tokenizer or Words(),
            stats=lambda: SimpleNamespace(fingerprint="0123456789abcdef"),
        )
        self.seen: list[Tenant] = []

    async def submit(self, work: Work) -> FakeTicket:
        self.works.append(work)
        played = self.plays(work)
        if isinstance(played, Exception):
            raise played
        self.tickets.append(FakeTicket(played))
        return self.tickets[-1]

    def view(self, tenant: Tenant) -> Any:
        self.seen.append(tenant)
        return self.boost

    def load(self) -> Load:
        return Load(1, 2, self.limits.slots)

    def close(self, drain: float) -> None:
        self.closed.append(drain)
        self.alive = False


def app_of(scheduler: FakeScheduler, keys: Path | None = None, shared: str | None = None) -> Any:
    refused: list[int] = []
    app = create_app(scheduler, "tiny", Door(keys, shared), refused=refused.append)  # type: ignore[arg-type]
    app.state.refused = refused
    return app


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """The app behind a real socket; its address."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        end = time.monotonic() + 10
        while not server.started and time.monotonic() < end:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


def logprob(token: int, *top: tuple[int, float]) -> TokenLogprob:
    return TokenLogprob(token, -0.5, top)
