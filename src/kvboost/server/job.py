"""A request in the scheduler's hands, and the ticket that its client holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import takewhile

from torch import Tensor

from kvboost.boost import KVBoost
from kvboost.engine import Prefilled
from kvboost.errors import ConfigError, PromptTooLongError
from kvboost.generation import Generation
from kvboost.metrics import Stopwatch
from kvboost.options import Options
from kvboost.prompt import Prompt
from kvboost.sampling import Sampling
from kvboost.server.limits import Limits
from kvboost.server.work import (
    DeadlineError,
    Done,
    Ended,
    Event,
    Piece,
    Served,
    Started,
    TokenLogprob,
    Work,
)
from kvboost.types import Timing, Usage


class Cancelled(Exception):
    """The client is gone."""


class Choice:
    """One answer of a request in the making."""

    def __init__(self, index: int, made: Generation, top: int | None) -> None:
        self.index, self.made = index, made
        self._top = top
        self.last = 0.0

    def take(self, logits_1V: Tensor, job: Job) -> None:
        """The next token, and tell the client."""
        text = self.made.take(logits_1V)
        now = time.perf_counter()
        if self.last:
            job.gaps.append(now - self.last)
        else:
            job.tell_started(self.made)
        self.last = now
        token = self.made.answer.ids[-1]
        chance = None if self._top is None else _logprob(logits_1V, token, self._top)
        job.tell(Piece(self.index, text, token, chance))
        if self.made.over:
            rest = self.made.answer.end()
            job.tell(Ended(self.index, rest, self.made.answer.finish_reason))


def _logprob(logits_1V: Tensor, token: int, top: int) -> TokenLogprob:
    chances = logits_1V[0].float().log_softmax(-1)
    best = chances.topk(top) if top else None
    likely = zip(best.indices.tolist(), best.values.tolist(), strict=True) if best else ()
    return TokenLogprob(token, float(chances[token]), tuple(likely))


class Job:
    """All that is known of one request. Belongs to the worker once it is queued, but for
    `cancelled`, which anybody may set."""

    def __init__(
        self,
        work: Work,
        view: KVBoost,
        built: Prompt,
        options: list[Options],
        clock: Stopwatch,
    ) -> None:
        self.work, self.view, self.built, self.options = work, view, built, options
        self.clock = clock
        self.deadline = 0.0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.events: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self.cancelled = False
        self.pinned = len(built.ids)
        self.is_pinned: bool | None = None
        self.queued = 0.0
        self.choices: list[Choice] = []
        self.prefilled: Generation | None = None
        self.misses: Mapping[str, int] = {}
        self.gaps: list[float] = []
        self.usage = Usage()
        self._begun = False
        self._open = ExitStack()

    @classmethod
    def of(
        cls,
        work: Work,
        view: KVBoost,
        started: float,
        loop: asyncio.AbstractEventLoop,
        limits: Limits,
    ) -> Job:
        """Raises PromptError and ConfigError for what can't be answered."""
        clock = Stopwatch(view._engine.runner.layout.device, started)
        options = view.parse(work.options)
        if work.n > limits.slots:
            raise ConfigError(
                f"n is {work.n}: this server answers {limits.slots} at a time at most"
            )
        built = view.build(work.prompt, options, clock)
        if limits.prompt_tokens is not None and len(built.ids) > limits.prompt_tokens:
            raise PromptTooLongError(
                f"the prompt has {len(built.ids)} tokens and this server takes "
                f"{limits.prompt_tokens}: shorten it"
            )
        view._engine.room(len(built.ids), 1)
        each = [replace(options, sampling=_seeded(options.sampling, n)) for n in range(work.n or 1)]
        job = cls(work, view, built, each, clock)
        job.loop, job.deadline = loop, started + limits.seconds
        if work.pinned is not None:
            start = view.build(work.pinned, options, Stopwatch(clock._device))
            pairs = zip(built.ids, start.ids, strict=False)
            job.pinned = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return job

    @property
    def slots(self) -> int:
        return max(1, self.work.n)

    @property
    def key(self) -> object:
        """Requests with the same key need the same KV; with reuse off it is for nobody else."""
        o, t = self.options[0], self.work.tenant
        if o.reuse == "off":
            return self
        return (t.namespace, t.shared, self.built, o.reuse, o.policy)

    @property
    def first(self) -> Generation:
        assert self.prefilled is not None
        return self.prefilled

    @property
    def live(self) -> list[Choice]:
        """Answers that are not complete."""
        return [choice for choice in self.choices if not choice.made.over]

    @property
    def timing(self) -> Timing:
        return self.prefilled.timing if self.prefilled else Timing()

    def overdue(self) -> Exception | None:
        """Why this should not go on, if it should not."""
        if self.cancelled:
            return Cancelled("the client is gone")
        if time.perf_counter() > self.deadline:
            return DeadlineError("the request took longer than this server allows")
        return None

    def open(self) -> None:
        """The request is taken: until it is over, nothing is upgraded."""
        self._open.enter_context(self.view._upgrades.traffic.request())

    def begin(self, twin: Generation | None) -> None:
        """Prefill, or take over the twin's KV."""
        view, top = self.view, self.work.top_logprobs
        if twin is None:
            made = view.begin(self.built, self.options[0], self.clock)
        else:
            made = view.fork(twin, self.options[0], self.clock)
            made.prefilled = _taken_over(made.prefilled)
        self.prefilled = made
        others = [
            view.fork(made, options, Stopwatch(self.clock._device, self.clock._started))
            for options in self.options[1:]
        ]
        made_all = [made, *others] if self.work.n else []
        self.choices = [Choice(n, one, top) for n, one in enumerate(made_all)]
        self.usage = made.prefilled.usage
        if not self.work.n:
            made.ttft = self.clock.elapsed()
            self.tell_started(made)

    def finish(self) -> None:
        """Store what was computed."""
        for choice in self.choices:
            self.view.store(choice.made)
        if not self.choices:
            self.view.store(self.first)
        if self.work.pin is not None:
            made, seconds = self.first.prefilled, self.work.pin
            self.is_pinned = self.view._engine.pin_used(made, self.pinned, seconds)
        self.clock.lap("store")

    def close(self) -> None:
        """The request is over."""
        generated = sum(len(choice.made.answer.ids) for choice in self.choices)
        self.usage = replace(self.usage, generated=generated)
        self.view.account(self.usage)
        self._open.close()

    def tell_started(self, made: Generation) -> None:
        if not self._begun:
            self._begun = True
            policy, exact = made.options.policy.name, made.prefilled.exact
            self.tell(Started(self.usage, self.timing, self.queued, made.ttft, policy, exact))

    def tell(self, event: Event | Exception) -> None:
        assert self.loop is not None
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)

    def served(self, outcome: str, error: str) -> Served:
        made = self.prefilled
        return Served(
            id=self.work.id,
            tenant=self.work.tenant.name,
            outcome=outcome,
            prompt=len(self.built.ids),
            queued=self.queued,
            ttft=made.ttft if made and self._begun else None,
            usage=self.usage,
            timing=self.timing,
            policy=self.options[0].policy.name,
            exact=made.prefilled.exact if made else False,
            seconds=self.clock.elapsed(),
            misses=self.misses,
            gaps=tuple(self.gaps),
            error=error,
        )


def _seeded(sampling: Sampling, n: int) -> Sampling:
    """Several answers to one seed differ, and are the same each time."""
    return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + n)


def _taken_over(made: Prefilled) -> Prefilled:
    """Nothing of it was computed for this request. Behind moved KV nothing is exact."""
    usage = made.usage
    into = "exact" if made.exact else "moved"
    taken = replace(usage, computed=0, **{into: getattr(usage, into) + usage.computed})
    return replace(made, usage=taken, passes=())


class Ticket:
    """A request that was taken. Iterate once, in the event loop that submitted it: Started, then
    Piece and Ended of every answer, then Done. Raises what went wrong: Cancelled, DeadlineError,
    BusyError if the server stops, ConfigError, or any other exception for a fault of ours."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.prompt_ids = job.built.ids

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self._job.events.get()
            if isinstance(event, Exception):
                raise event
            yield event
            if isinstance(event, Done):
                return

    def cancel(self) -> None:
        """The client is gone: stop at the next step. May be called at any time, from any thread."""
        self._job.cancelled = True
