"""Means, ratios and differences with their intervals, from paired measurements.

Intervals are 95 % percentile bootstraps over requests, 2,000 of them; the same numbers in give the
same numbers out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
_DRAWS = 2000
_FLIPS = 10_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A value, and the ends of its 95 % bootstrap interval, from n requests."""

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio_of_means(pairs: Sequence[tuple[float, float]]) -> Interval:
    """Of all time spent: the mean of the first over the mean of the second."""
    return _interval(pairs, lambda a, b: a.mean(-1) / b.mean(-1))


def median_ratio(pairs: Sequence[tuple[float, float]]) -> Interval:
    """The median of the pairs' own ratios."""
    return _interval(pairs, lambda a, b: np.median(a / b, -1))


def difference(pairs: Sequence[tuple[float, float]]) -> Interval:
    """The mean of the first less the mean of the second."""
    return _interval(pairs, lambda a, b: (a - b).mean(-1))


def _interval(
    pairs: Sequence[tuple[float, float]], of: Callable[[Numbers, Numbers], Numbers]
) -> Interval:
    """`of` works along the last axis."""
    both = np.array(pairs, dtype=np.float64)
    drawn = np.random.default_rng(0).integers(len(both), size=(_DRAWS, len(both)))
    low, high = np.percentile(of(both[drawn, 0], both[drawn, 1]), (2.5, 97.5))
    return Interval(float(of(both[:, 0], both[:, 1])), float(low), float(high), len(both))


def sign_flip(pairs: Sequence[tuple[float, float]]) -> float:
    """How likely a mean difference as large as this is if the two were the same (two-sided)."""
    apart = np.array([a - b for a, b in pairs], dtype=np.float64)
    signs = np.random.default_rng(0).choice((-1.0, 1.0), size=(_FLIPS, len(apart)))
    as_large = np.abs((signs * apart).mean(-1)) >= abs(apart.mean()) * (1 - 1e-9)
    return float((1 + as_large.sum()) / (1 + _FLIPS))


def percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(values, 100 * share))
