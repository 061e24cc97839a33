"""From a request that a client may make to the works that the scheduler takes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvboost.options import GenerateOptions
from kvboost.prompt import PromptLike
from kvboost.server import tools
from kvboost.server.errors import ApiError
from kvboost.server.grammar import Grammars
from kvboost.server.limits import Limits
from kvboost.server.schema import (
    Ask,
    ChatAsk,
    Message,
    NamedTool,
    Reused,
    TextAsk,
    TextFormat,
    Tool,
    ToolCall,
)
from kvboost.server.tools import Dialect, Plain, dialect_of
from kvboost.server.work import Tenant, Work
from kvboost.types import Message as Rendered

_ENDLESS = 1 << 16
"""Tokens of an answer to which nobody gave a limit: the model's window ends it before, mostly."""
_OF_COMPLETIONS = 16
"""The same of plain completions, where OpenAI's API has this default."""
_COLDEST = 1e-5
"""Temperatures below are 0: the likeliest token is as good as certain."""
_DAY, _FIVE_MINUTES = 86400.0, 300.0


@dataclass(frozen=True, slots=True)
class Plan:
    """works: one for each prompt. parser: made anew for each answer. most_calls: further tool calls
    of an answer don't count."""

    works: tuple[Work, ...]
    n: int
    parser: tools.ParserMaker = Plain
    most_calls: int | None = None


