"""The codec: errors within half a step, raw and sink tokens bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvboost.config import KVFormat
from kvboost.kv import ChunkKV, KVBuffer, KVLayout, LayerGroup
from kvboost.rope import KeyShifter, Rotation
from kvboost.store.codec import SINK_TOKENS, PackedKV, encode, place, shapes

QUANTISED: list[KVFormat] = ["k8v8", "k8v4", "k4v4"]
FORMATS: list[KVFormat] = ["raw", *QUANTISED]
BITS = {"k8v8": (8, 8), "k8v4": (8, 4), "k4v4": (4, 4)}


def rotation(pairs: int, interleaved: bool = False) -> Rotation:
    return Rotation(1e4 ** -(torch.arange(pairs).double() / pairs), interleaved)


def one_group(dim: int, layers: int = 2, heads: int = 3, dtype=torch.float32) -> KVLayout:
    shifter = KeyShifter([rotation(dim // 2)] * layers)
    group = LayerGroup(tuple(range(layers)), heads, dim, dim, shifter)
    return KVLayout((group,), dtype, torch.device("cpu"))


def mixed(dtype: torch.dtype) -> KVLayout:
    """Two shapes; partial, interleaved and no rotation; odd sizes that nothing divides."""
    first = KeyShifter([rotation(32), rotation(16, interleaved=True), None])
    groups = (
        LayerGroup((0, 2, 3), 1, 64, 80, first),
        LayerGroup((1,), 3, 10, 9, KeyShifter([rotation(5)])),
    )
    return KVLayout(groups, dtype, torch.device("cpu"))


def random_kv(layout: KVLayout, tokens: int, seed: int = 0) -> ChunkKV:
    """Keys with large channel biases, values with large tokens."""
    rng = torch.Generator().manual_seed(seed)
    k, v = [], []
    for g in layout.groups:
        shape = (len(g.layers), g.heads, tokens)
        bias = 9 * torch.randn(*shape[:2], 1, g.k_dim, generator=rng)
        k.append((bias + torch.randn(*shape, g.k_dim, generator=rng)).to(layout.dtype))
        size = torch.rand(*shape, 1, generator=rng) * 5
        v.append((size * torch.randn(*shape, g.v_dim, generator=rng)).to(layout.dtype))
    return ChunkKV(tuple(k), tuple(v))


def placed(packed: PackedKV, layout: KVLayout, start: int) -> KVBuffer:
    buffer = KVBuffer(layout, start + packed.tokens)
    place(packed, 0, packed.tokens, start, buffer)
    return buffer


def rotated(k: Tensor, places: list[int], dim: int) -> Tensor:
    """The slow, obvious rotation of Llama-style keys, in float64."""
    angle = torch.tensor(places, dtype=torch.float64)[:, None] * rotation(dim // 2).inv_freq
    a, b = k.double().chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def half_step(x: Tensor, dim: int, bits: int) -> Tensor:
    """Half a quantisation step of values that share a scale, ends rounded outwards to bfloat16."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    return ((high - low + low.abs() / 64) / (2**bits - 1) / 2) * 1.02 + 1e-4


@pytest.mark.parametrize("fmt", QUANTISED)
@settings(max_examples=25, deadline=None)
@given(
    dim=st.sampled_from([64, 80, 128]),
    tokens=st.integers(1, 300),
    position=st.sampled_from([0, 1, 3, 77, 6000]),
    start=st.integers(0, 9000),
)
def test_error_is_within_half_a_step_wherever_a_chunk_is_placed(
    fmt: KVFormat, dim: int, tokens: int, position: int, start: int
) -> None:
    layout = one_group(dim)
    kv = random_kv(layout, tokens)
    plain = rotated(kv.k[0], [-p for p in range(position, position + tokens)], dim)
    wanted = rotated(plain, list(range(start, start + tokens)), dim)
    buffer = placed(encode(kv, layout, position, fmt), layout, start)
    k, v = buffer.k[0][:, :, start:], buffer.v[0][:, :, start:]

    a, b = half_step(plain, 2, BITS[fmt][0]).chunk(2, -1)  # a rotation mixes a pair's errors
    assert ((k - wanted).abs() <= torch.cat([a + b, a + b], -1)).all()
    for lo in range(0, dim, 32):
        part = kv.v[0][..., lo : lo + 32]
        assert ((v[..., lo : lo + 32] - part).abs() <= half_step(part, -1, BITS[fmt][1])).all()


