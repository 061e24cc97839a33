"""What Prometheus reads, what the page is told, what is logged; and that deploy/ fits it."""

from __future__ import annotations

import json
import logging
import re
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import Depends, FastAPI, HTTPException
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from served import MIB, FakeBoost, FakeScheduler, disk, script, served, server

from kvboost.server import logs, status
from kvboost.server.metrics import Metrics
from kvboost.server.work import Load
from kvboost.types import Usage

ROOT = Path(__file__).parent.parent


def client(metrics: Metrics, scheduler: Any = None, guard: Any = ()) -> TestClient:
    app = FastAPI()
    app.include_router(metrics.router(scheduler or FakeScheduler(), guard))
    return TestClient(app)


def read(metrics: Metrics, scheduler: Any = None) -> dict[tuple[str, ...], float]:
    """Values by name and labels' values, in the order of the labels' names."""
    text = client(metrics, scheduler).get("/metrics").text
    return {
        (sample.name, *(text for _, text in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# -- /metrics


def test_a_request_is_counted_by_every_class() -> None:
    metrics = Metrics(FakeBoost())
    metrics.observe(served())
    got = read(metrics)
    assert got["kvboost_requests_total", "done", "library"] == 1
    for name, tokens in (("exact", 300), ("moved", 500), ("recomputed", 60), ("computed", 140)):
        assert got["kvboost_prompt_tokens_total", name, "library"] == tokens
    assert got["kvboost_generated_tokens_total", "library"] == 3
    assert got["kvboost_missed_tokens_total", "new"] == 130
    assert got["kvboost_missed_tokens_total", "short"] == 9
    assert got["kvboost_phase_seconds_total", "probe"] == pytest.approx(0.02)
    assert got["kvboost_time_to_first_token_seconds_sum", "yes"] == pytest.approx(0.12)
    assert got["kvboost_request_queue_time_seconds_sum",] == pytest.approx(0.02)
    assert got["kvboost_inter_token_latency_seconds_count",] == 2
    assert got["kvboost_e2e_request_latency_seconds_sum",] == pytest.approx(0.25)
    assert got["kvboost_repair_rows_sum",] == 60


def test_a_cold_request_is_not_among_the_reused_nor_the_repaired() -> None:
    metrics = Metrics(FakeBoost())
    metrics.observe(served(usage=Usage(computed=1000, generated=3)))
    got = read(metrics)
    assert got["kvboost_time_to_first_token_seconds_count", "no"] == 1
    assert got["kvboost_repair_rows_count",] == 0


@pytest.mark.parametrize("outcome", ["cancelled", "deadline", "failed"])
def test_a_request_that_ended_before_its_first_token(outcome: str) -> None:
    metrics = Metrics(FakeBoost())
    metrics.observe(served(outcome=outcome, ttft=None, usage=Usage(), misses={}, gaps=()))
    got = read(metrics)
    assert got["kvboost_requests_total", outcome, "library"] == 1
    assert got["kvboost_e2e_request_latency_seconds_count",] == 0
    assert ("kvboost_time_to_first_token_seconds_count", "no") not in got


def test_refusals_are_counted_by_status() -> None:
    metrics = Metrics(FakeBoost())
    for code in (429, 429, 401):
        metrics.refused(code)
    got = read(metrics)
    assert got["kvboost_requests_refused_total", "429"] == 2
    assert got["kvboost_requests_refused_total", "401"] == 1


def test_queue_and_tiers_are_looked_up() -> None:
    boost = FakeBoost(disk(), server(up=False))
    got = read(Metrics(boost), FakeScheduler(Load(3, 5, 8)))
    assert got["kvboost_requests_waiting",] == 3
    assert got["kvboost_answers_running",] == 5
    assert got["kvboost_slots",] == 8
    assert got["kvboost_tier_bytes", "memory"] == 1400 * MIB
    assert got["kvboost_tier_limit_bytes", "disk"] == 20480 * MIB
    assert got["kvboost_tier_evictions_total", "memory"] == 60
    assert got["kvboost_tier_hits_total", "valkey"] == 420
    assert got["kvboost_tier_flaws_total", "torn", "disk"] == 1
    assert [got["kvboost_tier_up", name] for name in ("memory", "disk", "valkey")] == [1, 1, 0]
    assert got["kvboost_upgraded_tokens_total",] == 5200
    assert ("kvboost_tier_bytes", "valkey") not in got  # its server counts for itself


def test_names_keep_the_conventions_of_prometheus() -> None:
    metrics = Metrics(FakeBoost(disk()))
    metrics.observe(served())
    text = client(metrics).get("/metrics").text
    for family in text_string_to_metric_families(text):
        assert family.name.startswith(("kvboost_", "process_"))
        assert family.documentation
        samples = {sample.name for sample in family.samples if sample.name.startswith("kvboost_")}
        if family.type == "counter":
            assert all(name.endswith("_total") for name in samples)
        if family.type == "gauge" and not family.name.endswith("_created"):
            assert not any(name.endswith("_total") for name in samples)


def test_observing_a_long_answer_takes_no_time_to_speak_of() -> None:
    metrics, long = Metrics(FakeBoost()), served(gaps=(0.05,) * 1000)
    start = time.process_time()
    for _ in range(10):
        metrics.observe(long)
    assert (time.process_time() - start) / 10 < 0.05


def test_the_store_is_asked_once_for_many_watchers() -> None:
    boost = FakeBoost()
    page = client(Metrics(boost))
    for _ in range(5):
        page.get("/status.json")
    assert boost.asked == 1


# -- the page's numbers


def test_the_page_is_told_only_what_it_does_not_know() -> None:
    metrics = Metrics(FakeBoost())
    page = client(metrics)
    for request in script(3):
        metrics.observe(request)
    first = page.get("/status.json").json()
    assert [r["number"] for r in first["requests"]] == [1, 2, 3]
    metrics.observe(served(id="newest"))
    metrics.refused(429)
    news = page.get("/status.json", params={"after": first["served"]}).json()
    assert [r["id"] for r in news["requests"]] == ["newest"]
    assert (news["served"], news["refused"]) == (4, 1)
    for after in (4, 99):
        assert page.get("/status.json", params={"after": after}).json()["requests"] == []


def test_history_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "KEPT", 5)
    metrics = Metrics(FakeBoost())
    for request in script(12):
        metrics.observe(request)
    for after, numbers in ((0, [8, 9, 10, 11, 12]), (-7, [8, 9, 10, 11, 12]), (10, [11, 12])):
        told = client(metrics_of(metrics)).get("/status.json", params={"after": after}).json()
        assert [r["number"] for r in told["requests"]] == numbers


def metrics_of(metrics: Metrics) -> Metrics:
    """The same history behind a router of its own."""
    other = Metrics(FakeBoost())
    other._history = metrics._history
    return other


def test_places_say_what_they_know() -> None:
    page = client(Metrics(FakeBoost(disk(), server())))
    memory, folder, valkey = page.get("/status.json").json()["places"]
    assert (memory["evicted"], memory["hits"]) == (60, None)
    assert (folder["evicted"], folder["hits"]) == (None, 420)
    assert valkey["bytes"] is None


def test_numbers_are_guarded_and_the_page_is_not() -> None:
    def nobody() -> None:
        raise HTTPException(401)

    page = client(Metrics(FakeBoost()), guard=[Depends(nobody)])
    assert page.get("/metrics").status_code == page.get("/status.json").status_code == 401
    assert page.get("/").status_code == page.get("/page/status.js").status_code == 200


def test_the_page_comes_with_a_strict_policy_and_nothing_else_is_served() -> None:
    page = client(Metrics(FakeBoost()))
    index = page.get("/")
    assert index.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in index.headers["content-security-policy"]
    for part in re.findall(r'(?:src|href)="(page/[^"]+)"', index.text):
        assert page.get(f"/{part}").status_code == 200
    for name in ("__init__.py", "..%2fmetrics.py", "none.css"):
        assert page.get(f"/page/{name}").status_code == 404


def test_every_reason_is_explained() -> None:
    known = {"new", "little", "short", "sink", "off", "unmovable"}  # of work.Served.misses
    assert set(status.REASONS) == known
    assert all(reason.what and reason.advice for reason in status.REASONS.values())


# -- logs


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], Any]]:
    """Call it once to configure, and again for what was logged. Leaves logging as it was."""
    root, access = logging.getLogger(), logging.getLogger("uvicorn.access")
    level, filters = root.level, access.filters[:]

    def configured_or_logged() -> Any:
        if any(isinstance(each.formatter, logs.JsonFormatter) for each in root.handlers):
            return [json.loads(line) for line in capsys.readouterr().err.splitlines()]
        root.handlers = []  # pytest's own must not be closed; it has others for each phase
        return logs.configure("info")

    yield configured_or_logged
    logging.captureWarnings(False)
    access.filters = filters
    root.setLevel(level)
    root.handlers = [h for h in root.handlers if not isinstance(h.formatter, logs.JsonFormatter)]


