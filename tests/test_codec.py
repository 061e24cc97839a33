"""The codec: errors within half a step, raw and sink tokens bit for bit, and no damaged entry
taken for a good one."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvboost.keys import KeySpace
from kvboost.kv import ChunkKV, KVBuffer, KVLayout, LayerGroup
from kvboost.plan import Entry
from kvboost.rope import KeyShifter, Rotation
from kvboost.store.codec import (
    _PRELUDE,
    MAX_TOKENS,
    SINK_TOKENS,
    EntryError,
    KVFormat,
    PackedKV,
    _digest,
    dump,
    encode,
    load,
    place,
    read_header,
)

KEYS = KeySpace("model", "tenant")
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
    written = len(dump(an_entry(80, position), packed, KEYS))
    assert packed.nbytes < written < packed.nbytes + 1600
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in packed.tensors.values()}
    assert sum(s.nbytes() for s in kept.values()) == packed.nbytes


@pytest.mark.parametrize("value", [0.0, -3.0, 1e-7, 40000.0])
def test_constant_and_extreme_values(value: float) -> None:
    layout = one_group(64, dtype=torch.float16)
    x = torch.full((2, 3, 9, 64), value).half()
    buffer = placed(encode(ChunkKV((x,), (x,)), layout, 10, "k8v4"), layout, 10)
    for y in (buffer.k[0], buffer.v[0]):
        torch.testing.assert_close(y[:, :, 10:], x, atol=1e-7, rtol=0.01)


# -- bytes


def an_entry(tokens: int, position: int = 0, *, exact: bool = True, keys: KeySpace = KEYS) -> Entry:
    ids = tuple(range(7, 7 + tokens))
    parent = keys.prefix(keys.root, [position]) if position else keys.root
    key = keys.prefix(parent, ids) if exact else keys.approximate(parent, ids)
    return Entry(key, parent, keys.content(ids), ids, position)


def written(fmt: KVFormat, layout: KVLayout, entry: Entry, seed: int = 0) -> bytes:
    kv = random_kv(layout, len(entry.ids), seed)
    return dump(entry, encode(kv, layout, entry.position, fmt), KEYS)


def flaw(data: bytes, keys: KeySpace = KEYS, layout: KVLayout | None = None) -> str:
    with pytest.raises(EntryError) as caught:
        load(data, keys, layout or LAYOUT)
    assert caught.value.flaw in str(caught.value)
    return caught.value.flaw


LAYOUT = mixed(torch.bfloat16)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "position"), [(3, 0), (33, 0), (1, 9), (64, 9)])
def test_written_and_read_back(
    fmt: KVFormat, dtype: torch.dtype, tokens: int, position: int
) -> None:
    layout = mixed(dtype)
    for exact in (True, False):
        entry = an_entry(tokens, position, exact=exact)
        packed = encode(random_kv(layout, tokens), layout, position, fmt)
        again, read = load(dump(entry, packed, KEYS), KEYS, layout)
        assert again == entry
        assert (read.fmt, read.position, read.tokens, read.head) == (
            packed.fmt,
            packed.position,
            packed.tokens,
            packed.head,
        )
        assert read.tensors.keys() == packed.tensors.keys()
        assert all(torch.equal(read.tensors[n], t) for n, t in packed.tensors.items())


def test_a_header_is_read_without_the_rest() -> None:
    entry = an_entry(40, 12)
    data = written("k8v4", LAYOUT, entry)
    header = read_header(data[:500], KEYS, LAYOUT)
    assert header.entry == entry and header.outline.fmt == "k8v4"
    assert header.start + header.size == len(data)


def damaged(data: bytes, other: bytes, seed: int) -> bytes:
    """A flipped bit, a truncation, more bytes, or half of another entry."""
    rng = random.Random(seed)
    at, cut = rng.randrange(len(data)), rng.randrange(1, min(len(data), len(other)))
    flipped = bytes([data[at] ^ 1 << rng.randrange(8)])
    ways: list[Callable[[], bytes]] = [
        lambda: data[:at] + flipped + data[at + 1 :],
        lambda: data[:at],
        lambda: data + rng.randbytes(1 + at % 9),
        lambda: data[:cut] + other[cut:],
        lambda: data[:at] + rng.randbytes(len(data) - at),
    ]
    return ways[seed % len(ways)]()


@pytest.mark.parametrize("fmt", FORMATS)
def test_no_damage_goes_unnoticed(fmt: KVFormat) -> None:
    data = written(fmt, LAYOUT, an_entry(20, 12))
    other = written(fmt, LAYOUT, an_entry(20), seed=1)
    flaws = [flaw(damaged(data, other, seed)) for seed in range(200)]
    assert {"truncated", "checksum"} <= set(flaws)


def test_every_bit_of_a_header_counts() -> None:
    data = written("k8v4", LAYOUT, an_entry(2, 12))
    for at in range(read_header(data, KEYS, LAYOUT).start):
        for bit in range(8):
            flaw(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])


def test_what_belongs_to_others_is_foreign() -> None:
    data = written("k8v4", LAYOUT, an_entry(20, 12))
    for keys in (KeySpace("other", "tenant"), KeySpace("model"), KeySpace("model", "tenant", "r")):
        assert flaw(data, keys) == "foreign"
    assert flaw(b"PK\x03\x04" + data[4:]) == "foreign"
    raw = written("raw", LAYOUT, an_entry(20, 12))
    assert flaw(raw, layout=mixed(torch.float16)) == "shape"
    assert flaw(data, layout=one_group(64)) == "shape"


def test_an_entry_from_the_future_is_named_so() -> None:
    data = written("raw", LAYOUT, an_entry(20))
    assert flaw(data[:8] + struct.pack("<I", 2) + data[12:]) == "version"


def forged(data: bytes, at: int, field: bytes) -> bytes:
    """A header that was changed by somebody who knows how to make its checksum."""
    (tokens,) = struct.unpack_from("<I", data, 46)
    end = _PRELUDE.size + 4 * tokens
    head = data[:at] + field + data[at + len(field) : end]
    return head + _digest(head) + data[end + 32 :]


def test_forged_headers_allocate_nothing() -> None:
    entry = an_entry(20, 12)
    data = written("k8v4", LAYOUT, entry)
    assert load(forged(data, 0, data[:8]), KEYS, LAYOUT)[0] == entry
    assert flaw(forged(data, 58, struct.pack("<Q", 1 << 60))) == "shape"  # size
    assert flaw(forged(data, 44, b"\x09")) == "shape"  # link
    assert flaw(forged(data, 45, b"\x00")) == "shape"  # format
    assert flaw(forged(data, 45, b"\x09")) == "shape"
    assert flaw(forged(data, 66, bytes(32))) == "foreign"  # key
    assert flaw(data[:46] + struct.pack("<I", (1 << 32) - 1) + data[50:]) == "truncated"
    many = b"".join((data[:46], struct.pack("<I", MAX_TOKENS + 1), data[50:162], bytes(1 << 19)))
    assert flaw(forged(many, 0, b"")) == "shape"


def test_kv_that_is_not_what_its_header_says_is_refused() -> None:
    layout, entry = one_group(64), an_entry(20, 12)
    packed = encode(random_kv(layout, 19), layout, 12, "k8v4")
    assert flaw(dump(entry, packed, KEYS), layout=layout) == "shape"
