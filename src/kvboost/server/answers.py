"""From the events of answers to what OpenAI's API calls choices, whole or in pieces.

`Choice` understands one answer's events; a `Shape` writes down what it understood, for chat or for
plain completions.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvboost.server.tools import Call, Parser
from kvboost.server.work import Ended, Piece, TokenLogprob
from kvboost.types import FinishReason, Usage

Json = dict[str, Any]
Token = Callable[[int], str]
"""The text of one token."""


@dataclass(slots=True)
class Delta:
    """What one event, or several, added to an answer. at: characters of the answer's tokens before
    those of `logprobs`. first: number of the first of `calls`."""

    text: str = ""
    calls: list[Call] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    at: int = 0
    first: int = 0

    def __bool__(self) -> bool:
        return bool(self.text or self.calls or self.logprobs or self.finish)

    def add(self, other: Delta) -> None:
        self.text += other.text
        self.calls += other.calls
        self.logprobs += other.logprobs
        self.finish = other.finish or self.finish


class Choice:
    """One answer as it comes."""

    def __init__(self, parser: Parser, most_calls: int | None, token: Token) -> None:
        self._parser, self._most, self._token = parser, most_calls, token
        self._calls = self._chars = 0

    def take(self, event: Piece | Ended) -> Delta:
        text, calls = self._parser.push(event.text)
        delta = Delta(text, calls, at=self._chars)
        if isinstance(event, Piece):
            if event.logprob is not None:
                delta.logprobs.append(event.logprob)
                self._chars += len(self._token(event.logprob.token))
        else:
            text, calls = self._parser.end()
            delta.add(Delta(text, calls))
        if self._most is not None:
            del delta.calls[max(0, self._most - self._calls) :]
        delta.first = self._calls
        self._calls += len(delta.calls)
        if isinstance(event, Ended):
            delta.finish = self._finish(event.finish_reason)
        return delta

    def _finish(self, reason: FinishReason) -> str:
        return "tool_calls" if self._calls and reason == "stop" else reason


class Shape(Protocol):
    """How answers are written down."""

    @property
    def name(self) -> str: ...

    @property
    def chunk_name(self) -> str: ...

    def new_id(self) -> str: ...

    def opening(self, index: int) -> Json | None:
        """What a stream says first of a choice."""

    def piece(self, index: int, delta: Delta) -> Json: ...

    def whole(self, index: int, delta: Delta) -> Json: ...


@dataclass(frozen=True, slots=True)
class ChatShape:
    token: Token
    logprobs: bool
    name: str = "chat.completion"
    chunk_name: str = "chat.completion.chunk"

    def new_id(self) -> str:
        return f"chatcmpl-{uuid.uuid4().hex}"

    def opening(self, index: int) -> Json:
        said = {"role": "assistant", "content": ""}
        return {"index": index, "delta": said, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, delta: Delta) -> Json:
        said: Json = {"content": delta.text} if delta.text else {}
        if delta.calls:
            numbered = enumerate(delta.calls, delta.first)
            said["tool_calls"] = [{"index": n, **_call(call)} for n, call in numbered]
        return {"index": index, "delta": said, **self._rest(delta)}

    def whole(self, index: int, delta: Delta) -> Json:
        message: Json = {"role": "assistant", "content": delta.text, "refusal": None}
        if delta.calls:
            message["content"] = delta.text or None
            message["tool_calls"] = [_call(call) for call in delta.calls]
        return {"index": index, "message": message, **self._rest(delta)}

    def _rest(self, delta: Delta) -> Json:
        listed = None
        if self.logprobs:
            content = [
                {
                    **self._entry(given.token, given.logprob),
                    "top_logprobs": [self._entry(*entry) for entry in given.top],
                }
                for given in delta.logprobs
            ]
            listed = {"content": content, "refusal": None}
        return {"logprobs": listed, "finish_reason": delta.finish}

    def _entry(self, token: int, logprob: float) -> Json:
        text = self.token(token)
        whole = "\ufffd" not in text  # else it is a part of a character
        return {
            "token": text,
            "logprob": finite(logprob),
            "bytes": list(text.encode()) if whole else None,
        }


@dataclass(frozen=True, slots=True)
class TextShape:
    """echoes: the text that goes before each choice's own."""

    token: Token
    logprobs: bool
    echoes: Mapping[int, str]
    name: str = "text_completion"
    chunk_name: str = "text_completion"

    def new_id(self) -> str:
        return f"cmpl-{uuid.uuid4().hex}"

    def opening(self, index: int) -> Json | None:
        echo = self.echoes.get(index)
        return self._choice(index, Delta(echo), "") if echo else None

    def piece(self, index: int, delta: Delta) -> Json:
        return self._choice(index, delta, "")

    def whole(self, index: int, delta: Delta) -> Json:
        return self._choice(index, delta, self.echoes.get(index, ""))

    def _choice(self, index: int, delta: Delta, before: str) -> Json:
        listed = self._listed(delta) if self.logprobs else None
        text = before + delta.text
        return {"index": index, "text": text, "logprobs": listed, "finish_reason": delta.finish}

    def _listed(self, delta: Delta) -> Json:
        tokens = [self.token(given.token) for given in delta.logprobs]
        offsets, at = list[int](), delta.at
        for token in tokens:
            offsets.append(at)
            at += len(token)
        tops = [
            {self.token(token): finite(logprob) for token, logprob in given.top}
            for given in delta.logprobs
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [finite(given.logprob) for given in delta.logprobs],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": offsets,
        }


def usage_of(usage: Usage) -> Json:
    """cached_tokens: reused exactly. What was moved, repaired and computed is told apart."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": {
            "cached_tokens": usage.exact,
            "moved_tokens": usage.moved,
            "recomputed_tokens": usage.recomputed,
            "computed_tokens": usage.computed,
        },
    }


def envelope(name: str, id: str, model: str, fingerprint: str) -> Json:
    """What stands around choices."""
    return {
        "id": id,
        "object": name,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint,
    }


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's API writes -9999 for what can't be."""
    return max(logprob, -9999.0)


def _call(call: Call) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
