"""What the README says: its snippet is run, its table is made of the records kept."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvboost
from kvboost import KVBoost

README = Path(__file__).parents[1] / "README.md"


def test_snippet_prints_what_it_says(
    default_model: tuple[Any, Any], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    blocks = re.findall(r"```(\w*)\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    code = next(text for kind, text in blocks if kind == "python")
    expected = next(text for kind, text in blocks if kind == "")
    monkeypatch.setattr(KVBoost, "from_pretrained", lambda name: KVBoost(*default_model))
    exec(code, {"__name__": kvboost.__name__})
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == expected.splitlines()[:2]
    assert re.fullmatch(r"first token after [\d.]+ s, then after [\d.]+ s", printed[2])


def test_tables_are_those_of_the_records_kept(tmp_path: Path) -> None:
    """`make docs` has been run: README's table and docs/benchmarks.md's are made of them."""
    root = README.parent
    (tmp_path / "docs").mkdir()
    pages = ("README.md", "docs/benchmarks.md")
    for page in pages:
        shutil.copy(root / page, tmp_path / page)
    write = [sys.executable, "-m", "benchmarks.proof", "--out", str(tmp_path)]
    records = sorted((root / "benchmarks" / "runs").glob("*.jsonl.gz"))
    assert subprocess.run([*write, *records], cwd=root, check=False).returncode == 0 and records
    for page in pages:
        assert (tmp_path / page).read_text() == (root / page).read_text()
