"""What requests asked for, as hashes: enough to replay them against a store, without a model.

A trace is a file of JSON lines. The first is its header:

    {"kvboost_trace": 1, "bytes_per_token": 23040,
     "seconds_per_token": 0.001, "seconds_per_position": 2.7e-07}

Storing a token takes `bytes_per_token`. Prefilling the token at position p takes
`seconds_per_token + p * seconds_per_position`. Every other line is a request, in order of time:

    {"chunks": [["<content>", "<lineage>", 80], ...], "answer": 2}

A chunk is the digest of its tokens, the digest of its tokens and all tokens before it (16 bytes
each, as 32 hex digits), and its number of tokens. Its parent is the lineage of the chunk before it,
its position the sum of the tokens before it. The last `answer` chunks were stored and not looked
up: they hold generated tokens.

No text and no token ids. Digests are keyed by namespace and model; whoever knows both, and has a
text, can test whether it was in a prompt.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvboost.errors import ConfigError
from kvboost.keys import DIGEST_BYTES, ChunkKey, KeyKind
from kvboost.types import Chunk

_log = logging.getLogger(__name__)
_VERSION = 1
_HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class Cost:
    """What a token takes to store and to prefill. The defaults are those of SmolLM2-135M in bf16 on
    two CPU cores: 0.5 s for 500 tokens, 2.5 s for 2,000."""

    bytes_per_token: int = 23_040
    seconds_per_token: float = 1.0e-3
    seconds_per_position: float = 2.7e-7

    def bytes(self, tokens: int) -> int:
        return tokens * self.bytes_per_token

    def seconds(self, position: int, tokens: int) -> float:
        """To prefill `tokens` of them, the first at `position`."""
        middle = position + (tokens - 1) / 2
        return tokens * (self.seconds_per_token + middle * self.seconds_per_position)


@dataclass(frozen=True, slots=True)
class TraceChunk:
    """Of both keys only the first 16 bytes are kept; zeros fill them up."""

    content: ChunkKey
    lineage: ChunkKey
    tokens: int


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Chunks in order; the last `answer` of them are stored and not looked up."""

    chunks: tuple[TraceChunk, ...]
    answer: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time."""

    cost: Cost
    requests: tuple[TraceRequest, ...]


class TraceRecorder:
    """Appends requests to a file. Safe to use from several threads of one process."""

    def __init__(self, path: Path, cost: Cost) -> None:
        """A trace that is there is continued, and keeps its own seconds. Raises ConfigError if the
        file is something else, or its tokens have another size."""
        self._path = path
        self._lock = threading.Lock()
        self._ended = False
        try:
            if not path.exists() or path.stat().st_size == 0:
                path.write_text(_header(cost), encoding="utf-8")
                return
            with path.open(encoding="utf-8", errors="replace") as file:
                size = _cost(json.loads(file.readline())).bytes_per_token
        except OSError as error:
            raise ConfigError(f"the trace can't be written: {error}") from error
        except ValueError as error:
            raise ConfigError(f"{path} is there, and is not a trace: {error}") from error
        if size != cost.bytes_per_token:
            raise ConfigError(
                f"{path} is a trace with {size} bytes per token, not {cost.bytes_per_token}: "
                "give the name of a new file"
            )

    def record(
        self,
        chunks: Sequence[Chunk],
        lineage: Sequence[ChunkKey],
        contents: Sequence[ChunkKey],
        answer: int = 0,
    ) -> None:
        """Append a request. `lineage`: all prefix keys, as if nothing had been approximate (what
        is, depends on the store). The last `answer` chunks were not looked up. A file that can't
        be written ends the trace, not the request."""
        if self._ended:
            return
        line = _line(zip(contents, lineage, map(len, chunks), strict=True), answer)
        try:
            with self._lock, self._path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            self._ended = True
            _log.warning("the trace ends here: %s", error)


def write_trace(trace: Trace, path: Path) -> None:
    """Write a whole trace; a file that is there is replaced."""
    with path.open("w", encoding="utf-8") as file:
        file.write(_header(trace.cost))
        for request in trace.requests:
            rows = ((c.content, c.lineage, c.tokens) for c in request.chunks)
            file.write(_line(rows, request.answer))


def read_trace(path: Path) -> Trace:
    """Raises ConfigError, with the line's number, if the file is not a trace."""
    cost, requests = None, []
    chunks: dict[tuple[str, str, int], TraceChunk] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                if cost is None:
                    cost = _cost(json.loads(line))
                else:
                    requests.append(_parsed(json.loads(line), chunks))
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error
    if cost is None:
        raise ConfigError(f"{path} is empty: a trace begins with a header")
    return Trace(cost, tuple(requests))


def _header(cost: Cost) -> str:
    return json.dumps({"kvboost_trace": _VERSION, **asdict(cost)}) + "\n"


def _line(rows: Iterable[tuple[ChunkKey, ChunkKey, int]], answer: int) -> str:
    chunks = [[_hex(content), _hex(lineage), tokens] for content, lineage, tokens in rows]
    return json.dumps({"chunks": chunks, "answer": answer}) + "\n"


def _hex(key: ChunkKey) -> str:
    return key.digest[:_HASH_BYTES].hex()


def _cost(header: Any) -> Cost:
    if not isinstance(header, dict) or header.get("kvboost_trace") != _VERSION:
        raise ValueError(f'a trace begins with a header, {{"kvboost_trace": {_VERSION}, ...}}')
    size = header.get("bytes_per_token")
    if type(size) is not int or size < 1:
        raise ValueError(f"bytes_per_token must be a whole number of at least 1, not {size!r}")
    return Cost(size, _seconds(header, "token"), _seconds(header, "position"))


def _seconds(header: dict[str, Any], per: str) -> float:
    value = header.get(f"seconds_per_{per}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"seconds_per_{per} must be a number of at least 0, not {value!r}")
    return value


def _parsed(line: Any, known: dict[tuple[str, str, int], TraceChunk]) -> TraceRequest:
    """A request; chunks that are `known` are not made twice."""
    if not isinstance(line, dict) or not isinstance(line.get("chunks"), list):
        raise ValueError('a request must have a list of "chunks"')
    rows, answer = line["chunks"], line.get("answer", 0)
    if type(answer) is not int or not 0 <= answer <= len(rows):
        raise ValueError(f'"answer" must be a number of chunks from 0 to {len(rows)}')
    chunks = []
    for row in rows:
        match row:
            case [str(content), str(lineage), int(tokens)] if type(tokens) is int and tokens > 0:
                key = (content, lineage, tokens)
                if key not in known:
                    known[key] = TraceChunk(
                        _key(KeyKind.CONTENT, content), _key(KeyKind.PREFIX, lineage), tokens
                    )
                chunks.append(known[key])
            case _:
                raise ValueError(f"a chunk must be [content, lineage, tokens], not {row!r}")
    return TraceRequest(tuple(chunks), answer)


def _key(kind: KeyKind, text: str) -> ChunkKey:
    if not re.fullmatch(f"[0-9a-f]{{{2 * _HASH_BYTES}}}", text):
        raise ValueError(f"a hash must have {2 * _HASH_BYTES} hex digits, not {text!r}")
    return ChunkKey(kind, bytes.fromhex(text).ljust(DIGEST_BYTES, b"\0"))
