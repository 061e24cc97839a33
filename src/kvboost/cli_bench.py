"""`kvboost bench`: measure on this machine what reuse gives, and what it costs in quality."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvboost.bench import report
from kvboost.bench.items import from_items
from kvboost.bench.material import Material
from kvboost.bench.peers import find_peers, install, known_peers, peers_folder
from kvboost.bench.record import RECORD, read
from kvboost.bench.run import Bench, Setup
from kvboost.bench.systems import options_of
from kvboost.bench.workloads import WORKLOADS, generate

SYSTEMS = ("plain", "exact", "auto", "drift", "query", "cacheblend", "none")
QUICK = {"bugs": 15, "edits": 7}
_N = 50


Model = Annotated[
    str,
    typer.Argument(
        help="'default' (the embedded SmolLM2-135M-Instruct), a Hugging Face id, a local folder, "
        "or a GGUF file.",
    ),
]
Workload = Annotated[
    list[str] | None,
    typer.Option(
        help=f"What is asked: {', '.join(WORKLOADS)}. May be given several times.",
        show_default="all; none with --items",
    ),
]
Items = Annotated[
    Path | None,
    typer.Option(help="Questions of your own: a file of JSON lines, see docs/workloads.md."),
]
PerPrompt = Annotated[int, typer.Option(help="Documents in a prompt, with --items.", min=1)]
Files = Annotated[
    Path | None,
    typer.Option(
        help="The folder of source files that workloads are made from.",
        show_default="Python's standard library",
    ),
]
Number = Annotated[
    int | None,
    typer.Option("--n", "-n", help="Requests of each workload.", show_default=str(_N), min=1),
]
Systems = Annotated[
    list[str] | None,
    typer.Option(
        help="What answers: plain (transformers alone), exact (prefix caching at its best), a "
        "recompute policy of KVBoost (auto, none, selective, drift, cacheblend, query, full), one "
        "with a number (selective:16, cacheblend:0.15, query:0.08), or an installed peer. May be "
        "given several times; plain is always among them.",
        show_default=", ".join(SYSTEMS) + " and installed peers",
    ),
]
Peers = Annotated[
    Path | None,
    typer.Option(
        help="The folder that systems of others are installed in.",
        show_default="$KVBOOST_PEERS, or a folder beside KVBoost's models",
    ),
]
InstallPeer = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Install a system of others to compare with, and end: {', '.join(known_peers())}."
    ),
]
Out = Annotated[Path, typer.Option(help="The folder for the record, the report and its plots.")]
Quick = Annotated[
    bool,
    typer.Option("--quick", help="A small run of under five minutes on two cores."),
]
Dtype = Annotated[str, typer.Option(help="auto takes what this machine is faster at.")]
Seed = Annotated[int, typer.Option(help="Another seed makes other requests.")]


def bench(
    model: Model = "default",
    workload: Workload = None,
    items: Items = None,
    per_prompt: PerPrompt = 8,
    files: Files = None,
    n: Number = None,
    seed: Seed = 0,
    system: Systems = None,
    peers: Peers = None,
    install_peer: InstallPeer = None,
    out: Out = Path("kvboost-bench"),
    quick: Quick = False,
    dtype: Dtype = "auto",
) -> None:
    """Measure speed and quality of KVBoost, prefix caching and plain transformers.

    All answer the same requests in turns, on this machine. Every answer is compared with that of
    plain transformers, and with the right one where it is known. The report explains its columns.

    A run that was stopped goes on where it stopped when the same command is given again.

    Examples: `kvboost bench --quick`;
    `kvboost bench --workload bugs --system auto --system query:0.08 -n 200 --out bugs`;
    `kvboost bench Qwen/Qwen2.5-1.5B-Instruct --items questions.jsonl`.
    """
    console, folder = Console(), peers or peers_folder()
    if install_peer:
        for name in install_peer:
            console.print(f"{name} is installed in {install(name, folder)}", highlight=False)
        return
    found = find_peers(folder)
    names = _systems(system or (SYSTEMS[:3] if quick else (*SYSTEMS, *found)), found)
    installed = {name: found[name] for name in names if name in found}
    counts = _counts(workload, items, n, quick)
    with console.status(f"Loading {model!r} and making requests"):
        made = Bench(Setup(model, dtype, seed, names, installed, out))
        material = Material.of(made.boost.tokenizer, files)
        workloads = {name: generate(name, k, seed, material) for name, k in counts.items()}
        if items is not None:
            workloads[items.stem] = from_items(items, n or _N, seed, per_prompt)
    made.run(workloads)
    show(out, console)


def _systems(names: Sequence[str], peers: Mapping[str, Path]) -> list[str]:
    """Each once, plain first. Raises ConfigError for a name that is nobody's."""
    for name in names:
        if name not in ("plain", *peers):
            options_of(name)
    return list(dict.fromkeys(["plain", *names]))


def _counts(
    workload: Sequence[str] | None, items: Path | None, n: int | None, quick: bool
) -> dict[str, int]:
    """How many requests of which workloads."""
    if quick:
        chosen: Sequence[str] = workload or (() if items else list(QUICK))
        return {name: n or QUICK.get(name, 9) for name in chosen}
    return dict.fromkeys(workload or (() if items else list(WORKLOADS)), n or _N)


def show(out: Path, console: Console) -> None:
    """Write the report of the record in `out`, and print its main columns."""
    header, records = read(out / RECORD)
    plots: list[str] = []
    if importlib.util.find_spec("matplotlib"):
        plots = importlib.import_module("kvboost.bench.plots").write(records, out)
    else:
        console.print('No plots: they need matplotlib (pip install "kvboost[bench]").')
    page = out / "report.md"
    page.write_text(report.markdown(header, records, plots), encoding="utf-8")
    console.print(report.terminal(header, records))
    console.print(f"{page}, and the record of every request in {out / RECORD}", highlight=False)
