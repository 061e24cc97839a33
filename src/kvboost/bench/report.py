"""The report of a run, in Markdown and for a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from kvboost.bench.cost import TERMS, Floor, fit, over_floor
from kvboost.bench.record import Record
from kvboost.bench.stats import Interval, percentile
from kvboost.bench.summary import COLD, Summary, kl_tests, summarise

_WORDS = f"""\
**plain** is transformers alone: chat template, tokenizer, one forward pass. **exact** is prefix
caching at its best: KVBoost with `reuse="exact"`. The others reuse text anywhere in the prompt and
repair it by the policy of that name.

All systems answer the same requests in the same order, taking turns at going first; each keeps its
own store, emptied before each workload. TTFT is wall clock from the call (tokenizing and lookup
included) to the first token; total adds storing what was computed, decoding is in neither. Faster:
mean TTFT of the other over this one's, with a 95 % bootstrap interval over requests. Cold requests
are those of which no system had {COLD:.0%} of the prompt. The classes exact, moved, recomputed and
computed are shares of all prompt tokens. KL (nats per token, against plain) and top-1 compare
next-token distributions over plain's own greedy answer, up to its end or 16 tokens; p95 is of
requests, max of single tokens. Same: that answer is the same to the last token. Accuracy is
over requests whose answer is known. Stale: answered as if an edit had not been made."""


def markdown(header: Mapping[str, Any], records: Sequence[Record], plots: Sequence[str]) -> str:
    """The whole report. plots: names of files beside it."""
    floor = Floor(**header["floor"])
    lines = ["# kvboost bench", "", _WORDS, "", described(header)]
    for name in header["workloads"]:
        many = [record for record in records if record.workload == name]
        summaries = summarise(many)
        if summaries:
            lines += ["", f"## {name}", "", _counts(many)]
            lines += _speed(summaries) + _tokens(summaries, floor)
            lines += _quality(summaries) + _tests(summaries) + _peers(many)
    lines += _cost(records, floor)
    lines += [text for name in plots for text in ("", f"![{name.partition('.')[0]}]({name})")]
    return "\n".join(lines) + "\n"


def described(header: Mapping[str, Any]) -> str:
    """What was run, and on what."""
    left_out = ("workloads", "systems", "prompts", "floor")
    return ", ".join(f"{k} {v}" for k, v in header.items() if k not in left_out and v) + "."


def _counts(records: Sequence[Record]) -> str:
    donors = len({r.place for r in records if r.donor})
    count = len({r.place for r in records}) - donors
    prompts = [r.prompt for r in records if r.system == "plain" and not r.donor]
    said = f"{count} requests of {min(prompts):,} to {max(prompts):,} tokens"
    return said + (f", and {donors} that only make KV for them." if donors else ".")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return ["", *("| " + " | ".join(cells) + " |" for cells in lines)]


def _speed(summaries: Sequence[Summary]) -> list[str]:
    head = [
        *("system", "TTFT mean, ms", "median", "p95", "faster than plain", "without cold requests"),
        *("median of single ratios", "faster than exact", "total mean, ms"),
    ]
    rows = [
        [
            s.system,
            *(_ms(t) for t in (s.mean(lambda r: r.ttft), s.ttft(0.5), s.ttft(0.95))),
            *(_times(i) for i in (s.faster, s.warm, s.median, s.faster_than_exact)),
            _ms(s.mean(lambda r: r.total)) if _ours(s) else "",
        ]
        for s in summaries
    ]
    return _table(head, rows)


def _tokens(summaries: Sequence[Summary], floor: Floor) -> list[str]:
    head = ["system", "reused", *_CLASSES, "stored, MB", "peak memory, MB"]
    rows = []
    for s in summaries:
        prompt = sum(r.prompt for r in s.records)
        shares = [sum(getattr(r, name) for r in s.records) / prompt for name in _CLASSES]
        rows.append(
            [
                s.system,
                _percent(sum(r.reused * r.prompt for r in s.records) / prompt),
                *(_percent(share) if _ours(s) else "" for share in shares),
                f"{max(r.bytes for r in s.records) / 1e6:,.0f}" if _ours(s) else "",
                f"{max(r.peak for r in s.records) / 1e6:,.0f}" if any(shares) else "",
            ]
        )
    head.append("TTFT over the machine's floor, median")
    for row, s in zip(rows, summaries, strict=True):
        over = over_floor(s.records, floor)
        row.append("" if over is None else f"{over:.2f}")
    return _table(head, rows)


def _quality(summaries: Sequence[Summary]) -> list[str]:
    head = [
        *("system", "KL mean", "KL p95", "KL max", "top-1", "same", "accuracy"),
        *("less plain's accuracy", "stale"),
    ]
    rows = []
    for s in summaries:
        most = [r.kl_max for r in s.records if r.kl_max is not None]
        kl = (statistics.mean(s.kl), percentile(s.kl, 0.95), max(most)) if s.kl else ()
        rows.append(
            [
                s.system,
                *([f"{value:.4f}" for value in kl] or ["", "", ""]),
                *(_percent(s.share(of)) for of in (lambda r: r.top1, lambda r: r.same)),
                _percent(s.accuracy),
                _points(s.better),
                _percent(s.share(lambda r: r.stale)),
            ]
        )
    return _table(head, rows)


def _tests(summaries: Sequence[Summary]) -> list[str]:
    rows = [
        [f"{t.one} against {t.other}", f"{t.kl[0]:.4f}", f"{t.kl[1]:.4f}", f"{t.p:.4f}"]
        for t in kl_tests(summaries)
    ]
    head = ["KL on the same requests", "first", "second", "p (signs flipped)"]
    return _table(head, rows) if rows else []


def _peers(records: Sequence[Record]) -> list[str]:
    """What they say of themselves, and what went wrong with them."""
    notes = {record.system: record.note for record in records if record.note}
    lines = [text for name, note in notes.items() for text in ("", f"{name}: {note}.")]
    return lines + [
        text
        for record in records
        if record.failed
        for text in ("", f"{record.system} failed at {record.request}: {record.failed}")
    ]


def _cost(records: Sequence[Record], floor: Floor) -> list[str]:
    """How TTFT follows from token counts, and what the floor is made of."""
    lines = ["", "## Where the time goes"]
    if (model := fit([r for r in records if not r.donor])) is not None:
        terms = [
            f"{seconds * 1e6:.3g} µs per {name}"
            for name, seconds in zip(TERMS, model.seconds, strict=True)
        ]
        lines += [
            "",
            f"TTFT of all of these systems is {' + '.join(terms)}, fitted on every other request. "
            f"On the {model.n:,} others the error is {model.median_error:.1%} in the median and "
            f"{model.p90_error:.1%} at the 90th percentile. A pass through some of the layers "
            "counts for that share of one.",
        ]
    lines += [
        "",
        f"The floor of a request: each pass at {floor.flops / 1e9:,.0f} GFLOP/s (measured: a "
        "matrix product in the model's dtype and shapes) or the time to read its weights, and the "
        f"copy of its reused KV at {floor.bandwidth / 1e9:.1f} GB/s read and written (measured); "
        f"{floor.parameters / 1e6:,.0f} M parameters, {floor.kv_bytes:,} bytes of KV a token. "
        "Attention is not in it.",
    ]
    return lines


_CLASSES = "exact", "moved", "recomputed", "computed"


def _ours(s: Summary) -> bool:
    return any(record.parts for record in s.records)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _times(i: Interval | None) -> str:
    return "" if i is None else f"{i.value:.2f}x [{i.low:.2f}, {i.high:.2f}]"


def _points(i: Interval | None) -> str:
    if i is None:
        return ""
    value, low, high = (100 * x for x in (i.value, i.low, i.high))
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def terminal(header: Mapping[str, Any], records: Sequence[Record]) -> Table:
    """The main columns, in 100 characters."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("workload", "system"):
        table.add_column(name)
    for name in ("TTFT ms", "x plain", "x exact", "reused", "KL", "top-1", "same", "accuracy"):
        table.add_column(name, justify="right")
    for name in header["workloads"]:
        for n, s in enumerate(summarise([r for r in records if r.workload == name])):
            prompt = sum(r.prompt for r in s.records)
            table.add_row(
                "" if n else name,
                s.system,
                _ms(s.mean(lambda r: r.ttft)),
                f"{s.faster.value:.2f}" if s.faster else "",
                f"{s.faster_than_exact.value:.2f}" if s.faster_than_exact else "",
                f"{sum(r.reused * r.prompt for r in s.records) / prompt:.0%}",
                f"{statistics.mean(s.kl):.4f}" if s.kl else "",
                _percent(s.share(lambda r: r.top1)),
                _percent(s.share(lambda r: r.same)),
                _percent(s.accuracy),
                end_section=False,
            )
    return table
