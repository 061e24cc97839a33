"""`kvboost serve`, from its options to its end."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from servers import free_port
from typer.testing import CliRunner

from kvboost import cli, cli_serve
from kvboost.errors import ConfigError

RUNNER = CliRunner()


def test_help_names_every_option() -> None:
    shown = RUNNER.invoke(cli.app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    for name in ("api-keys", "insecure", "shared", "slots", "drain", "max-bytes", "max-divergence"):
        assert f"--{name}" in shown


def test_a_public_bind_needs_keys() -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        RUNNER.invoke(cli.app, ["serve", "--host", "0.0.0.0"], catch_exceptions=False)


def test_without_the_extra_it_says_how_to_get_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"kvboost\[server\]"):
        cli_serve.serve()


def test_it_answers_until_it_is_told_to_stop(tmp_path: Path) -> None:
    """A request in hand is finished, its stream to the end."""
    port = free_port()
    program = "from kvboost.cli import main; main()"
    options = ["--port", str(port), "--dtype", "float32"]
    command = [sys.executable, "-c", program, "serve", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        greeting = process.stdout.readline() + process.stdout.readline()
        assert f"http://127.0.0.1:{port}/v1" in greeting and "curl" in greeting
        body = {"model": "default", "messages": [{"role": "user", "content": "Count."}]}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        asked: Any = {**body, "stream": True, "max_tokens": 60, "temperature": 0}
        with httpx2.stream("POST", url, json=asked, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and "error" not in "".join(rest)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
