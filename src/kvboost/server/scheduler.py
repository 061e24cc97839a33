"""Runs many requests on one model: prefill in pieces, with batched decode steps in between.

One worker thread does everything that needs the model. Requests are prefilled one after the other,
tenants in turns; between the passes of a prefill every answer in the making gets its next token, so
nobody waits for somebody else's long prompt. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import TypeVar

import torch

from kvboost.boost import KVBoost
from kvboost.errors import KVBoostError, PromptTooLongError
from kvboost.prompt import PromptLike
from kvboost.server.heap import Heap
from kvboost.server.job import Cancelled, Choice, Job, Ticket
from kvboost.server.limits import Limits
from kvboost.server.misses import misses
from kvboost.server.queue import FairQueue
from kvboost.server.turns import Turns
from kvboost.server.work import BusyError, DeadlineError, Done, Load, Served, Tenant, Work

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Scheduler:
    """One worker thread, which does everything that needs the model."""

    def __init__(
        self, boost: KVBoost, limits: Limits, observe: Callable[[Served], None] = lambda _: None
    ) -> None:
        """observe: told of each request once it is over, in the worker thread."""
        self.boost, self.limits = boost, limits
        self._observe = observe
        self._views: dict[Tenant, KVBoost] = {}
        self._waiting: FairQueue[Job] = FairQueue()
        self._running: list[Job] = []
        self._turns = Turns(self._between, lambda: bool(self._running), lambda: len(self._waiting))
        self._starting: Job | None = None
        self._heap = Heap()
        self._usual = 1.0  # seconds that a request takes, smoothed
        self._tokenizing = threading.Lock()
        self._longest = max(16, *map(len, boost.tokenizer.get_vocab()))  # characters of a token
        self._changed = threading.Condition()
        self._closing: float | None = None  # when what is left is cancelled
        self._thread = threading.Thread(target=self._work, name="kvboost-scheduler", daemon=True)
        self._thread.start()

    # -- from the event loop

    async def submit(self, work: Work) -> Ticket:
        """Tokenise and queue. Raises PromptError or ConfigError for what can't be answered,
        BusyError when the queue is full or the server is stopping."""
        self._refuse_if_busy()
        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        job = await asyncio.to_thread(self._prepare, work, started, loop)
        with self._changed:
            self._refuse_if_busy()
            job.open()
            self._waiting.put(work.tenant.name, job)
            self._changed.notify()
        return Ticket(job)

    def view(self, tenant: Tenant) -> KVBoost:
        """The same model and store as that tenant sees them."""
        if tenant not in self._views:
            self._views[tenant] = view = self.boost.scoped(tenant.namespace, tenant.shared)
            view._engine.pauses = self._turns
        return self._views[tenant]

    def load(self) -> Load:
        running = sum(len(job.live) for job in list(self._running))
        return Load(len(self._waiting), running, self.limits.slots)

    @property
    def alive(self) -> bool:
        """Whether the worker runs and takes requests."""
        return self._thread.is_alive() and self._closing is None

    def close(self, drain: float) -> None:
        """Take no more requests, give those in hand so many seconds, cancel what is left, stop."""
        with self._changed:
            self._closing = min(time.monotonic() + drain, self._closing or inf)
            self._changed.notify()
        self._thread.join(drain + 30.0)

    def _refuse_if_busy(self) -> None:
        if not self.alive:
            raise BusyError("the server is shutting down: try again in a moment", 5.0)
        if (ahead := len(self._waiting)) >= self.limits.queue:
            wait = max(1.0, self._usual * ahead / self.limits.slots)
            raise BusyError(f"{ahead} requests are waiting already: try again later", wait)

    def _prepare(self, work: Work, started: float, loop: asyncio.AbstractEventLoop) -> Job:
        view = self.view(work.tenant)
        window = view._engine.runner.support.max_tokens
        if window is not None and _characters(work.prompt) > window * self._longest:
            raise PromptTooLongError(
                f"the prompt is far over the model's window of {window} tokens: shorten it"
            )
        with self._tokenizing:  # tokenizers that are used by two threads refuse
            return Job.of(work, view, started, loop, self.limits)

    # -- in the worker

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._running and self._closing is None:
                    self._changed.wait()
            if self._closing is not None and self._end_of_drain(self._closing):
                return
            self._drop_late()
            if job := self._waiting.take(self._fits):
                self._start(job)
            self._step()
            self._heap.tidy()

    def _fits(self, job: Job) -> bool:
        """Whether there are slots enough for its answers."""
        return sum(len(other.live) for other in self._running) + job.slots <= self.limits.slots

    def _end_of_drain(self, end: float) -> bool:
        """Whether nothing is left to do. After the end what is left is cancelled."""
        if time.monotonic() > end:
            for job in [*self._waiting.drain(), *self._running]:
                self._fail(job, BusyError("the server is shutting down", 5.0))
        return not self._waiting and not self._running

    def _drop_late(self) -> None:
        """End what nobody waits for any more, or what has taken too long."""
        for job in [*self._waiting, *self._running]:
            if error := job.overdue():
                self._waiting.discard(job)
                self._fail(job, error)

    def _between(self) -> None:
        """Between two passes of a prefill."""
        if self._starting is not None and (error := self._starting.overdue()):
            raise error
        if self._closing is not None and time.monotonic() > self._closing:
            raise BusyError("the server is shutting down", 5.0)
        self._step()

    def _start(self, job: Job) -> None:
        """Prefill a request, or take over the KV of one like it that is being answered."""
        self._starting = job
        job.queued = job.clock.lap("queue")
        try:
            twin = next((other for other in self._running if other.key == job.key), None)
            job.begin(twin.first if twin else None)
            job.misses = misses(job.view._engine, job.first.prefilled, job.options[0].reuse)
            self._running.append(job)
            for choice in job.live:
                self._take(job, choice, job.first.prefilled.logits)
            if job in self._running:
                self._guarded(job, partial(job.view.store, job.first))
                self._end_if_over(job)
        except Exception as error:  # noqa: BLE001 - of one request; the others go on
            self._fail(job, error)
        finally:
            self._starting = None

    @torch.inference_mode()
    def _step(self) -> None:
        """The next token of every answer in the making."""
        self._drop_late()
        live = [(job, choice) for job in self._running for choice in job.live]
        if not live:
            return
        requests = [(choice.made.prefilled, choice.made.ids) for _, choice in live]
        try:
            with self._turns.step():
                logits = self.boost._engine.steps(requests)
        except Exception:  # noqa: BLE001 - whose it is shows when each runs alone
            _log.exception("a batched step failed: going on one by one")
            self._step_alone(live)
            return
        for n, (job, choice) in enumerate(live):
            self._take(job, choice, logits[n : n + 1])
        for job in {id(job): job for job, _ in live}.values():
            self._end_if_over(job)

    def _step_alone(self, live: list[tuple[Job, Choice]]) -> None:
        for job, choice in live:
            if job in self._running:
                made = choice.made
                step = partial(self.boost._engine.step, made.prefilled, made.ids)
                logits = self._guarded(job, step)
                if logits is not None:
                    self._take(job, choice, logits)
                    self._end_if_over(job)

    def _take(self, job: Job, choice: Choice, logits: torch.Tensor) -> None:
        self._guarded(job, partial(choice.take, logits, job))

    def _guarded(self, job: Job, do: Callable[[], T]) -> T | None:
        """Do something for one request; if that fails, so does the request."""
        try:
            return do()
        except Exception as error:  # noqa: BLE001 - of one request; the others go on
            self._fail(job, error)
            return None

    def _end_if_over(self, job: Job) -> None:
        if job in self._running and not job.live:
            self._guarded(job, job.finish)
            if job in self._running:
                self._running.remove(job)
                self._over(job, "done", "")
                job.tell(Done(job.usage, job.timing, job.is_pinned))

    def _fail(self, job: Job, error: Exception) -> None:
        """End a request. What was computed of it is stored, unless the fault may be there."""
        if job in self._running:
            self._running.remove(job)
        gone = isinstance(error, Cancelled | DeadlineError | BusyError)
        if gone and job.choices:
            try:
                job.finish()
            except Exception:  # noqa: BLE001 - the request is over anyway
                _log.exception("request %s could not be stored", job.work.id)
        outcome = {Cancelled: "cancelled", DeadlineError: "deadline"}.get(type(error), "failed")
        if not isinstance(error, KVBoostError | Cancelled):
            _log.error("request %s failed", job.work.id, exc_info=error)
        self._over(job, outcome, type(error).__name__)
        job.tell(error)

    def _over(self, job: Job, outcome: str, error: str) -> None:
        self._usual += 0.2 * (job.clock.elapsed() - self._usual)
        job.close()
        try:
            self._observe(job.served(outcome, error))
        except Exception:  # noqa: BLE001 - watching must not stop the work
            _log.exception("could not record request %s", job.work.id)


def _characters(prompt: PromptLike) -> int:
    """Of a prompt's text; tokenising millions of them keeps others waiting."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(str(m.get("content", ""))) for m in prompt if isinstance(m, Mapping))
