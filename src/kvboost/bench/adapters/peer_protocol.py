"""The peer's side of the talk with `kvboost bench`: one JSON object a line, in and out.

An adapter is a script run by the Python of the system it drives: `serve(Engine)`. What the system
prints goes to standard error. Imports nothing but what is in every Python.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

CACHE_BYTES = 4 << 30
"""What a system may keep of earlier prompts."""


class Engine(Protocol):
    """A loaded model. version, note: what the benchmark's record says of the system."""

    version: str
    note: str

    def answer(
        self, ids: list[int], text: str, n: int, first: Callable[[int], None]
    ) -> dict[str, Any]:
        """The greedy answer to a prompt, which is given as ids and as text; at most n tokens.

        Calls `first` with the first token the moment there is one. Returns "text"; "ids", None if
        the answer ended before it had n; and "cached", the prompt's tokens not computed now, None
        if not known.
        """
        ...


def serve(start: Callable[[str, str, int], Engine]) -> None:
    """Load (model, dtype, window), then answer until the other side closes its end."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**told: Any) -> None:
        lines.write(json.dumps(told) + "\n")
        lines.flush()

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        def first(token: int) -> None:
            say(id=asked["id"], token=token)

        try:
            return engine.answer(asked["ids"], asked["text"], asked["n"], first)
        except Exception as error:  # of whatever kind, the next prompt may do
            logging.exception("prompt %s", asked["id"])
            return {"error": f"{type(error).__name__}: {error}"}

    model, dtype, window = sys.argv[1:]
    engine = start(model, dtype, int(window))
    engine.answer(list(range(100, 228)), "Say hello to them. " * 30, 2, lambda token: None)
    say(ready=True, version=engine.version, note=engine.note)
    for line in sys.stdin:
        asked = json.loads(line)
        say(id=asked["id"], **answer(asked))
