"""The command line."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import kvboost
from kvboost.boost import KVBoost
from kvboost.demo import demo as run_demo
from kvboost.errors import KVBoostError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Reuse the KV cache of text a model has read before, wherever it stands in the prompt.",
)
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
        if name in ("dtype", "device", "fingerprint", "reuse"):
            table.add_row(name, str(value))
    Console().print(table)


def main() -> None:
    """Entry point: our own errors are a line for the user, not a traceback."""
    try:
        app()
    except KVBoostError as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False)
        raise SystemExit(1) from None
