"""Runs the server until it is told to stop."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import socket
from pathlib import Path

import uvicorn
from fastapi import Depends

from kvboost.boost import KVBoost
from kvboost.server import logs
from kvboost.server.address import Address
from kvboost.server.app import create_app
from kvboost.server.auth import Door
from kvboost.server.border import admin
from kvboost.server.limits import Limits
from kvboost.server.metrics import Metrics
from kvboost.server.scheduler import Scheduler
from kvboost.server.work import Served

_MARGIN = 5.0
"""Seconds that connections get to close in, once all requests are over."""


class _Server(uvicorn.Server):
    """Says where it is once it listens, and drains the scheduler as soon as it is told to stop."""

    def __init__(self, config: uvicorn.Config, scheduler: Scheduler, greeting: str) -> None:
        super().__init__(config)
        self._scheduler, self._greeting = scheduler, greeting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self._greeting, flush=True)  # noqa: T201 - for whoever started it

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drain = self._scheduler.limits.drain
        closing = asyncio.create_task(asyncio.to_thread(self._scheduler.close, drain))
        await super().shutdown(sockets)
        await closing


def serve(boost: KVBoost, model: str, limits: Limits, address: Address) -> None:
    """Blocks. Raises ConfigError for a file of keys that can't be used."""
    door = Door(address.keys, address.shared)
    logs.configure("info")
    metrics = Metrics(boost)

    def observe(served: Served) -> None:
        metrics.observe(served)
        logs.served(served)

    scheduler = Scheduler(boost, limits, observe)
    name = Path(model).name if Path(model).exists() else model
    page = metrics.router(scheduler, [Depends(admin)])
    config = uvicorn.Config(
        create_app(scheduler, name, door, [page], metrics.refused),
        host=address.host,
        port=address.port,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(limits.drain + _MARGIN),
    )
    # uvicorn sends itself the signal again when it has stopped: there are still files to close.
    signal.signal(signal.SIGTERM, lambda *_: None)
    _Server(config, scheduler, _greeting(name, address)).run()


def _greeting(model: str, address: Address) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
    key = " -H 'Authorization: Bearer KEY'" if address.keys else ""
    return (
        f"KVBoost serves {model} at {address.url}/v1 - its page is {address.url}/ - try:\n"
        f"  curl {address.url}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        f"-d '{json.dumps(body)}'"
    )