def test_a_request_is_one_line(lines: Any) -> None:
    lines()
    logs.served(served())
    (line,) = lines()
    assert line["level"] == "info"
    assert line["id"] == "req-1"
    assert line["tokens"] == {
        "exact": 300,
        "moved": 500,
        "recomputed": 60,
        "computed": 140,
        "generated": 3,
    }
    assert line["misses"] == {"new": 130, "short": 9}
    assert (line["outcome"], line["ttft"], line["queued"]) == ("done", 0.12, 0.02)
    assert "error" not in line


def test_a_failure_is_an_error_and_says_what_it_was(lines: Any) -> None:
    lines()
    logs.served(served(outcome="failed", ttft=None, error="RuntimeError: out of memory"))
    (line,) = lines()
    assert (line["level"], line["error"]) == ("error", "RuntimeError: out of memory")
    assert line["ttft"] is None


def test_lines_carry_the_id_of_the_request_in_hand(lines: Any) -> None:
    lines()
    token = logs.request_id.set("req-7")
    logging.getLogger("kvboost.store").warning("the disk tier %s", "is slow\nand late")
    logs.request_id.reset(token)
    logging.getLogger("kvboost.store").warning("later")
    first, second = lines()
    assert (first["id"], first["message"]) == ("req-7", "the disk tier is slow\nand late")
    assert "id" not in second


