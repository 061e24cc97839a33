"""A coding agent's prompts: tool definitions, calls and results, and a history made shorter."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from kvboost.bench.draws import zipf_sample
from kvboost.bench.material import Material, clip
from kvboost.bench.request import Request
from kvboost.errors import ConfigError

_TURNS, _COMPACTED_AT, _KEPT, _REPOSITORY = 6, 4, 2, 24
_SYSTEM = (
    "You are a coding agent. You work on a task in a repository with the tools below. To use one, "
    "write a sentence on what you do next and then the call as one line of JSON. When you know "
    "the answer, write it in a few words instead."
)
_TOOLS: dict[str, tuple[str, dict[str, str]]] = {
    "list_files": ("List the files of the repository.", {"folder": "where to begin"}),
    "read_file": ("Read a source file from its beginning.", {"path": "which file"}),
    "search": (
        "Find the lines that contain a word.",
        {"word": "what to look for", "path": "the file or folder to look in"},
    ),
    "write_file": (
        "Write a file. What was in it before is lost.",
        {"path": "which file", "content": "its new text"},
    ),
    "replace": (
        "Replace a piece of text that occurs exactly once in a file.",
        {"path": "which file", "old": "the text to replace", "new": "the text to put there"},
    ),
    "delete_file": ("Delete a file.", {"path": "which file"}),
    "move_file": (
        "Move a file or give it another name.",
        {"path": "which file", "target": "its new path"},
    ),
    "run_tests": (
        "Run the tests and return the failures.",
        {"path": "the test file or folder", "pattern": "run only tests with this in their name"},
    ),
    "run_command": (
        "Run a shell command and return its output and its exit status.",
        {"command": "the command line", "seconds": "stop it after this time"},
    ),
    "show_changes": ("Show what was changed in a file so far.", {"path": "which file"}),
    "history": (
        "List the last commits that touched a file.",
        {"path": "which file", "count": "how many commits"},
    ),
    "fetch_page": ("Fetch a page of the documentation as text.", {"address": "of the page"}),
}
_TASKS = (
    "Find out what {} does and which other files need it.",
    "Review {}: is there a mistake in its error handling?",
    "Explain to a new colleague how {} works.",
    "We want to split {} in two. Propose where to cut.",
)


@dataclass(frozen=True, slots=True)
class _Step:
    summary: str
    call: str
    result: str


def agents(n: int, rng: Random, material: Material) -> Iterator[Request]:
    """Sessions of six requests in one repository, each with one tool result more than the one
    before. The tools stand in another order in each session. In the fourth request all results
    but the last two have become a summary."""
    files = _repository(rng, material)
    for session in range(-(-n // _TURNS)):
        tools = rng.sample(sorted(_TOOLS), len(_TOOLS))
        system = "\n".join([_SYSTEM, "", "Tools:", *(_definition(name) for name in tools)])
        read = zipf_sample(files, _TURNS - 1, rng)
        task = "Task: " + rng.choice(_TASKS).format(rng.choice(read)[0])
        steps = _steps(files, read, rng)
        for turn in range(1, _TURNS + 1):
            compacted = _COMPACTED_AT - _KEPT if turn >= _COMPACTED_AT else 0
            history = _history(task, steps[:compacted], steps[compacted:turn])
            yield Request(
                id=f"agents-{session}-{turn - 1}",
                messages=({"role": "system", "content": system}, *history),
                session=f"agents-{session}",
            )


def _repository(rng: Random, material: Material) -> list[tuple[str, str]]:
    """Names and beginnings of files, in order of popularity."""
    files = []
    for name, text in rng.sample(material.files, len(material.files)):
        part = clip(text, rng.randint(300, 900), material).rstrip()
        if len(material.tokens(part)) >= 150:
            files.append((name, part))
        if len(files) == _REPOSITORY:
            break
    if len(files) < _TURNS:
        raise ConfigError(
            f"too few files for an agent to read: give a folder with at least {_TURNS} of 150 "
            "tokens or more, or none to take the standard library"
        )
    return files


def _definition(name: str) -> str:
    description, parameters = _TOOLS[name]
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return json.dumps({"name": name, "description": description, "parameters": schema})


def _steps(
    files: Sequence[tuple[str, str]], read: Sequence[tuple[str, str]], rng: Random
) -> list[_Step]:
    """A listing, then a file a step; in one of them a word is looked up instead of reading all."""
    listing = "\n".join(sorted(name for name, _ in files))
    steps = [_step("I look at what there is.", "list_files", {"folder": "."}, listing)]
    searched = rng.choice(read)
    for file in read:
        name, text = file
        words = sorted(set(re.findall(r"[^\W\d]\w{4,}", text)))
        if file == searched and words:
            word = rng.choice(words)
            found = "\n".join(f"{name}: {line}" for line in text.split("\n") if word in line)
            arguments = {"word": word, "path": name}
            steps.append(_step(f"I look for {word}.", "search", arguments, found))
        else:
            steps.append(_step(f"I read {name} next.", "read_file", {"path": name}, text))
    return steps


def _step(plan: str, tool: str, arguments: dict[str, str], result: str) -> _Step:
    call = json.dumps({"tool": tool, "arguments": arguments})
    what = ", ".join(arguments.values())
    return _Step(f"{tool} ({what})", f"{plan}\n{call}", f"Result of {tool}:\n\n{result}")


def _history(
    task: str, compacted: Sequence[_Step], steps: Sequence[_Step]
) -> Iterator[dict[str, str]]:
    """Roles take turns; what was compacted is a part of the first message."""
    if compacted:
        done = "\n".join(f"- {step.summary}: nothing that decides it" for step in compacted)
        task = f"{task}\n\nWhat you did so far, in short:\n{done}"
    yield {"role": "user", "content": task}
    for step in steps:
        yield {"role": "assistant", "content": step.call}
        yield {"role": "user", "content": step.result}
