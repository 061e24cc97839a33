"""What holds a stored entry together: sizes, keys and checksums around opaque bytes.

Can be checked by who has neither the model nor the key of an encrypted entry; needs no torch.
docs/entry-format.md specifies it.
"""

from __future__ import annotations

import struct
from typing import Literal, NamedTuple

from xxhash import xxh3_128_digest

Flaw = Literal["truncated", "checksum", "version", "foreign", "shape", "locked"]

MAGIC, VERSION = b"KVBENTRY", 1
_PRELUDE = struct.Struct("<8sHHIQ32s32s32s16s")
_CHECKSUM = 16
_ALIGN = 64
MAX_META = 1 << 19


class EntryError(ValueError):
    """These bytes are no entry that may be used here. `flaw` says why, in a word to count by."""

    def __init__(self, flaw: Flaw) -> None:
        super().__init__(f"the stored entry can't be used: {flaw}")
        self.flaw: Flaw = flaw


class Frame(NamedTuple):
    """What anyone may know of an entry: `meta` and `body` are sizes in bytes, `checksum` is the
    body's; key, parent and content are digests."""

    sealed: bool
    meta: int
    body: int
    key: bytes
    parent: bytes
    content: bytes
    checksum: bytes

    @property
    def prelude(self) -> bytes:
        """The entry's first bytes."""
        sealed = int(self.sealed)
        return _PRELUDE.pack(MAGIC, VERSION, sealed, *self[1:])

    @property
    def front(self) -> int:
        """Size of prelude, meta, padding (the body is aligned) and checksum."""
        return -(-(_PRELUDE.size + self.meta + _CHECKSUM) // _ALIGN) * _ALIGN


def front_size(data: bytes | bytearray | memoryview) -> int | None:
    """The size of the front that `data` begins with; None if it is no entry's beginning."""
    try:
        return _frame(data).front
    except EntryError:
        return None


def outline(data: bytes | bytearray | memoryview) -> Frame | None:
    """The frame of a whole entry's first bytes; None if they are not as written."""
    try:
        return open_front(data)[0]
    except EntryError:
        return None


def close_front(frame: Frame, meta: bytes) -> bytes:
    front = (frame.prelude + meta).ljust(frame.front - _CHECKSUM, b"\0")
    return front + xxh3_128_digest(front)


def _frame(data: bytes | bytearray | memoryview) -> Frame:
    if len(data) < _PRELUDE.size:
        raise EntryError("truncated" if MAGIC.startswith(bytes(data[:8])) else "foreign")
    magic, version, sealed, *fields = _PRELUDE.unpack_from(data)
    if magic != MAGIC:
        raise EntryError("foreign")
    if version != VERSION:
        raise EntryError("version")
    frame = Frame(bool(sealed), *fields)
    if frame.meta > MAX_META:
        raise EntryError("shape")
    return frame


def open_front(data: bytes | bytearray | memoryview) -> tuple[Frame, bytes]:
    """The frame and the meta of the front that `data` begins with.

    Raises EntryError unless they are as written.
    """
    frame = _frame(data)
    if len(data) < frame.front:
        raise EntryError("truncated")
    end = frame.front - _CHECKSUM
    if data[end : frame.front] != xxh3_128_digest(data[:end]):
        raise EntryError("checksum")
    return frame, bytes(data[_PRELUDE.size : _PRELUDE.size + frame.meta])


def open_body(frame: Frame, data: bytes | bytearray | memoryview) -> memoryview:
    """The body of a whole entry. Raises EntryError unless it is as written."""
    if len(data) != frame.front + frame.body:
        raise EntryError("truncated")
    body = memoryview(data)[frame.front :]
    if xxh3_128_digest(body) != frame.checksum:
        raise EntryError("checksum")
    return body


def flaw_of(data: bytes | bytearray | memoryview) -> Flaw | None:
    """What is wrong with a whole entry's bytes, as far as its own checksums tell."""
    try:
        open_body(open_front(data)[0], data)
    except EntryError as error:
        return error.flaw
    return None
