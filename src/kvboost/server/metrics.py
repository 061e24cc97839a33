"""What the server counts: for Prometheus, and for the status page.

Knows sizes, times and names of tenants; nothing of prompts or answers. No label has values that a
client chooses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import fields

from fastapi import APIRouter, Request, Response
from fastapi.params import Depends
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder

from kvboost.boost import KVBoost, Stats
from kvboost.server.page import add_page
from kvboost.server.pull import Pulled
from kvboost.server.scheduler import Scheduler
from kvboost.server.status import REASONS, History, status
from kvboost.server.work import Served
from kvboost.types import Timing

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
_LONG = (*_SECONDS, 120.0, 300.0, 600.0)
_SHORT = (0.001, 0.002, 0.005, *_SECONDS[:9])
_ROWS = (0, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_CLASSES = ("exact", "moved", "recomputed", "computed")
_PHASES = tuple(f.name for f in fields(Timing) if f.name not in ("ttft", "total"))
_FRESH = 1.0
"""Seconds for which the store's numbers are not asked for again: a tier's server may be slow, and
many may watch the page."""


class Metrics:
    """Counts requests as they end; looks up everything else when asked."""

    def __init__(self, boost: KVBoost) -> None:
        self._boost = boost
        self._history = History()
        self._lock = threading.Lock()
        self._asked: tuple[float, Stats] | None = None
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter(
            "kvboost_requests",
            "Requests that ended: done, cancelled, deadline, failed",
            ["tenant", "outcome"],
            registry=registry,
        )
        self._refused = Counter(
            "kvboost_requests_refused",
            "Requests that were not taken, by HTTP status",
            ["status"],
            registry=registry,
        )
        self._prompt = Counter(
            "kvboost_prompt_tokens",
            "Prompt tokens: exact (reused), moved (reused), recomputed (repaired), computed",
            ["tenant", "class"],
            registry=registry,
        )
        self._generated = Counter(
            "kvboost_generated_tokens", "Tokens of answers", ["tenant"], registry=registry
        )
        self._missed = Counter(
            "kvboost_missed_tokens",
            "Prompt tokens that were computed, by why nothing stored was used",
            ["reason"],
            registry=registry,
        )
        self._phases = Counter(
            "kvboost_phase_seconds", "Time by what it went into", ["phase"], registry=registry
        )
        for reason in REASONS:
            self._missed.labels(reason)
        self._histograms(registry)

    def _histograms(self, registry: CollectorRegistry) -> None:
        self._ttft = Histogram(
            "kvboost_time_to_first_token_seconds",
            "From submission to the first token, by whether KV was reused",
            ["reused"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._queue = Histogram(
            "kvboost_request_queue_time_seconds",
            "Time that requests waited before they were taken up",
            buckets=_SHORT,
            registry=registry,
        )
        self._gap = Histogram(
            "kvboost_inter_token_latency_seconds",
            "Between successive tokens of an answer",
            buckets=_SHORT,
            registry=registry,
        )
        self._total = Histogram(
            "kvboost_e2e_request_latency_seconds",
            "From submission to the end, of requests that were done",
            buckets=_LONG,
            registry=registry,
        )
        self._repair = Histogram(
            "kvboost_repair_rows",
            "Prompt tokens recomputed per request that used moved KV",
            buckets=_ROWS,
            registry=registry,
        )

    def observe(self, served: Served) -> None:
        """A request is over. Fast, and safe to call from any thread."""
        usage, timing = served.usage, served.timing
        self._requests.labels(served.tenant, served.outcome).inc()
        for name in _CLASSES:
            self._prompt.labels(served.tenant, name).inc(getattr(usage, name))
        self._generated.labels(served.tenant).inc(usage.generated)
        for reason, tokens in served.misses.items():
            self._missed.labels(reason).inc(tokens)
        for phase in _PHASES:
            self._phases.labels(phase).inc(getattr(timing, phase))
        self._queue.observe(served.queued)
        if served.ttft is not None:
            reused = usage.prompt > usage.computed
            self._ttft.labels("yes" if reused else "no").observe(served.ttft)
        for gap in served.gaps:
            self._gap.observe(gap)
        if served.outcome == "done":
            self._total.observe(served.seconds)
        if usage.moved or usage.recomputed:
            self._repair.observe(usage.recomputed)
        self._history.add(served)

    def refused(self, status: int) -> None:
        """A request was not taken: bad, not allowed, too much."""
        self._refused.labels(str(status)).inc()
        self._history.refuse()

    def router(self, scheduler: Scheduler, guard: Sequence[Depends] = ()) -> APIRouter:
        """`/metrics`, the status page at `/`, and its numbers at `/status.json`.

        guard: dependencies of the two that tell numbers; the page itself tells nobody anything.
        To be called once.
        """
        self.registry.register(Pulled(self._stats, scheduler.load))
        router = APIRouter(include_in_schema=False)

        @router.get("/metrics", dependencies=guard)
        def metrics(request: Request) -> Response:
            encode, kind = choose_encoder(request.headers.get("accept", ""))
            return Response(encode(self.registry), headers={"Content-Type": kind})

        @router.get("/status.json", dependencies=guard)
        def numbers(response: Response, after: int = 0) -> dict[str, object]:
            response.headers["Cache-Control"] = "no-store"
            return status(self._stats(), scheduler.load(), self._history, after)

        add_page(router)
        return router

    def _stats(self) -> Stats:
        with self._lock:
            now = time.monotonic()
            if self._asked is None or now - self._asked[0] > _FRESH:
                self._asked = now, self._boost.stats()
            return self._asked[1]
