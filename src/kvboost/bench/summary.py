"""What a run found: one summary for each workload and system, donors left out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from kvboost.bench.record import Record
from kvboost.bench.stats import (
    Interval,
    difference,
    median_ratio,
    percentile,
    ratio_of_means,
    sign_flip,
)

COLD = 0.1
"""A request is cold if no system had this share of its prompt."""


@dataclass(frozen=True)
class Summary:
    """One system on one workload.

    faster, faster_than_exact: mean TTFT of plain transformers, or of prefix caching, over this
    one's; warm: the same over plain's, without cold requests; median: of the single ratios over
    plain's. better: accuracy less plain's. None where there is nothing to compare.
    """

    system: str
    records: Sequence[Record]
    faster: Interval | None
    faster_than_exact: Interval | None
    warm: Interval | None
    median: Interval | None
    accuracy: float | None
    better: Interval | None

    def mean(self, of: Callable[[Record], float]) -> float:
        return statistics.mean(map(of, self.records))

    def ttft(self, share: float) -> float:
        """A percentile."""
        return percentile([record.ttft for record in self.records], share)

    @property
    def kl(self) -> list[float]:
        """Of each request; empty if the system hides its logits."""
        return [record.kl_mean for record in self.records if record.kl_mean is not None]

    def share(self, of: Callable[[Record], bool | float | None]) -> float | None:
        """The mean over the requests where it is known."""
        known = [float(value) for value in map(of, self.records) if value is not None]
        return statistics.mean(known) if known else None


Places = dict[int, Record]


def summarise(records: Sequence[Record]) -> list[Summary]:
    """Of one workload."""
    by: dict[str, Places] = {}
    for record in records:
        if not record.donor and not record.failed:
            by.setdefault(record.system, {})[record.place] = record
    warm = {p for places in by.values() for p, record in places.items() if record.reused >= COLD}
    return [_summary(name, by, warm) for name in by]


def _summary(name: str, by: Mapping[str, Places], warm: set[int]) -> Summary:
    own, plain, exact = by[name], by["plain"], by.get("exact", {})
    times = {place: (plain[place].ttft, record.ttft) for place, record in own.items()}
    cached = [(exact[p].ttft, own[p].ttft) for p in own if p in exact and name != "exact"]
    right = [
        (float(bool(own[p].right)), float(bool(plain[p].right)))
        for p in own
        if own[p].right is not None
    ]
    if name == "plain":
        times = {}
    return Summary(
        system=name,
        records=list(own.values()),
        faster=_of(ratio_of_means, list(times.values())),
        faster_than_exact=_of(ratio_of_means, cached),
        warm=_of(ratio_of_means, [pair for place, pair in times.items() if place in warm]),
        median=_of(median_ratio, list(times.values())),
        accuracy=statistics.mean(a for a, _ in right) if right else None,
        better=_of(difference, right) if times else None,
    )


Pairs = Sequence[tuple[float, float]]


def _of(statistic: Callable[[Pairs], Interval], pairs: Pairs) -> Interval | None:
    return statistic(pairs) if pairs else None


@dataclass(frozen=True)
class Test:
    """Mean KL of two systems on the same requests, and how likely so large a difference is if they
    are the same."""

    one: str
    other: str
    kl: tuple[float, float]
    p: float
    n: int


def kl_tests(summaries: Sequence[Summary], least: int = 6) -> list[Test]:
    """Each two systems that use moved KV; none with fewer than `least` requests."""
    kl = {
        s.system: {r.place: r.kl_mean for r in s.records if r.kl_mean is not None}
        for s in summaries
        if any(record.moved for record in s.records)
    }
    tests = []
    for one, other in combinations(kl, 2):
        pairs = [(kl[one][p], kl[other][p]) for p in kl[one] if p in kl[other]]
        if len(pairs) >= least:
            means = tuple(statistics.mean(column) for column in zip(*pairs, strict=True))
            tests.append(Test(one, other, (means[0], means[1]), sign_flip(pairs), len(pairs)))
    return tests
