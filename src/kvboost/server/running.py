"""An HTTP request's works on their way through the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Self

from kvboost.server.job import Ticket
from kvboost.server.scheduler import Scheduler
from kvboost.server.work import Done, Ended, Event, Piece, Started, Work
from kvboost.types import Timing, Usage

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class Running:
    """Works that were all taken. Of their events it makes those of one work: choices are numbered
    on, the first Started counts, and one Done comes at the end."""

    def __init__(self, tickets: Sequence[Ticket], n: int) -> None:
        self._tickets, self._n = tickets, n

    @classmethod
    async def submit(cls, scheduler: Scheduler, works: Sequence[Work]) -> Self:
        """All or none. Raises what `Scheduler.submit` raises."""
        tickets: list[Ticket] = []
        try:
            for work in works:
                tickets.append(await scheduler.submit(work))
        except BaseException:
            for ticket in tickets:
                ticket.cancel()
            raise
        return cls(tickets, works[0].n)

    def cancel(self) -> None:
        for ticket in self._tickets:
            ticket.cancel()

    async def events(self) -> AsyncIterator[Event]:
        done, started = Done(Usage(), Timing()), False
        async for number, event in _merged(self._tickets):
            if isinstance(event, Done):
                done = replace(event, usage=_sum(done.usage, event.usage))
            elif isinstance(event, Started):
                if not started:
                    started = True
                    yield event
            else:
                yield _renumbered(event, number * self._n)
        yield done


@asynccontextmanager
async def watched(receive: Receive, cancel: Callable[[], None]) -> AsyncIterator[None]:
    """Cancel as soon as the client is gone. The body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        cancel()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        cancel()  # also if the answer was left for any other reason


async def _merged(tickets: Sequence[Ticket]) -> AsyncIterator[tuple[int, Event]]:
    """The events of all, as they come, each with the number of its ticket."""
    if len(tickets) == 1:
        async for event in tickets[0]:
            yield 0, event
        return
    sources = [aiter(ticket) for ticket in tickets]
    nexts = {asyncio.ensure_future(anext(source)): n for n, source in enumerate(sources)}
    try:
        while nexts:
            ready, _ = await asyncio.wait(nexts, return_when=asyncio.FIRST_COMPLETED)
            for task in ready:
                number = nexts.pop(task)
                try:
                    event = task.result()
                except StopAsyncIteration:
                    continue
                nexts[asyncio.ensure_future(anext(sources[number]))] = number
                yield number, event
    finally:
        for task in nexts:
            task.cancel()


def _renumbered(event: Piece | Ended, by: int) -> Piece | Ended:
    return replace(event, choice=event.choice + by) if by else event


def _sum(one: Usage, other: Usage) -> Usage:
    return Usage(
        exact=one.exact + other.exact,
        moved=one.moved + other.moved,
        recomputed=one.recomputed + other.recomputed,
        computed=one.computed + other.computed,
        generated=one.generated + other.generated,
    )
