"""Entries as bytes: read back as written, and no damaged or foreign one taken for a good one."""

from __future__ import annotations

import base64
import random
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from test_codec import FORMATS, mixed, one_group, random_kv
from xxhash import xxh3_128_digest

from kvboost.config import KVFormat
from kvboost.errors import ConfigError
from kvboost.keys import KeySpace
from kvboost.plan import Entry
from kvboost.store.codec import MAX_TOKENS, encode
from kvboost.store.entry import Codebook
from kvboost.store.frame import EntryError, close_front, flaw_of, front_size, open_front, outline
from kvboost.store.seal import AESSeal
from kvboost.store.tier import Record

KEYS = KeySpace("model", "tenant")
LAYOUT = mixed(torch.bfloat16)
SECRET = base64.b64encode(bytes(range(32))).decode()
SEALED = Codebook(KEYS, LAYOUT, AESSeal(SECRET))
PLAIN = Codebook(KEYS, LAYOUT)
BOOKS = [PLAIN, SEALED]


def an_entry(tokens: int, position: int = 0, *, exact: bool = True, keys: KeySpace = KEYS) -> Entry:
    ids = tuple(range(7, 7 + tokens))
    parent = keys.prefix(keys.root, [position]) if position else keys.root
    key = keys.prefix(parent, ids) if exact else keys.approximate(parent, ids)
    return Entry(key, parent, keys.content(ids), ids, position)


def written(fmt: KVFormat, book: Codebook, entry: Entry, seed: int = 0) -> bytes:
    kv = random_kv(book.layout, len(entry.ids), seed)
    record = book.dump(entry, encode(kv, book.layout, entry.position, fmt))
    return record.front + record.body


def flaw(data: bytes, book: Codebook = PLAIN) -> str:
    with pytest.raises(EntryError) as caught:
        book.load(data)
    assert caught.value.flaw in str(caught.value)
    return caught.value.flaw


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "position"), [(3, 0), (33, 0), (1, 9), (64, 9)])
def test_written_and_read_back(
    fmt: KVFormat, dtype: torch.dtype, tokens: int, position: int, sealed: bool
) -> None:
    layout = mixed(dtype)
    book = Codebook(KEYS, layout, AESSeal(SECRET) if sealed else None)
    for exact in (True, False):
        entry = an_entry(tokens, position, exact=exact)
        packed = encode(random_kv(layout, tokens), layout, position, fmt)
        record = book.dump(entry, packed, seconds=0.5)
        assert (record.key, record.parent, record.content, record.seconds) == (
            entry.key.digest,
            entry.parent.digest,
            entry.content.digest,
            0.5,
        )
        again, read = book.load(record.front + record.body)
        assert again == entry
        assert (read.fmt, read.position, read.tokens, read.head) == (
            packed.fmt,
            packed.position,
            packed.tokens,
            packed.head,
        )
        assert read.tensors.keys() == packed.tensors.keys()
        assert all(torch.equal(read.tensors[n], t) for n, t in packed.tensors.items())


@pytest.mark.parametrize("book", BOOKS)
def test_a_front_is_read_without_the_rest(book: Codebook) -> None:
    entry = an_entry(40, 12)
    data = written("k8v4", book, entry)
    front = front_size(data[:200])
    assert front is not None and front % 64 == 0 and front_size(data[:50]) is None
    header = book.read(data[:front])
    assert header.entry == entry and header.fmt == "k8v4"
    assert header.frame.front + header.frame.body == len(data)
    assert outline(data[:front]) == header.frame
    assert flaw_of(data) is None and outline(data[: front - 1]) is None


def test_an_entry_takes_little_more_than_its_tensors() -> None:
    layout = one_group(64, layers=30, heads=3, dtype=torch.bfloat16)  # SmolLM2-135M's
    packed = encode(random_kv(layout, 80), layout, 400, "k8v4")
    record = Codebook(KEYS, layout).dump(an_entry(80, 400), packed)
    assert packed.nbytes < record.nbytes < packed.nbytes + 1600


def test_a_sealed_entry_shows_no_token_and_opens_with_its_key_only() -> None:
    entry = an_entry(40, 12)
    data = written("raw", SEALED, entry)
    tokens = struct.pack("<4I", *entry.ids[5:9])
    assert tokens not in data and tokens in written("raw", PLAIN, entry)
    assert KEYS.root.digest not in data
    other = AESSeal(base64.b64encode(bytes(32)).decode())
    for book in (PLAIN, Codebook(KEYS, LAYOUT, other)):
        assert flaw(data, book) == "locked"
    assert flaw(written("raw", PLAIN, entry), SEALED) == "locked"
    assert flaw_of(data) is None  # whoever has no key can still check it


@pytest.mark.parametrize("secret", ["", "short", base64.b64encode(bytes(31)).decode(), "ä" * 44])
def test_a_bad_secret_is_named(secret: str) -> None:
    with pytest.raises(ConfigError, match="KVBOOST_CACHE_KEY") as caught:
        AESSeal(secret)
    assert not secret or secret not in str(caught.value)


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


