"""Tool calls in the text of an answer, in the dialects that chat templates teach their models.

hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, anywhere and repeatedly (Qwen)
llama    the whole answer is {"name": ..., "parameters": {...}}, several separated by ";"
mistral  the whole answer is [TOOL_CALLS] [{"name": ..., "arguments": ...}] or name{...}; the marker
         is a special token, and may be missing from the text

A model whose template knows no tools, or none of these, is taught hermes by the system message.
Text that is no call of a function that was offered is left as it is.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvboost.types import Message

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MARKERS = ("[TOOL_CALLS]", "<|python_tag|>")
_JSON = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Call:
    """arguments: a JSON object as text. The id is of the form that Mistral's templates demand."""

    id: str
    name: str
    arguments: str


Found = tuple[str, list[Call]]
"""Text to show, and calls that are complete."""


class Parser(Protocol):
    """Told an answer's text piece by piece. Nothing of a call is ever shown as text."""

    def push(self, text: str) -> Found: ...

    def end(self) -> Found:
        """The answer is over: what was held back."""


ParserMaker = Callable[[], Parser]
"""Each answer needs one of its own."""


class Plain:
    """No tools were offered."""

    def push(self, text: str) -> Found:
        return text, []

    def end(self) -> Found:
        return "", []


class Tagged:
    """hermes. Space around calls is not shown."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._held = self._gap = ""
        self._calling = self._called = False

    def push(self, text: str) -> Found:
        self._held += text
        shown, calls = "", list[Call]()
        while True:
            tag = _CLOSE if self._calling else _OPEN
            before, found, after = self._held.partition(tag)
            if not found:
                break
            if self._calling:
                calls += self._close(parsed := calls_in(before, self._names))
                before = "" if parsed else f"{self._gap}{_OPEN}{before}{_CLOSE}"
            else:
                self._gap = before[len(before.rstrip()) :]
                before = before.rstrip()
            shown, self._held, self._calling = shown + before, after, not self._calling
        if not self._calling:
            free = len(self._held) - _overlap(self._held, _OPEN)
            free = len(self._held[:free].rstrip())
            shown, self._held = shown + self._held[:free], self._held[free:]
        return shown, calls

    def end(self) -> Found:
        held, self._held = self._held, ""
        if self._calling:
            calls = self._close(calls_in(held, self._names))
            return ("", calls) if calls else (self._gap + _OPEN + held, [])
        return ("" if self._called else held), []

    def _close(self, calls: list[Call]) -> list[Call]:
        self._called = self._called or bool(calls)
        return calls


class Whole:
    """llama and mistral: all of the answer, or nothing of it."""

    def __init__(self, names: Sequence[str], begins: Callable[[str, Sequence[str]], bool]) -> None:
        """begins: whether text that starts like this may become a call."""
        self._names, self._begins = names, begins
        self._held = ""
        self._plain = False

    def push(self, text: str) -> Found:
        self._held += text
        head = self._held.lstrip()
        self._plain = self._plain or bool(head and not self._begins(head, self._names))
        if not self._plain:
            return "", []
        shown, self._held = self._held, ""
        return shown, []

    def end(self) -> Found:
        held, self._held = self._held, ""
        calls = [] if self._plain else calls_in(held, self._names)
        return ("", calls) if calls else (held, [])


class Listed:
    """Calls that a grammar forces: a JSON list. Each is told as soon as it is complete."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._held = ""
        self._called = False

    def push(self, text: str) -> Found:
        self._held += text
        calls = list[Call]()
        while "}" in text and (at := self._held.find("{")) >= 0:
            try:
                value, end = _JSON.raw_decode(self._held, at)
            except (json.JSONDecodeError, RecursionError):
                break
            if (call := _call(value, self._names)) is None:
                break
            calls.append(call)
            self._held, self._called = self._held[end:], True
        return "", calls

    def end(self) -> Found:
        """What is left of a call that was cut off is shown only if nothing else is there."""
        held, self._held = self._held, ""
        return "" if self._called else held, []


@dataclass(frozen=True, slots=True)
class Dialect:
    """native: the chat template itself shows tools to the model."""

    name: str
    native: bool
    parser: Callable[[Sequence[str]], Parser]


def _llama_begins(head: str, names: Sequence[str]) -> bool:
    return head[0] == "{" or _may_become(head, _MARKERS)


def _mistral_begins(head: str, names: Sequence[str]) -> bool:
    return head[0] == "[" or _may_become(head, names)


LLAMA = Dialect("llama", True, lambda names: Whole(names, _llama_begins))
MISTRAL = Dialect("mistral", True, lambda names: Whole(names, _mistral_begins))
HERMES = Dialect("hermes", True, Tagged)
TAUGHT = Dialect("taught", False, Tagged)


def dialect_of(template: str) -> Dialect:
    """By what the chat template says of tools."""
    if "tools" not in template:
        return TAUGHT
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if _OPEN in template and "<function=" not in template:
        return HERMES
    return LLAMA if "ipython" in template else TAUGHT


def calls_in(text: str, names: Sequence[str]) -> list[Call]:
    """The calls that a text consists of; none if there is anything else in it."""
    text = text.strip()
    for marker in _MARKERS:
        text = text.removeprefix(marker).strip()
    for name in names:
        rest = text.removeprefix(name).removeprefix("[ARGS]")
        if len(rest) < len(text) and rest.startswith("{"):
            text = f'{{"name": {json.dumps(name)}, "arguments": {rest}}}'
    calls, values = list[Call](), _values(text)
    for value in values:
        call = _call(value, names)
        if call is None:
            return []
        calls.append(call)
    return calls


def taught(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The same chat for a template without tools: all that concerns them is put into texts."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    told = [_as_text(message) for message in messages]
    first = dict(told[0])
    system = f"{first['content']}\n\n" if first["role"] == "system" else ""
    lesson: Message = {"role": "system", "content": system + _LESSON.format(tools=lines)}
    return [lesson, *told[1:]] if system else [lesson, *told]


_LESSON = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def _as_text(message: Message) -> Message:
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    told = [f"{_OPEN}\n{json.dumps(call['function'])}\n{_CLOSE}" for call in calls]
    before = [str(message["content"])] if message.get("content") else []
    return {"role": "assistant", "content": "\n".join(before + told)}


def _values(text: str) -> list[Any]:
    """JSON values one after the other, lists of them flattened; none if anything is no JSON."""
    values, at = list[Any](), 0
    while at < len(text):
        try:
            value, at = _JSON.raw_decode(text, at)
        except (json.JSONDecodeError, RecursionError):
            return []
        values += value if isinstance(value, list) else [value]
        while at < len(text) and text[at] in " \t\r\n;,":
            at += 1
    return values


def _call(value: object, names: Sequence[str]) -> Call | None:
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    given = value.get("arguments", value.get("parameters", {}))
    if isinstance(given, str):
        given = next(iter(_values(given)), None)
    if not isinstance(given, dict):
        return None
    return Call(secrets.token_hex(5)[:9], value["name"], json.dumps(given, ensure_ascii=False))


def _may_become(head: str, words: Sequence[str]) -> bool:
    return any(word.startswith(head) or head.startswith(word) for word in words)


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins the tag."""
    sizes = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((n for n in sizes if tag.startswith(text[-n:])), 0)
