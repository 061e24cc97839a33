"""The shared tier in folders and buckets: real files, fsspec's memory, and a bucket of our own."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from tier_contract import TierContract, digest, framed, make_record, whole

from kvboost.errors import ConfigError
from kvboost.store.objects import ObjectTier
from kvboost.store.tier import TierError


class Bucket(AsyncFileSystem):
    """An object store as s3fs shows one: asynchronous, its listings cached, no folders."""

    protocol = "bucket"
    objects: ClassVar[dict[str, bytes]] = {}
    failure: ClassVar[Exception | None] = None
    delay: ClassVar[float] = 0
    busy: ClassVar[int] = 0
    busiest: ClassVar[int] = 0

    async def _asked(self) -> None:
        Bucket.busy += 1
        Bucket.busiest = max(Bucket.busiest, Bucket.busy)
        await asyncio.sleep(Bucket.delay)
        Bucket.busy -= 1
        if Bucket.failure:
            raise Bucket.failure

    async def _cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        await self._asked()
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path][start:end]

    async def _pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        await self._asked()
        self.objects[path] = value

    async def _rm_file(self, path: str, **_: Any) -> None:
        await self._asked()
        self.objects.pop(path, None)

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        await self._asked()
        if path not in self.dircache:
            found = [name for name in self.objects if name.startswith(f"{path}/")]
            if not found:
                raise FileNotFoundError(path)
            self.dircache[path] = [{"name": name, "size": 0, "type": "file"} for name in found]
        entries = self.dircache[path]
        return entries if detail else [entry["name"] for entry in entries]

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        await self._asked()
        return {"name": path, "type": "directory"}

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.pop(path, None)

    def mv(self, *_: object, **__: object) -> None:
        raise AssertionError("a copy, in a bucket")


fsspec.register_implementation("bucket", Bucket, clobber=True)


@pytest.fixture(autouse=True)
def _emptied() -> Iterator[None]:
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    Bucket.objects.clear()


@pytest.fixture(params=["file", "memory", "bucket"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/[kv] store" if request.param == "file" else f"{request.param}://kv"


@pytest.fixture
def tier(url: str) -> ObjectTier:
    return ObjectTier(url)


@pytest.fixture
def folder(tmp_path: Path) -> tuple[ObjectTier, Path]:
    return ObjectTier(f"file://{tmp_path}/kv"), tmp_path / "kv"


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


class TestContract(TierContract):
    pass


# -- records


@pytest.mark.parametrize("size", [0, 1800, 1900, 2048, 5000, 100_000])
def test_fronts_of_any_size(tier: ObjectTier, size: int) -> None:
    digests = digest("long"), digest("root"), digest("content")
    r, small = framed(digests, b"body", bytes(size)), make_record("small", size=0)
    assert tier.write(r) and tier.write(small)
    assert tier.find([digest("root")], 2) == [[small.front, r.front]]
    assert list(tier.read([r.key, small.key])) == [whole(r), whole(small)]


def test_another_tier_sees_what_this_one_writes(url: str) -> None:
    a, b = make_record("a"), make_record("b")
    one, other = ObjectTier(url), ObjectTier(url)
    assert one.write(a) and other.find([a.parent], 9) == [[a.front]]
    assert one.write(b) and other.find([a.parent], 9) == [[b.front, a.front]]
    other.discard(a.key, "checksum")
    other.discard(digest("unknown"), None)
    assert one.find([a.parent], 9) == [[b.front]] and list(one.read([a.key])) == [None]
    assert one.write(a) and other.find([a.parent], 9) == [[a.front, b.front]]


def test_another_process_sees_the_same_until_it_is_killed(
    folder: tuple[ObjectTier, Path],
) -> None:
    tier, root = folder
    mine, theirs, torn = make_record("mine"), make_record("theirs"), make_record("torn")
    assert tier.write(mine)
    program = (
        "import os, signal, sys\n"
        "from fsspec.implementations.local import LocalFileSystem\n"
        "from tier_contract import make_record, whole\n"
        "from kvboost.store.objects import ObjectTier\n"
        "def kill(fs, path, data):\n"
        "    with open(path, 'wb') as file:\n"
        "        file.write(data[:700])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "tier, mine = ObjectTier(sys.argv[1]), make_record('mine')\n"
        "assert tier.find([mine.parent], 9) == [[mine.front]]\n"
        "assert list(tier.read([mine.key])) == [whole(mine)]\n"
        "assert tier.write(make_record('theirs')) and not tier.write(mine)\n"
        "LocalFileSystem.pipe_file = kill\n"
        "tier.write(make_record('torn'))\n"
    )
    here = str(Path(__file__).parent)
    process = subprocess.run([sys.executable, "-c", program, f"file://{root}"], cwd=here)
    assert process.returncode == -signal.SIGKILL
    assert tier.find([mine.parent], 9) == [[theirs.front, mine.front]]
    assert tier.fronts([torn.key]) == [None] and tier.write(torn)
    assert list(tier.read([torn.key])) == [whole(torn)]


# -- what is gone, torn or too much


def test_marks_of_records_that_are_gone_are_removed(folder: tuple[ObjectTier, Path]) -> None:
    tier, root = folder
    a, b = make_record("a"), make_record("b")
    assert tier.write(a) and tier.write(b)
    (root / "entries" / a.key.hex()[:2] / a.key.hex()).unlink()
    assert tier.find([a.parent, a.content], 9) == [[b.front], []]
    assert sorted(path.name[17:] for path in files(root / "groups")) == [b.key.hex()] * 2


def test_groups_keep_the_newest(folder: tuple[ObjectTier, Path]) -> None:
    tier, root = folder
    records = [make_record(f"r{n}", size=10) for n in range(70)]
    assert all(tier.write(r) for r in records)
    newest = [r.front for r in reversed(records)]
    assert tier.find([digest("root")], 5) == [newest[:5]]
    assert len(files(root / "groups" / digest("root").hex())) == 64
    assert tier.find([digest("root")], 100) == [newest[:64]]
    assert not tier.write(records[0]), "it is there, and in its groups again"
    assert tier.find([digest("root")], 1) == [[records[0].front]]


@pytest.mark.parametrize("data", [b"", b"text", b"KVBENTRY", None])
def test_a_torn_record_is_a_miss_and_makes_way(
    folder: tuple[ObjectTier, Path], data: bytes | None
) -> None:
    tier, root = folder
    r = make_record("r")
    assert tier.write(r)
    path = root / "entries" / r.key.hex()[:2] / r.key.hex()
    path.write_bytes(r.front[:-1] if data is None else data)
    assert tier.fronts([r.key]) == [None] and tier.find([r.parent], 9) == [[]]
    assert tier.write(r) and tier.find([r.parent], 9) == [[r.front]]


def test_other_files_in_the_way_are_left_alone(folder: tuple[ObjectTier, Path]) -> None:
    tier, root = folder
    r = make_record("r")
    assert tier.write(r)
    strange = [root / "groups" / r.parent.hex() / name for name in (".DS_Store", "0-zz", "a-b-c")]
    for path in strange:
        path.touch()
    assert tier.find([r.parent], 9) == [[r.front]] and all(path.exists() for path in strange)


def test_a_write_that_fails_leaves_nothing(
    folder: tuple[ObjectTier, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, root = folder
    r = make_record("r")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "mv", fail)
        with pytest.raises(TierError, match="the disk is broken"):
            tier.write(r)
    assert files(root) == [] and tier.find([r.parent], 9) == [[]]
    assert tier.write(r) and tier.find([r.parent], 9) == [[r.front]]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_no_room_and_no_right_to_write(
    folder: tuple[ObjectTier, Path], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    tier, _ = folder
    r = make_record("r")
    assert tier.write(r)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    for step in ("makedirs", "rm_file"):
        monkeypatch.setattr(LocalFileSystem, step, refuse)
    assert not tier.write(make_record("s"))
    assert tier.find([r.parent], 9) == [[r.front]] and list(tier.read([r.key])) == [whole(r)]


# -- a bucket


def test_a_bucket_is_asked_for_many_things_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tier, records = ObjectTier("bucket://kv"), [make_record(f"r{n}") for n in range(8)]
    assert all(tier.write(r) for r in records)
    monkeypatch.setattr(Bucket, "delay", 0.02)
    for call in (
        lambda: tier.find([r.content for r in records], 1),
        lambda: list(tier.read([r.key for r in records])),
    ):
        Bucket.busiest = 0
        call()
        assert Bucket.busiest >= 4


class Foreign(Exception):
    """Like botocore's: of no common base."""


