"""Errors as OpenAI's API words them: {"error": {message, type, param, code}}, and their status.

Messages are for the client. Of faults of ours it is told no more than the request's id.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from kvboost.errors import ConfigError, PromptError, PromptTooLongError
from kvboost.server.job import Cancelled
from kvboost.server.schema import TAG
from kvboost.server.work import BusyError, DeadlineError

INVALID = "invalid_request_error"
REFUSALS = (BusyError, ConfigError, DeadlineError, PromptError)
"""What the scheduler raises on purpose."""

TOO_LARGE = "the body is larger than this server takes: send less"
_GONE = 499  # as nginx logs it: the client left, nobody reads this


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    """The body of every answer that is no success."""

    error: ErrorBody


class ApiError(Exception):
    """A request that is refused, with all that the client is told."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message, param = _sendable(message), None if param is None else _sendable(param)
        super().__init__(message)
        self.status, self.headers = status, headers
        kind = "server_error" if status >= 500 else INVALID
        if status == 429:
            kind = "requests"
        self.body = ErrorBody(message=message, type=kind, param=param, code=code)

    @property
    def content(self) -> dict[str, Any]:
        return ErrorAnswer(error=self.body).model_dump()

    def response(self) -> JSONResponse:
        return JSONResponse(self.content, self.status, self.headers)


def refusal(error: Exception, stopping: bool = False) -> ApiError:
    """What the client is told of one of REFUSALS. stopping: the server takes no more requests."""
    message = str(error)
    if isinstance(error, BusyError):
        wait = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
        if stopping:
            return ApiError(503, message, code="shutting_down", headers=wait)
        return ApiError(429, message, code="rate_limit_exceeded", headers=wait)
    if isinstance(error, DeadlineError):
        return ApiError(504, message, code="deadline_exceeded")
    if isinstance(error, PromptError):
        code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
        return ApiError(400, message, code=code)
    return ApiError(400, message, param=_named(message))


def unforeseen(request_id: str) -> ApiError:
    return ApiError(
        500,
        "the server failed at this request; whoever runs it finds the cause in its log under "
        f"{request_id}",
    )


def invalid(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first thing that is wrong with a body."""
    first = errors[0]
    where, kind = _path(first["loc"][1:]), first["type"]
    if kind == "json_invalid":
        return ApiError(400, f"the body is no valid JSON: {first['ctx']['error']}")
    if kind == "extra_forbidden":
        return ApiError(
            400, f"unknown field {where}: leave it out", param=where, code="unknown_parameter"
        )
    if below := first.get("ctx", {}).get("param"):
        where = f"{where}.{below}" if where else below
    code = "missing_required_parameter" if kind == "missing" else "invalid_value"
    return ApiError(400, f"{where or 'the body'}: {first['msg']}", param=where or None, code=code)


def install(app: FastAPI) -> None:
    """All errors of the app in this shape."""

    async def on_refusal(request: Request, error: Exception) -> JSONResponse:
        return refusal(error, stopping=not request.app.state.scheduler.alive).response()

    async def on_api_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response()

    async def on_invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return invalid(error.errors()).response()

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return _http(request, error).response()

    async def on_cancelled(_: Request, error: Exception) -> Response:
        return Response(status_code=_GONE)

    for kind in REFUSALS:
        app.add_exception_handler(kind, on_refusal)
    app.add_exception_handler(Cancelled, on_cancelled)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)


def _sendable(text: str) -> str:
    """Half characters, which JSON may hold and UTF-8 may not, as question marks."""
    return text.encode(errors="replace").decode()


def _http(request: Request, error: HTTPException) -> ApiError:
    """What the framework refuses by itself."""
    messages = {
        404: f"there is no {request.url.path} here: see /openapi.json for what there is",
        405: f"{request.url.path} takes no {request.method}: see /openapi.json for what it takes",
        413: TOO_LARGE,
    }
    message = messages.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers)


def _path(loc: Sequence[str | int]) -> str:
    """messages[0].content[1].type"""
    path = ""
    for item in loc:
        if isinstance(item, int):
            path += f"[{item}]"
        elif not item.startswith((TAG, "[")):
            path += f".{item}" if path else item
    return path


def _named(message: str) -> str | None:
    """A ConfigError's message begins with the option's name, mostly."""
    names = (
        "n",
        "recompute",
        "max_divergence",
        "reuse",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
    )
    return next((name for name in names if name in message.split(":")[0].split()), None)
