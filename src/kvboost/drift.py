"""What recomputed tokens tell about the moved ones around them.

KV that was moved among new neighbours is off, and neighbouring tokens are off by nearly the same:
on Qwen2.5-0.5B, one token in eight tells 70 to 85 % of the variance of what the keys of the others
lack in the deeper layers (docs/adr/0008). So where some tokens of a run are recomputed anyway,
what their keys and values changed by is added to the rest, weighed by distance, layer by layer.

Knows tensors and positions, nothing of models or policies. Shapes: H kv heads, T positions, R rows
of a pass, S of them samples, N positions of a span, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_REACH = 16.0
"""Tokens away from a sample at which it tells half as much."""

_DOUBT = 0.5
"""Weight of the moved KV as it is, against 1 for a sample at the same place."""

KEYS, VALUES = 1.0, 0.5
"""How much of the correction is taken: samples tell less of values than of keys (docs/adr/0008)."""


@dataclass(frozen=True, slots=True)
class Run:
    """Moved KV at positions [start, end), and those of them whose fresh KV tells of the others."""

    start: int
    end: int
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Patch:
    """One run's correction in one pass. take_S: where its samples are among the pass's rows."""

    span: slice
    take_S: Tensor
    rows_S: Tensor
    weights_NS: Tensor

    def spread(self, fresh_HRD: Tensor, buffer_HTD: Tensor, share: float) -> None:
        """Add to the span `share` of what the samples' fresh KV is away from the buffer's, weighed
        by distance."""
        change = fresh_HRD[:, self.take_S] - buffer_HTD[:, self.rows_S]
        weights = self.weights_NS.expand(len(change), -1, -1)
        span = buffer_HTD[:, self.span]
        span.copy_(torch.baddbmm(span, weights, change, alpha=share))


def patches(runs: Sequence[Run], rows: Sequence[int], after: int, like: Tensor) -> Iterator[Patch]:
    """The corrections of a pass over `rows`: of positions from `after` on to its last row.

    Passes that come one after the other correct each position once. like: dtype and device.
    """
    place = {row: i for i, row in enumerate(rows)}
    for run in runs:
        start, end = max(run.start, after), min(run.end, rows[-1] + 1)
        samples = [s for s in run.samples if start <= s < end and s in place]
        if not samples:
            continue
        at = torch.tensor(samples, device=like.device)
        distance = (torch.arange(start, end, device=like.device)[:, None] - at).abs()
        weights = 1 / (1 + distance / _REACH)
        weights /= weights.sum(1, keepdim=True) + _DOUBT
        take = torch.tensor([place[s] for s in samples], device=like.device)
        yield Patch(slice(start, end), take, at, weights.to(like.dtype))
