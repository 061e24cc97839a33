"""What stands around every request: its id, who asks, and faults that nobody foresaw."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost.server.auth import Caller, Door
from kvboost.server.errors import TOO_LARGE, ApiError, unforeseen
from kvboost.server.logs import request_id

log = logging.getLogger(__name__)


class Border:
    """Middleware. Under /v1 the caller is known before the body is read, and a body that says that
    it is too large isn't."""

    def __init__(
        self, app: ASGIApp, door: Door, body_bytes: int, refused: Callable[[int], None]
    ) -> None:
        """refused: told the status of each request that didn't reach the scheduler."""
        self._app, self._door, self._refused = app, door, refused
        self._body_bytes = body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = id = f"req_{uuid.uuid4().hex}"
        request_id.set(id)
        began = False

        async def named(message: Message) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                MutableHeaders(scope=message)["x-request-id"] = id
                if message["status"] >= 400 and not state.get("taken"):
                    self._refused(message["status"])
            await send(message)

        try:
            connection = HTTPConnection(scope)
            if scope["path"].startswith("/v1"):
                state["caller"] = self._door.caller(connection)
            announced = connection.headers.get("content-length", "")
            if announced.isdecimal() and int(announced) > self._body_bytes:
                raise ApiError(413, TOO_LARGE)
            await self._app(scope, receive, named)
        except ApiError as error:
            await error.response()(scope, receive, named)
        except Exception:
            log.exception("request %s failed", id)
            if not began:
                await unforeseen(id).response()(scope, receive, named)


def caller_of(request: Request) -> Caller:
    caller = request.state.caller
    assert isinstance(caller, Caller)
    return caller


def admin(request: Request) -> Caller:
    """Raises ApiError(403) for others, ApiError(401) for those without a key."""
    door = request.app.state.door
    assert isinstance(door, Door)
    caller = door.caller(request)
    if not caller.admin:
        raise ApiError(
            403,
            "this needs an API key with admin rights (or, on a server without keys, to be asked "
            "from the same machine)",
            code="insufficient_permissions",
        )
    return caller
