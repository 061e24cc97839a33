"""Who asks, and what they may: API keys from a file.

The file is JSON:

    {"keys": [{"name": "alice", "key": "sk-..."},
              {"name": "team", "sha256": "9f86d0...", "namespace": "alice", "admin": true}]}

`sha256` is the key's digest in hex (`printf %s KEY | sha256sum`), for a file without secrets.
`namespace` is where KV is stored and found, the name if it isn't given. Keys with `admin` may use
/v1/cache and see the metrics; one whose namespace is the shared one fills that.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import HTTPConnection

from kvboost.errors import ConfigError
from kvboost.server.errors import ApiError
from kvboost.server.work import Tenant

_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]", "::1")


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: Tenant
    admin: bool


class _Key(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str = Field(min_length=1)
    key: str | None = Field(None, min_length=1)
    sha256: str | None = Field(None, pattern=r"^[0-9a-fA-F]{64}$")
    namespace: str | None = Field(None, min_length=1)
    admin: bool = False

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("give either key or sha256")
        return self

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256) if self.sha256 else _digest(self.key or "")


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    keys: list[_Key] = Field(min_length=1)

    @model_validator(mode="after")
    def _all_different(self) -> Self:
        for what in ("name", "digest"):
            if len({getattr(key, what) for key in self.keys}) < len(self.keys):
                raise ValueError("two keys are the same, or have the same name")
        return self


class Door:
    """Knows the keys. Without a file everybody is the tenant "default", and an admin if they ask
    from this machine."""

    def __init__(self, keys: Path | None = None, shared: str | None = None) -> None:
        """Raises ConfigError for a file that can't be used."""
        self._shared = shared
        self._callers = {key.digest: self._caller(key) for key in _read(keys)} if keys else None

    @property
    def locked(self) -> bool:
        """Whether a key is needed."""
        return self._callers is not None

    def caller(self, connection: HTTPConnection) -> Caller:
        """Raises ApiError(401) for a missing or wrong key."""
        if self._callers is None:
            return Caller(self._tenant("default", "default"), admin=_from_here(connection))
        scheme, _, key = connection.headers.get("authorization", "").partition(" ")
        given, found = _digest(key.strip()), None
        for digest, caller in self._callers.items():  # all of them, whichever it is
            if hmac.compare_digest(digest, given):
                found = caller
        if found is None or scheme.lower() != "bearer":
            said = (
                "wrong API key" if key else "no API key: send the header Authorization: Bearer KEY"
            )
            raise ApiError(
                401, said, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )
        return found

    def _caller(self, key: _Key) -> Caller:
        return Caller(self._tenant(key.name, key.namespace or key.name), key.admin)

    def _tenant(self, name: str, namespace: str) -> Tenant:
        return Tenant(name, namespace, None if namespace == self._shared else self._shared)


def _read(path: Path) -> list[_Key]:
    try:
        return _File.model_validate_json(path.read_bytes()).keys
    except OSError as error:
        raise ConfigError(f"can't read the API keys: {error}") from error
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {where or 'the file'}: {first['msg']}") from None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _from_here(connection: HTTPConnection) -> bool:
    """Asked from this machine, by one of its own names: a page from elsewhere in a browser here
    would send the name it came from."""
    try:
        local = ipaddress.ip_address(
            connection.client.host if connection.client else ""
        ).is_loopback
    except ValueError:
        return False
    return local and connection.url.hostname in _LOCAL_NAMES
