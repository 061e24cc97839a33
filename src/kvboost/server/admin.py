"""What administrators may do with the cache, under /v1/cache.

All of it happens in the namespace of the key that asks: the shared one is filled with a key of that
namespace.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Any, cast

from fastapi import APIRouter, Depends, Request
from fastapi.responses import StreamingResponse

from kvboost.options import GenerateOptions, PromptOptions
from kvboost.prompt import PromptBuilder, PromptLike
from kvboost.server.asked import Reader, reuse_options
from kvboost.server.border import admin, caller_of
from kvboost.server.errors import REFUSALS, ApiError, ErrorAnswer, refusal, unforeseen
from kvboost.server.job import Cancelled
from kvboost.server.running import Running, watched
from kvboost.server.scheduler import Scheduler
from kvboost.server.schema import Explain, Pin, Warm
from kvboost.server.work import Done, Work
from kvboost.types import Timing, Usage

Json = dict[str, Any]
log = logging.getLogger(__name__)


def router(scheduler: Scheduler, reader: Reader) -> APIRouter:
    router = APIRouter(
        prefix="/v1/cache",
        dependencies=[Depends(admin)],
        responses={"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}},
    )

    @router.get("/stats")
    def stats(request: Request) -> Json:
        """What runs, what memory and tiers hold, and what was reused so far."""
        return asdict(scheduler.view(caller_of(request).tenant).stats())

    @router.post("/explain")
    def explain(ask: Explain, request: Request) -> Json:
        """What would be reused of a prompt, and where it first differs from what is stored."""
        view = scheduler.view(caller_of(request).tenant)
        options = cast(PromptOptions, reuse_options(ask))
        return asdict(view.explain(_prompt(ask, reader), **options))

    @router.post("/clear")
    def clear(request: Request) -> Json:
        """Forget what memory holds, of all namespaces. Disk and server keep theirs."""
        scheduler.view(caller_of(request).tenant).clear()
        return {"cleared": True}

    _add_computing(router, scheduler, reader)
    return router


def _add_computing(router: APIRouter, scheduler: Scheduler, reader: Reader) -> None:
    """What needs the model."""

    @router.post("/pin")
    async def pin(ask: Pin, request: Request) -> Json:
        """Keep a prompt in memory for `seconds`; compute it first, if need be."""
        work = _work(request, _prompt(ask, reader), reuse_options(ask), ask.seconds)
        done = await _run(scheduler, request, work)
        if not done.pinned:
            raise ApiError(400, _NOT_PINNED)
        return {"tokens": done.usage.prompt, "seconds": ask.seconds}

    @router.post("/warm", response_class=StreamingResponse)
    async def warm(ask: Warm, request: Request) -> StreamingResponse:
        """Compute and store documents, or the beginning of a chat. The answer is a line of JSON for
        each that is done, and a last one with `"finished": true`, or with an `error`."""
        builder = PromptBuilder(scheduler.boost.tokenizer)
        works = list[Work]()
        for document in ask.documents:
            given = document if isinstance(document, str) else document.model_dump()
            built = builder.warm(given)
            options: GenerateOptions = {"segments": built.borders, "reuse": "exact"}
            works.append(_work(request, built.ids, options, ask.pin))
        if ask.messages:
            works.append(_work(request, reader.messages(ask.messages), {}, ask.pin))
        lines = _progress(scheduler, request, works)
        return StreamingResponse(lines, media_type="application/x-ndjson")


def _prompt(ask: Explain, reader: Reader) -> PromptLike:
    return reader.messages(ask.messages) if ask.prompt is None else ask.prompt


def _work(
    request: Request, prompt: PromptLike, options: GenerateOptions, pin: float | None
) -> Work:
    tenant = caller_of(request).tenant
    return Work(request.state.request_id, tenant, prompt, options, n=0, pin=pin)


_NOT_PINNED = (
    "this can't be pinned: at most half of the memory for KV can be, and nothing that the request "
    "says not to store. Give the server more --max-bytes, or pin less"
)


async def _run(scheduler: Scheduler, request: Request, work: Work) -> Done:
    running = await Running.submit(scheduler, [work])
    request.state.taken = True
    done = Done(Usage(), Timing())
    async with watched(request.receive, running.cancel):
        async for event in running.events():
            if isinstance(event, Done):
                done = event
    return done


async def _progress(
    scheduler: Scheduler, request: Request, works: Sequence[Work]
) -> AsyncIterator[str]:
    """One after the other, so that the queue stays free for others."""
    try:
        tokens = 0
        for number, work in enumerate(works, 1):
            done = await _run(scheduler, request, work)
            if done.pinned is False:
                yield _line(ApiError(400, _NOT_PINNED).content)
                return
            tokens += done.usage.prompt
            yield _line({"done": number, "of": len(works), "tokens": done.usage.prompt})
        yield _line({"finished": True, "tokens": tokens})
    except Cancelled:
        return
    except REFUSALS as error:
        yield _line(refusal(error).content)
    except Exception:
        log.exception("warming failed")
        yield _line(unforeseen(request.state.request_id).content)


def _line(content: Json) -> str:
    return json.dumps(content) + "\n"