class Reader:
    """Knows what the model's tokenizer and the server's limits allow."""

    def __init__(self, tokenizer: Any, limits: Limits, grammars: Grammars) -> None:
        self._limits, self._grammars = limits, grammars
        self._vocabulary = len(tokenizer)
        self._template = str(getattr(tokenizer, "chat_template", None) or "")
        self.dialect: Dialect = dialect_of(self._template)

    def chat(self, ask: ChatAsk, tenant: Tenant, id: str) -> Plan:
        """Raises ApiError for what can't be honoured. May take a while where a grammar is made."""
        options = self._options(ask, ask.max_completion_tokens or ask.max_tokens or _ENDLESS)
        offered = _offered(ask)
        prompt = self.messages(ask.messages, offered)
        if offered and self.dialect.native:
            options["tools"] = [_schema(tool) for tool in offered]
        pin, pinned = self._pin(ask, offered)
        parser, grammar = self._expectations(ask, offered)
        if grammar is not None:
            options["processors"] = [self._grammars.processor(grammar, ask.n or 1)]
        top = (ask.top_logprobs or 0) if ask.logprobs else None
        work = Work(id, tenant, prompt, options, ask.n or 1, top, pin, pinned)
        most = 1 if ask.parallel_tool_calls is False else None
        return Plan((work,), work.n, parser, most)

    def text(self, ask: TextAsk, tenant: Tenant, id: str) -> Plan:
        """Raises ApiError for what can't be honoured."""
        options = self._options(ask, ask.max_tokens or _OF_COMPLETIONS)
        prompts = prompts_of(ask)
        if len(prompts) > self._limits.queue:
            raise ApiError(
                400, f"this server takes {self._limits.queue} prompts at once", param="prompt"
            )
        n, pin = ask.n or 1, _key_pin(ask)
        works = [
            Work(f"{id}-{k}" if k else id, tenant, prompt, options, n, ask.logprobs, pin)
            for k, prompt in enumerate(prompts)
        ]
        return Plan(tuple(works), n)

    def messages(self, messages: Sequence[Message], offered: Sequence[Tool] = ()) -> list[Rendered]:
        """As the chat template takes them."""
        rendered = [self._message(n, message) for n, message in enumerate(messages)]
        talked = any(message.role == "tool" or message.tool_calls for message in messages)
        if not self.dialect.native and (offered or talked):
            return tools.taught(rendered, [_schema(tool) for tool in offered])
        return rendered

    def _message(self, number: int, message: Message) -> Rendered:
        role = "system" if message.role == "developer" else message.role
        made: dict[str, Any] = {"role": role, "content": _joined(message)}
        if message.tool_calls:
            made["tool_calls"] = [_call(number, n, c) for n, c in enumerate(message.tool_calls)]
        if message.tool_call_id is not None:
            made["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            if message.role != "tool" and not re.search(_NAME, self._template):
                raise ApiError(
                    400,
                    "this model's chat template has no place for names: leave it out",
                    param=f"messages[{number}].name",
                )
            made["name"] = message.name
        return made

    def _options(self, ask: Ask, wanted: int) -> GenerateOptions:
        """wanted: tokens of an answer."""
        given = ask.max_tokens or getattr(ask, "max_completion_tokens", None)
        most = self._limits.answer_tokens
        if most is not None and given is not None and given > most:
            name = "max_tokens" if ask.max_tokens else "max_completion_tokens"
            raise ApiError(400, f"this server gives answers of at most {most} tokens", param=name)
        options = reuse_options(ask)
        options["max_new_tokens"] = min(wanted, most or wanted)
        options["temperature"] = 1.0 if ask.temperature is None else _divisor(ask.temperature)
        options["stop"] = ask.stop or ()
        options["seed"] = ask.seed
        bias = {int(token): float(bias) for token, bias in (ask.logit_bias or {}).items()}
        if any(token >= self._vocabulary for token in bias):
            said = f"the model has {self._vocabulary} tokens, numbered from 0"
            raise ApiError(400, said, param="logit_bias")
        if bias:
            options["logit_bias"] = bias
        if ask.top_p is not None:
            options["top_p"] = float(ask.top_p)
        if ask.top_k is not None:
            options["top_k"] = ask.top_k
        if ask.presence_penalty is not None:
            options["presence_penalty"] = float(ask.presence_penalty)
        if ask.frequency_penalty is not None:
            options["frequency_penalty"] = float(ask.frequency_penalty)
        return options

    def _expectations(
        self, ask: ChatAsk, offered: Sequence[Tool]
    ) -> tuple[tools.ParserMaker, str | None]:
        """What reads an answer, and the grammar that it must keep to."""
        if offered:
            names = [tool.function.name for tool in offered]
            if ask.tool_choice in (None, "auto"):
                return lambda: self.dialect.parser(names), self._strict(offered)
            once = ask.parallel_tool_calls is False or isinstance(ask.tool_choice, NamedTool)
            return lambda: tools.Listed(names), self._grammars.calls(offered, once)
        if isinstance(ask.response_format, TextFormat | None):
            return Plain, None
        return Plain, self._grammars.answer(ask.response_format)

    def _strict(self, offered: Sequence[Tool]) -> str | None:
        """The grammar that strict functions need which may be called, but need not be."""
        strict = [n for n, tool in enumerate(offered) if tool.function.strict]
        if not strict:
            return None
        if self.dialect.name not in ("hermes", "taught"):
            raise ApiError(
                400,
                f"with this model's {self.dialect.name} tools, strict needs tool_choice "
                '"required" or a named function',
                param=f"tools[{strict[0]}].function.strict",
            )
        return self._grammars.tagged(offered)

    def _pin(self, ask: ChatAsk, offered: Sequence[Tool]) -> tuple[float | None, PromptLike | None]:
        """How long what stays in memory: up to the last part that has cache_control, or all."""
        marked = [
            (number, place, part.cache_control.seconds)
            for number, message in enumerate(ask.messages)
            for place, part in enumerate(message.parts)
            if part.cache_control is not None
        ]
        if not marked or ask.prompt_cache_key is not None:
            seconds = max([_key_pin(ask) or 0.0, *(mark[2] for mark in marked)])
            return seconds or None, None
        number, place, _ = marked[-1]
        last = ask.messages[number]
        cut = last.model_copy(update={"content": last.parts[: place + 1]})
        pinned = self.messages([*ask.messages[:number], cut], offered)
        return max(mark[2] for mark in marked), pinned


_NAME = r"""message\.name|message\[['"]name['"]\]"""


def prompts_of(ask: TextAsk) -> list[str | list[int]]:
    if isinstance(ask.prompt, str):
        return [ask.prompt]
    texts = [piece for piece in ask.prompt if isinstance(piece, str)]
    return list(texts) or [[piece for piece in ask.prompt if isinstance(piece, int)]]


def reuse_options(ask: Reused) -> GenerateOptions:
    options: GenerateOptions = {"reuse": ask.reuse}
    if ask.recompute is not None:
        options["recompute"] = ask.recompute
    if ask.max_divergence is not None:
        options["max_divergence"] = ask.max_divergence
    if ask.documents:
        options["documents"] = [
            d if isinstance(d, str) else {"title": d.title, "text": d.text} for d in ask.documents
        ]
    return options


def _offered(ask: ChatAsk) -> list[Tool]:
    """The tools that may be called."""
    if ask.tool_choice == "none":
        return []
    listed = ask.tools or []
    if isinstance(ask.tool_choice, NamedTool):
        return [tool for tool in listed if tool.function.name == ask.tool_choice.function.name]
    return listed


def _schema(tool: Tool) -> dict[str, Any]:
    return tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})


def _joined(message: Message) -> str:
    return "\n".join(part.text for part in message.parts)


def _call(number: int, place: int, call: ToolCall) -> dict[str, Any]:
    """Templates write the arguments as JSON themselves."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (json.JSONDecodeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        where = f"messages[{number}].tool_calls[{place}].function.arguments"
        raise ApiError(400, "arguments must be a JSON object, as text", param=where)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _divisor(temperature: float) -> float:
    """Scores are divided by it: by next to nothing they would be infinite."""
    return float(temperature) if temperature >= _COLDEST else 0.0


def _key_pin(ask: Ask) -> float | None:
    if ask.prompt_cache_key is None:
        return None
    return _DAY if ask.prompt_cache_retention == "24h" else _FIVE_MINUTES
