"""What every tier must do, whatever it is made of.

Subclass TierContract in a test module that has a fixture `tier`: an empty one, with room for 20 MB.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable
from dataclasses import replace

from xxhash import xxh3_128_digest

from kvboost.store.frame import Frame, close_front
from kvboost.store.tier import Record, Tier


def digest(name: object) -> bytes:
    return hashlib.blake2b(repr(name).encode(), digest_size=32).digest()


def make_record(
    name: object,
    parent: object = "root",
    content: object = None,
    *,
    size: int = 2000,
    seconds: float = 0.1,
) -> Record:
    """A record with a true frame and random tensors: the same name gives the same one."""
    body = random.Random(repr((name, size))).randbytes(size)
    digests = digest(name), digest(parent), digest(content or f"content of {name}")
    return replace(framed(digests, body, repr((name, size)).encode()), seconds=seconds)


def framed(digests: tuple[bytes, bytes, bytes], body: bytes, meta: bytes = b"") -> Record:
    frame = Frame(False, len(meta), len(body), *digests, xxh3_128_digest(body))
    return Record(*digests, close_front(frame, meta), body, 0.0)


def numbered(number: int) -> Record:
    """One of many records that make a tree, of 50 kB and more."""
    return make_record(number, number // 2, size=50_000 + 4000 * number)


def whole(record: Record) -> bytes:
    return record.front + record.body


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Call `work` with 0 to count - 1 at once; raises what one of them raised."""
    failed: list[Exception] = []

    def one(at: int) -> None:
        try:
            work(at)
        except (AssertionError, RuntimeError, ValueError, TypeError) as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(at,)) for at in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


