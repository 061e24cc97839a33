"""What the command line does with a disk tier; what it imports was written by strangers."""

from __future__ import annotations

import io
import os
import random
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from test_disk import held, on_disk
from tier_contract import digest, make_record, whole

from kvboost.errors import ConfigError
from kvboost.store import maintenance
from kvboost.store.disk import MIN_BYTES, DiskTier
from kvboost.store.frame import flaw_of
from kvboost.store.maintenance import Imported

RECORDS = [make_record(n, n - 1, size=20_000) for n in range(20)]
KEYS = [record.key for record in RECORDS]


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path / "kv", MIN_BYTES)
    for record in RECORDS:
        tier.write(record)
    yield tier
    tier.close()


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path / "empty", MIN_BYTES)
    yield tier
    tier.close()


def test_lists_entries_in_order(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "_PAGE", 7)
    tier.used(KEYS[:1])
    tier.used(KEYS[:1])
    rows = list(maintenance.entries(tier))
    assert [(row.key, row.parent, row.content) for row in rows] == [
        (r.key, r.parent, r.content) for r in RECORDS
    ]
    assert [row.hits for row in rows] == [2] + [0] * 19
    assert all(20_000 < row.bytes < 32_000 for row in rows)
    assert all(row.created <= row.last_used for row in rows)


def test_clear_leaves_nothing(tier: DiskTier, empty: DiskTier) -> None:
    tier.discard(KEYS[0], "checksum")
    assert maintenance.clear(tier) == 19
    assert held(tier) == set(tier.folder.stored()) == set()
    assert tier.usage().entries == 0
    assert (tier.usage().bytes or 0) <= (empty.usage().bytes or 0) + 8192
    for path in tier.folder.root.rglob("*"):
        assert path.is_dir() or not any(r.key in path.read_bytes() for r in RECORDS), path
    assert tier.write(RECORDS[0])
    assert maintenance.clear(tier) == 1
    assert maintenance.clear(tier) == 0


def test_scan_finds_what_is_wrong(tier: DiskTier) -> None:
    flipped = bytearray(whole(RECORDS[5]))
    flipped[9000] ^= 1
    for at, data in ((5, flipped), (6, whole(RECORDS[7])[:-1]), (8, b"")):
        Path(tier.folder.path(KEYS[at])).write_bytes(data)
    os.unlink(tier.folder.path(KEYS[9]))
    tier.folder.write(digest("orphan"), b"no record")
    seen = list(maintenance.scan(tier, flaw_of))
    flaws = {step.key: step.flaw for step in seen if step.flaw}
    assert flaws == {KEYS[5]: "checksum", KEYS[6]: "truncated", KEYS[8]: "truncated"}
    assert [(step.done, step.total) for step in seen] == [(n, 19) for n in range(1, 20)]
    assert held(tier) == set(tier.folder.stored()) == set(KEYS) - flaws.keys() - {KEYS[9]}
    assert len(list((tier.folder.root / "quarantine").iterdir())) == 3
    assert all(step.flaw is None for step in maintenance.scan(tier, flaw_of))


def test_what_is_exported_can_be_imported(tier: DiskTier, empty: DiskTier, tmp_path: Path) -> None:
    path = tmp_path / "export.tar"
    assert maintenance.export(tier, path) == 20
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert maintenance.import_(empty, path, flaw_of) == Imported(20, 0, 0)
    assert list(empty.read(KEYS)) == [whole(record) for record in RECORDS]
    assert empty.fronts(KEYS) == [record.front for record in RECORDS]
    assert empty.find([KEYS[3]], 9) == [[RECORDS[4].front]]
    assert maintenance.import_(empty, path, flaw_of) == Imported(0, 20, 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "export.tar", "kv"]


def test_importing_keeps_the_budget(empty: DiskTier, tmp_path: Path) -> None:
    with DiskTierOf(tmp_path / "large", 4 * MIN_BYTES) as large:
        for n in range(100):
            large.write(make_record(n, n, size=900_000))
        maintenance.export(large, tmp_path / "large.tar")
    done = maintenance.import_(empty, tmp_path / "large.tar", flaw_of)
    assert done.stored == 100
    assert on_disk(empty.folder.root) <= MIN_BYTES
    assert len(held(empty)) > 20


class DiskTierOf:
    """A tier for a `with` statement."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.tier = DiskTier(path, max_bytes)

    def __enter__(self) -> DiskTier:
        return self.tier

    def __exit__(self, *_: object) -> None:
        self.tier.close()


def add(tar: tarfile.TarFile, name: str, data: bytes, kind: bytes = tarfile.REGTYPE) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.type, member.linkname = len(data), kind, "/etc/passwd"
    tar.addfile(member, io.BytesIO(data))


def test_only_sound_records_under_their_own_name_are_imported(
    empty: DiskTier, tmp_path: Path
) -> None:
    good, other = RECORDS[0], RECORDS[1]
    name = f"{good.key.hex()}.kv"
    path = tmp_path / "strange.tar"
    with tarfile.open(path, "w") as tar:
        for bad in (f"../{name}", f"/{name}", f"x/{name}", name.upper(), f"{name}\n", f"{name}/.."):
            add(tar, bad, whole(good))
        add(tar, name, b"", tarfile.SYMTYPE)
        add(tar, name, b"", tarfile.LNKTYPE)
        add(tar, name, b"", tarfile.DIRTYPE)
        add(tar, name, b"", tarfile.FIFOTYPE)
        add(tar, name, whole(other))
        add(tar, name, whole(good)[:-1])
        add(tar, name, whole(good) + b"\0")
        add(tar, name, b"")
        add(tar, name, bytes(MIN_BYTES // 4 + 1))
    before = set(tmp_path.rglob("*"))
    assert maintenance.import_(empty, path, flaw_of) == Imported(0, 0, 15)
    assert set(tmp_path.rglob("*")) == before
    assert held(empty) == set(empty.folder.stored()) == set()


@pytest.mark.parametrize("data", [b"", b"x" * 3000, b"\x1f\x8b" + b"x" * 3000])
def test_what_is_no_export_is_a_config_error(empty: DiskTier, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "no.tar"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"no\.tar"):
        maintenance.import_(empty, path, flaw_of)
    with pytest.raises(ConfigError, match="missing"):
        maintenance.import_(empty, tmp_path / "missing", flaw_of)


def test_a_damaged_export_is_imported_in_part_or_refused(
    tier: DiskTier, empty: DiskTier, tmp_path: Path
) -> None:
    path, rng = tmp_path / "export.tar", random.Random(1)
    maintenance.export(tier, path)
    sound = path.read_bytes()
    for _ in range(100):
        data = bytearray(sound)
        for _ in range(rng.choice([1, 30])):
            data[512 * rng.randrange(len(data) // 512) + rng.randrange(512)] = rng.randrange(256)
        path.write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
        with suppress(ConfigError):
            maintenance.import_(empty, path, flaw_of)
    assert set(KEYS) >= held(empty)
    assert list(empty.read(KEYS)) == [whole(record) for record in RECORDS]


@pytest.mark.parametrize(
    "place", [lambda path: path / "missing" / "x.tar", lambda path: path / "kv"]
)
def test_an_export_needs_a_place(
    tier: DiskTier, tmp_path: Path, place: Callable[[Path], Path]
) -> None:
    with pytest.raises(ConfigError, match="can't write"):
        maintenance.export(tier, place(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["kv"]
