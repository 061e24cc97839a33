"""The command line, and the demo on one small scene."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import kvboost
from kvboost import ConfigError, Document, KVBoost, cli, demo
from kvboost.store.trace import write_trace
from kvboost.store.workloads import generate

RUNNER = CliRunner()


def test_help_teaches_and_version_is_ours() -> None:
    shown = RUNNER.invoke(cli.app, ["--help"])
    assert shown.exit_code == 0 and "demo" in shown.output and "info" in shown.output
    assert RUNNER.invoke(cli.app, ["--version"]).output.strip() == kvboost.__version__


def test_our_errors_are_a_line_not_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kvboost", "info", "no such model"])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_info_says_what_the_model_allows(default_model: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(KVBoost, "from_pretrained", lambda name: KVBoost(*default_model))
    shown = RUNNER.invoke(cli.app, ["info"]).output
    assert "float32" in shown and "anywhere" in shown and "measured on a model" in shown


def test_demo_shows_each_request_and_a_summary(default_model: Any, monkeypatch: Any) -> None:
    docs = tuple(
        Document(f"{name} keeps {n} red birds in a large cage. " * 6, name)
        for n, name in enumerate(("Ada", "Boris"))
    )
    turns = [
        demo.Turn("cold", "How many birds has Ada?", docs),
        demo.Turn("reversed", "How many birds has Boris?", docs[::-1]),
        demo.Turn("second turn", "And Ada?", follows=True),
    ]
    monkeypatch.setattr(demo, "_scenes", lambda: iter([("A scene", turns)]))
    console = Console(file=StringIO(), width=130)
    shown = demo.Demo(KVBoost(*default_model), KVBoost(*default_model), console)
    shown.run()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "A scene" in text and "reversed" in text
    assert re.search(r"Mean time to first token of 3 requests, cold ones included", text)
    cold, reordered, chat = shown.results
    assert cold.ours.exact and cold.ours.text == cold.full.text
    assert reordered.ours.usage.moved > 0 and reordered.prefix.usage.moved == 0
    assert chat.full.usage.prompt > reordered.full.usage.generated


def test_simulate_compares_policies(tmp_path: Path) -> None:
    write_trace(generate("chats", seed=3, requests=60), tmp_path / "trace.jsonl")
    words = ["simulate", str(tmp_path / "trace.jsonl"), "--budget", "10%", "--budget", "5e7"]
    said = RUNNER.invoke(cli.app, words).output
    for word in ("60 requests", "value", "s3-fifo", "10% =", "5e7 = 50.0 MB"):
        assert word in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["no-such-file"], "neither a file nor"),
        (["chats", "--budget", "x"], "budget"),
        (["chats", "--budget", "0"], "budget"),
        (["chats", "--budget", "10%", "--policy", "mru"], "s3-fifo"),
    ],
)
def test_simulate_says_what_is_wrong(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RUNNER.invoke(cli.app, ["simulate", *words], catch_exceptions=False)
