"""KV tensors: a stored chunk's, and a request's buffer. Knows nothing of models or stores.

Shapes: L layers, H kv heads, T tokens, D head dim. Layers that differ in (H, D) form groups; a
tensor never mixes groups. Most models have one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvboost.rope import KeyShifter


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Model layers whose K and V have the same shape, and how their keys move."""

    layers: tuple[int, ...]
    heads: int
    k_dim: int
    v_dim: int
    shifter: KeyShifter


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What KV of one loaded model looks like."""

    groups: tuple[LayerGroup, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def layers(self) -> int:
        return sum(len(g.layers) for g in self.groups)

    @property
    def bytes_per_token(self) -> int:
        values = sum(len(g.layers) * g.heads * (g.k_dim + g.v_dim) for g in self.groups)
        return values * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ChunkKV:
    """Keys and values of one chunk, per group `[L, H, T, D]`, in the model's own dtype.

    Keys are as the model computed them, rotated for the position that the chunk's `Entry` names.
    So an exact hit is a copy, bit for bit, and a moved one is rotated once, by the difference
    (docs/adr/0002). Never written to after it is stored.
    """

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]

    @property
    def tokens(self) -> int:
        return self.k[0].shape[2]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.k, *self.v))


class KVBuffer:
    """Keys and values of one request, room for `capacity` tokens, in place from first to last."""

    def __init__(self, layout: KVLayout, capacity: int) -> None:
        def empty(group: LayerGroup, dim: int) -> Tensor:
            shape = (len(group.layers), group.heads, capacity, dim)
            return torch.empty(shape, dtype=layout.dtype, device=layout.device)

        self.layout = layout
        self.capacity = capacity
        self.k = [empty(g, g.k_dim) for g in layout.groups]
        self.v = [empty(g, g.v_dim) for g in layout.groups]
        self._at = {
            layer: (n, row)
            for n, g in enumerate(layout.groups)
            for row, layer in enumerate(g.layers)
        }

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views `[H, capacity, D]` of a model layer's keys and values."""
        group, row = self._at[layer]
        return self.k[group][row], self.v[group][row]

    def cut(self, start: int, end: int) -> ChunkKV:
        """A copy of tokens [start, end), to be stored."""
        return ChunkKV(
            tuple(k[:, :, start:end].clone() for k in self.k),
            tuple(v[:, :, start:end].clone() for v in self.v),
        )

    def copy(self, tokens: int, capacity: int) -> KVBuffer:
        """Another buffer with the first `tokens` of this one, and room for `capacity`."""
        other = KVBuffer(self.layout, capacity)
        for mine, theirs in zip((*self.k, *self.v), (*other.k, *other.v), strict=True):
            theirs[:, :, :tokens] = mine[:, :, :tokens]
        return other
