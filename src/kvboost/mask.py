"""The one place that builds attention masks: row i sees positions <= i, within its window."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def causal_mask(rows: Tensor, length: int, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """Additive mask `[1, 1, rows, length]`: 0 where a row may look, the dtype's minimum elsewhere.

    Additive because a boolean mask is silently wrong under eager attention. With `window`, a row
    sees itself and the `window - 1` positions before it.
    """
    keys = torch.arange(length, device=rows.device)
    seen = keys <= rows[:, None]
    if window is not None:
        seen &= keys > rows[:, None] - window
    mask = torch.zeros(seen.shape, dtype=dtype, device=rows.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[None, None]


def layer_masks(
    rows: Tensor, length: int, dtype: torch.dtype, windows: Mapping[str, int | None]
) -> Tensor | dict[str, Tensor]:
    """What a model takes: one mask, or one for each kind of layer where kinds are mixed.

    `windows`: the sliding window of each kind, None for full attention.
    """
    masks = {kind: causal_mask(rows, length, dtype, w) for kind, w in windows.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def step_masks(
    positions: Tensor, length: int, dtype: torch.dtype, windows: Mapping[str, int | None]
) -> Tensor | dict[str, Tensor | None] | None:
    """For one token each of several requests, at `positions` `[B, 1]`: `[B, 1, 1, length]`, which
    hides what is out of its window. None where there is nothing to hide: each request attends to
    its own tokens only."""

    def mask(window: int | None) -> Tensor | None:
        if window is None or length <= window:
            return None
        return causal_mask(positions[:, 0], length, dtype, window).transpose(0, 2)

    masks = {kind: mask(window) for kind, window in windows.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))
