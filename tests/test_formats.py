"""kv_format="auto": measured once for each model, the smallest format under the limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import boost, tokens

from kvboost import KVBoost, formats
from kvboost.formats import measure_formats


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    return tmp_path


def known(home: Path, text: str) -> None:
    digest = boost("llama").stats().fingerprint
    (home / "formats").mkdir()
    (home / "formats" / f"{digest}.json").write_text(text)


def test_less_precise_formats_are_further_apart() -> None:
    runner = boost("llama")._engine.runner
    apart = measure_formats(runner, tokens(640, 1))
    assert list(apart) == ["raw", "k8v8", "k8v4", "k4v4"]
    assert 0 == apart["raw"] < apart["k8v8"] < apart["k8v4"] < apart["k4v4"]


@pytest.mark.parametrize(
    ("limit", "fmt"), [(1e-9, "raw"), (0.01, "k8v8"), (0.04, "k8v4"), (9, "k4v4")]
)
def test_the_smallest_under_a_share_of_the_limit_is_taken(
    home: Path, limit: float, fmt: str
) -> None:
    known(home, '{"raw": 0, "k8v8": 0.0001, "k8v4": 0.001, "k4v4": 0.004}')
    made = boost("llama", kv_format="auto", max_divergence=limit)
    assert made.stats().kv_format == fmt


def test_measured_once_for_each_model(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def measure(runner: Any, ids: list[int]) -> dict[str, float]:
        measured.append(len(ids))
        return {"raw": 0.0, "k8v8": 0.0, "k8v4": 1.0, "k4v4": 1.0}

    monkeypatch.setattr(formats, "measure_formats", measure)
    for _ in range(2):
        assert boost("llama", kv_format="auto").stats().kv_format == "k8v8"
    assert len(measured) == 1
    boost("qwen2", kv_format="auto")
    assert len(measured) == 2


@pytest.mark.parametrize("torn", ["", "{", "[]", '{"k8v8": "x"}', "null", '{"k8v8": []}'])
def test_a_torn_note_is_measured_again(home: Path, torn: str) -> None:
    known(home, torn)
    assert boost("llama", kv_format="auto", max_divergence=1e9).stats().kv_format == "k4v4"


def test_a_home_that_cannot_be_written_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_HOME", "/proc/nowhere")
    assert boost("llama", kv_format="auto", max_divergence=1e9).stats().kv_format == "k4v4"


def test_the_embedded_model_takes_k8v4(default_model: tuple[Any, Any]) -> None:
    assert KVBoost(*default_model, kv_format="auto").stats().kv_format == "k8v4"
