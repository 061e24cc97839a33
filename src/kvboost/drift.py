"""What recomputed tokens tell about the moved ones around them.

KV that was moved among new neighbours is off, and neighbouring tokens are off by nearly the same:
on Qwen2.5-0.5B, one token in eight tells 70 to 85 % of the variance of what the keys of the others
lack in the deeper layers (docs/adr/0008). So where some tokens of a run are recomputed anyway,
what their keys and values changed by is added to the rest, weighed by distance and by how many
tokens they speak for, layer by layer.

Knows tensors and positions, nothing of models or policies. Shapes: H kv heads, T positions, R rows
of a pass, S of them samples, N positions of a span, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_REACH, _NEIGHBOURS, _DOUBT = 48, 32, 16
"""In tokens: how far from a sample it tells a quarter as much; how many around it, up to the middle
between it and the next, it speaks for at most, so that a dense head does not outvote the few behind
it; the weight of the moved KV as it is. Measured in docs/adr/0015."""

_TOGETHER = 4
"""Runs that are corrected by one product, most of it zeros. Four of 540 tokens with 41 samples each
take .27 of the time of four products (2 cores, bf16)."""


@dataclass(frozen=True, slots=True)
class Run:
    """Moved KV at positions [start, end), and those of them whose fresh KV tells of the others."""

    start: int
    end: int
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Patch:
    """The correction of a few runs in one pass. take_S: where their samples are among the pass's
    rows."""

    span: slice
    take_S: Tensor
    rows_S: Tensor
    weights_NS: Tensor

    def spread(self, fresh_HRD: Tensor, buffer_HTD: Tensor) -> None:
        """Add to the span what the samples' fresh KV is away from the buffer's, weighed."""
        fresh, old = fresh_HRD.index_select(1, self.take_S), buffer_HTD.index_select(1, self.rows_S)
        weights = self.weights_NS.expand(len(fresh), -1, -1)
        buffer_HTD[:, self.span].baddbmm_(weights, fresh - old)


def patches(runs: Sequence[Run], rows: Sequence[int], after: int, like: Tensor) -> Iterator[Patch]:
    """The corrections of a pass over `rows`: of positions from `after` on to its last row.

    Passes that come one after the other correct each position once. like: dtype and device.
    """
    place = {row: i for i, row in enumerate(rows)}
    told = []
    for run in runs:
        start, end = max(run.start, after), min(run.end, rows[-1] + 1)
        if samples := tuple(s for s in run.samples if start <= s < end and s in place):
            told.append(Run(start, end, samples))
    for n in range(0, len(told), _TOGETHER):
        few = told[n : n + _TOGETHER]
        first, last = few[0].start, few[-1].end
        at = torch.tensor([s for run in few for s in run.samples], device=like.device)
        weights, done = torch.zeros(last - first, len(at), dtype=like.dtype, device=at.device), 0
        for run in few:
            columns = slice(done, done := done + len(run.samples))
            weights[run.start - first : run.end - first, columns] = _weights(run, at.device)
        take = torch.tensor([place[s] for run in few for s in run.samples], device=at.device)
        yield Patch(slice(first, last), take, at, weights)


def _weights(run: Run, device: torch.device) -> Tensor:
    """What each sample tells of each position of a run, `[N, S]`."""
    at = torch.tensor(run.samples, device=device)
    ends = torch.tensor([run.start - 1, *run.samples, run.end], device=device)
    around = ((ends[2:] - ends[:-2]) / 2).clamp(max=_NEIGHBOURS)
    distance = (torch.arange(run.start, run.end, device=device)[:, None] - at).abs()
    weights = around / (1 + distance / _REACH) ** 2
    return weights / (weights.sum(1, keepdim=True) + _DOUBT)
