"""What a Python source says that can be asked about: errors, docstrings, definitions.

Sources are parsed, never imported. Docstrings are taken out of the text, so that it can be asked
which definition they describe.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_SENTENCE_WORDS = range(5, 41)


@dataclass(frozen=True, slots=True)
class Fact:
    """What a question quotes, and the text that would make any other file an answer as well. The
    trace of a docstring is in no file, all others are in theirs."""

    kind: Literal["raises", "describes", "defines"]
    quote: str
    trace: str


@dataclass(frozen=True, slots=True)
class Source:
    """Lines without docstrings, where definitions at top level start, and facts with the first
    and the last line each of them needs."""

    lines: tuple[str, ...]
    starts: tuple[int, ...]
    facts: tuple[tuple[int, int, Fact], ...]


def parse(text: str) -> Source:
    """Without lines if it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escape sequences
            tree = ast.parse(text)
    except (SyntaxError, ValueError):  # null bytes are a ValueError
        return Source((), (), ())
    lines = text.split("\n")
    nodes = list(ast.walk(tree))
    docstrings = [
        (node, found)
        for node in nodes
        if isinstance(node, _Definition) and (found := _docstring(node, lines))
    ]
    gone = {n for _, doc in docstrings for n in range(doc.lineno, (doc.end_lineno or 0) + 1)}
    kept = [number for number in range(1, len(lines) + 1) if number not in gone]
    place = {number: n for n, number in enumerate(kept)}
    facts = [fact for node in nodes for fact in _stated(node, lines)]
    facts += [fact for node, _ in docstrings for fact in _described(node)]
    top = [node for node in tree.body if isinstance(node, _Definition)]
    return Source(
        tuple(lines[number - 1] for number in kept),
        tuple(place[min([n.lineno, *(d.lineno for d in n.decorator_list)])] for n in top),
        tuple((place[first], place[last], fact) for first, last, fact in facts),
    )


def _docstring(node: _Definition, lines: list[str]) -> ast.Expr | None:
    """The docstring, if it has its lines for itself and something comes after it."""
    doc = node.body[0]
    alone = (
        len(node.body) > 1
        and isinstance(doc, ast.Expr)
        and ast.get_docstring(node)
        and lines[doc.lineno - 1][: doc.col_offset].isspace()
        and node.body[1].lineno > (doc.end_lineno or 0)
    )
    return doc if alone and isinstance(doc, ast.Expr) else None


def _described(node: _Definition) -> Iterator[tuple[int, int, Fact]]:
    paragraph = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph)[0]
    if len(sentence.split()) in _SENTENCE_WORDS:
        yield node.lineno, node.body[1].lineno, Fact("describes", sentence, sentence)


def _stated(node: ast.AST, lines: list[str]) -> Iterator[tuple[int, int, Fact]]:
    if isinstance(node, _Definition) and not node.name.startswith("__"):
        keyword, kind = (
            ("class", "class") if isinstance(node, ast.ClassDef) else ("def", "function")
        )
        fact = Fact("defines", f"{kind} `{node.name}`", f"{keyword} {node.name}")
        yield node.lineno, node.lineno, fact
    match node:
        case ast.Raise(
            exc=ast.Call(
                func=ast.Name(id=error) | ast.Attribute(attr=error),
                args=[ast.Constant(value=str(message)), *_],
            )
        ):
            last = node.end_lineno or node.lineno
            shown = any(message in line for line in lines[node.lineno - 1 : last])
            if shown and len(message) >= 12 and " " in message:
                yield node.lineno, last, Fact("raises", f"{error}: {message}", message)
