"""Plots of a run: times, times by length, and quality against cost.

The only file that imports matplotlib, which `kvboost[bench]` installs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvboost.bench.record import Record
from kvboost.bench.summary import Summary, summarise

Workloads = Mapping[str, Sequence[Summary]]


class Look(NamedTuple):
    color: str
    marker: str


Looks = Mapping[str, Look]
_WIDE = 3
_MARKS = "osD^vP*Xhd<>"


def write(records: Sequence[Record], folder: Path) -> list[str]:
    """The names of the files that were written."""
    names = list(dict.fromkeys(record.workload for record in records))
    found = {name: summarise([r for r in records if r.workload == name]) for name in names}
    found = {name: summaries for name, summaries in found.items() if summaries}
    systems = list(dict.fromkeys(s.system for many in found.values() for s in many))
    look = {name: Look(f"C{n % 10}", _MARKS[n % len(_MARKS)]) for n, name in enumerate(systems)}
    drawn: dict[str, Callable[[Axes, Sequence[Summary], Looks], None]] = {
        "ttft.png": _distribution,
        "length.png": _by_length,
        "quality.png": _quality,
    }
    for name, draw in drawn.items():
        _panels(found, draw, look, folder / name)
    return list(drawn) if found else []


def _panels(
    workloads: Workloads,
    draw: Callable[[Axes, Sequence[Summary], Looks], None],
    look: Looks,
    path: Path,
) -> None:
    """A panel for each workload, one legend for all."""
    if not workloads:
        return
    wide = min(_WIDE, len(workloads))
    high = -(-len(workloads) // wide)
    figure = Figure(figsize=(5.2 * wide + 1.6, 4.0 * high), layout="constrained")
    panels = figure.subplots(high, wide, squeeze=False).flat
    for axes, (name, summaries) in zip(panels, workloads.items(), strict=False):
        draw(axes, summaries, look)
        axes.set_title(name)
        axes.grid(visible=True, which="major", alpha=0.25)
    for axes in list(panels):
        axes.set_visible(False)
    handles: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside right upper")
    figure.savefig(path, dpi=110)


def _readable(axis: Axis) -> None:
    """A logarithmic axis that reads 0.2, 0.5, 1, 2."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _distribution(axes: Axes, summaries: Sequence[Summary], look: Looks) -> None:
    for s in summaries:
        times = sorted(record.ttft for record in s.records)
        shares = [n / len(times) for n in range(len(times) + 1)]
        axes.step(
            [times[0], *times], shares, where="post", color=look[s.system].color, label=s.system
        )
    axes.set_xscale("log")
    _readable(axes.xaxis)
    axes.set_xlabel("time to first token, seconds")
    axes.set_ylabel("share of requests")


def _by_length(axes: Axes, summaries: Sequence[Summary], look: Looks) -> None:
    for s in summaries:
        axes.scatter(
            [record.prompt for record in s.records],
            [record.ttft for record in s.records],
            s=18,
            alpha=0.7,
            label=s.system,
            color=look[s.system].color,
            marker=look[s.system].marker,
        )
    axes.set_yscale("log")
    _readable(axes.yaxis)
    axes.set_xlabel("prompt, tokens")
    axes.set_ylabel("time to first token, seconds")


def _quality(axes: Axes, summaries: Sequence[Summary], look: Looks) -> None:
    """Mean KL against the mean time over plain's, with its interval."""
    for s in summaries:
        if s.faster is None or not s.kl:
            continue
        mean = statistics.mean(s.kl)
        axes.errorbar(
            1 / s.faster.value,
            mean,
            xerr=[
                [1 / s.faster.value - 1 / s.faster.high],
                [1 / s.faster.low - 1 / s.faster.value],
            ],
            markersize=8,
            capsize=3,
            linestyle="none",
            label=s.system,
            color=look[s.system].color,
            marker=look[s.system].marker,
        )
    axes.set_yscale("log")
    _readable(axes.yaxis)
    axes.set_xlabel("mean time to first token over plain's")
    axes.set_ylabel("mean KL against plain, nats per token")