@pytest.mark.parametrize("error", [Foreign("no route"), TimeoutError(), OSError("odd")])
def test_a_bucket_that_fails(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    tier, r = ObjectTier("bucket://kv"), make_record("r")
    assert tier.write(r)
    monkeypatch.setattr(Bucket, "failure", error)
    for call in (
        lambda: tier.find([r.parent], 9),
        lambda: tier.fronts([r.key]),
        lambda: list(tier.read([r.key])),
        lambda: tier.write(r),
        lambda: tier.discard(r.key, None),
    ):
        with pytest.raises(TierError, match=f"bucket: .*({error}|TimeoutError)$"):
            call()
    monkeypatch.undo()
    assert tier.find([r.parent], 9) == [[r.front]]


def test_a_bucket_that_may_be_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tier, r = ObjectTier("bucket://kv"), make_record("r")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("Access Denied")

    assert tier.write(r)
    del Bucket.objects[f"kv/entries/{r.key.hex()[:2]}/{r.key.hex()}"]
    monkeypatch.setattr(tier, "_fs", Bucket(skip_instance_cache=True))
    monkeypatch.setattr(tier._fs, "pipe_file", refuse)
    monkeypatch.setattr(tier._fs, "rm_file", refuse)
    assert not tier.write(r) and tier.find([r.parent], 9) == [[]]


def test_a_bucket_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bucket, "failure", FileNotFoundError("no such bucket"))
    tier, r = ObjectTier("bucket://kv"), make_record("r")
    assert tier.find([r.parent], 9) == [[]] and list(tier.read([r.key])) == [None]
    with pytest.raises(TierError, match="no such bucket"):
        tier.write(r)


# -- what the user can correct


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (PermissionError("Forbidden"), "check the rights"),
        (Foreign("Unable to locate credentials"), "check the rights"),
    ],
)
def test_a_bucket_without_the_right_to_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception, advice: str
) -> None:
    monkeypatch.setattr(Bucket, "failure", error)
    with pytest.raises(ConfigError, match=f"{error}.*{advice}"):
        ObjectTier("bucket://kv")


def test_a_bucket_that_is_away_may_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "failure", Foreign("no route"))
        tier = ObjectTier("bucket://kv")
    assert tier.write(make_record("r"))


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match="Install s3fs"):
        ObjectTier("s3://bucket/kv")


def test_an_unknown_scheme() -> None:
    with pytest.raises(ConfigError, match="nonsense:// can't be used: Protocol not known"):
        ObjectTier("nonsense://user:s3cret@bucket/kv")


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "kv").touch()
    with pytest.raises(ConfigError, match="give a folder"):
        ObjectTier(f"file://{tmp_path}/kv")
