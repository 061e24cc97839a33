"""Moves rotated keys to other positions.

This module knows rotations, not models: which layer rotates how is found by the model's probe.
Shapes: L layers, H kv heads, T tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """How a layer rotates its keys: pairs of the first `2 * len(inv_freq)` dimensions.

    inv_freq: radians per position of each pair, float64, on the CPU. interleaved: pairs are
    (0, 1), (2, 3), ... (GPT-J style), else (0, n/2), (1, n/2 + 1), ... (Llama style).
    """

    inv_freq: Tensor
    interleaved: bool = False

    def shift(self, k_LHTD: Tensor, delta: int | Tensor, out_LHTD: Tensor) -> None:
        """Write keys moved by `delta` positions, all by one or each by its own `[T, 1]`, to `out`.

        Rotations add, so one rotation by the difference moves a key from its old position to its
        new one; a factor on cos and sin (YaRN) is already in the key and stays there. Angles in
        float64, arithmetic in float32, one rounding to the storage dtype.
        """
        n = 2 * len(self.inv_freq)
        angle = self.inv_freq * delta
        cos = angle.cos().to(k_LHTD.device, torch.float32)
        sin = angle.sin().to(k_LHTD.device, torch.float32)
        a, b = self._pairs(k_LHTD[..., :n].float())
        out_a, out_b = self._pairs(out_LHTD[..., :n])
        out_a.copy_(torch.addcmul(a * cos, b, sin, value=-1))
        out_b.copy_(torch.addcmul(b * cos, a, sin))
        out_LHTD[..., n:] = k_LHTD[..., n:]

    def _pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.interleaved:
            return x[..., ::2], x[..., 1::2]
        half = x.shape[-1] // 2
        return x[..., :half], x[..., half:]


class KeyShifter:
    """Moves keys of all layers of one KV buffer group.

    `rotations[l]` is layer l's rotation, or None for a layer without positions in its keys.
    """

    def __init__(self, rotations: Sequence[Rotation | None]) -> None:
        self._groups: list[tuple[Rotation | None, list[int] | slice]] = []
        for rotation in dict.fromkeys(rotations):
            layers = [i for i, r in enumerate(rotations) if r is rotation]
            whole = len(layers) == len(rotations)
            self._groups.append((rotation, slice(None) if whole else layers))

    def shift(self, k_LHTD: Tensor, delta: int | Tensor, out_LHTD: Tensor) -> None:
        """As `Rotation.shift`; a move of all by nothing is a plain copy."""
        if isinstance(delta, int) and delta == 0:
            out_LHTD.copy_(k_LHTD)
            return
        for rotation, layers in self._groups:
            for at in [layers] if isinstance(layers, slice) else [slice(i, i + 1) for i in layers]:
                if rotation is None:
                    out_LHTD[at] = k_LHTD[at]
                else:
                    rotation.shift(k_LHTD[at], delta, out_LHTD[at])
