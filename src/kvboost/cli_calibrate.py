"""`kvboost calibrate`: measure how a model bears moved KV, and remember it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvboost.bench.material import Material
from kvboost.boost import KVBoost
from kvboost.calibrate import Calibration, Measured
from kvboost.calibrate import calibrate as measure
from kvboost.config import Config
from kvboost.profiles import save_profile, to_json
from kvboost.recompute import MEASURED_AT


def calibrate(
    model: Annotated[
        str,
        typer.Argument(
            help="'default' (the embedded SmolLM2-135M-Instruct), a Hugging Face id, a local "
            "folder, or a GGUF file.",
        ),
    ] = "default",
    files: Annotated[
        Path | None,
        typer.Option(
            help="A folder of source or text files that are like what the model will read.",
            show_default="Python's standard library",
        ),
    ] = None,
    prompts: Annotated[int, typer.Option("--prompts", "-n", help="Of each kind.", min=2)] = 12,
    dtype: Annotated[str, typer.Option(help="auto takes what this machine is faster at.")] = "auto",
    limit: Annotated[
        float, typer.Option(help="The divergence that may be traded; see Config.max_divergence.")
    ] = Config().max_divergence,
) -> None:
    """Measure how far from full recompute MODEL's answers are on moved KV, by repair.

    The result is kept for this very model (weights, adapter, number format) and from then on
    decides what recompute="auto" does. Minutes with the embedded model, longer with larger ones.
    """
    console = Console()
    boost = KVBoost.from_pretrained(model, dtype=dtype)
    material = Material.of(boost.tokenizer, files)
    with Progress(console=console) as progress:
        found = measure(boost, material, prompts, progress)
    _show(found, console)
    console.print_json(json.dumps(to_json(found.profile)))
    steps = [found.profile.step(damage, limit) for damage in MEASURED_AT]
    of_files, of_passages = (step or "no repair that there is" for step in steps)
    console.print(
        f"At {limit:g}, files of 512 tokens are repaired by {of_files}, passages of 200 by "
        f"{of_passages}.",
        highlight=False,
    )
    if None in steps:
        console.print("Prompts that none repairs are computed from the first moved token on.")
    path = save_profile(boost.stats().fingerprint, found.profile)
    console.print(f"Kept in {path}", highlight=False)


def _show(found: Calibration, console: Console) -> None:
    console.print(
        f"This number format alone: KL {found.floor:.4f} against float32 (nats per token).",
        highlight=False,
    )
    _table("Text that shifted: tokens recomputed after an edit", found.shift, console)
    _table("Where the question looks (8 % recomputed)", found.bands, console)
    _table("Files of 512 tokens among new neighbours", found.files, console)
    _table("Passages of 200 tokens among new neighbours", found.passages, console)
    kept = ", ".join(f"{name} {kl:.4f}" for name, kl in found.formats.items())
    console.print(f"Storage formats, KL added: {kept}", highlight=False)


def _table(title: str, rows: Sequence[Measured], console: Console) -> None:
    table = Table("", "KL mean", "worst prompt", "top-1", "time over full", title=title, box=None)
    for row in rows:
        table.add_row(
            row.what, f"{row.kl:.4f}", f"{row.worst:.4f}", f"{row.top1:.1%}", f"{row.time:.3f}"
        )
    console.print(table)
