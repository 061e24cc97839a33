"""Rotation, masks and buffers against the slow and obvious way."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvboost.keys import KeySpace
from kvboost.kv import ChunkKV, KVBuffer, KVLayout, LayerGroup
from kvboost.mask import causal_mask
from kvboost.plan import Entry, Piece, Seam, Splice
from kvboost.rope import KeyShifter, Rotation
from kvboost.store import encode, place_run

FREQUENCIES = torch.tensor([1.0, 0.3, 0.07, 0.001], dtype=torch.float64)
KEY = KeySpace("model").root


def rotated(k: Tensor, position: int, *, interleaved: bool) -> Tensor:
    """Pair by pair, as complex numbers in float64."""
    out, n = k.double().clone(), len(FREQUENCIES)
    for i, frequency in enumerate(FREQUENCIES.tolist()):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + n)
        turned = torch.complex(out[..., a], out[..., b])
        turned = turned * complex(math.cos(position * frequency), math.sin(position * frequency))
        out[..., a], out[..., b] = turned.real, turned.imag
    return out


@given(old=st.integers(0, 8000), new=st.integers(0, 8000), interleaved=st.booleans())
def test_a_moved_key_is_the_key_rotated_for_its_new_place(
    old: int, new: int, interleaved: bool
) -> None:
    k = torch.randn(2, 3, 5, 12, generator=torch.Generator().manual_seed(0))  # 8 of 12 dims turn
    stored = rotated(k, old, interleaved=interleaved).float()
    moved = torch.empty_like(stored)
    Rotation(FREQUENCIES, interleaved).shift(stored, new - old, moved)
    expected = rotated(k, new, interleaved=interleaved).float()
    torch.testing.assert_close(moved, expected, atol=1e-5, rtol=0)


def test_a_factor_on_rotated_keys_is_kept_not_applied_again() -> None:
    """YaRN scales cos and sin: the factor is in the stored key."""
    k = torch.randn(1, 1, 5, 8)
    moved = torch.empty_like(k)
    Rotation(FREQUENCIES).shift(1.3 * rotated(k, 5, interleaved=False).float(), 100, moved)
    expected = 1.3 * rotated(k, 105, interleaved=False)
    torch.testing.assert_close(moved.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("delta", [0, 7])
def test_each_layer_moves_by_its_own_rotation(delta: int) -> None:
    slow, fast = Rotation(FREQUENCIES), Rotation(FREQUENCIES * 2)
    k = torch.randn(4, 1, 5, 8)
    moved = torch.empty_like(k)
    KeyShifter([fast, None, slow, fast]).shift(k, delta, moved)
    expected = [
        rotated(k[0], 2 * delta, interleaved=False),
        k[1].double(),
        rotated(k[2], delta, interleaved=False),
        rotated(k[3], 2 * delta, interleaved=False),
    ]
    torch.testing.assert_close(moved.double(), torch.stack(expected), atol=1e-5, rtol=0)


def test_bf16_keys_are_rounded_once() -> None:
    k = torch.randn(1, 2, 50, 8).bfloat16()
    moved = torch.empty_like(k)
    Rotation(FREQUENCIES).shift(k, 1234, moved)
    assert torch.equal(moved, rotated(k, 1234, interleaved=False).float().bfloat16())


def layout(dtype: torch.dtype = torch.float32) -> KVLayout:
    """Five layers of two shapes, keys and values of different width."""
    turning = Rotation(FREQUENCIES)
    groups = (
        LayerGroup((0, 2, 3), 2, 8, 6, KeyShifter([turning] * 3)),
        LayerGroup((1, 4), 1, 12, 4, KeyShifter([turning, None])),
    )
    return KVLayout(groups, dtype, torch.device("cpu"))


def filled(capacity: int) -> KVBuffer:
    buffer = KVBuffer(layout(), capacity)
    for tensor in (*buffer.k, *buffer.v):
        tensor.normal_()
    return buffer


def splice(start: int, *pieces: Piece) -> Splice:
    return Splice(start, pieces, exact=False, seam=Seam.NONE)


def entry(position: int, count: int) -> Entry:
    return Entry(KEY, KEY, KEY, tuple(range(count)), position)


def test_what_is_cut_out_is_placed_bit_for_bit() -> None:
    buffer, other = filled(40), filled(40)
    packed = encode(buffer.cut(10, 25), buffer.layout, 10, "raw")
    place_run(splice(10, Piece(entry(10, 15), 0, 15)), [packed], other)
    for n in range(5):
        for mine, theirs in zip(other.layer(n), buffer.layer(n), strict=True):
            assert torch.equal(mine[:, 10:25], theirs[:, 10:25])


def test_a_splice_touches_its_own_tokens_only_and_moves_keys_not_values() -> None:
    source, target = filled(60), filled(60)
    before = [(k.clone(), v.clone()) for k, v in map(target.layer, range(5))]
    pieces = (Piece(entry(10, 15), 4, 15), Piece(entry(25, 20), 0, 7))
    run = splice(30, *pieces)
    assert (run.end, run.shift) == (48, 16)
    stored = [encode(source.cut(a, b), source.layout, a, "raw") for a, b in ((10, 25), (25, 45))]
    place_run(run, stored, target)
    for n in range(5):
        (k, v), (old_k, old_v), (from_k, from_v) = target.layer(n), before[n], source.layer(n)
        still = n == 4
        expected = from_k.double() if still else rotated(from_k, 16, interleaved=False)
        torch.testing.assert_close(k[:, 30:48].double(), expected[:, 14:32], atol=1e-5, rtol=0)
        assert torch.equal(v[:, 30:48], from_v[:, 14:32])
        for now, then in ((k, old_k), (v, old_v)):
            assert torch.equal(now[:, :30], then[:, :30])
            assert torch.equal(now[:, 48:], then[:, 48:])


def test_a_cut_is_a_copy_of_its_own_size() -> None:
    buffer = filled(40)
    kv = buffer.cut(3, 9)
    kept = [t.clone() for t in (*kv.k, *kv.v)]
    for tensor in (*buffer.k, *buffer.v):
        tensor.zero_()
    assert all(torch.equal(a, b) for a, b in zip((*kv.k, *kv.v), kept, strict=True))
    assert kv.tokens == 6
    assert kv.nbytes == 6 * buffer.layout.bytes_per_token
    assert sum(t.untyped_storage().nbytes() for t in (*kv.k, *kv.v)) == kv.nbytes


def test_layout_counts_layers_and_bytes() -> None:
    half = layout(torch.bfloat16)
    assert half.layers == 5
    assert half.bytes_per_token == 2 * (3 * 2 * (8 + 6) + 2 * 1 * (12 + 4))
    assert ChunkKV((torch.zeros(3, 2, 7, 8),), (torch.zeros(3, 2, 7, 6),)).tokens == 7


@given(
    rows=st.sets(st.integers(0, 19), min_size=1).map(sorted),
    window=st.none() | st.integers(1, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_row_sees_what_is_not_after_it_and_in_its_window(
    rows: list[int], window: int | None, dtype: torch.dtype
) -> None:
    mask = causal_mask(torch.tensor(rows), 20, dtype, window)
    assert mask.shape == (1, 1, len(rows), 20)
    assert mask.dtype == dtype
    for n, row in enumerate(rows):
        for key in range(20):
            seen = key <= row and (window is None or row - key < window)
            assert float(mask[0, 0, n, key]) == (0 if seen else torch.finfo(dtype).min)
