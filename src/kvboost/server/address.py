"""Where a server listens and whom it lets in. Imports nothing of ours but errors."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from kvboost.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Address:
    """keys: a file of API keys, see `auth.py`. shared: a namespace in which everybody finds KV and
    nobody stores it but a key of that namespace. insecure: anybody who reaches the port may ask."""

    host: str = "127.0.0.1"
    port: int = 8000
    keys: Path | None = None
    shared: str | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if not self.local and self.keys is None and not self.insecure:
            raise ConfigError(
                f"{self.host} can be reached from other machines: give --api-keys FILE, or "
                "--insecure if anybody may use this server"
            )

    @property
    def local(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def url(self) -> str:
        return (
            f"http://[{self.host}]:{self.port}"
            if ":" in self.host
            else f"http://{self.host}:{self.port}"
        )
