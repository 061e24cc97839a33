"""The command line."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import track
from rich.table import Table

import kvboost
from kvboost import cli_bench, cli_cache, cli_calibrate, cli_serve
from kvboost.boost import KVBoost
from kvboost.demo import demo as run_demo
from kvboost.errors import ConfigError, KVBoostError
from kvboost.store.simulate import SIMULATED, simulate, unlimited
from kvboost.store.trace import Trace, read_trace
from kvboost.store.workloads import WORKLOADS, generate

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Reuse the KV cache of text a model has read before, wherever it stands in the prompt.",
)
app.add_typer(cli_cache.app, name="cache")
app.command()(cli_bench.bench)
app.command()(cli_calibrate.calibrate)
app.command()(cli_serve.serve)
BUDGETS = ("5%", "10%", "20%", "40%")
Model = Annotated[
    str,
    typer.Argument(
        help="'default' (the embedded SmolLM2-135M-Instruct), a Hugging Face id, a local folder, "
        "or a GGUF file.",
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(kvboost.__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


@app.command()
def demo(model: Model = "default") -> None:
    """Answer real questions three ways and compare: full recompute, prefix caching, KVBoost.

    Takes two to three minutes on two cores with the default model.
    """
    run_demo(model, Console())


@app.command()
def info(model: Model = "default") -> None:
    """Say what this machine would run MODEL in, and whether its KV can be moved."""
    stats = KVBoost.from_pretrained(model).stats()
    table = Table(show_header=False, box=None)
    for name, value in asdict(stats).items():
        if name in ("dtype", "device", "fingerprint", "reuse", "repairs"):
            table.add_row(name, str(value))
    Console().print(table)


@app.command("simulate")
def replay(
    trace: Annotated[
        str,
        typer.Argument(
            help="A file that KVBoost wrote (its option `trace=`), or a made-up workload: "
            + ", ".join(WORKLOADS),
        ),
    ],
    budget: Annotated[
        list[str] | None,
        typer.Option(
            help="Memory for KV: bytes (4e9), or a share of all that is asked for (10%). May be "
            "given several times.",
            show_default=", ".join(BUDGETS),
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help=f"What chooses the chunk that goes when memory is full: {', '.join(SIMULATED)}. "
            "May be given several times.",
            show_default="all",
        ),
    ] = None,
) -> None:
    """Replay a trace under memory budgets and eviction policies, without a model.

    Shows how many of the seconds of prefill that stored KV could save are saved.

    docs/traces.md says what a trace holds, docs/eviction.md what to expect.
    """
    policies, replayed = policy or list(SIMULATED), _trace(trace)
    most = unlimited(replayed)
    table = Table("budget", *policies, box=None)
    for share in track(budget or BUDGETS, "Replaying", transient=True):
        size = _bytes(share, most.bytes)
        saved = [simulate(replayed, name, size).saved for name in policies]
        table.add_row(
            f"{share} = {decimal(size)}", *(f"{s / (most.saved or 1):.1%}" for s in saved)
        )
    console = Console()
    console.print(
        f"{len(replayed.requests):,} requests; prefill takes {most.seconds:,.0f} s, and an endless "
        f"store ({decimal(most.bytes)}) saves {most.saved:,.0f} s of it. Of those:",
        highlight=False,
    )
    console.print(table)


def _trace(name: str) -> Trace:
    if name in WORKLOADS:
        return generate(name, seed=0, requests=1500)
    if not Path(name).is_file():
        raise ConfigError(f"{name!r} is neither a file nor one of {', '.join(WORKLOADS)}")
    return read_trace(Path(name))


def _bytes(budget: str, most: int) -> int:
    number, share = budget.removesuffix("%"), budget.endswith("%")
    try:
        size = float(number) * (most / 100 if share else 1)
    except ValueError:
        size = 0.0
    if not 0 < size < float("inf"):
        raise ConfigError(f"a budget is bytes (4e9) or a share (10%), not {budget!r}")
    return round(size)


def main() -> None:
    """Entry point: our own errors are a line for the user, not a traceback."""
    try:
        app()
    except KVBoostError as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False)
        raise SystemExit(1) from None
