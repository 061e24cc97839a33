"""`kvboost cache`: what is in a folder, is it sound, empty it, take it elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import boost, tokens
from typer.testing import CliRunner

from kvboost.cli import app
from kvboost.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What two namespaces stored."""
    for namespace in ("ours", "theirs"):
        with boost("llama", disk=tmp_path / "kv", namespace=namespace) as made:
            made.generate(tokens(300, 1), max_new_tokens=1)
            made.generate(tokens(300, 1), max_new_tokens=1)
    return tmp_path / "kv"


def run(*words: object, answer: str = "", status: int = 0) -> str:
    result = CliRunner().invoke(app, ["cache", *map(str, words)], input=answer)
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.output


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("entries/*/*.kv"))


def test_ls_and_stats(folder: Path) -> None:
    listed = run("ls", folder, "--limit", 3).splitlines()
    assert len(listed) == 4 and all("raw" in line for line in listed[1:])
    said = run("stats", folder)
    assert len([line for line in said.splitlines() if " raw " in line]) == 2
    assert f"{len(entries(folder))} entries" in said


def test_doctor_finds_what_is_damaged_and_puts_it_away(folder: Path) -> None:
    assert "are sound" in run("doctor", folder)
    first, second, third = entries(folder)[:3]
    count = len(entries(folder))
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 8
    first.write_bytes(data)
    second.write_bytes(second.read_bytes()[:-100])
    third.unlink()
    said = run("doctor", folder, status=1)
    assert "checksum" in said and "truncated" in said
    assert len(entries(folder)) == count - 3
    assert len(list(folder.glob("quarantine/*.kv"))) == 2
    assert f"{count - 3} entries checked, {count - 3} are sound" in run("doctor", folder)


def test_clear_asks_first(folder: Path) -> None:
    run("clear", folder, answer="n\n", status=1)
    assert entries(folder)
    assert f"{len(entries(folder))} entries removed" in run("clear", folder, "--yes")
    assert not entries(folder)


def test_export_and_import_into_another_folder(folder: Path, tmp_path: Path) -> None:
    count, file, other = len(entries(folder)), tmp_path / "kv.tar", tmp_path / "other"
    assert f"{count} entries written" in run("export", folder, file)
    assert f"{count} entries taken in, 0" in run("import", other, file)
    assert f"0 entries taken in, {count}" in run("import", other, file)
    with boost("llama", disk=other, namespace="ours") as made:
        assert made.generate(tokens(300, 1), max_new_tokens=1).usage.computed == 1


@pytest.mark.parametrize("command", ["ls", "stats", "doctor", "clear", "export"])
def test_a_folder_that_is_none_of_ours_is_left_alone(command: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="check the path"):
        run(command, tmp_path / "typo", *(["x.tar"] if command == "export" else []))
    assert not (tmp_path / "typo").exists()


def test_a_file_that_is_no_export_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"no tar" * 1000)
    with pytest.raises(ConfigError, match=r"x\.tar"):
        run("import", folder, tmp_path / "x.tar")


def test_a_folder_of_another_format_is_refused_at_the_start(folder: Path) -> None:
    (folder / "format").write_text("KVBoost entries, version 2")
    count = len(entries(folder))
    with pytest.raises(ConfigError, match="version 2"):
        boost("llama", disk=folder)
    assert len(entries(folder)) == count
