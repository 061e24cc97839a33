"""The files of a disk tier: one for each record, the flawed ones apart.

Knows neither budget nor index. Whoever changes anything here holds the index's write lock, so what
lies in `incoming` when a change begins was left by a process that was killed.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from errno import ENOTEMPTY
from io import FileIO
from pathlib import Path

import numpy

from kvboost.store.frame import VERSION, front_size, outline

BLOCK = 4096
FAN_OUT = 256
FORMAT = f"KVBoost entries, version {VERSION}"
_NAME = re.compile(r"[0-9a-f]{64}\.kv")
_QUARANTINED = 16
_HEAD = 4096
"""Holds the front of a chunk of up to 900 tokens."""


def charge(size: int) -> int:
    """Bytes on disk of a file: whole blocks, and one in which the file system accounts for it."""
    return (-(-size // BLOCK) + 1) * BLOCK


def key_of(name: str) -> bytes | None:
    """The key in a file's name; None if it is not the name of a record."""
    return bytes.fromhex(name[:64]) if _NAME.fullmatch(name) else None


class Folder:
    """Where the files are. Only this user can read them, whatever the umask."""

    def __init__(self, root: Path, quarantine_bytes: int) -> None:
        self.root = root
        self._quarantine_bytes = quarantine_bytes
        self.index = root / "index.sqlite3"
        self._format = root / "format"
        self._entries = str(root / "entries")
        self._incoming = str(root / "incoming")
        self._quarantine = str(root / "quarantine")

    def create(self) -> None:
        """OSError if there is a folder with something else in it: nothing of that is touched."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._format.exists():
            if os.listdir(self.root) and not self._format.exists():
                raise OSError(ENOTEMPTY, "there is something else in it", str(self.root))
            with open(self._format, "w", opener=_private) as file:
                file.write(FORMAT)
        for folder in (self._entries, self._incoming, self._quarantine):
            _mkdir(folder)
        with suppress(FileExistsError):
            # SQLite gives its other files the mode of this one.
            os.close(os.open(self.index, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))

    def format(self) -> str:
        """Of what is in here, as whoever made the folder wrote it down."""
        return self._format.read_text(encoding="utf-8", errors="replace") or FORMAT

    def path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._entries}/{name[:2]}/{name}.kv"

    def read(self, key: bytes) -> memoryview | None:
        """What the file holds, as far as it says itself how much that is, and a byte more.

        In memory that is not cleared first, which holds Python's lock: two threads then read 46 MB
        in 12 ms, not 25.
        """
        try:
            with open(self.path(key), "rb", buffering=0) as file:
                head = _head(file)
                frame = outline(head)
                size = frame.front + frame.body + 1 if frame else len(head)
                data = numpy.empty(min(size, os.fstat(file.fileno()).st_size), numpy.uint8).data
                file.seek(0)
                return data[: file.readinto(data)]
        except FileNotFoundError:
            return None

    def expect(self, key: bytes) -> None:
        """Have the kernel read a record that will be asked for soon."""
        with suppress(FileNotFoundError, AttributeError), open(self.path(key), "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def has(self, key: bytes) -> bool:
        return os.path.exists(self.path(key))

    def head(self, key: bytes) -> bytes:
        """The front of a record's file and maybe more; empty if there is none."""
        try:
            with open(self.path(key), "rb", buffering=0) as file:
                return _head(file)
        except FileNotFoundError:
            return b""

    def status(self, key: bytes) -> tuple[int, float]:
        """Size of a record's file, and when it was written; zeros if there is none."""
        try:
            status = os.stat(self.path(key))
        except FileNotFoundError:
            return 0, 0.0
        return status.st_size, status.st_mtime

    def free(self) -> int:
        """Bytes that the file system has left for us."""
        return shutil.disk_usage(self.root).free

    def log_bytes(self) -> int:
        """Of the index's write-ahead log."""
        try:
            return os.stat(f"{self.index}-wal").st_size
        except FileNotFoundError:
            return 0

    def write(self, key: bytes, *parts: bytes) -> None:
        """Whole or not at all, unless the machine loses power: nothing is synced here."""
        self.clean()
        path = self.path(key)
        temporary = f"{self._incoming}/{key.hex()}.{os.getpid()}"
        try:
            with open(temporary, "xb", opener=_private) as file:
                for part in parts:
                    file.write(part)
            try:
                os.replace(temporary, path)
            except FileNotFoundError:  # the first whose key begins so
                _mkdir(os.path.dirname(path))
                os.replace(temporary, path)
        finally:
            _unlink(temporary)

    def remove(self, key: bytes) -> None:
        _unlink(self.path(key))

    def clean(self) -> None:
        """Remove what killed processes had begun to write."""
        for name in os.listdir(self._incoming):
            _unlink(f"{self._incoming}/{name}")

    def probe(self) -> None:
        """OSError if nothing can be written here."""
        path = f"{self._incoming}/probe.{os.getpid()}"
        with suppress(FileExistsError), open(path, "xb", opener=_private) as file:
            file.write(b"kvboost")
        _unlink(path)

    def stored(self) -> Iterator[bytes]:
        """The key of every record that has a file. Other files are not ours, and left alone."""
        for part in os.listdir(self._entries):
            with suppress(NotADirectoryError):
                for name in os.listdir(f"{self._entries}/{part}"):
                    key = key_of(name)
                    if key is not None and name[:2] == part:
                        yield key

    def quarantine(self, path: str | Path, name: str) -> None:
        """Put a file away for whoever wants to know what happened. The last 16 are kept."""
        target, now = f"{self._quarantine}/{name}", time.time_ns()
        with suppress(FileNotFoundError):
            os.replace(path, target)
            os.utime(target, ns=(now, now))
        kept = 0
        for at, (_, size, old) in enumerate(sorted(self._quarantined(), reverse=True)):
            kept += size
            if at >= _QUARANTINED or kept > self._quarantine_bytes:
                _unlink(old)

    def quarantined(self) -> int:
        """Bytes on disk of the files in quarantine."""
        return sum(size for _, size, _ in self._quarantined())

    def release(self) -> None:
        """Remove the files in quarantine."""
        for _, _, path in list(self._quarantined()):
            _unlink(path)

    def _quarantined(self) -> Iterator[tuple[int, int, str]]:
        for name in os.listdir(self._quarantine):
            path = f"{self._quarantine}/{name}"
            status = os.lstat(path)
            yield status.st_mtime_ns, charge(status.st_size), path


def _head(file: FileIO) -> bytes:
    head = file.read(_HEAD)
    return head + file.read(max(0, (front_size(head) or 0) - _HEAD))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _mkdir(path: str) -> None:
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
