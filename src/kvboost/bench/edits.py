"""A source file that changes a little between questions about it."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Sequence
from random import Random

from kvboost.bench.draws import module_names
from kvboost.bench.excerpts import Excerpts
from kvboost.bench.material import Material
from kvboost.bench.request import Request
from kvboost.types import Document

_VERSIONS = 9
_SYSTEM = (
    "You help programmers to find their way in a code base. You are shown source files as they "
    "are now, and a question about them. Answer with the value and nothing else."
)
_CONSTANTS = (
    "RETRY_LIMIT",
    "BATCH_SIZE",
    "QUEUE_LENGTH",
    "TIMEOUT_MS",
    "WORKER_COUNT",
    "CACHE_SECONDS",
)
_INSERTED = (
    "# see the discussion in issue {}",
    "# Measured once: it took {} ms",
    "_seen_{} = True",
    "debug_step = {}",
    "assert True, 'step {}'",
)
_NAMES = ("entry", "source", "target", "current", "record", "pending", "option", "context")


def edits(n: int, rng: Random, material: Material) -> Iterator[Request]:
    """Sessions of nine requests: a file as it is, then after 1 to 20 more edits each time. It has
    a constant that is asked for, and that every other version gives a new value."""
    excerpts = Excerpts(material, rng)
    for session in range(-(-n // _VERSIONS)):
        edited = excerpts.draw(rng.randint(1500, 2500))
        beside = excerpts.draw(500)
        first = rng.random() < 0.5
        title, other = module_names(2, rng)
        unused = [name for name in _CONSTANTS if name not in edited.text + beside.text]
        constant = rng.choice(unused)
        versions = _versions(edited.text.split("\n"), constant, rng)
        for number, (text, gold, stale) in enumerate(versions):
            documents = (Document(text, title), Document(beside.text, other))
            question = f"What is the value of {constant} in {title}? Answer with the value only."
            yield Request(
                id=f"edits-{session}-{number}",
                messages=(
                    {"role": "system", "content": _SYSTEM},
                    {"role": "user", "content": question},
                ),
                documents=documents if first else documents[::-1],
                gold=gold,
                stale=stale,
                session=f"edits-{session}",
            )


def _versions(lines: list[str], constant: str, rng: Random) -> Iterator[tuple[str, str, str]]:
    """Text, the constant's value, and the one before if it is another (else "")."""
    value = rng.randint(100, 999)
    at = _near_the_end(lines)
    lines = [*lines[:at], f"{constant} = {value}", "", "", *lines[at:]]
    yield "\n".join(lines), str(value), ""
    for _ in range(_VERSIONS - 1):
        for _ in range(rng.randint(1, 20)):
            lines = _edit(lines, constant, rng)
        stale = ""
        if rng.random() < 0.5:
            stale = str(value)
            value = rng.choice([v for v in range(100, 1000) if v != value])
            place = next(n for n, line in enumerate(lines) if line.startswith(constant))
            lines = [*lines[:place], f"{constant} = {value}", *lines[place + 1 :]]
        yield "\n".join(lines), str(value), stale


def _near_the_end(lines: Sequence[str]) -> int:
    """Where the last definition at top level starts, if that is in the last third."""
    starts = [
        n
        for n in range(1, len(lines))
        if not lines[n - 1] and re.match(r"(async def|def|class|@)", lines[n])
    ]
    return starts[-1] if starts and starts[-1] > len(lines) * 2 / 3 else len(lines)


def _edit(lines: list[str], constant: str, rng: Random) -> list[str]:
    """One small edit anywhere but at the constant."""
    places = [n for n, line in enumerate(lines) if line.strip() and not line.startswith(constant)]
    places = places[rng.randrange(len(places)) :]
    edited = rng.choice((_insert, _delete, _rename, _renumber))(lines, places, rng)
    return _insert(lines, places, rng) if edited == lines else edited


def _insert(lines: list[str], places: list[int], rng: Random) -> list[str]:
    here = lines[places[0]]
    indent = here[: len(here) - len(here.lstrip())]
    line = indent + rng.choice(_INSERTED).format(rng.randint(10, 9999))
    return [*lines[: places[0]], line, *lines[places[0] :]]


def _delete(lines: list[str], places: list[int], rng: Random) -> list[str]:
    return [*lines[: places[0]], *lines[places[0] + 1 :]]


def _rename(lines: list[str], places: list[int], rng: Random) -> list[str]:
    """One name, from the first line that has one to some lines after it."""
    for start in places:
        words = re.findall(r"\b[A-Za-z_]\w{3,}\b", lines[start])
        if names := [word for word in words if not keyword.iskeyword(word)]:
            name, end = rng.choice(names), start + rng.randint(1, 30)
            new = rng.choice(_NAMES)
            renamed = [re.sub(rf"\b{name}\b", new, line) for line in lines[start:end]]
            return [*lines[:start], *renamed, *lines[end:]]
    return lines


def _renumber(lines: list[str], places: list[int], rng: Random) -> list[str]:
    """Another number in the first line that has one."""
    for n in places:
        if re.search(r"\b\d+\b", lines[n]):
            line = re.sub(r"\b\d+\b", str(rng.randint(0, 999)), lines[n], count=1)
            return [*lines[:n], line, *lines[n + 1 :]]
    return lines