class TierContract:
    def test_has_a_name(self, tier: Tier) -> None:
        assert tier.name
        assert tier.name == tier.name.lower()

    def test_gives_back_what_was_written(self, tier: Tier) -> None:
        record = make_record("a")
        assert tier.write(record)
        assert tier.fronts([record.key]) == [record.front]
        assert list(tier.read([record.key])) == [whole(record)]

    def test_writing_twice_changes_nothing(self, tier: Tier) -> None:
        record = make_record("a")
        other = Record(record.key, record.parent, record.content, b"front", b"body", 1.0)
        assert tier.write(record)
        assert not tier.write(record)
        assert not tier.write(other)
        assert list(tier.read([record.key])) == [whole(record)]
        assert tier.find([record.parent], 9) == [[record.front]]

    def test_what_is_not_there_is_no_error(self, tier: Tier) -> None:
        tier.write(make_record("a"))
        unknown = digest("unknown")
        assert tier.find([unknown], 9) == [[]]
        assert tier.fronts([unknown]) == [None]
        assert list(tier.read([unknown])) == [None]
        tier.used([unknown])
        tier.discard(unknown, "checksum")
        tier.discard(unknown, None)

    def test_nothing_asked_is_nothing_answered(self, tier: Tier) -> None:
        tier.write(make_record("a"))
        assert tier.find([], 9) == []
        assert tier.fronts([]) == []
        assert list(tier.read([])) == []
        tier.used([])

    def test_answers_in_the_order_of_the_question(self, tier: Tier) -> None:
        a, b, c = (make_record(name, f"before {name}") for name in "abc")
        for record in (a, b, c):
            tier.write(record)
        keys = [c.key, digest("unknown"), a.key, c.key, b.key]
        assert tier.fronts(keys) == [c.front, None, a.front, c.front, b.front]
        assert list(tier.read(keys)) == [whole(c), None, whole(a), whole(c), whole(b)]
        groups = [b.parent, digest("unknown"), a.content, b.parent]
        assert tier.find(groups, 9) == [[b.front], [], [a.front], [b.front]]

    def test_finds_by_parent_and_content_newest_first(self, tier: Tier) -> None:
        kin = [make_record(n, "parent", f"content {n % 2}") for n in range(6)]
        for record in kin:
            tier.write(record)
        odd, even = [kin[n].front for n in (5, 3, 1)], [kin[n].front for n in (4, 2, 0)]
        groups = [digest("parent"), digest("content 1"), digest("content 0")]
        assert tier.find(groups, 9) == [[r.front for r in reversed(kin)], odd, even]
        assert tier.find(groups, 2) == [[kin[5].front, kin[4].front], odd[:2], even[:2]]

    def test_finds_a_record_once_that_is_in_a_group_twice(self, tier: Tier) -> None:
        record = make_record("a", "group", "group")
        older = make_record("b", "group", "other")
        tier.write(older)
        tier.write(record)
        assert tier.find([digest("group")], 9) == [[record.front, older.front]]

    def test_a_group_can_have_many_records(self, tier: Tier) -> None:
        many = [make_record(n, "parent", size=10) for n in range(70)]
        for record in many:
            tier.write(record)
        newest = [record.front for record in many[:5:-1]]
        assert tier.find([digest("parent")], 64) == [newest[:64]]

    def test_many_at_once(self, tier: Tier) -> None:
        many = [make_record(n, n - 1, size=10) for n in range(300)]
        for record in many:
            assert tier.write(record)
        keys = [record.key for record in many]
        assert tier.fronts(keys) == [record.front for record in many]
        assert list(tier.read(keys)) == [whole(record) for record in many]
        assert tier.find(keys[:-1], 1) == [[record.front] for record in many[1:]]
        tier.used(keys)

    def test_any_bytes_any_size(self, tier: Tier) -> None:
        bodies = [b"", b"\0", b"\r\n\x1a\xff" * 9, bytes(range(256)) * 64, b"\0" * 1_500_000]
        records = [
            framed((digest(at), digest("p"), b"\0" * 31 + bytes([at])), body)
            for at, body in enumerate(bodies)
        ]
        for record in records:
            assert tier.write(record)
        keys = [record.key for record in records]
        assert list(tier.read(keys)) == [whole(record) for record in records]
        assert tier.find([b"\0" * 32], 9) == [[records[0].front]]

    def test_discarded_is_gone_and_can_be_written_again(self, tier: Tier) -> None:
        for flaw in ("checksum", None):
            record, other = make_record(flaw, "p"), make_record(f"{flaw} 2", "p")
            tier.write(record)
            tier.write(other)
            tier.discard(record.key, flaw)
            assert tier.fronts([record.key, other.key]) == [None, other.front]
            assert tier.find([record.parent, record.content], 1) == [[other.front], []]
            assert list(tier.read([record.key])) == [None]
            assert tier.write(record)
            assert list(tier.read([record.key])) == [whole(record)]

    def test_a_flaw_can_have_any_name(self, tier: Tier) -> None:
        record = make_record("a")
        tier.write(record)
        tier.discard(record.key, "../../\0 Ünfit" * 40)
        assert list(tier.read([record.key])) == [None]

    def test_what_is_read_may_be_changed(self, tier: Tier) -> None:
        record = make_record("a")
        tier.write(record)
        for data in tier.read([record.key]):
            if isinstance(data, bytearray):
                data[:] = b"\0" * len(data)
        assert list(tier.read([record.key])) == [whole(record)]

    def test_reading_can_be_given_up(self, tier: Tier) -> None:
        records = [make_record(n) for n in range(5)]
        for record in records:
            tier.write(record)
        reading = tier.read([record.key for record in records])
        assert next(reading) == whole(records[0])
        del reading
        assert list(tier.read([records[4].key])) == [whole(records[4])]

    def test_usage_counts(self, tier: Tier) -> None:
        empty = tier.usage()
        assert empty.entries in (0, None)
        for n in range(3):
            tier.write(make_record(n))
        usage = tier.usage()
        assert usage.entries in (3, None)
        if usage.bytes is not None and empty.bytes is not None:
            assert usage.bytes >= empty.bytes + 3 * 2000
        if usage.bytes is not None and usage.max_bytes is not None:
            assert usage.bytes <= usage.max_bytes

    def test_several_threads(self, tier: Tier) -> None:
        """Each writes its own and what all write; whatever is read is whole."""
        shared = [make_record(("shared", n), size=30_000) for n in range(10)]
        written: list[bool] = []

        def work(at: int) -> None:
            for n in range(10):
                mine = make_record((at, n), ("chain", at), size=20_000)
                assert tier.write(mine)
                assert list(tier.read([mine.key])) == [whole(mine)]
                written.append(tier.write(shared[n]))
                for record, data in zip(shared, tier.read([r.key for r in shared]), strict=True):
                    assert data is None or data == whole(record)
                tier.used([mine.key, shared[n].key])
                assert len(tier.find([mine.parent], 64)[0]) == n + 1

        in_threads(4, work)
        assert sum(written) == len(shared)
        assert list(tier.read([r.key for r in shared])) == [whole(r) for r in shared]

    def test_closing_twice_is_fine(self, tier: Tier) -> None:
        tier.close()
        tier.close()
