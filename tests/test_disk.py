"""The disk tier: what it holds survives a restart, is shared, and never takes more than it may."""

from __future__ import annotations

import itertools
import os
import random
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tier_contract import TierContract, digest, make_record, whole

from kvboost.errors import ConfigError
from kvboost.store import disk_rows
from kvboost.store.disk import MIN_BYTES, DiskTier
from kvboost.store.tier import MemoryTier, Record, Tier


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path / "kv", 64 << 20)
    yield tier
    tier.close()


class TestContract(TierContract):
    """On disk, and on the double in memory."""

    @pytest.fixture(params=["disk", "memory"])
    def tier(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
        tier: Tier = MemoryTier()
        if request.param == "disk":
            tier = DiskTier(tmp_path / "kv", 64 << 20)
        yield tier
        tier.close()


def on_disk(folder: Path) -> int:
    """Bytes that a folder takes, as the file system counts."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in [".", *names]:
            try:
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
            except FileNotFoundError:  # evicted by somebody just now
                continue
    return total


def held(tier: DiskTier) -> set[bytes]:
    with tier.index.reading() as db:
        return disk_rows.keys(db)


def chain(name: str, count: int, size: int = 400_000) -> list[Record]:
    """Records that follow each other. Later ones save more: attention looks back further."""
    return [
        make_record((name, n), (name, n - 1), size=size, seconds=0.1 + n / 1000)
        for n in range(count)
    ]


# -- restart, several users


def test_a_restart_finds_everything(tmp_path: Path) -> None:
    records = [make_record(n, "p", size=5000 + n) for n in range(20)]
    first = DiskTier(tmp_path, MIN_BYTES)
    for record in records:
        first.write(record)
    usage = first.usage()
    first.close()
    again = DiskTier(tmp_path, MIN_BYTES)
    assert again.usage().entries == usage.entries == 20
    assert again.find([digest("p")], 64) == [[r.front for r in reversed(records)]]
    assert list(again.read([r.key for r in records])) == [whole(r) for r in records]
    assert not again.write(records[0])
    again.close()


def test_two_tiers_on_one_folder_see_each_other(tier: DiskTier) -> None:
    other = DiskTier(tier.folder.root, 64 << 20)
    a, b = make_record("a", "p"), make_record("b", "p")
    assert tier.write(a)
    assert other.write(b)
    assert not other.write(a)
    assert tier.find([digest("p")], 9) == [[b.front, a.front]]
    tier.discard(b.key, "checksum")
    assert other.fronts([a.key, b.key]) == [a.front, None]
    other.close()


def test_what_another_evicts_while_it_is_being_read_is_a_miss(tier: DiskTier) -> None:
    other = DiskTier(tier.folder.root, 64 << 20)
    records = [make_record(n) for n in range(4)]
    for record in records:
        tier.write(record)
    reading = tier.read([record.key for record in records])
    assert next(reading) == whole(records[0])
    other.discard(records[1].key, None)
    os.unlink(tier.folder.path(records[2].key))
    assert list(reading) == [None, None, whole(records[3])]
    assert tier.usage().entries == 2, "the row without a file is gone"
    other.close()


def test_a_closed_tier_says_so(tier: DiskTier) -> None:
    tier.close()
    with pytest.raises(Exception, match="closed"):
        tier.fronts([digest("a")])


@pytest.mark.parametrize("max_bytes", [0, MIN_BYTES - 1, -1, 1e9, True, None])
def test_a_limit_too_small_is_refused(tmp_path: Path, max_bytes: int) -> None:
    with pytest.raises(ConfigError, match="at least"):
        DiskTier(tmp_path, max_bytes)
    assert not list(tmp_path.iterdir())


def test_only_this_user_may_look(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        tier = DiskTier(tmp_path / "a" / "kv", MIN_BYTES)
        tier.write(make_record("a"))
        tier.write(make_record("b"))
        tier.discard(make_record("b").key, "checksum")
        for path in [tier.folder.root, *tier.folder.root.rglob("*")]:
            expected = 0o700 if path.is_dir() else 0o600
            assert stat.S_IMODE(path.stat().st_mode) == expected, path
        assert len(list(tier.folder.root.rglob("*"))) >= 8
        tier.close()
    finally:
        os.umask(before)


# -- the budget


def test_never_takes_more_than_it_may(tmp_path: Path) -> None:
    """Small records, then large ones, then small ones: index and folders have their price."""
    tier = DiskTier(tmp_path, MIN_BYTES)
    rng = random.Random(1)
    written = 0
    for size in [1] * 1500 + [2_000_000] * 30 + [300_000] * 60 + [4000] * 1000:
        written += tier.write(make_record(rng.random(), rng.random(), size=size))
        if written % 20 == 0 or size > 4000:
            assert on_disk(tmp_path) <= MIN_BYTES
            assert on_disk(tmp_path) <= (tier.usage().bytes or 0) + (2 << 20)  # folders
    assert written == 2590
    tier.close()


def test_the_index_shrinks(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, MIN_BYTES)
    for n in range(1500):
        tier.write(Record(digest(n), digest("p"), digest("c"), bytes(3000), b"", 0.1))
    large = tier.folder.index.stat().st_size
    for n in range(40):
        tier.write(make_record(("large", n), n, size=2_000_000, seconds=99.0))
    tier.close()  # copies the log
    assert large > 4_000_000
    assert tier.folder.index.stat().st_size < large / 2


def test_uses_most_of_what_it_may(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 2 * MIN_BYTES)
    for n in range(60):
        assert tier.write(make_record(n, n, size=1_800_000))
    assert (tier.usage().entries or 0) * 1_800_000 > 2 * MIN_BYTES * 0.8
    tier.close()


def test_what_takes_a_quarter_is_not_stored(tier: DiskTier) -> None:
    tier.write(make_record("a"))
    assert not tier.write(make_record("b", size=17 << 20))
    assert held(tier) == {digest("a")}


def test_a_lower_limit_holds_from_the_start(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 2 * MIN_BYTES)
    for n in range(40):
        tier.write(make_record(n, n, size=1_000_000))
    tier.close()
    assert on_disk(tmp_path) > MIN_BYTES
    tier = DiskTier(tmp_path, MIN_BYTES)
    assert on_disk(tmp_path) <= MIN_BYTES
    assert (tier.usage().entries or 0) > 10
    tier.close()


def test_the_quarantine_is_bounded(tier: DiskTier) -> None:
    quarantine = tier.folder.root / "quarantine"
    for n in range(40):
        record = make_record(n, size=400_000 if n < 20 else 2000)
        tier.write(record)
        tier.discard(record.key, "check sum")
        assert on_disk(quarantine) <= 5 << 20
    names = sorted(path.name for path in quarantine.iterdir())
    assert names == sorted(f"check-sum-{digest(n).hex()}.kv" for n in range(24, 40))
    newest = quarantine / f"check-sum-{digest(39).hex()}.kv"
    assert newest.read_bytes() == whole(make_record(39))


# -- what goes first


def fill(tier: DiskTier, count: int = 80, size: int = 400_000, start: int = 0) -> None:
    for n in range(start, start + count):
        assert tier.write(make_record(("fill", n), ("none", n), size=size))


def test_a_chain_loses_its_end_first(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, MIN_BYTES)
    links = chain("c", 40)
    for record in links:
        assert tier.write(record)
    lengths = []
    for n in range(40):
        tier.write(make_record(("other", n), ("none", n), size=400_000, seconds=0.2))
        here = [record.key in held(tier) for record in links]
        assert here == sorted(here, reverse=True), "a beginning is left"
        lengths.append(sum(here))
    assert lengths[0] > 35
    assert lengths[-1] < 20
    tier.close()


def test_a_chain_longer_than_the_tier_keeps_its_beginning(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, MIN_BYTES)
    fill(tier)
    stored = list(itertools.takewhile(tier.write, chain("c", 90)))
    assert held(tier) == {record.key for record in stored}, "everything else went first"
    assert 50 < len(stored) < 90
    tier.close()


def test_equal_records_that_follow_each_other_go_from_the_end(tmp_path: Path) -> None:
    """Even if a parent came later than its child, and nothing tells what either saves."""
    tier = DiskTier(tmp_path, MIN_BYTES)
    links = [make_record(n, n - 1, size=400_000, seconds=0.0) for n in range(20)]
    for record in [*links[10:], *links[:10]]:
        tier.write(record)
    for n in range(60):
        tier.write(make_record(("x", n), ("none", n), size=400_000, seconds=0.0))
        here = [record.key in held(tier) for record in links]
        assert here == sorted(here, reverse=True)
    tier.close()


def test_what_is_used_or_saves_more_stays(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, MIN_BYTES)
    popular, dear, plain = make_record("popular"), make_record("dear", seconds=5.0), "plain"
    for record in (popular, dear, make_record(plain)):
        tier.write(record)
    for n in range(3):
        fill(tier, start=80 * n)
        tier.used([popular.key])
    assert {popular.key, dear.key} <= held(tier)
    tier.close()


def test_what_was_popular_once_goes_one_day(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, MIN_BYTES)
    old = make_record("old", size=400_000)
    tier.write(old)
    for _ in range(1000):
        tier.used([old.key])
    tier.close()
    tier = DiskTier(tmp_path, MIN_BYTES)  # what has been learnt survives
    fill(tier, 200)
    assert old.key in held(tier)
    for n in range(1, 10):
        if old.key not in held(tier):
            break
        fill(tier, 200, start=200 * n)
    assert old.key not in held(tier)
    tier.close()


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 0.0])
def test_any_time_is_accepted(tier: DiskTier, seconds: float) -> None:
    record = make_record("a", seconds=seconds)
    assert tier.write(record)
    tier.used([record.key])
    assert list(tier.read([record.key])) == [whole(record)]


def test_chains_that_run_in_circles_end(tmp_path: Path) -> None:
    """Digests of true prompts don't, but files can say what they like."""
    tier = DiskTier(tmp_path, MIN_BYTES)
    for n in range(60):
        parent = n if n % 3 == 0 else n + 1 - 2 * (n % 3 == 2)
        assert tier.write(make_record(n, parent, size=400_000))
    fill(tier)
    tier.close()


class Machine(RuleBasedStateMachine):
    """Against a dict: what is there is what was written, and no record outlives its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.tier = DiskTier(self.path, MIN_BYTES)
        self.other = DiskTier(self.path, MIN_BYTES)
        self.written: dict[bytes, Record] = {}
        self.gone: set[bytes] = set()

    names = st.integers(0, 60)

    @rule(name=names, megabytes=st.sampled_from([0.001, 0.4, 2, 7]), seconds=st.floats(0, 2))
    def write(self, name: int, megabytes: float, seconds: float) -> None:
        """Number n follows n // 2."""
        size = int(megabytes * 1e6)
        record = make_record(name, name // 2 if name else "root", size=size, seconds=seconds)
        known = record.key in held(self.tier)
        stored = self.tier.write(record)
        assert not (stored and known)
        if stored:
            self.written[record.key] = record
            self.gone.discard(record.key)

    @rule(names=st.lists(names, max_size=5))
    def use(self, names: list[int]) -> None:
        self.tier.used([digest(name) for name in names])

    @rule(name=names, flaw=st.sampled_from(["checksum", None]))
    def discard(self, name: int, flaw: str | None) -> None:
        self.tier.discard(digest(name), flaw)
        self.gone.add(digest(name))

    @rule()
    def swap(self) -> None:
        self.tier, self.other = self.other, self.tier

    @rule()
    def reopen(self) -> None:
        self.tier.close()
        self.tier = DiskTier(self.path, MIN_BYTES)

    @invariant()
    def agrees(self) -> None:
        here = held(self.tier)
        assert here <= self.written.keys() - self.gone
        keys = [digest(name) for name in range(61)]
        for key, front, data in zip(
            keys, self.tier.fronts(keys), self.tier.read(keys), strict=True
        ):
            assert (front is not None) == (data is not None) == (key in here)
            assert front is None or front == self.written[key].front
            assert data is None or data == whole(self.written[key])

    @invariant()
    def keeps_its_budget(self) -> None:
        assert on_disk(self.path) <= MIN_BYTES
        assert self.tier.usage().entries == len(held(self.tier))
        assert not list((self.path / "incoming").iterdir())

    def teardown(self) -> None:
        self.tier.close()
        self.other.close()
        self.folder.cleanup()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "incoming").mkdir()
    (tmp_path / "incoming" / "invoice.pdf").write_text("to be paid")
    with pytest.raises(ConfigError, match="something else"):
        DiskTier(tmp_path, MIN_BYTES)
    assert [p.name for p in tmp_path.rglob("*")] == ["incoming", "invoice.pdf"]


def test_a_file_that_claims_to_be_huge_is_not_believed(tmp_path: Path) -> None:
    tier, record = DiskTier(tmp_path, MIN_BYTES), make_record("r")
    assert tier.write(record)
    os.truncate(tier.folder.path(record.key), 1 << 43)
    (data,) = tier.read([record.key])
    assert data is not None and len(data) == record.nbytes + 1
    tier.close()