def test_a_large_key_bias_costs_little_at_any_position() -> None:
    layout = one_group(64, dtype=torch.bfloat16)
    plain = torch.randn(2, 3, 80, 64, generator=torch.Generator().manual_seed(1))
    plain[..., 40] += 300
    k = rotated(plain, list(range(5000, 5080)), 64).bfloat16()
    packed = encode(ChunkKV((k,), (k,)), layout, 5000, "k8v4")
    error = placed(packed, layout, 5000).k[0][:, :, 5000:].float() - k
    assert error.norm() < 0.005 * k.float().norm()
    assert error[..., :8].abs().max() < 0.05


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_first_tokens_of_a_prompt_and_raw_chunks_are_kept_bit_for_bit(
    fmt: KVFormat, dtype: torch.dtype
) -> None:
    layout = mixed(dtype)
    kv = random_kv(layout, 50)
    for position in (0, 2, 30):
        buffer = placed(encode(kv, layout, position, fmt), layout, position)
        kept = 50 if fmt == "raw" else max(SINK_TOKENS - position, 0)
        for mine, theirs in zip((*buffer.k, *buffer.v), (*kv.k, *kv.v), strict=True):
            torch.testing.assert_close(mine[:, :, position:], theirs, atol=4, rtol=0)
            same = (mine[:, :, position:] == theirs).all((0, 1, 3))
            assert same[:kept].all() and (fmt == "raw" or not same[kept:].all())


@pytest.mark.parametrize("start", [70, 3])
def test_raw_is_copied_or_rotated_by_the_difference(start: int) -> None:
    layout = mixed(torch.bfloat16)
    kv = random_kv(layout, 50)
    mine = placed(encode(kv, layout, 70, "raw"), layout, start)
    for n, group in enumerate(layout.groups):
        k = torch.empty_like(kv.k[n])
        group.shifter.shift(kv.k[n], start - 70, k)
        assert torch.equal(mine.k[n][:, :, start:], k)
        assert torch.equal(mine.v[n][:, :, start:], kv.v[n])


@pytest.mark.parametrize("fmt", FORMATS)
@settings(max_examples=20, deadline=None)
@given(position=st.sampled_from([0, 2, 30]), ends=st.tuples(st.integers(0, 50), st.integers(0, 50)))
def test_a_part_is_placed_as_in_the_whole(
    fmt: KVFormat, position: int, ends: tuple[int, int]
) -> None:
    lo, hi = sorted(ends)
    layout = mixed(torch.bfloat16)
    packed = encode(random_kv(layout, 50), layout, position, fmt)
    whole, part = placed(packed, layout, 40), KVBuffer(layout, 100)
    for x in (*part.k, *part.v):
        x.fill_(7)
    place(packed, lo, hi, 40 + lo, part)
    for a, b in zip((*part.k, *part.v), (*whole.k, *whole.v), strict=True):
        assert torch.equal(a[:, :, 40 + lo : 40 + hi], b[:, :, 40 + lo : 40 + hi])
        assert (a[:, :, : 40 + lo] == 7).all() and (a[:, :, 40 + hi :] == 7).all()


@pytest.mark.parametrize("position", [0, 400])
@pytest.mark.parametrize(("fmt", "limit"), [("k8v8", 0.58), ("k8v4", 0.45), ("k4v4", 0.36)])
def test_sizes(fmt: KVFormat, limit: float, position: int) -> None:
    layout = one_group(64, layers=30, heads=3, dtype=torch.bfloat16)  # SmolLM2-135M's
    kv = random_kv(layout, 80)
    packed = encode(kv, layout, position, fmt)
    assert packed.nbytes <= limit * kv.nbytes
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in packed.tensors.values()}
    assert sum(s.nbytes() for s in kept.values()) == packed.nbytes


@pytest.mark.parametrize("fmt", FORMATS)
@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(1, 100), position=st.integers(0, 6))
def test_shapes_are_those_that_encode_gives(fmt: KVFormat, tokens: int, position: int) -> None:
    layout = mixed(torch.float16)
    packed = encode(random_kv(layout, tokens), layout, position, fmt)
    given_ = {name: (tuple(t.shape), t.dtype) for name, t in packed.tensors.items()}
    wanted = shapes(layout, position, tokens, fmt)
    assert wanted == given_ and list(wanted) == list(given_)


@pytest.mark.parametrize("value", [0.0, -3.0, 1e-7, 40000.0])
def test_constant_and_extreme_values(value: float) -> None:
    layout = one_group(64, dtype=torch.float16)
    x = torch.full((2, 3, 9, 64), value).half()
    buffer = placed(encode(ChunkKV((x,), (x,)), layout, 10, "k8v4"), layout, 10)
    for y in (buffer.k[0], buffer.v[0]):
        torch.testing.assert_close(y[:, :, 10:], x, atol=1e-7, rtol=0.01)
