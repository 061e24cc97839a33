"""Stored KV: quantised to a format, and placed in a request's buffer.

Knows nothing of bytes, tiers, budgets or models.
Shapes: L layers, H kv heads, T tokens, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from kvboost.config import KVFormat
from kvboost.kv import ChunkKV, KVBuffer, KVLayout
from kvboost.plan import Splice

SINK_TOKENS = 4
"""A prompt's first tokens are its attention sink: kept as the model made them in any format."""

MAX_TOKENS = 1 << 16
"""The longest chunk that can be read back."""


class _Scheme(NamedTuple):
    """Integers of `bits`; neighbours along `dim` share a scale, `size` of them at most."""

    bits: int
    dim: int
    size: int


# A key channel has a range of its own, most of it bias; a value's range is its token's.
_K8, _K4 = _Scheme(8, 2, MAX_TOKENS), _Scheme(4, 2, 32)
_V8, _V4 = _Scheme(8, 3, 32), _Scheme(4, 3, 32)
_SCHEMES = {"k8v8": (_K8, _V8), "k8v4": (_K8, _V4), "k4v4": (_K4, _V4)}


@dataclass(frozen=True, slots=True, eq=False)
class PackedKV:
    """One chunk's KV in a format. Never written to after it is made.

    Tokens [0, head) are as the model made them, their keys rotated for `position` on: tensors
    `k0`, `v0` of group 0, and so on. The others are quantised, their keys without rotation:
    `k0.q`, `k0.scale`, `k0.zero`, ...
    """

    fmt: KVFormat
    position: int
    tokens: int
    head: int
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, fmt: KVFormat, position: int, tokens: int, tensors: dict[str, Tensor]) -> Self:
        return cls(fmt, position, tokens, _head(position, tokens, fmt), tensors)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def to(self, device: torch.device) -> PackedKV:
        return replace(self, tensors={name: t.to(device) for name, t in self.tensors.items()})


Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def shapes(layout: KVLayout, position: int, tokens: int, fmt: KVFormat) -> Shapes:
    """Names, shapes and dtypes of the tensors that `encode` gives, in its order."""
    head = _head(position, tokens, fmt)
    found: Shapes = {}
    for n, group in enumerate(layout.groups):
        sizes = [(len(group.layers), group.heads, head, dim) for dim in (group.k_dim, group.v_dim)]
        if head:
            found |= {f"{x}{n}": (size, layout.dtype) for x, size in zip("kv", sizes, strict=True)}
        if head < tokens:
            for x, size, scheme in zip("kv", sizes, _SCHEMES[fmt], strict=True):
                whole = [*size[:2], tokens - head, size[3]]
                parts = whole.copy()
                parts[scheme.dim] = -(-parts[scheme.dim] // scheme.size)
                packed = whole if scheme.bits == 8 else [-(-math.prod(whole) // 2)]
                found[f"{x}{n}.q"] = tuple(packed), torch.uint8
                for name in ("scale", "zero"):
                    found[f"{x}{n}.{name}"] = tuple(parts), torch.bfloat16
    return found


def _head(position: int, tokens: int, fmt: KVFormat) -> int:
    """How many of a chunk's tokens are kept as they are."""
    return tokens if fmt == "raw" else min(max(SINK_TOKENS - position, 0), tokens)


def encode(kv: ChunkKV, layout: KVLayout, position: int, fmt: KVFormat) -> PackedKV:
    """Pack a chunk whose first token stood at `position`. Format raw shares kv's tensors."""
    tokens = kv.tokens
    head = _head(position, tokens, fmt)
    tensors: dict[str, Tensor] = {}
    for n, group in enumerate(layout.groups):
        if head:  # a view would keep the whole chunk alive
            tensors[f"k{n}"], tensors[f"v{n}"] = (
                x[n] if head == tokens else x[n][:, :, :head].clone() for x in (kv.k, kv.v)
            )
        if head < tokens:
            k, v = (torch.empty_like(x[n][:, :, head:], dtype=torch.float32) for x in (kv.k, kv.v))
            places = torch.arange(position + head, position + tokens)[:, None]
            group.shifter.shift(kv.k[n][:, :, head:], -places, k)
            v.copy_(kv.v[n][:, :, head:])
            for name, x, scheme in zip((f"k{n}", f"v{n}"), (k, v), _SCHEMES[fmt], strict=True):
                tensors |= _quantised(name, x, scheme)
    return PackedKV.of(fmt, position, tokens, tensors)


def place_run(splice: Splice, stored: Sequence[PackedKV], buffer: KVBuffer) -> None:
    """Write a splice's chunks to their places."""
    at = splice.start
    for piece, packed in zip(splice.pieces, stored, strict=True):
        place(packed, piece.lo, piece.hi, at, buffer)
        at += len(piece)


def place(packed: PackedKV, lo: int, hi: int, start: int, buffer: KVBuffer) -> None:
    """Write the chunk's tokens [lo, hi) to the buffer from position `start` on, keys rotated once
    to their new places. What is stored raw and did not move is copied bit for bit."""
    cut = min(max(packed.head, lo), hi)
    raw, rest = slice(0, cut - lo), slice(cut - lo, hi - lo)
    stored = slice(cut - packed.head, hi - packed.head)
    for n, group in enumerate(buffer.layout.groups):
        k_out, v_out = (x[n][:, :, start : start + hi - lo] for x in (buffer.k, buffer.v))
        if lo < cut:
            k, v = (packed.tensors[name][:, :, lo:cut] for name in (f"k{n}", f"v{n}"))
            group.shifter.shift(k, start - packed.position - lo, k_out[:, :, raw])
            v_out[:, :, raw] = v
        if cut < hi:
            places = torch.arange(start + cut - lo, start + hi - lo)[:, None]
            k = _restored(packed, f"k{n}", k_out)[:, :, stored]
            group.shifter.shift(k, places, k_out[:, :, rest])
            v_out[:, :, rest] = _restored(packed, f"v{n}", v_out)[:, :, stored]


def _quantised(name: str, x: Tensor, scheme: _Scheme) -> dict[str, Tensor]:
    """x, which is overwritten, as q * scale + zero. Scale and zero are rounded outwards first (to
    bfloat16, which nothing overflows) and q fits them, so no error is larger than half a step."""
    levels, dim = 2**scheme.bits - 1, scheme.dim
    parts = torch.split(x, scheme.size, dim)
    low = torch.cat([part.amin(dim, keepdim=True) for part in parts], dim)
    high = torch.cat([part.amax(dim, keepdim=True) for part in parts], dim)
    zero = -_rounded_up(-low)
    scale = _rounded_up((high - zero.float()) / levels)
    scale = scale.masked_fill(scale == 0, 1)
    for n, part in enumerate(parts):
        part.sub_(zero.narrow(dim, n, 1).float()).div_(scale.narrow(dim, n, 1).float())
    q = x.round_().clamp_(0, levels).to(torch.uint8)
    if scheme.bits == 4:  # a byte holds one of the first half of all integers, one of the second
        first, second = torch.nn.functional.pad(q.flatten(), (0, q.numel() % 2)).view(2, -1)
        q = first | second << 4
    return {f"{name}.q": q, f"{name}.scale": scale, f"{name}.zero": zero}


def _restored(packed: PackedKV, name: str, out: Tensor) -> Tensor:
    """The quantised tokens as float32, on the device of `out`, which is like them."""
    bits, dim, size = _SCHEMES[packed.fmt]["kv".index(name[0])]
    q, scale, zero = (packed.tensors[f"{name}.{x}"].to(out.device) for x in ("q", "scale", "zero"))
    shape = (*out.shape[:2], packed.tokens - packed.head, out.shape[3])
    if bits == 4:
        q = torch.stack((q & 15, q >> 4)).view(-1)[: math.prod(shape)]
    x, scale, zero = q.view(shape).float(), scale.float(), zero.float()
    for n, part in enumerate(torch.split(x, size, dim)):
        part.mul_(scale.narrow(dim, n, 1)).add_(zero.narrow(dim, n, 1))
    return x


def _rounded_up(x: Tensor) -> Tensor:
    y = x.bfloat16()
    above = (x + x.abs() * (torch.finfo(y.dtype).eps / 2)).bfloat16()
    return torch.where(y.float() < x, above, y)
