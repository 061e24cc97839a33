"""`python -m benchmarks.eviction`: policies compared by replaying traces, without a model.

Writes docs/eviction.md between its generated marks, and its plot.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import typer
from rich.progress import track

from benchmarks.report import between_marks
from kvboost.store.simulate import SIMULATED, simulate, unlimited
from kvboost.store.trace import Trace, read_trace
from kvboost.store.workloads import WORKLOADS, generate

BUDGETS = (0.05, 0.10, 0.20, 0.40)
TUNED_ON = range(1, 4)  # the policy was made looking at these seeds
HELD_OUT = range(101, 104)

Shares = dict[tuple[str, float, str], list[float]]
"""By workload, budget and policy, of each trace: seconds saved over what an endless store saves."""


@dataclass(frozen=True)
class Workload:
    """What the page says of a workload: means over its traces."""

    requests: int
    chunks: int
    gigabytes: float
    most: float


def compare(
    traces: Mapping[str, Sequence[Trace]],
) -> tuple[Shares, dict[str, Workload]]:
    """Replay every trace with every policy at every budget."""
    shares: Shares = {}
    workloads = {}
    flat = [(name, trace) for name, several in traces.items() for trace in several]
    endless: dict[str, list[tuple[int, float, float]]] = {}
    for name, trace in track(flat, "Replaying traces"):
        most = unlimited(trace)
        endless.setdefault(name, []).append((most.stored, most.bytes, most.saved / most.seconds))
        for budget in BUDGETS:
            for policy in SIMULATED:
                saved = simulate(trace, policy, budget * most.bytes).saved
                shares.setdefault((name, budget, policy), []).append(saved / most.saved)
    for name, several in traces.items():
        chunks, size, share = (
            statistics.mean(column) for column in zip(*endless[name], strict=True)
        )
        workloads[name] = Workload(len(several[0].requests), round(chunks), size / 1e9, share)
    return shares, workloads


def main(
    trace: Annotated[list[Path] | None, typer.Option(help="Replay this file instead.")] = None,
    requests: Annotated[int, typer.Option(help="Requests per generated trace.")] = 1500,
    tuning: Annotated[bool, typer.Option(help="Seeds that the policy was made on.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("docs"),
) -> None:
    """Compare eviction policies. Some three minutes for the generated traces."""
    if trace:
        shares, workloads = compare({path.stem: [read_trace(path)] for path in trace})
        print(tables(shares, workloads))
        return
    seeds = TUNED_ON if tuning else HELD_OUT
    made = {kind: [generate(kind, seed, requests) for seed in seeds] for kind in WORKLOADS}
    shares, workloads = compare(made)
    print(tables(shares, workloads))
    if not tuning:
        write(shares, workloads, out)


def tables(shares: Shares, workloads: Mapping[str, Workload]) -> str:
    """Markdown. Bold: the best policy, and all within 2 % of it."""
    policies = list(SIMULATED)
    lines = ["| trace | requests | chunks | working set | saved by an endless store |"]
    lines += ["|" + "---|" * 5]
    for name, w in workloads.items():
        lines.append(
            f"| {name} | {w.requests:,} | {w.chunks:,} | {w.gigabytes:.1f} GB | {w.most:.0%} |"
        )
    lines += ["", f"| trace | budget | {' | '.join(policies)} | value / best other: mean (worst) |"]
    lines += ["|" + "---|" * (len(policies) + 3)]
    for name in workloads:
        for budget in BUDGETS:
            row = {policy: shares[name, budget, policy] for policy in policies}
            means = [statistics.mean(values) for values in row.values()]
            cells = [f"**{x:.3f}**" if x >= 0.98 * max(means) else f"{x:.3f}" for x in means]
            mean, worst = _ratio(row)
            cells.append(f"{mean:.3f} ({worst:.3f})")
            lines.append(f"| {name} | {budget:.0%} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(row: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """Our policy over the best other: of the means, and of the single trace where it is worst."""
    others = [values for policy, values in row.items() if policy != "value"]
    best = max(statistics.mean(values) for values in others)
    single = zip(row["value"], *others, strict=True)
    return statistics.mean(row["value"]) / best, min(own / max(rest) for own, *rest in single)


def write(shares: Shares, workloads: Mapping[str, Workload], out: Path) -> None:
    between_marks(out / "eviction.md", f"\n{tables(shares, workloads)}\n")
    _plot(shares, list(workloads), out / "eviction.png")


def _plot(shares: Shares, names: Sequence[str], path: Path) -> None:
    figure, panels = plt.subplots(1, len(names), figsize=(4 * len(names), 3.6), squeeze=False)
    for axes, name in zip(panels[0], names, strict=True):
        for policy in SIMULATED:
            axes.plot(
                BUDGETS,
                [statistics.mean(shares[name, budget, policy]) for budget in BUDGETS],
                marker="o",
                markersize=4,
                linewidth=2.4 if policy == "value" else 1.2,
                label=policy,
            )
        axes.set_xscale("log")
        axes.set_xticks(BUDGETS, [f"{budget:.0%}" for budget in BUDGETS])
        axes.minorticks_off()
        axes.set_title(name)
        axes.set_xlabel("budget over working set")
        axes.grid(visible=True, alpha=0.25)
    panels[0][0].set_ylabel("seconds saved over most possible")
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
