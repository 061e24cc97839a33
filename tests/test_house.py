"""The rules of the house: budgets, import direction, exported names."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

import kvboost

SRC = Path(kvboost.__file__).parent
FILES = sorted(SRC.rglob("*.py"))
NAMES = [str(path.relative_to(SRC)) for path in FILES]
TORCH_FREE = {"types.py", "errors.py", "config.py", "chunking.py", "keys.py", "align.py", "plan.py"}

AROUND = {
    *("cli.py", "cli_bench.py", "cli_cache.py", "cli_calibrate.py", "cli_serve.py"),
    "calibrate.py",
    *("demo.py", "explain.py", "hub.py", "loading.py", "fingerprint.py", "upgrade.py"),
    *("formats.py", "numerics.py", "profiles.py", "support.py"),
}
FILE_LINES, FUNCTION_LINES, CORE_LINES = 400, 50, 3960


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_file_and_functions_keep_their_budget(path: Path) -> None:
    assert lines(path) <= FILE_LINES
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES, f"{node.name} in line {node.lineno}: {length} lines"


def test_core_keeps_its_budget() -> None:
    """Core: what a request passes through. Without what shows things to people, finds models or
    finds out about them when they are loaded, and without the store's formats and tiers, which have
    a folder and limits of their own. 3,500 lines, 400 for requests computed together
    (`generation.py`, `passes.py`, `BatchCache`) and what edits leave (`align.py`), and 60 for
    attention (`attention.py`)."""
    core = [f for f in FILES if f.parent == SRC and f.name not in AROUND]
    assert sum(map(lines, core)) <= CORE_LINES


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_only_the_border_imports_transformers(path: Path) -> None:
    if (
        path not in (SRC / "model.py", SRC / "loading.py") and path.parent.name != "adapters"
    ):  # run by peers' own pythons
        assert "transformers" not in imported(path)


@pytest.mark.parametrize("path", [f for f in FILES if f.name in TORCH_FREE and f.parent == SRC])
def test_nouns_and_integers_need_no_torch(path: Path) -> None:
    assert not imported(path) & {"torch", "numpy"}


def test_exported_names_are_exactly_all() -> None:
    public = {
        name
        for name, value in vars(kvboost).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    public.discard("annotations")
    assert public == set(kvboost.__all__) - {"__version__"}
    assert all(hasattr(kvboost, name) for name in kvboost.__all__)
    assert kvboost.__all__ == sorted(kvboost.__all__, key=str)
