"""`python -m benchmarks.proof RECORD...`: docs/benchmarks.md and README's table, from records of
`kvboost bench`. Those that the tables are made of are kept in benchmarks/runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.report import between_marks, head
from kvboost.bench import plots
from kvboost.bench.cost import Floor, fit, over_floor
from kvboost.bench.peers import known_peers
from kvboost.bench.record import Record, read
from kvboost.bench.report import described
from kvboost.bench.stats import Interval, percentile, ratio_of_means
from kvboost.bench.summary import COLD, Summary, summarise

_SHORT = ("model", "workload", "requests", "tokens")


def main(
    runs: Annotated[list[Path], typer.Argument(help="Records, gzipped; the first one is drawn.")],
    out: Annotated[Path, typer.Option(help="The repository.")] = Path(),
) -> None:
    """Write the tables."""
    found = [(run.name, *read(run)) for run in runs]
    rows = [row for _, header, records in found for row in _rows(header, records)]
    columns = ("faster than plain [95 %]", "than prefix caching [95 %]", "reused", "KL mean")
    full = head(*_SHORT, "system", *columns, "KL p95", "top-1", "same answer", "accuracy, points")
    full += ["| " + " | ".join(row) + " |" for row in rows]
    full += [line for _, header, records in found for line in _others(header, records)]
    told = [
        text
        for name, header, records in found
        for text in ("", f"- `{name}`: {described(header)} {_cost(header, records)}")
    ]
    between_marks(out / "docs" / "benchmarks.md", "\n".join([*full, *told, ""]))
    brief = head(*_SHORT, *columns, "top-1", "accuracy, points")
    brief += [
        "| " + " | ".join([*row[:4], *row[5:9], row[10], row[12]]) + " |"
        for row in rows
        if row[4] == "auto"
    ]
    between_marks(out / "README.md", "\n".join([*brief, ""]))
    plots.write(found[0][2], out / "docs")


def _rows(header: Mapping[str, Any], records: Sequence[Record]) -> Iterator[list[str]]:
    model = Path(header["model"]).stem if header["model"] != "default" else "SmolLM2-135M"
    for workload in header["workloads"]:
        mine = [record for record in records if record.workload == workload]
        for s in summarise(mine):
            tokens = round(s.mean(lambda r: r.prompt))
            yield [model, workload, f"{len(s.records)}", f"{tokens:,}", s.system, *_figures(s)]


def _others(header: Mapping[str, Any], records: Sequence[Record]) -> Iterator[str]:
    """How much sooner `auto` has the first token than each system, by what of the prompt it had."""
    peers = set(header["systems"]) - {"plain", "exact", "auto"}
    if "auto" not in header["systems"] or not peers.intersection(known_peers()):
        return
    systems = [system for system in header["systems"] if system != "auto"]
    yield from head("`auto` sooner than", "it had", "requests", *systems)
    asked = [r for r in records if not r.donor and not r.failed]
    by = {(r.workload, r.place, r.system): r for r in asked}
    for workload in header["workloads"]:
        places: dict[str, list[int]] = {"nothing": [], "moved text": [], "a prefix": []}
        for r in asked:
            if (r.workload, r.system) == (workload, "auto"):
                known = "a prefix" if r.exact >= r.moved else "moved text"
                places["nothing" if r.reused < COLD else known].append(r.place)
        for had, at in places.items():
            pairs = {
                s: [
                    (by[workload, p, s].ttft, by[workload, p, "auto"].ttft)
                    for p in at
                    if (workload, p, s) in by  # a peer may have failed
                ]
                for s in systems
            }
            if at:
                sooner = [_times(ratio_of_means(pairs[s]) if pairs[s] else None) for s in systems]
                yield "| " + " | ".join([workload, had, str(len(at)), *sooner]) + " |"


def _figures(s: Summary) -> list[str]:
    prompt = sum(r.prompt for r in s.records)
    reused = sum(r.reused * r.prompt for r in s.records) / prompt
    top1, same = s.share(lambda r: r.top1), s.share(lambda r: r.same)
    return [
        _times(s.faster),
        _times(s.faster_than_exact),
        f"{reused:.0%}",
        f"{statistics.mean(s.kl):.4f}" if s.kl else "",
        f"{percentile(s.kl, 0.95):.4f}" if s.kl else "",
        "" if top1 is None else f"{top1:.1%}",
        "" if same is None else f"{same:.0%}",
        _accuracy(s),
    ]


def _times(i: Interval | None) -> str:
    return "" if i is None else f"**{i.value:.2f}x** [{i.low:.2f}, {i.high:.2f}]"


def _accuracy(s: Summary) -> str:
    """Its own, and the difference from full recompute's with its interval."""
    if s.accuracy is None:
        return ""
    own = f"{100 * s.accuracy:.1f}"
    if s.better is None:
        return own
    value, low, high = (100 * x for x in (s.better.value, s.better.low, s.better.high))
    return f"{own} ({value:+.1f} [{low:+.1f}, {high:+.1f}])"


def _cost(header: Mapping[str, Any], records: Sequence[Record]) -> str:
    """How well TTFT follows from token counts, and how far it is from the machine's floor."""
    asked, floor = [r for r in records if not r.donor], Floor(**header["floor"])
    over = [
        f"{system} {times:.2f}"
        for system in header["systems"]
        if (times := over_floor([r for r in asked if r.system == system], floor))
    ]
    said = f"TTFT over the machine's floor, median: {', '.join(over)}."
    if (model := fit(asked)) is not None:
        said += (
            f" Predicted from token counts it is off by {model.median_error:.1%} in the median, by "
            f"{model.p90_error:.1%} at the 90th percentile, of {model.n} that were not fitted."
        )
    return said


if __name__ == "__main__":
    typer.run(main)
