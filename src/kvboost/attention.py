"""Attention by matrix products: on a CPU faster than torch's own, which is written for few keys.

Knows tensors, nothing of models. Shapes: H kv heads, G query heads that share one, R rows, T
positions, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_SCORES = 2**21
"""How many are computed at a time, so that they stay in the processor's cache."""

_FEWEST, _MOST = 16, 128
"""Rows that attend together, to the positions that the first to the last of them may see."""

_EVEN = 128
"""Positions by which products grow: each shape has a kernel of its own, made when it is met."""

_APART = 8
"""From one to the next of the keys that tell how large a row's scores are."""


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Softmax attention, `[1, R, H * G, D]`. q `[1, H * G, R, D]`, k and v `[1, H, T, D]`, mask
    `[1, 1, R, T]` additive: rows are in order, and see what is before them or the last of it.

    Scores are rounded to the dtype of q. So they are taken from about a row's largest, as a sample
    of keys tells: those that count are small then, and rounding spares them (docs/adr/0013).
    """
    heads, length, rows = k.shape[1], k.shape[2], q.shape[2]
    group = q.shape[1] // heads
    asked = q[0].view(heads, group, rows, -1).transpose(1, 2).flatten(1, 2)
    keys, values, mask_RT = k[0].transpose(1, 2), v[0], mask[0, 0]
    about = torch.bmm(asked, keys[:, :, ::_APART]).amax(-1, keepdim=True) * scaling
    out = asked.new_empty(heads, rows * group, v.shape[3])
    together = min(max(_SCORES // (q.shape[1] * length), _FEWEST), _MOST)
    blocks = [range(n, min(n + together, rows)) for n in range(0, rows, together)]
    for block, (start, end) in zip(blocks, _spans(mask_RT, blocks), strict=True):
        part = slice(block.start * group, block.stop * group)
        hidden = mask_RT[block.start : block.stop, start:end].repeat_interleave(group, 0)
        scores = hidden - about[:, part]
        scores.baddbmm_(asked[:, part], keys[:, :, start:end], alpha=scaling)
        torch.softmax(scores, -1, out=scores)
        torch.bmm(scores, values[:, start:end], out=out[:, part])
    return out.view(heads, rows, group, -1).transpose(0, 1).flatten(1, 2).contiguous()[None]


def _spans(mask_RT: Tensor, blocks: Sequence[range]) -> Iterator[tuple[int, int]]:
    """Of each block the positions [start, end) that its rows see, and a few more."""
    length = mask_RT.shape[1]
    seen_first = mask_RT[[block[0] for block in blocks]] == 0
    seen_last = mask_RT[[block[-1] for block in blocks]] == 0
    starts = seen_first.int().argmax(1).tolist()
    behind = seen_last.flip(1).int().argmax(1).tolist()
    for start, rest in zip(starts, behind, strict=True):
        yield start // _EVEN * _EVEN, min(-(-(length - rest) // _EVEN) * _EVEN, length)
