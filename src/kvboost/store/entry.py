"""A stored chunk as bytes, and back. docs/entry-format.md specifies them.

Knows nothing of tiers or budgets. Reads what strangers may have written: evaluates nothing, and
allocates no more than it was given.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any, NamedTuple, Protocol, get_args

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor
from xxhash import xxh3_128_digest

from kvboost.config import KVFormat
from kvboost.keys import ChunkKey, KeyKind, KeySpace
from kvboost.kv import KVLayout
from kvboost.plan import Entry
from kvboost.store.codec import MAX_TOKENS, PackedKV, Shapes, shapes
from kvboost.store.frame import EntryError, Frame, close_front, open_body, open_front
from kvboost.store.tier import Record

_META = struct.Struct("<32sBBIQ")
_FORMATS = get_args(KVFormat)
_LINKS = (
    (KeyKind.PREFIX, KeyKind.PREFIX),
    (KeyKind.CONTEXT, KeyKind.PREFIX),
    (KeyKind.CONTEXT, KeyKind.CONTEXT),
)
"""What may follow what: (kind of an entry's key, kind of its parent's)."""
_INDEX_BYTES = 1 << 14
"""Room for safetensors' own header."""
_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.uint8: "U8"}


class Seal(Protocol):
    """Encrypts what is written, with authentication. `place` ties it to where it belongs."""

    name: str
    """Tells keys apart and gives none away."""
    overhead: int
    """Bytes that `close` adds."""

    def close(self, data: bytes, place: bytes) -> bytes: ...

    def open(self, data: bytes, place: bytes) -> bytes:
        """Raises EntryError if this key did not close it, or not for this place."""


class Header(NamedTuple):
    """What an entry's front says. shapes: of the tensors that its body must hold."""

    entry: Entry
    fmt: KVFormat
    shapes: Shapes
    frame: Frame


class Codebook(NamedTuple):
    """What turns entries into bytes and back: the same keys, layout and seal read what they
    wrote."""

    keys: KeySpace
    layout: KVLayout
    seal: Seal | None = None

    def dump(self, entry: Entry, packed: PackedKV, seconds: float = 0.0) -> Record:
        """The entry as bytes. seconds: of prefill that a hit saves, for eviction."""
        body = save_tensors({name: t.cpu().contiguous() for name, t in packed.tensors.items()})
        meta = _META.pack(
            self.keys.root.digest,
            _LINKS.index((entry.key.kind, entry.parent.kind)),
            _FORMATS.index(packed.fmt),
            len(entry.ids),
            entry.position,
        ) + struct.pack(f"<{len(entry.ids)}I", *entry.ids)
        digests = (entry.key.digest, entry.parent.digest, entry.content.digest)
        if self.seal is not None:
            body = self.seal.close(body, b"body" + entry.key.digest)
            frame = Frame(
                True, len(meta) + self.seal.overhead, len(body), *digests, xxh3_128_digest(body)
            )
            meta = self.seal.close(meta, frame.prelude)
        else:
            frame = Frame(False, len(meta), len(body), *digests, xxh3_128_digest(body))
        return Record(*digests, close_front(frame, meta), body, seconds)

    def read(self, data: bytes | bytearray | memoryview) -> Header:
        """The front that `data` begins with; what follows it need not be there.

        Raises EntryError unless it is as `dump` made it.
        """
        frame, meta = open_front(data)
        if frame.sealed != (self.seal is not None):
            raise EntryError("locked")
        if self.seal is not None:
            meta = self.seal.open(meta, frame.prelude)
        if len(meta) < _META.size:
            raise EntryError("shape")
        root, link, fmt, tokens, position = _META.unpack_from(meta)
        if root != self.keys.root.digest:
            raise EntryError("foreign")
        fits = 0 < tokens <= MAX_TOKENS and len(meta) == _META.size + 4 * tokens
        if not fits or link >= len(_LINKS) or fmt >= len(_FORMATS):
            raise EntryError("shape")
        wanted = shapes(self.layout, position, tokens, _FORMATS[fmt])
        if frame.body > sum(map(_nbytes, wanted.values())) + _INDEX_BYTES:
            raise EntryError("shape")
        ids = struct.unpack_from(f"<{tokens}I", meta, _META.size)
        kind, parent_kind = _LINKS[link]
        parent = ChunkKey(parent_kind, frame.parent)
        follow = self.keys.prefix if kind is KeyKind.PREFIX else self.keys.approximate
        entry = Entry(follow(parent, ids), parent, self.keys.content(ids), ids, position)
        if (entry.key.digest, entry.content.digest) != (frame.key, frame.content):
            raise EntryError("foreign")
        return Header(entry, _FORMATS[fmt], wanted, frame)

    def load(self, data: bytes | bytearray | memoryview) -> tuple[Entry, PackedKV]:
        """The entry and its KV, on the CPU. What can be written to becomes its tensors' memory;
        bytes are copied, which takes longer than reading them from a file.

        Raises EntryError unless all of it is as `dump` made it, for these keys and this layout.
        """
        entry, fmt, wanted, frame = self.read(data)
        body = open_body(frame, data)
        if self.seal is not None:
            body = memoryview(self.seal.open(bytes(body), b"body" + frame.key))
        if body.readonly:
            body = memoryview(bytearray(body))
        return entry, PackedKV.of(fmt, entry.position, len(entry.ids), _tensors(body, wanted))


class Summary(NamedTuple):
    """What the front of an entry that is not sealed says to whoever has no keys. space: digest of
    model, namespace and rope regime."""

    space: bytes
    fmt: KVFormat
    tokens: int


def summary(front: bytes) -> Summary | None:
    """None if it is sealed, or damaged."""
    try:
        frame, meta = open_front(front)
        root, _, fmt, tokens, _ = _META.unpack_from(meta)
        return None if frame.sealed else Summary(root, _FORMATS[fmt], tokens)
    except (EntryError, struct.error, IndexError):
        return None


def _tensors(body: memoryview, wanted: Shapes) -> dict[str, Tensor]:
    """The tensors of a safetensors file, of exactly these names, shapes and dtypes, in place:
    safetensors' own loader copies them twice, which takes a quarter of the time of an exact hit."""
    size = int.from_bytes(body[:8], "little")
    if not 0 < size <= min(_INDEX_BYTES, len(body) - 8):
        raise EntryError("shape")
    data = body[8 + size :]
    try:
        index = json.loads(bytes(body[8 : 8 + size]))
        found = {name: _tensor(data, index[name], *like) for name, like in wanted.items()}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise EntryError("shape") from error
    if len(index) != len(wanted):
        raise EntryError("shape")
    return found


def _tensor(
    data: memoryview, fields: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    start, end = fields["data_offsets"]
    expected = {"dtype": _DTYPES[dtype], "shape": [*shape], "data_offsets": [start, end]}
    spans = type(start) is int and 0 <= start < end <= len(data)
    if fields != expected or not spans or end - start != _nbytes((shape, dtype)):
        raise ValueError(f"not {expected}")
    flat = torch.frombuffer(data, dtype=dtype, count=math.prod(shape), offset=start)
    return flat.view(shape)


def _nbytes(like: tuple[tuple[int, ...], torch.dtype]) -> int:
    shape, dtype = like
    return math.prod(shape) * dtype.itemsize
