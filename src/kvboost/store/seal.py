"""Encryption at rest: AES-256 in GCM, through the library `cryptography`."""

from __future__ import annotations

import base64
import hashlib
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvboost.errors import ConfigError
from kvboost.store.frame import EntryError

_NONCE = 12


class AESSeal:
    """A `Seal`. Entries closed with another key are as if they were not there."""

    overhead = _NONCE + 16

    def __init__(self, secret: str) -> None:
        """secret: 32 random bytes in base64. Raises ConfigError for anything else."""
        try:
            key = base64.b64decode(secret, validate=True)
        except ValueError:
            key = b""
        if len(key) != 32:
            raise ConfigError(
                "KVBOOST_CACHE_KEY must be 32 bytes in base64; `openssl rand -base64 32` makes one"
            )
        self.name = hashlib.blake2b(key, digest_size=16, person=b"kvboost.seal").hexdigest()
        self._cipher = AESGCM(key)

    def close(self, data: bytes, place: bytes) -> bytes:
        nonce = os.urandom(_NONCE)
        return nonce + self._cipher.encrypt(nonce, data, place)

    def open(self, data: bytes, place: bytes) -> bytes:
        try:
            return self._cipher.decrypt(data[:_NONCE], data[_NONCE:], place)
        except (InvalidTag, ValueError) as error:
            raise EntryError("locked") from error
