"""How a request becomes a response: submitted, followed to its first token, then whole or streamed.

The response begins with the first token, so that what goes wrong before has a status of its own and
the headers can tell when it came.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from kvboost.server.answers import Choice, Delta, Json, Shape, Token, envelope, usage_of
from kvboost.server.asked import Plan
from kvboost.server.running import Running, watched
from kvboost.server.scheduler import Scheduler
from kvboost.server.schema import Ask
from kvboost.server.stream import Chunks
from kvboost.server.work import Done, Ended, Event, Piece, Started

_PARTS = ("tokenize", "lookup", "assemble", "probe", "forward")


@dataclass(frozen=True, slots=True)
class Answering:
    """model, fingerprint: as responses name them."""

    scheduler: Scheduler
    model: str
    fingerprint: str
    token: Token

    async def respond(self, request: Request, ask: Ask, plan: Plan, shape: Shape) -> Response:
        """Raises what the scheduler raises, until the first token is there."""
        running = await Running.submit(self.scheduler, plan.works)
        request.state.taken = True
        events = running.events()
        count = plan.n * len(plan.works)
        choices = {k: Choice(plan.parser(), plan.most_calls, self.token) for k in range(count)}
        async with AsyncExitStack() as guard:
            await guard.enter_async_context(watched(request.receive, running.cancel))
            headers = _headers(await anext(events))
            if not ask.stream:
                return JSONResponse(await self._whole(events, choices, shape), headers=headers)
            usage = ask.stream_options is not None and ask.stream_options.include_usage
            head = self._head(shape.chunk_name, shape)
            chunks = Chunks(shape, choices, head, usage, request.state.request_id)
            body = _guarded(guard.pop_all(), chunks.lines(events))
            headers |= {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return StreamingResponse(body, headers=headers, media_type="text/event-stream")

    async def _whole(
        self, events: AsyncIterator[Event], choices: dict[int, Choice], shape: Shape
    ) -> Json:
        totals, usage = {k: Delta() for k in choices}, Json()
        async for event in events:
            if isinstance(event, Piece | Ended):
                totals[event.choice].add(choices[event.choice].take(event))
            elif isinstance(event, Done):
                usage = usage_of(event.usage)
        listed = [shape.whole(k, total) for k, total in totals.items()]
        return {**self._head(shape.name, shape), "choices": listed, "usage": usage}

    def _head(self, name: str, shape: Shape) -> Json:
        return envelope(name, shape.new_id(), self.model, self.fingerprint)


async def _guarded(
    guard: AbstractAsyncContextManager[object], body: AsyncIterator[bytes]
) -> AsyncIterator[bytes]:
    async with guard:
        async for chunk in body:
            yield chunk


def _headers(event: Event) -> dict[str, str]:
    if not isinstance(event, Started):  # the client left before
        return {}
    seconds = {"ttft": event.ttft, "queued": event.queued}
    seconds |= {part: getattr(event.timing, part) for part in _PARTS}
    return {
        **{f"x-kvboost-{name}-ms": f"{value * 1e3:.2f}" for name, value in seconds.items()},
        "x-kvboost-exact": "true" if event.exact else "false",
        "x-kvboost-policy": event.policy,
    }
