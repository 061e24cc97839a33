"""What a disk tier does when things go wrong: killed, full, read-only, gone, damaged."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import disk_child
import pytest
from test_disk import chain, held, on_disk
from tier_contract import digest, in_threads, make_record, numbered, whole

import kvboost
from kvboost.errors import ConfigError
from kvboost.store import disk_index, disk_rows
from kvboost.store.disk import MIN_BYTES, DiskTier
from kvboost.store.folder import Folder
from kvboost.store.frame import flaw_of, outline
from kvboost.store.tier import TierError

PACKAGE = Path(kvboost.__file__).parent
RECORDS = [make_record(n, n - 1, size=20_000) for n in range(30)]
KEYS = [record.key for record in RECORDS]


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    """With thirty records."""
    tier = DiskTier(tmp_path / "kv", MIN_BYTES)
    for record in RECORDS:
        tier.write(record)
    yield tier
    tier.close()


def child(folder: Path, seed: int, seconds: float) -> subprocess.Popen[str]:
    """Another process that uses the folder; back when it has opened it."""
    args = [PACKAGE, folder, MIN_BYTES, seed, seconds]
    process = subprocess.Popen(
        [sys.executable, disk_child.__file__, *map(str, args)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


def stop_while_writing(process: subprocess.Popen[str], incoming: Path) -> None:
    """Stop the process at a moment when a file is half written."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if any(incoming.iterdir()):
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)  # only now has every thread of it stopped
            if any(incoming.iterdir()):
                return
            process.send_signal(signal.SIGCONT)


def all_sound(tier: DiskTier) -> bool:
    """Whether everything that should be there is a whole record under its own key."""
    keys = sorted(held(tier))
    frames = [data and outline(data) for data in tier.read(keys)]
    return [frame and frame.key for frame in frames] == keys and not any(
        flaw_of(data) for data in tier.read(keys) if data is not None
    )


# -- other processes


def test_killed_at_any_moment_leaves_whole_records(tmp_path: Path) -> None:
    rng, left = random.Random(1), 0
    written = {record.key: record for record in map(numbered, range(300))}
    for round in range(50):
        process = child(tmp_path, round, 60)
        time.sleep(rng.random() * 0.12)
        if round % 5 == 0:
            stop_while_writing(process, tmp_path / "incoming")
        process.send_signal(signal.SIGKILL)
        process.communicate()
        left += len(list((tmp_path / "incoming").iterdir()))
        assert on_disk(tmp_path) <= MIN_BYTES
        tier = DiskTier(tmp_path, MIN_BYTES)
        found = zip(written, tier.read(list(written)), strict=True)
        assert all(data is None or data == whole(written[key]) for key, data in found)
        assert held(tier) <= written.keys()
        assert set(tier.folder.stored()) == held(tier)
        assert not list((tmp_path / "incoming").iterdir())
        assert on_disk(tmp_path) <= MIN_BYTES
        tier.close()
    assert left >= 10, "some were killed while writing"