def test_exceptions_stay_on_their_line(lines: Any) -> None:
    lines()
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("uvicorn.error").exception("Exception in ASGI application")
    (line,) = lines()
    assert line["exception"].endswith("ValueError: broken")


def test_access_is_logged_where_it_was_refused(lines: Any) -> None:
    lines()
    access = logging.getLogger("uvicorn.access")
    for path, code in (("/health", 200), ("/v1/chat/completions", 401)):
        access.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:5", "GET", path, "1.1", code)
    (line,) = lines()
    assert line["message"].endswith("401")


# -- deploy/ and docs/


def exported() -> dict[str, set[str]]:
    """Every metric's name, as queries name it, and its labels."""
    metrics = Metrics(FakeBoost(disk(), server()))
    metrics.observe(served())
    metrics.observe(served(usage=Usage(computed=5)))
    metrics.refused(429)
    names: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(client(metrics).get("/metrics").text):
        for sample in family.samples:
            names.setdefault(sample.name, set()).update(sample.labels)
    return names


def test_the_dashboard_asks_for_what_there_is() -> None:
    board = json.loads((ROOT / "deploy/grafana-dashboard.json").read_text(encoding="utf-8"))
    known = exported()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            names = re.findall(r"\b(?:kvboost|process)_\w+", query)
            assert names, query
            assert set(names) <= known.keys(), query
            labels = {"job", "instance"}.union(*(known[name] for name in names))
            asked = [w for by in re.findall(r"by \(([^)]*)\)", query) for w in by.split(", ")]
            asked += re.findall(r"[{,](\w+)=", query)
            asked += re.findall(r"{{(\w+)}}", target["legendFormat"])
            assert set(asked) <= labels, query


def test_the_dashboard_shows_every_metric_of_ours_or_says_why_not() -> None:
    board = (ROOT / "deploy/grafana-dashboard.json").read_text(encoding="utf-8")
    unshown = {
        "kvboost_tier_entries",  # goes with the bytes
        "kvboost_tier_refused_total",  # mostly: was there already
        "kvboost_tier_latency_seconds",
        "kvboost_tier_bytes_per_second",
    }
    ours = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in exported()}
    ours = {name for name in ours if name.startswith("kvboost_")}
    missing = {n for n in ours if n not in board and f"{n}_total" not in ours}
    assert missing == unshown


def test_the_docs_list_every_metric() -> None:
    text = (ROOT / "docs/server.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`(kvboost_\w+)", text))
    ours = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exported()}
    assert told == {n for n in ours if n.startswith("kvboost_") and not n.endswith("_created")}
    assert all(f"`{reason}`" in text for reason in status.REASONS)


def test_deployment_files_are_well_formed() -> None:
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text(encoding="utf-8"))
    assert {"kvboost", "valkey"} <= compose["services"].keys()
    for service in compose["services"].values():
        assert "latest" not in service.get("image", "")
        for named in service.get("volumes", []):
            source = named.partition(":")[0]
            assert source.startswith(".") or source in compose["volumes"]
    scrape = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text(encoding="utf-8"))
    assert scrape["scrape_configs"][0]["job_name"] == "kvboost"


def test_the_image_installs_extras_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    recipe = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
    (extras,) = re.findall(r"\.whl\)\[([\w,]+)\]", recipe)
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert re.search(r"^USER (?!root)", recipe, re.MULTILINE)
    assert "HEALTHCHECK" in recipe


def test_load_is_never_older_than_the_question() -> None:
    scheduler = FakeScheduler()
    page = client(Metrics(FakeBoost()), scheduler)
    page.get("/status.json")
    scheduler.now = replace(scheduler.now, waiting=4)
    assert page.get("/status.json").json()["load"]["waiting"] == 4
