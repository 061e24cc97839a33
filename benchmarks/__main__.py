"""`make bench`: measure, then write docs/core.md and its plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import core
from benchmarks.measure import machine
from benchmarks.report import write
from kvboost import KVBoost


def main(
    model: Annotated[str, typer.Option(help="As for KVBoost.from_pretrained.")] = "default",
    n: Annotated[int, typer.Option(help="Prompts per measurement.")] = 20,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("docs"),
    only: Annotated[str, typer.Option(help="Measure only this one.")] = "",
) -> None:
    """Measure the core against plain transformers on this machine. Some 20 minutes on two cores."""
    fast = KVBoost.from_pretrained(model)
    exact = KVBoost.from_pretrained(model, dtype="float32")
    parts = {
        "cold": lambda: core.cold(fast, n),
        "exact": lambda: core.exact(fast, n),
        "edit": lambda: core.edit(fast, n) + core.edit(exact, n, " (float32)"),
        "composition": lambda: core.composition(fast, n),
    }
    record = out / "core.json"
    results: dict[str, Any] = json.loads(record.read_text()) if only and record.exists() else {}
    for name, measure in parts.items():
        if only in ("", name):
            results[name] = [row.json() for row in measure()]
    results["machine"] = machine(fast, model, n)
    record.write_text(json.dumps(results, indent=1) + "\n")
    write(results, out)


if __name__ == "__main__":
    typer.run(main)