def test_processes_and_threads_share_a_folder_and_its_budget(tmp_path: Path) -> None:
    """Nobody sees anything but whole records, nobody fails, and the folder is never too large."""
    processes = [child(tmp_path, seed, 2.0) for seed in (1, 2)]
    tier = DiskTier(tmp_path, MIN_BYTES)
    end = time.monotonic() + 2.0

    def work(at: int) -> None:
        rng = random.Random(at)
        while time.monotonic() < end:
            if at == 0:
                assert on_disk(tmp_path) <= MIN_BYTES
            name = rng.randrange(300)
            tier.write(numbered(name))
            data = next(tier.read([digest(name)]))
            assert data is None or flaw_of(data) is None
            assert len(tier.find([digest(name // 2)], 64)) == 1

    in_threads(3, work)
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    assert all_sound(tier)
    assert set(tier.folder.stored()) == held(tier)
    assert on_disk(tmp_path) <= MIN_BYTES
    tier.close()


def test_opened_by_many_at_once(tmp_path: Path) -> None:
    def work(at: int) -> None:
        for n in range(10):
            tier = DiskTier(tmp_path / str(n), MIN_BYTES)
            assert tier.write(make_record(at))
            tier.close()

    in_threads(4, work)
    tier = DiskTier(tmp_path / "9", MIN_BYTES)
    assert tier.usage().entries == 4
    tier.close()


def test_a_lock_held_too_long_is_an_outage(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_index, "_PATIENCE", 0.05)
    impatient = DiskTier(tier.folder.root, MIN_BYTES)
    with tier.index.writing():
        with pytest.raises(TierError, match="locked"):
            impatient.write(make_record("a"))
        with pytest.raises(TierError, match="locked"):
            impatient.used(KEYS)
        assert impatient.fronts(KEYS[:1]) == [RECORDS[0].front], "looking up needs no lock"
    assert impatient.write(make_record("a"))
    impatient.close()


# -- what killed processes and strangers leave


def test_opening_tidies_up(tier: DiskTier) -> None:
    root = tier.folder.root
    tier.close()
    (root / "incoming" / "half.1").write_bytes(b"half")
    lost, orphan = RECORDS[3], make_record("orphan", "p", size=20_000)
    os.unlink(tier.folder.path(lost.key))
    tier.folder.write(orphan.key, whole(orphan))
    for name, data in (("no record", b"x" * 5000), ("empty", b""), ("swapped", whole(lost))):
        tier.folder.write(digest(name), data)
    cut = make_record("cut")
    tier.folder.write(cut.key, whole(cut)[:100])
    (root / "entries" / "README").write_text("not ours")
    tier = DiskTier(root, MIN_BYTES)
    assert held(tier) == {*KEYS, orphan.key} - {lost.key} == set(tier.folder.stored())
    assert tier.find([digest("p")], 9) == [[orphan.front]]
    assert not list((root / "incoming").iterdir())
    assert (root / "entries" / "README").exists()
    tier.close()


def test_what_a_power_loss_tore_is_for_the_reader_to_see(tier: DiskTier) -> None:
    for record, data in zip(RECORDS, (b"", whole(RECORDS[1])[:5000]), strict=False):
        Path(tier.folder.path(record.key)).write_bytes(data)
        assert list(tier.read([record.key])) == [data]
        tier.discard(record.key, "truncated")
    assert list(tier.read(KEYS[:3])) == [None, None, whole(RECORDS[2])]
    assert len(list((tier.folder.root / "quarantine").iterdir())) == 2


# -- no space, no permission


def test_a_full_disk_is_an_outage(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    a = make_record("a")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(TierError, match="No space left") as caught:
            tier.write(a)
    assert isinstance(caught.value.__cause__, OSError)
    with monkeypatch.context() as patch:
        patch.setattr(disk_rows, "insert", lambda *_: full())
        with pytest.raises(TierError, match="No space left"):
            tier.write(a)
    assert not list((tier.folder.root / "incoming").iterdir())
    assert set(tier.folder.stored()) == held(tier) == set(KEYS)
    assert tier.write(a)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MB."""
    place = tmp_path / "mount"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(place)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def remount(place: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(place)], check=True)


def test_room_is_made_where_the_disk_is_smaller_than_the_limit(small_disk: Path) -> None:
    tier = DiskTier(small_disk / "kv", MIN_BYTES)
    for n in range(60):
        assert tier.write(make_record(n, n, size=500_000))
    assert len(held(tier)) > 8
    with pytest.raises(OSError, match="No space left"), open(small_disk / "other", "wb") as file:
        file.write(bytes(12 << 20))
    assert tier.write(make_record("more", size=500_000))
    assert all_sound(tier)
    tier.close()


def test_a_disk_that_fills_up(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as it could not be seen coming: a quota, another writer."""
    monkeypatch.setattr(Folder, "free", lambda _: 1 << 40)
    tier = DiskTier(small_disk / "kv", MIN_BYTES)
    stored = []
    with pytest.raises(TierError, match=r"No space left|disk is full"):
        for n in range(100):
            record = make_record(n, n, size=500_000)
            assert tier.write(record)
            stored.append(record)
    assert len(stored) > 15
    for _ in range(3):
        for size in (500_000, 3000):  # the small ones fill it to the last block
            with pytest.raises(TierError):
                for n in range(10_000):
                    tier.write(make_record((size, n), size=size))
    assert not list((small_disk / "kv" / "incoming").iterdir())
    assert list(tier.read([r.key for r in stored])) == [whole(r) for r in stored]
    remount(small_disk, "size=64m")
    assert tier.write(make_record("more", size=500_000))
    assert all_sound(tier)
    tier.close()
    tier = DiskTier(small_disk / "kv", MIN_BYTES)
    assert set(tier.folder.stored()) == held(tier)
    tier.close()


def test_a_disk_that_becomes_read_only(small_disk: Path) -> None:
    tier = DiskTier(small_disk / "kv", MIN_BYTES)
    a, b = make_record("a"), make_record("b")
    tier.write(a)
    for use in (tier.index.reading, tier.index.writing):
        with pytest.raises(KeyError), use():
            raise KeyError  # closes what is open, or the file system says that it is busy
    remount(small_disk, "ro")
    for change in (
        lambda: tier.write(b),
        lambda: tier.discard(a.key, "checksum"),
        lambda: tier.used([a.key]),
    ):
        with pytest.raises(TierError):
            change()
    assert list(tier.read([a.key])) == [whole(a)]
    with pytest.raises(ConfigError, match="choose a folder"):
        DiskTier(small_disk / "kv", MIN_BYTES)
    with pytest.raises(ConfigError, match="choose a folder"):
        DiskTier(small_disk / "new", MIN_BYTES)
    remount(small_disk, "rw")
    assert tier.write(b)
    tier.close()


@pytest.mark.parametrize("place", ["file", "file/below", "\0", "x" * 300])
def test_a_folder_that_cannot_be_is_a_config_error(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError):
        DiskTier(tmp_path / place, MIN_BYTES)


# -- gone


def test_a_folder_that_vanishes_is_made_again(tier: DiskTier) -> None:
    other = DiskTier(tier.folder.root, MIN_BYTES)
    shutil.rmtree(tier.folder.root)
    assert list(tier.read(KEYS[:2])) == [None, None]
    for user in (tier, other):
        assert user.fronts(KEYS[:1]) == [None]
        assert user.write(make_record(user is tier))
    assert held(tier) == held(other) == {digest(True), digest(False)}
    other.close()
    assert all_sound(tier)


def test_parts_of_a_folder_that_vanish(tier: DiskTier) -> None:
    for part in ("incoming", "entries", "quarantine"):
        shutil.rmtree(tier.folder.root / part)
        record = make_record(part)
        with pytest.raises(TierError):
            tier.write(record)
            tier.discard(record.key, "checksum")
        tier.discard(record.key, None)
        assert tier.write(record)
    tier.close()
    tier = DiskTier(tier.folder.root, MIN_BYTES)
    assert set(tier.folder.stored()) == held(tier) == {digest("entries"), digest("quarantine")}
    tier.close()


# -- a damaged index


def random_bytes(index: Path) -> None:
    index.write_bytes(random.Random(1).randbytes(50_000))


def truncated(index: Path) -> None:
    os.truncate(index, index.stat().st_size // 2)


def another_database(index: Path) -> None:
    index.unlink()
    db = sqlite3.connect(index)
    db.execute("CREATE TABLE entry (x)")
    db.commit()
    db.close()


def missing(index: Path) -> None:
    index.unlink()


def emptied(index: Path) -> None:
    os.truncate(index, 0)


DAMAGES = [random_bytes, truncated, another_database, missing, emptied]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_made_anew_from_the_files(tier: DiskTier, damage: object) -> None:
    tier.close()
    damage(tier.folder.index)
    tier = DiskTier(tier.folder.root, MIN_BYTES)
    assert tier.usage().entries == 30
    assert tier.fronts(KEYS) == [record.front for record in RECORDS]
    assert tier.find([KEYS[4], RECORDS[7].content], 9) == [[RECORDS[5].front], [RECORDS[7].front]]
    assert all_sound(tier)
    kept = [path.name for path in (tier.folder.root / "quarantine").iterdir()]
    assert len(kept) == (damage not in (missing, emptied))
    tier.close()


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_index_damaged_while_it_is_used(tier: DiskTier, damage: object) -> None:
    """An outage at most; then it is made anew, and the next writer finds the files."""
    other = DiskTier(tier.folder.root, MIN_BYTES)
    tier.index.compact()
    damage(tier.folder.index)
    outages = 0
    for n in range(6):
        for user in (tier, other):
            try:
                user.write(make_record(("new", n)))
                user.find(KEYS, 9)
                user.used(KEYS)
            except TierError:
                outages += 1
    assert outages <= 4
    for user in (tier, other):
        assert user.write(make_record(user is tier))
        assert all_sound(user)
        assert set(KEYS) <= held(user) == set(user.folder.stored())
    other.close()


def test_any_damage_to_the_index_is_an_outage_at_most(tier: DiskTier) -> None:
    """Bytes changed at random: no crash, and nothing of a wrong type comes back."""
    rng = random.Random(1)
    tier.index.compact()
    tier.close()
    root, outages = tier.folder.root, 0
    sound = tier.folder.index.read_bytes()
    for _ in range(40):
        data = bytearray(sound)
        for _ in range(rng.choice([1, 10, 100])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        tier.folder.index.write_bytes(data)
        tier = DiskTier(root, MIN_BYTES)
        for _ in range(3):
            try:
                found = list(itertools.chain(tier.fronts(KEYS), *tier.find(KEYS, 9)))
                assert all(front is None or type(front) is bytes for front in found)
                tier.used(KEYS)
                tier.write(make_record(rng.random(), size=3_000_000))
                tier.discard(KEYS[0], "checksum")
                tier.usage()
                break
            except TierError:
                outages += 1
        tier.close()
        for record in RECORDS:
            if not tier.folder.has(record.key):
                tier.folder.write(record.key, whole(record))
    assert outages < 40


def test_a_rebuilt_index_keeps_the_budget(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 2 * MIN_BYTES)
    for record in chain("c", 100):
        tier.write(record)
    tier.close()
    tier.folder.index.unlink()
    tier = DiskTier(tmp_path, MIN_BYTES)
    assert on_disk(tmp_path) <= MIN_BYTES
    here = [record.key in held(tier) for record in chain("c", 100)]
    assert here == sorted(here, reverse=True), "the end went"
    assert sum(here) > 40
    tier.close()
