"""What a benchmark makes of its records: statistics, cost, tables and plots."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvboost.bench import plots, report
from kvboost.bench.cost import TERMS, Floor, fit
from kvboost.bench.record import Record
from kvboost.bench.stats import difference, median_ratio, ratio_of_means, sign_flip
from kvboost.bench.summary import kl_tests, summarise

FLOOR = Floor(flops=1e11, bandwidth=1e10, parameters=10**8, weight_bytes=2 * 10**8, kv_bytes=23040)
HEADER: dict[str, Any] = {
    "model": "default",
    "workloads": {"made-up": 12},
    "floor": {name: getattr(FLOOR, name) for name in Floor.__dataclass_fields__},
}


def records(system: str, ttft: float, **fields: Any) -> list[Record]:
    made = Record("made-up", 0, "r", system, prompt=1000, passes=[(1000, 30)], same=True, **fields)
    return [replace(made, place=n, ttft=ttft * (1 + n / 100)) for n in range(12)]


def moved(system: str, ttft: float, kl: float) -> list[Record]:
    fields = {"exact": 100, "moved": 700, "recomputed": 100, "computed": 100}
    fast = records(system, ttft, parts={"forward": ttft}, kl_max=kl, top1=0.9, **fields)
    return [replace(r, kl_mean=kl * (1 + n / 50), right=n % 2 == 0) for n, r in enumerate(fast)]


RUN = [
    *records("plain", 1.0, kl_mean=0.0, kl_max=0.0, top1=1.0, right=True),
    *records("exact", 0.8, parts={"forward": 0.8}, kl_mean=0.001, kl_max=0.002, top1=1.0),
    *moved("auto", 0.2, 0.02),
    *moved("none", 0.1, 0.08),
    *records("peer", 0.5, cached=400),
]


def test_ratios_and_differences_know_their_uncertainty() -> None:
    pairs = [(2.0, 1.0), (4.0, 1.0), (6.0, 4.0)]
    assert ratio_of_means(pairs).value == pytest.approx(2.0)
    assert median_ratio(pairs).value == pytest.approx(2.0)
    assert difference(pairs).value == pytest.approx(2.0)
    for interval in (ratio_of_means(pairs), median_ratio(pairs), difference(pairs)):
        assert interval.low <= interval.value <= interval.high and interval.n == 3
    same = ratio_of_means([(3.0, 1.0)] * 5)
    assert same.low == same.high == 3.0


def test_a_difference_is_likely_only_if_signs_agree() -> None:
    assert sign_flip([(n + 1.0, n) for n in range(20)]) < 0.001
    assert sign_flip([(1.0, 0.0), (0.0, 1.0)] * 10) == 1.0


def test_donors_and_failures_are_in_no_figure() -> None:
    donors = [replace(r, place=100, donor=True, ttft=99.0) for r in RUN]
    failed = replace(RUN[-1], place=50, failed="gone")
    assert summarise([*RUN, *donors, failed]) == summarise(RUN)


def test_summaries_compare_with_plain_and_with_prefix_caching() -> None:
    plain, exact, auto, _, peer = summarise(RUN)
    assert plain.faster is None and plain.faster_than_exact is not None
    assert exact.faster_than_exact is None
    assert auto.faster is not None and auto.faster.value == pytest.approx(5)
    assert auto.faster_than_exact is not None and auto.faster_than_exact.value == pytest.approx(4)
    assert auto.accuracy == 0.5 and auto.better is not None
    assert auto.better.value == pytest.approx(-0.5)
    assert peer.kl == [] and peer.accuracy is None


def test_cold_requests_are_those_that_nobody_had() -> None:
    cold = [replace(r, place=r.place + 12, moved=0, exact=0, recomputed=0, cached=0) for r in RUN]
    auto = summarise([*RUN, *cold])[2]
    assert auto.warm is not None and auto.warm.n == 12
    assert auto.faster is not None and auto.faster.n == 24


def test_divergence_of_policies_is_compared_on_the_same_requests() -> None:
    (test,) = kl_tests(summarise(RUN))
    assert (test.one, test.other, test.n) == ("auto", "none", 12)
    assert test.p < 0.01 and test.kl[0] < test.kl[1]


def test_cost_is_found_where_it_follows_from_tokens() -> None:
    """The coefficients that times were made of, and no error on the requests left out."""
    made = []
    for n in range(60):
        rows, reused = 50 + 37 * n % 900, 31 * n % 500
        ttft = 0.02 + 1e-3 * rows + 1e-7 * rows * (rows + reused) + 2e-6 * reused
        passes, prompt = [(rows, 30)], rows + reused
        made.append(Record("w", n, "r", "auto", prompt, ttft=ttft, passes=passes, moved=reused))
    model = fit(made)
    assert model is not None and model.median_error < 1e-6 and model.n == 30
    cost = dict(zip(TERMS, model.seconds, strict=True))
    assert cost["pass"] == pytest.approx(0.02) and cost["row and token seen"] == pytest.approx(1e-7)
    assert fit(made[:10]) is None
    assert fit([*made, *(replace(r, system="plain", ttft=2 * r.ttft) for r in made)]) == model


def test_cost_is_never_negative() -> None:
    times = [
        Record("w", n, "r", "a", 1000 - n, ttft=1.0 + n, passes=[(n + 1, 3)]) for n in range(40)
    ]
    model = fit(times)
    assert model is not None and min(model.seconds) >= 0


def test_floor_is_the_slower_of_computing_and_reading_weights() -> None:
    one = Record("w", 0, "r", "a", 1000, passes=[(1, 30)])
    assert FLOOR.seconds(one) == pytest.approx(0.02)
    many = replace(one, passes=[(100, 15), (1000, 30)], moved=500)
    assert FLOOR.seconds(many) == pytest.approx(0.1 + 2.0 + 2 * 500 * 23040 / 1e10)


def test_report_has_a_row_for_each_system_and_says_what_failed(tmp_path: Path) -> None:
    failed = replace(RUN[-1], place=12, failed="its process died", request="r12")
    text = report.markdown(HEADER, [*RUN, failed], plots.write(RUN, tmp_path))
    for said in (
        "| auto | 211 |",
        "5.00x [5.00, 5.00]",
        "-50.0 [",
        "peer failed at r12",
        "GFLOP/s",
    ):
        assert said in text
    for name in ("ttft.png", "length.png", "quality.png"):
        assert f"({name})" in text and (tmp_path / name).stat().st_size > 10_000


def test_terminal_table_has_a_hundred_columns_at_most() -> None:
    console = Console(file=StringIO(), width=100)
    console.print(report.terminal(HEADER, RUN))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "5.00" in shown and "…" not in shown and "made-up" in shown
