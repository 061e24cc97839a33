"""`kvboost cache`: look after a folder that keeps KV on disk. Needs no model."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import Progress
from rich.table import Table

from kvboost.errors import ConfigError
from kvboost.store import maintenance
from kvboost.store.disk import DiskTier
from kvboost.store.entry import summary
from kvboost.store.frame import flaw_of

app = typer.Typer(
    no_args_is_help=True,
    help="Look after a folder that keeps KV on disk: the one given to KVBoost as `disk=`.",
)
Folder = Annotated[Path, typer.Argument(help="The folder given to KVBoost as `disk=`.")]
_ANY_SIZE = 1 << 60
_PAGE = 500


@contextmanager
def _open(folder: Path, max_bytes: int = _ANY_SIZE, *, new: bool = False) -> Iterator[DiskTier]:
    if not new and not (folder / "entries").is_dir():
        raise ConfigError(f"{folder} is no folder that KVBoost keeps KV in; check the path")
    tier = DiskTier(folder, max_bytes)
    try:
        yield tier
    finally:
        tier.close()


@app.command()
def ls(
    folder: Folder,
    limit: Annotated[int, typer.Option(help="How many, the newest first.", min=1)] = 20,
) -> None:
    """List entries: what each takes, when it was written and last used, how often it was a hit."""
    table = Table("key", "tokens", "format", "bytes", "written", "last used", "hits", box=None)
    with _open(folder) as tier:
        newest = deque(maintenance.entries(tier), maxlen=limit)
        fronts = tier.fronts([row.key for row in newest])
        for row, front in sorted(zip(newest, fronts, strict=True), reverse=True):
            known = summary(front) if front else None
            what = (f"{known.tokens}", known.fmt) if known else ("", "sealed")
            when = (_when(row.created), _when(row.last_used))
            table.add_row(row.key.hex()[:12], *what, decimal(row.bytes), *when, f"{row.hits}")
    Console().print(table)


@app.command()
def stats(folder: Folder) -> None:
    """Say how much is kept, and for how many models and namespaces."""
    entries, tokens, size = Counter[str](), Counter[str](), Counter[str]()
    hits = 0
    with _open(folder) as tier:
        rows = list(maintenance.entries(tier))
        for start in range(0, len(rows), _PAGE):
            page = rows[start : start + _PAGE]
            for row, front in zip(page, tier.fronts([r.key for r in page]), strict=True):
                known = summary(front) if front else None
                name = f"{known.space.hex()[:16]} {known.fmt}" if known else "sealed"
                entries[name] += 1
                tokens[name] += known.tokens if known else 0
                size[name] += row.bytes
                hits += row.hits
        used = tier.usage().bytes or 0
    table = Table("model and namespace", "entries", "tokens", "bytes", box=None)
    for name, count in entries.most_common():
        table.add_row(name, f"{count:,}", f"{tokens[name]:,}", decimal(size[name]))
    console = Console()
    console.print(table)
    console.print(f"{len(rows):,} entries, {decimal(used)} on disk with the index, {hits:,} hits")


@app.command()
def doctor(folder: Folder) -> None:
    """Check every entry's checksums; put damaged ones into quarantine, remove what is left over.

    Ends with status 1 if anything was damaged.
    """
    flaws: Counter[str] = Counter()
    seen = 0
    with _open(folder) as tier, Progress(transient=True) as progress:
        task = progress.add_task("Checking")
        for seen, examined in enumerate(maintenance.scan(tier, flaw_of), 1):
            progress.update(task, completed=seen, total=examined.total)
            if examined.flaw:
                flaws[examined.flaw] += 1
    console = Console()
    console.print(f"{seen:,} entries checked, {seen - flaws.total():,} are sound")
    for flaw, count in flaws.most_common():
        console.print(f"{count:,} put into {folder / 'quarantine'}: {flaw}")
    if flaws:
        raise typer.Exit(1)


@app.command()
def clear(
    folder: Folder, yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False
) -> None:
    """Remove every entry, of all models and namespaces, and the quarantine."""
    with _open(folder) as tier:
        count = tier.usage().entries
        if not yes:
            typer.confirm(f"Remove all {count:,} entries in {folder}?", abort=True)
        typer.echo(f"{maintenance.clear(tier):,} entries removed")


@app.command()
def export(
    folder: Folder, file: Annotated[Path, typer.Argument(help="The tar file to write.")]
) -> None:
    """Write all entries to a file, to be imported on another machine."""
    with _open(folder) as tier:
        typer.echo(f"{maintenance.export(tier, file):,} entries written to {file}")


@app.command("import")
def import_(
    folder: Folder,
    file: Annotated[Path, typer.Argument(help="What `kvboost cache export` wrote.")],
    max_bytes: Annotated[
        int, typer.Option(help="A limit; beyond it the least valuable goes.", show_default="none")
    ] = _ANY_SIZE,
) -> None:
    """Take in the entries of an export; each is checked, damaged ones are left out."""
    with _open(folder, max_bytes, new=True) as tier:
        done = maintenance.import_(tier, file, flaw_of)
    typer.echo(
        f"{done.stored:,} entries taken in, {done.known:,} there already or without room, "
        f"{done.refused:,} refused"
    )


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%m-%d %H:%M")
