"""Where the time goes: TTFT from token counts, and the least that the machine could take.

The model of cost is one for all systems of ours: what a request's passes and its reused tokens
cost. It is fitted on every other request and tested on the rest. Plain transformers may attend in
another way, at another cost.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from kvboost.bench.record import Record
from kvboost.boost import KVBoost

TERMS = ("prompt token", "pass", "row", "row and token seen", "reused token")


@dataclass(frozen=True)
class CostModel:
    """Seconds of each of TERMS, and the error on requests that it was not fitted on: share of the
    measured time, median and 90th percentile."""

    seconds: tuple[float, ...]
    median_error: float
    p90_error: float
    n: int


def fit(records: Sequence[Record]) -> CostModel | None:
    """Least squares of relative errors, no term below 0; None for too few requests."""
    used = [record for record in records if record.passes and record.system != "plain"]
    even = [record for record in used if record.place % 2 == 0]
    odd = [record for record in used if record.place % 2]
    if min(len(even), len(odd)) < 2 * len(TERMS):
        return None
    seconds = _non_negative(_terms(even) / _ttfts(even)[:, None])
    errors = np.abs(_terms(odd) @ seconds / _ttfts(odd) - 1)
    median, p90 = np.percentile(errors, (50, 90))
    return CostModel(tuple(seconds.tolist()), float(median), float(p90), len(odd))


def _ttfts(records: Sequence[Record]) -> Any:
    return np.array([record.ttft for record in records])


def _terms(records: Sequence[Record]) -> Any:
    """A pass through some of the layers counts for that share of a pass."""
    rows = []
    for record in records:
        depth = max(layers for _, layers in record.passes)
        passes = sum(layers / depth for _, layers in record.passes)
        computed = sum(r * layers / depth for r, layers in record.passes)
        seen = computed * record.prompt
        reused = record.exact + record.moved + record.recomputed
        rows.append((record.prompt, passes, computed, seen, reused))
    return np.array(rows, dtype=np.float64)


def _non_negative(terms: Any) -> Any:
    """x with |terms @ x - 1| least, leaving out one by one the terms that would be below 0."""
    kept, x = list(range(terms.shape[1])), np.zeros(terms.shape[1])
    scale = np.abs(terms).max(0).clip(1e-30)
    while kept:
        found = np.linalg.lstsq((terms / scale)[:, kept], np.ones(len(terms)), rcond=None)[0]
        if found.min() >= 0:
            x[kept] = found / scale[kept]
            break
        kept.pop(int(found.argmin()))
    return x


@dataclass(frozen=True)
class Floor:
    """What bounds this machine on this model. flops: of a matrix product in the model's dtype and
    shapes, a second. bandwidth: bytes that a copy moves a second, read and written."""

    flops: float
    bandwidth: float
    parameters: int
    weight_bytes: int
    kv_bytes: int

    def seconds(self, record: Record) -> float:
        """The least that a request's passes and the copy of its reused KV take: a pass computes
        its rows or reads the weights, whichever takes longer."""
        depth = max((layers for _, layers in record.passes), default=1)
        reads = self.weight_bytes / self.bandwidth
        passes = sum(
            layers / depth * max(2 * self.parameters * rows / self.flops, reads)
            for rows, layers in record.passes
        )
        reused = record.exact + record.moved + record.recomputed
        return passes + 2 * reused * self.kv_bytes / self.bandwidth


def over_floor(records: Sequence[Record], floor: Floor) -> float | None:
    """TTFT over the least it could take, median; None if passes are not known of any."""
    over = [record.ttft / floor.seconds(record) for record in records if record.passes]
    return statistics.median(over) if over else None


def floor(boost: KVBoost) -> Floor:
    """Measures the machine: some two seconds on two cores."""
    layout = boost._engine.runner.layout
    head = boost.model.get_output_embeddings()
    linear = [m for m in boost.model.modules() if isinstance(m, nn.Linear) and m is not head]
    widest = max(linear, key=lambda m: m.weight.numel()).weight
    rows = torch.randn(512, widest.shape[1], dtype=layout.dtype, device=layout.device)
    seconds = _best(lambda: rows @ widest.T)
    many = torch.zeros(1 << 27, dtype=torch.uint8, device=layout.device)
    other = torch.empty_like(many)
    parameters = sum(m.weight.numel() for m in linear)
    return Floor(
        flops=2 * rows.shape[0] * widest.numel() / seconds,
        bandwidth=2 * many.numel() / _best(lambda: other.copy_(many)),
        parameters=parameters,
        weight_bytes=parameters * layout.dtype.itemsize,
        kv_bytes=layout.bytes_per_token,
    )


@torch.inference_mode()
def _best(work: Callable[[], object]) -> float:
    """Seconds, the least of twenty."""
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
