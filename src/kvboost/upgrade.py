"""While nobody asks: computes exactly what was answered on approximate KV, so that the next turn
of the conversation finds an exact prefix.

Requests come first: one that arrives waits for the block in hand, no longer. Knows an engine and
token ids, nothing of text.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch

from kvboost.engine import Engine, Prefilled
from kvboost.fingerprint import weights_version
from kvboost.metrics import Stopwatch
from kvboost.model import PreTrainedModel
from kvboost.plan import ReusePlan
from kvboost.prompt import Prompt
from kvboost.store import place_run
from kvboost.types import Completion, Usage

_log = logging.getLogger(__name__)

_QUIET = 0.2
"""Seconds without a request before anything is computed."""

_BLOCK, _LEAST, _MOST = 0.1, 16, 512
"""Seconds that a block is meant to take, and limits of its rows."""


class Traffic:
    """The requests in hand at one model, made to any KVBoost around it."""

    def __init__(self) -> None:
        self.open: set[object] = set()  # needs no lock: the collector may end a request anywhere
        self._last = 0.0

    @contextmanager
    def request(self) -> Iterator[None]:
        mine = object()
        self.open.add(mine)
        try:
            yield
        finally:
            self._last = time.monotonic()
            self.open.discard(mine)

    def during(self, steps: Generator[str, None, Completion]) -> Generator[str, None, Completion]:
        """The same steps, as one request."""
        with self.request():
            return (yield from steps)

    def quiet(self) -> bool:
        return not self.open and time.monotonic() > self._last + _QUIET


_traffic: WeakKeyDictionary[PreTrainedModel, Traffic] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A prompt with its answer, its first `asked` tokens the prompt; `missing` of them not exact.
    engine: a copy, with the fingerprint that goes with `weights`, and without a trace."""

    engine: Engine
    weights: int
    prompt: Prompt
    asked: int
    missing: int


class Upgrades:
    """Prompts that wait to be computed exactly, newest first, and the thread that does it.

    The oldest are dropped beyond `budget` seconds of computing. Without a budget, no thread.
    """

    def __init__(self, model: PreTrainedModel, budget: float) -> None:
        self.tokens = 0
        self.traffic = _traffic.setdefault(model, Traffic())
        self._budget, self._rows = budget, _LEAST
        self._jobs: list[_Job] = []
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="kvboost-upgrade", daemon=True)
        if budget:
            self._thread.start()

    @property
    def waiting(self) -> int:
        """Tokens that are not exact yet."""
        return sum(job.missing for job in self._jobs)

    def add(self, engine: Engine, prefilled: Prefilled, ids: Sequence[int], weights: int) -> None:
        """A request of this engine is over, and `ids` are its tokens. Nothing is to do if exact,
        or so long that its rotation is its own: blocks would not compute what one pass does."""
        prompt, until = prefilled.prompt, prefilled.exact_until
        regime = engine.runner.support.regime(len(ids))
        if until == len(prompt.ids) or regime != "":
            return
        engine = copy(engine)
        engine.trace = engine.pauses = None
        whole = Prompt(tuple(ids), prompt.borders)
        new = _Job(engine, weights, whole, len(prompt.ids), len(ids) - until)
        with self._lock:
            # A conversation's next turn makes the one before it unnecessary.
            jobs = [
                new,
                *(j for j in self._jobs if whole.ids[: j.asked] != j.prompt.ids[: j.asked]),
            ]
            costs = accumulate(engine.seconds(j.missing) for j in jobs)
            self._jobs = [j for j, cost in zip(jobs, costs, strict=True) if cost <= self._budget]

    def wait(self, seconds: float) -> bool:
        """Until nothing waits; False if that takes longer."""
        end = time.monotonic() + seconds
        while self._jobs and time.monotonic() < end:
            time.sleep(0.01)
        return not self._jobs

    def clear(self) -> None:
        """Drop what waits; of what is being computed nothing more is stored."""
        with self._lock:
            self._jobs = []

    def close(self) -> None:
        """Drop what waits, and end the thread after the block in hand."""
        self._budget = 0.0
        self._closed.set()
        self.clear()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(10.0)

    def _work(self) -> None:
        while not self._closed.wait(_QUIET / 4):
            job = next(iter(self._jobs), None)
            if job is None or not self.traffic.quiet():
                continue
            try:
                done = self._upgrade(job)
            except (RuntimeError, MemoryError, OSError) as error:  # the device's: full, or gone
                _log.warning("a prompt could not be computed while idle: %s", error)
                done = True
            if done:
                with self._lock:
                    self._jobs = [j for j in self._jobs if j is not job]

    @torch.inference_mode()
    def _upgrade(self, job: _Job) -> bool:
        """Compute a prompt block by block, and store the chunks that are complete under prefix
        keys. False if a request came between."""
        engine, runner, ids = job.engine, job.engine.runner, job.prompt.ids
        lookup = engine.lookup(job.prompt, "exact")
        while (stored := lookup.fetch(plan := lookup.plan())) is None:
            pass
        buffer = runner.new_buffer(len(ids))
        for splice, kvs in zip(plan.splices, stored, strict=True):
            place_run(splice, kvs, buffer)
        at = plan.exact_tokens
        while at < len(ids):
            rows = range(at, min(at + self._rows, len(ids)))
            with runner.lock:
                if not self.traffic.quiet():
                    return False
                clock = Stopwatch(runner.layout.device)
                logits = runner.forward(buffer, ids[: rows.stop], rows)
                took = clock.lap("forward")
            wanted = any(j is job for j in self._jobs)
            if not wanted or weights_version(runner.model) != job.weights:
                return True
            at = rows.stop
            self.tokens += len(rows)
            if len(rows) == self._rows:  # a short one says nothing of long ones
                self._rows = min(max(int(_BLOCK / took * len(rows)) // 16 * 16, _LEAST), _MOST)
            done = max((c.end for c in lookup.chunks if c.end <= at), default=0)
            part = Prompt(ids[:done], tuple(b for b in job.prompt.borders if b < done))
            plan = ReusePlan(done, ())
            made = Prefilled(part, buffer, logits, plan, done, Usage(), (), set(), None)
            engine.harvest(made, part.ids)
        return True
