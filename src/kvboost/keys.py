"""What a chunk is called: digests that say what was computed, by which model, for whom.

Threat model: prompts come from strangers, and a key that two prompts share serves one the KV of
the other. A fast hash lets anyone construct such a pair; BLAKE2b at 256 bits does not. The root of
a KeySpace is the hash key, so tenants, models and rope regimes stay apart even where token ids are
the same. It is no secret unless the namespace is. Token ids are compared on every content hit
anyway. Every field is typed and length-prefixed: no two lists of fields give the same bytes.

Digests are the same in every process and on every machine. This module knows nothing about
chunk boundaries, tensors or tiers.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvboost.types import Chunk

FORMAT_VERSION = 1  # part of every root: raise it and no older entry is ever found
DIGEST_BYTES = 32


class KeyKind(StrEnum):
    """What a hit under the key is worth; for a prefix key, that it is exact."""

    PREFIX = "prefix"  # these tokens after exactly those before them, computed exactly
    CONTENT = "content"  # these tokens, wherever they stood
    CONTEXT = "context"  # these tokens after those before them, computed on approximate KV


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """A name for stored KV. Keys of different kinds are never equal."""

    kind: KeyKind
    digest: bytes

    def __post_init__(self) -> None:
        if len(self.digest) != DIGEST_BYTES:
            raise ValueError(
                f"a digest has {DIGEST_BYTES} bytes, not {len(self.digest)}; the entry it was "
                "read from is damaged, or was written by another format"
            )

    @property
    def hex(self) -> str:
        """The first 16 hex digits, for logs. Not an identity: use `kind` and `digest` for that."""
        return self.digest[:8].hex()


class KeySpace:
    """The keys of one namespace, model and rope regime. Nothing is found across key spaces."""

    def __init__(self, fingerprint: str, namespace: str = "default", regime: str = "") -> None:
        """`regime` names what else rotation depends on, for models whose frequencies change with
        the prompt's length (dynamic NTK, LongRoPE)."""
        if not fingerprint:
            raise ValueError("the fingerprint is empty; pass the digest of the model's weights")
        fields = (
            _field(b"v", struct.pack("<I", FORMAT_VERSION)),
            _field(b"n", namespace.encode()),
            _field(b"f", fingerprint.encode()),
            _field(b"r", regime.encode()),
        )
        digest = hashlib.blake2b(b"".join(fields), digest_size=DIGEST_BYTES, person=b"kvboost.root")
        self.root = ChunkKey(KeyKind.PREFIX, digest.digest())

    def content(self, ids: Sequence[int]) -> ChunkKey:
        """The key of these tokens wherever they stand. Whoever finds it compares the ids."""
        return self._key(KeyKind.CONTENT, ids, None)

    def prefix(self, parent: ChunkKey, ids: Sequence[int]) -> ChunkKey:
        """The key of exact KV: these tokens, after everything that `parent` stands for."""
        if parent.kind is not KeyKind.PREFIX:
            raise AssertionError(f"a prefix key cannot follow a {parent.kind} key")
        return self._key(KeyKind.PREFIX, ids, parent)

    def approximate(self, parent: ChunkKey, ids: Sequence[int]) -> ChunkKey:
        """The lineage of KV computed on approximate context. Never equal to a prefix key, and no
        prefix key can follow it: what is approximate once stays so down the whole chain."""
        if parent.kind is KeyKind.CONTENT:
            raise AssertionError("a content key has no lineage, so no context key can follow it")
        return self._key(KeyKind.CONTEXT, ids, parent)

    def _key(self, kind: KeyKind, ids: Sequence[int], parent: ChunkKey | None) -> ChunkKey:
        digest = hashlib.blake2b(
            _field(b"k", kind.encode()),
            digest_size=DIGEST_BYTES,
            key=self.root.digest,
            person=b"kvboost.chunk",
        )
        if parent is not None:
            digest.update(_field(b"p", parent.kind.encode()))
            digest.update(_field(b"d", parent.digest))
        digest.update(_field(b"i", _packed(ids)))
        return ChunkKey(kind, digest.digest())


def lineages(chunks: Sequence[Chunk], exact_until: int, keys: KeySpace) -> list[ChunkKey]:
    """The lineage that each chunk has in this prompt, were nothing after `exact_until` exact."""
    lineage: list[ChunkKey] = []
    parent = keys.root
    for chunk in chunks:
        exact = chunk.end <= exact_until
        parent = keys.prefix(parent, chunk.ids) if exact else keys.approximate(parent, chunk.ids)
        lineage.append(parent)
    return lineage


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + struct.pack("<Q", len(value)) + value


def _packed(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32, on any machine."""
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error as error:
        raise ValueError("token ids must be whole numbers from 0 to 2**32 - 1") from error
