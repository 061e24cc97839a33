"""What workloads are made of: source files, and a tokenizer to cut them to length.

Knows nothing of requests or models.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kvboost.errors import ConfigError

SUFFIXES = (".py", ".js", ".ts", ".go", ".rs", ".java", ".c", ".h", ".cpp", ".md", ".txt")
_NO_SOURCES = ("test", "tests", "idle_test", "encodings", "site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class Material:
    """tokens, text: a tokenizer's encode (without special tokens) and decode. files: names and
    texts."""

    tokens: Callable[[str], list[int]]
    text: Callable[[list[int]], str]
    files: Sequence[tuple[str, str]]

    @classmethod
    def of(cls, tokenizer: Any, folder: Path | None) -> Self:
        """With that folder's files, or the standard library's."""
        return cls(
            tokens=lambda text: list(
                tokenizer(text, add_special_tokens=False, verbose=False).input_ids
            ),
            text=lambda ids: str(tokenizer.decode(ids)),
            files=read_folder(folder) if folder else stdlib_files(),
        )


def stdlib_files() -> list[tuple[str, str]]:
    """The sources of Python's standard library, without its tests and its tables of encodings."""
    return list(_read(Path(sysconfig.get_paths()["stdlib"]), (".py",), _NO_SOURCES))


def read_folder(path: Path) -> list[tuple[str, str]]:
    """Source and text files in a folder and below, without hidden ones. Raises ConfigError if
    there are none."""
    if not path.is_dir():
        raise ConfigError(f"{path} is no folder: give one with source files")
    files = list(_read(path, SUFFIXES, ("node_modules",)))
    if not files:
        raise ConfigError(f"no source files in {path}: give a folder with {', '.join(SUFFIXES)}")
    return files


def _read(
    root: Path, suffixes: tuple[str, ...], skipped: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    for folder, below, names in os.walk(root):
        below[:] = sorted(b for b in below if b not in skipped and not b.startswith((".", "__py")))
        for name in sorted(names):
            if not name.endswith(suffixes) or name.startswith("."):
                continue
            path = Path(folder, name)
            try:
                yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def clip(text: str, tokens: int, material: Material) -> str:
    """The first lines of a text, as many as fit into so many tokens."""
    head = text[: 12 * tokens]  # more than that many tokens, unless they are very long
    ids = material.tokens(head)
    if len(ids) <= tokens and head == text:
        return text
    lines = material.text(ids[:tokens]).count("\n")
    return "\n".join(text.split("\n")[:lines])
