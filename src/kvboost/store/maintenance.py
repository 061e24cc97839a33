"""What the command line does with a disk tier: list, empty, examine, take away, bring back.

An export is an uncompressed tar with a member `<key>.kv` for each record. What is imported was
written by strangers: only members so named are looked at, nothing is unpacked to a path, and every
record is checked like one that was read from disk.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvboost.errors import ConfigError
from kvboost.store import disk_rows as rows
from kvboost.store.disk import DiskTier, recognise
from kvboost.store.disk_index import tier_errors
from kvboost.store.folder import key_of
from kvboost.store.tier import Record

Check = Callable[[bytes | bytearray | memoryview], str | None]
"""What is wrong with a record's bytes, None if nothing is: `frame.flaw_of`, or more."""

_PAGE = 500


class Examined(NamedTuple):
    """One record was examined, the `done`th of `total`. flaw: why it is in quarantine now."""

    done: int
    total: int
    key: bytes
    flaw: str | None


class Imported(NamedTuple):
    """stored: new here. known: there already, or no room. refused: flawed, or no records."""

    stored: int
    known: int
    refused: int


def entries(tier: DiskTier) -> Iterator[rows.Row]:
    """Every record, in the order of writing."""
    last = 0
    while True:
        with tier.index.reading() as db:
            page = rows.rows(db, last, _PAGE)
        if not page:
            return
        yield from page
        last = page[-1].id


def clear(tier: DiskTier) -> int:
    """Remove every record and what is in quarantine; how many records there were."""
    count = tier.usage().entries or 0
    with tier_errors(tier.folder):
        keys = list(tier.folder.stored())
    for at in range(0, len(keys), _PAGE):  # others' changes need not wait until all are gone
        with tier.index.writing():
            for key in keys[at : at + _PAGE]:
                tier.folder.remove(key)
    with tier.index.writing() as db:
        for key in tier.folder.stored():
            tier.folder.remove(key)
        tier.folder.release()
        rows.clear(db)
        rows.set_quarantined(db, 0)
    tier.index.compact()
    return count


def scan(tier: DiskTier, check: Check) -> Iterator[Examined]:
    """Compare files and index, then read every record; the flawed ones go to quarantine."""
    tier.sweep()
    total = tier.usage().entries or 0
    for done, row in enumerate(entries(tier), 1):
        flaw = None
        for data in tier.read([row.key]):
            flaw = None if data is None else check(data)
        if flaw is not None:
            tier.discard(row.key, flaw)
        yield Examined(done, max(done, total), row.key, flaw)


def export(tier: DiskTier, path: Path) -> int:
    """Write all records to a tar file, which only this user can read; how many there are."""
    count, unfinished = 0, path.with_name(f"{path.name}.part")
    try:
        with (
            open(unfinished, "wb", opener=_private) as file,
            tarfile.open(fileobj=file, mode="w|") as tar,
        ):
            for row in entries(tier):
                for data in tier.read([row.key]):
                    if data is not None:
                        member = tarfile.TarInfo(f"{row.key.hex()}.kv")
                        member.size, member.mode, member.mtime = len(data), 0o600, int(row.created)
                        tar.addfile(member, io.BytesIO(data))
                        count += 1
        os.replace(unfinished, path)
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error}; choose another place") from error
    finally:
        with suppress(OSError):
            unfinished.unlink()
    return count


def import_(tier: DiskTier, path: Path, check: Check) -> Imported:
    """Store the records of an export, as far as there is room."""
    stored = known = refused = 0
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                record = _record(tier, tar, member, check)
                if record is None:
                    refused += 1
                elif tier.write(record):
                    stored += 1
                else:
                    known += 1
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(f"can't read {path}: {error}; is it from `kvboost export`?") from error
    return Imported(stored, known, refused)


def _record(
    tier: DiskTier, tar: tarfile.TarFile, member: tarfile.TarInfo, check: Check
) -> Record | None:
    key = key_of(member.name)
    plain = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
    if key is None or not plain or member.size > tier.max_record_bytes:
        return None
    file = tar.extractfile(member)
    data = file.read() if file else b""
    if check(data) is not None:
        return None
    return recognise(key, data, len(data))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
