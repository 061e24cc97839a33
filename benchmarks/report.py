"""The report: a Markdown table and a plot, from the record of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_KINDS = {"none": "o", "selective": "s", "cacheblend": "^", "drift": "v", "query": "D", "auto": "*"}


def write(results: dict[str, Any], out: Path) -> None:
    """Write `core.md` between its generated marks, and the plot beside it."""
    between_marks(out / "core.md", _tables(results))
    if "composition" in results:
        _plot(results["composition"], out / "quality-cost.png")


def between_marks(page: Path, text: str) -> None:
    """Replace what stands between the marks of generated text; the rest is somebody's words."""
    mark, end = "<!-- generated -->", "<!-- end of generated -->"
    before, _, rest = page.read_text().partition(mark)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{mark}\n{text}\n{end}{after}")


def interval(r: dict[str, Any]) -> str:
    return f"**{r['value']:.3f}** [{r['low']:.3f}, {r['high']:.3f}]"


def _tables(results: dict[str, Any]) -> str:
    lines = ["", ", ".join(f"{k} {v}" for k, v in results["machine"].items()) + "."]
    lines += _head("measurement", "bar")
    for part in ("cold", "exact", "edit"):
        lines += [_line(row, bar=True) for row in results.get(part, [])]
    if "composition" in results:
        lines += _head("composition: repair")
        lines += [_line(row, bar=False) for row in results["composition"]]
        lines += ["", "![quality against cost](quality-cost.png)"]
    return "\n".join(lines)


def _head(*first: str) -> list[str]:
    columns = [first[0], "time over plain transformers: median [95 %]", *first[1:]]
    return head(*columns, "reused", "KL mean", "KL max", "top-1")


def head(*columns: str) -> list[str]:
    return ["", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]


def _line(row: dict[str, Any], *, bar: bool) -> str:
    cells = [row["what"], interval(row["time"])]
    cells += [row["bar"]] if bar else []
    if row["reused"]:
        cells += [
            f"{row['reused']:.0%}",
            f"{row['kl']:.4f}",
            f"{row['kl_max']:.3f}",
            f"{row['top1']:.1%}",
        ]
    else:
        cells += ["", "", "", ""]
    return "| " + " | ".join(cells) + " |"


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 5))
    for kind, marker in _KINDS.items():
        points = [r for r in rows if r["what"].split(",")[0].split(" ")[0] == kind]
        x, y = [r["time"]["value"] for r in points], [r["kl"] for r in points]
        axes.scatter(x, y, marker=marker, s=110 if kind == "auto" else 45, label=kind)
        for r in points:
            label = r["what"].removeprefix(kind).strip(" ,")
            axes.annotate(
                label,
                (r["time"]["value"], r["kl"]),
                fontsize=7,
                xytext=(4, 3),
                textcoords="offset points",
            )
    axes.set_yscale("log")
    axes.set_xlabel("time to first token over full recompute's")
    axes.set_ylabel("KL against full recompute, nats per token")
    axes.set_title("Composition: divergence against cost, by repair policy")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