@pytest.mark.parametrize("book", BOOKS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_no_damage_goes_unnoticed(fmt: KVFormat, book: Codebook) -> None:
    data = written(fmt, book, an_entry(20, 12))
    other = written(fmt, book, an_entry(20), seed=1)
    hurt = [damaged(data, other, seed) for seed in range(200)]
    flaws = [flaw(h, book) for h in hurt]
    assert {"truncated", "checksum"} <= set(flaws)
    assert flaws == [flaw_of(h) for h in hurt]  # seen without a key, too


@pytest.mark.parametrize("book", BOOKS)
def test_every_bit_of_a_front_counts(book: Codebook) -> None:
    data = written("k8v4", book, an_entry(2, 12))
    for at in range(front_size(data) or 0):
        for bit in range(8):
            flaw(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :], book)


def test_what_belongs_to_others_is_foreign() -> None:
    data = written("k8v4", PLAIN, an_entry(20, 12))
    for keys in (KeySpace("other", "tenant"), KeySpace("model"), KeySpace("model", "tenant", "r")):
        assert flaw(data, PLAIN._replace(keys=keys)) == "foreign"
    assert flaw(b"PK\x03\x04" + data[4:]) == "foreign"
    raw = written("raw", PLAIN, an_entry(20, 12))
    assert flaw(raw, PLAIN._replace(layout=mixed(torch.float16))) == "shape"
    assert flaw(data, PLAIN._replace(layout=one_group(64))) == "shape"


def test_an_entry_from_the_future_is_named_so() -> None:
    data = written("raw", PLAIN, an_entry(20))
    future = data[:8] + struct.pack("<H", 2) + data[10:]
    assert flaw(future) == "version" and flaw_of(future) == "version"
    assert front_size(future) is None


def forged(data: bytes, meta: bytes | None = None, **frame: object) -> bytes:
    """A front that was changed by somebody who knows how to make its checksum."""
    old, old_meta = open_front(data)
    meta = old_meta if meta is None else meta
    return close_front(old._replace(**{"meta": len(meta), **frame}), meta) + data[old.front :]


def test_forged_fronts_allocate_nothing() -> None:
    entry = an_entry(20, 12)
    data = written("k8v4", PLAIN, entry)
    meta = open_front(data)[1]
    assert PLAIN.load(forged(data))[0] == entry
    assert flaw(forged(data, body=1 << 60)) == "shape"
    assert flaw(forged(data, meta[:32] + b"\x09" + meta[33:])) == "shape"  # link
    assert flaw(forged(data, meta[:33] + b"\x00" + meta[34:])) == "shape"  # format
    assert flaw(forged(data, meta[:33] + b"\x09" + meta[34:])) == "shape"
    assert flaw(forged(data, meta[:34] + struct.pack("<I", (1 << 32) - 1) + meta[38:])) == "shape"
    assert flaw(forged(data, meta[:20])) == "shape"
    assert flaw(forged(data, key=bytes(32))) == "foreign"
    assert flaw(forged(data, content=bytes(32))) == "foreign"
    assert flaw(forged(data, parent=bytes(32))) == "foreign"
    many = meta[:34] + struct.pack("<I", MAX_TOKENS + 1) + meta[38:46] + bytes(4 * MAX_TOKENS + 4)
    assert flaw(forged(data, many)) == "shape"
    frame = open_front(data)[0]
    assert flaw(frame._replace(meta=1 << 30).prelude + data[frame.front :]) == "shape"


INDEX = b'{"k0":{"dtype":"BF16","shape":[3,1,20,64],"data_offsets":[0,%d]}}'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff" * 8,
        (1 << 60).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"null",
        (6).to_bytes(8, "little") + b'{"a":1',
        (9).to_bytes(8, "little") + b'{"k0":{}}',
        len(INDEX % 7680).to_bytes(8, "little") + INDEX % 7680 + bytes(100),
        len(INDEX % 10).to_bytes(8, "little") + INDEX % 10 + bytes(7680),
        (8000).to_bytes(8, "little") + b"[" * 8000,
    ],
)
def test_a_forged_body_is_refused(body: bytes) -> None:
    data = written("k8v4", PLAIN, an_entry(20, 12))
    frame = open_front(data)[0]
    head = forged(data, body=len(body), checksum=xxh3_128_digest(body))[: frame.front]
    assert flaw(head + body) == "shape"


def test_kv_that_is_not_what_its_front_says_is_refused() -> None:
    book, entry = Codebook(KEYS, one_group(64)), an_entry(20, 12)
    packed = encode(random_kv(book.layout, 19), book.layout, 12, "k8v4")
    record = book.dump(entry, packed)
    assert flaw(record.front + record.body, book) == "shape"


def test_swapped_bodies_are_noticed() -> None:
    for book in BOOKS:
        one, two = (
            book.dump(an_entry(20, p), encode(random_kv(LAYOUT, 20, p), LAYOUT, p, "raw"))
            for p in (12, 13)
        )
        swapped: Record = replace(one, body=two.body)
        assert flaw(swapped.front + swapped.body, book) == "checksum"
