"""Doubles of what the server's observability looks at, and made-up requests."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from kvboost.boost import Stats
from kvboost.server.work import Load, Served
from kvboost.store import StoreStats, TierStats
from kvboost.types import Timing, Usage

MIB = 1 << 20
IDLE = Load(0, 0, 8)
OUTCOMES = ("done", "cancelled", "deadline", "failed")


class FakeScheduler:
    def __init__(self, load: Load = IDLE) -> None:
        self.now = load

    def load(self) -> Load:
        return self.now


class FakeBoost:
    """Has the statistics that it is given, and counts how often it was asked."""

    def __init__(self, *tiers: TierStats, **changes: Any) -> None:
        self.asked = 0
        store = StoreStats(840, 61000, 1400 * MIB, 4096 * MIB, 900, 60, 2)
        self.now = Stats(
            dtype="bfloat16",
            device="cpu",
            fingerprint="0d1f2e",
            reuse="anywhere",
            repairs="measured on this model",
            requests=0,
            kv_format="k8v4",
            tokens=Usage(),
            store=store,
            tiers=tiers,
            upgraded=5200,
            waiting=310,
        )
        self.now = replace(self.now, **changes)

    def stats(self) -> Stats:
        self.asked += 1
        return self.now


def disk(**changes: Any) -> TierStats:
    plain = TierStats(
        name="disk",
        up=True,
        entries=3100,
        bytes=6200 * MIB,
        max_bytes=20480 * MIB,
        hits=420,
        misses=3,
        flaws={"torn": 1},
        written=3100,
        refused=4,
        dropped=0,
        outages=0,
        slow=2,
        latency=0.0004,
        bandwidth=1.2e9,
    )
    return replace(plain, **changes)


def server(**changes: Any) -> TierStats:
    unknown: dict[str, Any] = {"entries": None, "bytes": None, "max_bytes": None}
    return disk(name="valkey", **unknown | changes)


def served(**changes: Any) -> Served:
    """A request that found half of its prompt, and was answered."""
    plain = Served(
        id="req-1",
        tenant="library",
        outcome="done",
        prompt=1000,
        queued=0.02,
        ttft=0.12,
        usage=Usage(exact=300, moved=500, recomputed=60, computed=140, generated=3),
        timing=Timing(ttft=0.12, lookup=0.01, probe=0.02, forward=0.06, decode=0.1),
        seconds=0.25,
        policy="auto",
        exact=False,
        misses={"new": 130, "short": 9},
        gaps=(0.05, 0.05),
    )
    return replace(plain, **changes)


def script(n: int) -> list[Served]:
    """Requests as a day brings them; always the same."""
    chance = random.Random(5)
    made = []
    for number in range(n):
        prompt = chance.randrange(200, 4000)
        cold = chance.random() < 0.25
        exact, moved = (0, 0) if cold else (prompt // 3, chance.randrange(prompt // 2))
        repaired = moved // 9
        computed = prompt - exact - moved - repaired
        generated = chance.randrange(5, 200)
        ttft = 0.02 + computed * 4e-4 + chance.random() * 0.03
        made.append(
            served(
                id=f"chatcmpl-{chance.getrandbits(64):016x}",
                tenant=chance.choice(("library", "helpdesk", "agents")),
                outcome=chance.choices(OUTCOMES, (40, 2, 1, 1))[0],
                prompt=prompt,
                queued=chance.random() * 0.2 if number % 5 == 0 else 0.001,
                ttft=ttft,
                usage=Usage(exact, moved, repaired, computed, generated),
                timing=Timing(ttft=ttft),
                seconds=ttft + generated * 0.03,
                policy="auto" if moved else "none",
                exact=not moved,
                misses={chance.choice(("new", "sink", "short", "unmovable")): computed},
            )
        )
    return made
