"""The server's routes under /v1, and what stands around them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.security import HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.middleware.body_limit import RequestBodyLimitMiddleware

import kvboost
from kvboost.server import admin, errors
from kvboost.server.answering import Answering
from kvboost.server.answers import ChatShape, TextShape
from kvboost.server.asked import Plan, Reader, prompts_of
from kvboost.server.auth import Door
from kvboost.server.border import Border, caller_of
from kvboost.server.errors import ApiError, ErrorAnswer
from kvboost.server.grammar import Grammars
from kvboost.server.replies import ChatAnswer, Health, Model, Models, TextAnswer
from kvboost.server.scheduler import Scheduler
from kvboost.server.schema import ChatAsk, TextAsk

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request is refused; the message says why."},
    "5XX": {"model": ErrorAnswer, "description": "The server can't answer."},
}


def create_app(
    scheduler: Scheduler,
    model: str,
    door: Door,
    routers: Sequence[APIRouter] = (),
    refused: Callable[[int], None] = lambda _: None,
) -> FastAPI:
    """model: its name, as clients say it. routers: what else is served. refused: told the status of
    each request that didn't reach the scheduler. The app closes the scheduler when it stops."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(scheduler.close, scheduler.limits.drain)

    app = FastAPI(
        title="KVBoost",
        version=kvboost.__version__,
        lifespan=lifespan,
        docs_url=None,  # it would load scripts from elsewhere
        redoc_url=None,
    )
    app.state.scheduler, app.state.door = scheduler, door
    most = scheduler.limits.body_bytes
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=most)
    app.add_middleware(Border, door=door, body_bytes=most, refused=refused)
    errors.install(app)
    reader = Reader(scheduler.boost.tokenizer, scheduler.limits, Grammars(scheduler.boost))
    # The key was checked before; the dependency puts it into the OpenAPI document.
    key = [Depends(HTTPBearer(auto_error=False))] if door.locked else []
    app.include_router(_answers(scheduler, reader, model), dependencies=key)
    app.include_router(_models(model), dependencies=key)
    app.include_router(admin.router(scheduler, reader), dependencies=key)
    app.include_router(_health(scheduler))
    for router in routers:
        app.include_router(router)
    return app


def _router() -> APIRouter:
    return APIRouter(prefix="/v1", responses=_ERRORS)


def _answers(scheduler: Scheduler, reader: Reader, model: str) -> APIRouter:
    router, tokenizer = _router(), scheduler.boost.tokenizer

    @lru_cache(1 << 16)
    def token(id: int) -> str:
        return str(tokenizer.decode([id], clean_up_tokenization_spaces=False))

    fingerprint = f"fp_{scheduler.boost.stats().fingerprint[:12]}"
    answering = Answering(scheduler, model, fingerprint, token)

    @router.post("/chat/completions", response_model=None, responses={200: {"model": ChatAnswer}})
    async def chat(ask: ChatAsk, request: Request) -> Response:
        """Answer a chat, whole or (with `stream`) as server-sent events."""
        _known(ask.model, model)
        plan = await run_in_threadpool(reader.chat, ask, *_who(request))
        shape = ChatShape(token, bool(ask.logprobs))
        return await answering.respond(request, ask, plan, shape)

    @router.post("/completions", response_model=None, responses={200: {"model": TextAnswer}})
    async def text(ask: TextAsk, request: Request) -> Response:
        """Continue a text, whole or (with `stream`) as server-sent events."""
        _known(ask.model, model)
        plan = reader.text(ask, *_who(request))
        echoes = _echoes(ask, plan, tokenizer) if ask.echo else {}
        shape = TextShape(token, ask.logprobs is not None, echoes)
        return await answering.respond(request, ask, plan, shape)

    return router


def _who(request: Request) -> tuple[Any, str]:
    return caller_of(request).tenant, request.state.request_id


def _models(model: str) -> APIRouter:
    router, started = _router(), int(time.time())

    @router.get("/models")
    def models() -> Models:
        """The one model that this server runs."""
        return Models(data=[Model(id=model, created=started)])

    @router.get("/models/{name:path}")
    def one(name: str) -> Model:
        _known(name, model)
        return Model(id=model, created=started)

    return router


def _health(scheduler: Scheduler) -> APIRouter:
    router = APIRouter(responses=_ERRORS)

    @router.get("/health")
    def health() -> Health:
        """Whether requests are taken, and how busy the server is."""
        if not scheduler.alive:
            raise ApiError(503, "the server takes no more requests", code="shutting_down")
        load = scheduler.load()
        return Health(waiting=load.waiting, running=load.running, slots=load.slots)

    return router


def _known(name: str, model: str) -> None:
    if name not in (model, "default"):
        raise ApiError(
            404,
            f"there is no model {name!r} here: this server runs {model!r}",
            param="model",
            code="model_not_found",
        )


def _echoes(ask: TextAsk, plan: Plan, tokenizer: Any) -> dict[int, str]:
    prompts = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts_of(ask)]
    return {k * plan.n + j: prompt for k, prompt in enumerate(prompts) for j in range(plan.n)}
