"""What the status page is told: the newest requests, the queue, the store. Never a prompt."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import kvboost
from kvboost.boost import Stats
from kvboost.server.places import places
from kvboost.server.work import Load, Served

KEPT = 2000
"""Requests that the page can look back on."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why tokens were computed, and what whoever runs the server or asks it can do about that."""

    what: str
    advice: str


REASONS: Mapping[str, Reason] = {
    "new": Reason(
        "Nothing like it is stored.",
        "Expected for new text. If it was sent before, POST /v1/cache/explain shows where it "
        "differs: mostly a date or an id near the top, or tools and JSON keys in another order.",
    ),
    "little": Reason(
        "Some of it is stored, but so little that using it would cost more than it saves.",
        "Nothing to do. Prompts gain from sharing at least a sixth of their text.",
    ),
    "short": Reason(
        "Known only in pieces of a few tokens, which cost as much to repair as to compute.",
        "Send shared text as whole documents, unchanged, rather than in fragments.",
    ),
    "sink": Reason(
        "Stands at the very beginning, and what is stored there differs. All later text leans on a "
        "prompt's first tokens, so these are never taken from elsewhere.",
        "Begin all prompts alike: the same system prompt, with what changes further down.",
    ),
    "off": Reason(
        "The request said reuse=off.",
        "Leave that out, or say reuse=exact if answers must not change by a bit.",
    ),
    "unmovable": Reason(
        "Known from another place, but may not be moved here: the request said reuse=exact, or the "
        "model's KV can't be moved.",
        "Keep what is shared at the beginning and in the same order, or allow reuse=auto.",
    ),
}


class History:
    """The newest requests, numbered from 1. Safe to use from several threads."""

    def __init__(self) -> None:
        self.started = time.time()
        self._lock = threading.Lock()
        self._newest: deque[dict[str, object]] = deque(maxlen=KEPT)
        self._count = self._refused = 0

    def add(self, served: Served) -> None:
        row = {
            "at": time.time(),
            "id": served.id,
            "tenant": served.tenant,
            "outcome": served.outcome,
            "prompt": served.prompt,
            "usage": asdict(served.usage),
            "queued": served.queued,
            "ttft": served.ttft,
            "total": served.seconds,
            "policy": served.policy,
            "exact": served.exact,
            "misses": dict(served.misses),
        }
        with self._lock:
            self._count += 1
            self._newest.append({"number": self._count, **row})

    def refuse(self) -> None:
        with self._lock:
            self._refused += 1

    def since(self, after: int) -> dict[str, object]:
        """How many there were, and those of the newest that have a higher number."""
        with self._lock:
            unseen = min(max(0, self._count - after), len(self._newest))
            rows = list(self._newest)[len(self._newest) - unseen :]
            return {"served": self._count, "refused": self._refused, "requests": rows}


def status(stats: Stats, load: Load, history: History, after: int) -> dict[str, object]:
    """`after`: the number of the last request that the page knows."""
    return {
        "version": kvboost.__version__,
        "started": history.started,
        "now": time.time(),
        "about": {
            name: getattr(stats, name)
            for name in ("dtype", "device", "kv_format", "reuse", "repairs", "fingerprint")
        },
        "load": asdict(load),
        "places": [asdict(place) for place in places(stats)],
        "upgraded": stats.upgraded,
        "upgrade_waiting": stats.waiting,
        "reasons": {name: asdict(reason) for name, reason in REASONS.items()},
        **history.since(after),
    }
