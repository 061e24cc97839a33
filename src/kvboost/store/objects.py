"""Records as files in a shared folder or objects in a bucket: any file system that fsspec opens.

`entries/<2 hex>/<key>` is a record. `groups/<parent or content>/<time>-<key>` is an empty file, a
mark: a record is in a group by this name alone, so that one listing tells all of the group. Lookups
leave out records that are gone, and remove their marks. Nothing is evicted here; a bucket's
lifecycle rules may, by age.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from errno import EDQUOT, ENOSPC, EROFS
from typing import Any, TypeVar

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from kvboost.errors import ConfigError
from kvboost.store.heads import read_fronts
from kvboost.store.tier import Record, TierError, TierUsage

_KEPT = 64
"""Members of a group that are remembered; of others, as many are removed at a time."""
_BATCH = 8
"""Records read at a time, all at once if the file system can."""
_ABREAST = 16
_MARK = re.compile(r"[0-9a-f]{16}-((?:[0-9a-f]{2})+)")
_NO_ROOM = {ENOSPC, EDQUOT, EROFS}

_T = TypeVar("_T")


class ObjectTier:
    """Records under an fsspec URL; its options come from fsspec's own configuration.

    How long a call may take is up to the file system: a local one waits for its disk, s3fs and the
    like try again for minutes.
    """

    def __init__(self, url: str) -> None:
        self.name = url.partition("://")[0] if "://" in url else "file"
        try:
            self._fs, root = url_to_fs(url)
        except Exception as error:
            raise ConfigError(f"{self.name}:// can't be used: {error}") from error
        self._root = root.rstrip("/")
        # Such file systems show a file while it is written; object stores, asynchronous, don't.
        renames = type(self._fs).mv is not AbstractFileSystem.mv
        self._renames = renames and not self._fs.async_impl
        self._writing: set[bytes] = set()
        self._lock = threading.Lock()
        self._check()

    def find(self, groups: Sequence[bytes], limit: int) -> list[list[bytes]]:
        members = self._members(groups)
        newest = [list(marks)[:limit] for marks in members]
        distinct = list(dict.fromkeys(key for keys in newest for key in keys))
        fronts = dict(zip(distinct, self.fronts(distinct), strict=True))
        stale: list[str] = []
        for marks in members:
            stale += list(marks.values())[_KEPT:]
            stale += [path for key, path in marks.items() if fronts.get(key, b"") is None]
        with suppress(TierError):  # who may only read leaves them to others
            self._remove(stale[:_KEPT])
        return [[front for key in keys if (front := fronts[key]) is not None] for keys in newest]

    def fronts(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return read_fronts(keys, lambda keys, size: self._contents(keys, 0, size))

    def read(self, keys: Sequence[bytes]) -> Iterator[bytes | None]:
        for n in range(0, len(keys), _BATCH):
            yield from self._contents(keys[n : n + _BATCH], 0, None)

    def write(self, record: Record) -> bool:
        with self._lock:
            if record.key in self._writing:
                return False
            self._writing.add(record.key)
        try:
            return self._write(record)
        except TierError as error:
            cause = error.__cause__
            full = isinstance(cause, OSError) and cause.errno in _NO_ROOM
            if full or isinstance(cause, PermissionError):
                return False
            raise
        finally:
            self._writing.discard(record.key)

    def used(self, keys: Sequence[bytes]) -> None: ...

    def discard(self, key: bytes, flaw: str | None) -> None:
        self._remove([self._entry(key)])

    def usage(self) -> TierUsage:
        return TierUsage(None, None, None)

    def close(self) -> None: ...

    def _entry(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._root}/entries/{name[:2]}/{name}"

    def _group(self, group: bytes) -> str:
        return f"{self._root}/groups/{group.hex()}"

    def _members(self, groups: Sequence[bytes]) -> list[dict[bytes, str]]:
        """The keys in each group and where their marks are, newest first."""
        folders = [self._group(group) for group in groups]
        with self._reached():
            return self._each(self._marks, folders)

    def _marks(self, folder: str) -> dict[bytes, str]:
        self._fs.invalidate_cache(folder)
        try:
            paths = self._fs.ls(folder, detail=False)
        except FileNotFoundError:
            return {}
        marks: dict[bytes, str] = {}
        for path in sorted(paths, reverse=True):
            match = _MARK.fullmatch(path.rpartition("/")[2])
            if match:
                marks.setdefault(bytes.fromhex(match[1]), path)
        return marks

    def _contents(self, keys: Sequence[bytes], start: int, end: int | None) -> list[bytes | None]:
        """These bytes of each record; None for what is not there."""
        paths = [self._entry(key) for key in keys]
        with self._reached():
            found: list[Any] = self._fs.cat_ranges(paths, start, end, on_error="return")
            for n, data in enumerate(found):
                if isinstance(data, FileNotFoundError):
                    found[n] = None
                elif isinstance(data, Exception):
                    raise data
        return found

    def _write(self, record: Record) -> bool:
        there = self.fronts([record.key])[0] is not None
        groups = [record.parent, record.content]
        if there:  # in its groups too, unless its writer was killed or they were trimmed
            members = zip(groups, self._members(groups), strict=True)
            groups = [group for group, marks in members if record.key not in marks]
        else:
            self._put(self._entry(record.key), record.front + record.body)
        for group in groups:
            self._put(f"{self._group(group)}/{time.time_ns():016x}-{record.key.hex()}", b"")
        return not there

    def _put(self, path: str, data: bytes) -> None:
        """Whole or not at all; what is empty can't be torn."""
        with self._reached():
            if not self._renames:
                self._fs.pipe_file(path, data)
                return
            begun = f"{self._root}/incoming/{uuid.uuid4().hex}" if data else path
            for target in {begun, path}:
                self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            try:
                self._fs.pipe_file(begun, data)
                if data:
                    self._fs.mv(begun, path)
            except Exception:
                self._remove_one(begun)
                raise

    def _remove(self, paths: Sequence[str]) -> None:
        with self._reached():
            self._each(self._remove_one, paths)

    def _remove_one(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(path)

    def _each(self, call: Callable[[str], _T], paths: Sequence[str]) -> list[_T]:
        """Many at a time if the file system can."""
        if not self._fs.async_impl:
            return [call(path) for path in paths]
        with ThreadPoolExecutor(_ABREAST) as pool:
            return list(pool.map(call, paths))

    def _check(self) -> None:
        """Raise ConfigError for what the user can correct. A server that is away may come yet."""
        try:
            with self._reached():
                kind = self._fs.info(self._root)["type"]
        except TierError as error:
            cause = error.__cause__
            if isinstance(cause, PermissionError) or "credential" in str(cause).lower():
                raise ConfigError(f"{error}: check the rights and credentials for it") from error
            return
        if kind == "file":
            raise ConfigError(f"{self.name}: this is a file, give a folder")

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # fsspec promises no common class
            raise TierError(f"{self.name}: {str(error) or type(error).__name__}") from error
