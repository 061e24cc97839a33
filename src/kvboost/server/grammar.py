"""Answers that must keep to a grammar: JSON, a JSON schema, or calls of given functions.

Grammars are Lark or JSON schemas as llguidance reads them; it says which tokens may come next.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer, StructTag
from torch import Tensor

from kvboost.boost import KVBoost
from kvboost.errors import ConfigError
from kvboost.sampling import LogitsProcessor
from kvboost.server.errors import ApiError
from kvboost.server.schema import JsonFormat, SchemaFormat, Tool

_SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


class Grammars:
    """Makes and checks grammars for one model's tokenizer."""

    def __init__(self, boost: KVBoost) -> None:
        self._boost = boost
        self._lock = threading.Lock()

    def answer(self, wanted: JsonFormat | SchemaFormat) -> str:
        """Raises ApiError for a schema that can't be kept to. May take a second."""
        if isinstance(wanted, JsonFormat):
            return self._checked(_of_schema({"type": "object"}, strict=True), "response_format")
        schema = wanted.json_schema
        grammar = _of_schema(schema.json_schema, bool(schema.strict))
        return self._checked(grammar, "response_format.json_schema.schema")

    def calls(self, tools: Sequence[Tool], once: bool) -> str:
        """A JSON list of calls: of one, or at least one."""
        self._check_each(tools)
        lines = [f"call_{n}: {_lark_call(tool)}" for n, tool in enumerate(tools)]
        call = " | ".join(f"call_{n}" for n in range(len(tools)))
        more = "" if once else '(", " call)* '
        lark = "\n".join([f'start: "[" call {more}"]"', f"call: {call}", *lines])
        return self._checked(LLMatcher.grammar_from_lark(lark), "tools")

    def tagged(self, tools: Sequence[Tool]) -> str:
        """Free text, in which <tool_call> may only begin a call."""
        self._check_each(tools)
        opening = self._tokenizer.tokenize_str("<tool_call>", parse_special=True)
        tags = [
            StructTag(
                trigger="<tool_call>",
                begin=f"<tool_call>\n{_head(tool)}",
                grammar=_parameters(tool),
                end="}\n</tool_call>",
            )
            for tool in tools
        ]
        special = len(opening) == 1 and self._tokenizer.is_special_token(opening[0])
        lark = StructTag.to_grammar(tags, assume_special=special)
        return self._checked(LLMatcher.grammar_from_lark(lark), "tools")

    def processor(self, grammar: str, answers: int) -> LogitsProcessor:
        """For so many answers to the same prompt, which take turns."""
        return _Masks(LLMatcher(self._tokenizer, grammar), answers)

    @property
    def _tokenizer(self) -> LLTokenizer:
        with self._lock:
            return self._made

    @cached_property
    def _made(self) -> LLTokenizer:
        model, tokenizer = self._boost.model, self._boost.tokenizer
        listed = getattr(model.generation_config, "eos_token_id", None)
        ends = [*(listed if isinstance(listed, list) else [listed]), tokenizer.eos_token_id]
        known = sorted({end for end in ends if end is not None})
        vocabulary, probe = model.config.get_text_config().vocab_size, '{"a": 1}'
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None and known:
            with suppress(ValueError):  # a kind of tokenizer that it can't read
                made = LLTokenizer(_readable(backend.to_str()), n_vocab=vocabulary, eos_token=known)
                if made.decode_bytes(made.tokenize_str(probe)).endswith(probe.encode()):
                    return made
        raise ConfigError(
            "response_format and forced tools can't be kept to with this model's tokenizer: "
            "leave them out"
        )

    def _check_each(self, tools: Sequence[Tool]) -> None:
        for n, tool in enumerate(tools):
            grammar = LLMatcher.grammar_from_json_schema(_parameters(tool))
            self._checked(grammar, f"tools[{n}].function.parameters")

    def _checked(self, grammar: str, param: str) -> str:
        bad, said = LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        if bad:
            raise ApiError(
                400, f"{param}: answers can't be kept to it ({said[0]}): simplify it", param=param
            )
        return grammar


@dataclass(slots=True)
class _State:
    matcher: LLMatcher
    taken: tuple[int, ...] = ()


@dataclass(slots=True)
class _Masks:
    """A logits processor. It is told the tokens so far and finds the state that was made from them;
    there is one for each answer, the one used last at the end."""

    fresh: LLMatcher
    answers: int
    start: int | None = None
    states: list[_State] = field(default_factory=list)

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """The first call is with the prompt alone."""
        if self.start is None:
            self.start = ids.shape[1]
        state = self._state(tuple(ids[0, self.start :].tolist()))
        if flaw := state.matcher.get_error():
            raise ConfigError(f"the answer can't be kept to this schema ({flaw}): simplify it")
        bias = bytearray(state.matcher.compute_logit_bias())
        allowed = torch.frombuffer(bias, dtype=torch.uint8).to(scores.device) > 0
        return scores.masked_fill(~allowed, float("-inf"))

    def _state(self, tokens: tuple[int, ...]) -> _State:
        same = [s for s in self.states if s.taken in (tokens, tokens[:-1])]
        state = same[0] if same else _State(self.fresh.deep_copy())
        if same:
            self.states.remove(state)
        elif len(self.states) >= self.answers:
            del self.states[0]
        self.states.append(state)
        state.matcher.consume_tokens(list(tokens[len(state.taken) :]))
        state.taken = tokens
        return state


def _readable(tokenizer: str) -> str:
    """A tokenizer's JSON. transformers 4 gives byte-level tokenizers of GGUF files decoders of two
    kinds, of which llguidance takes the wrong one for the vocabulary's."""
    state = json.loads(tokenizer)
    decoder = state.get("decoder") or {}
    byte_level = [d for d in decoder.get("decoders", []) if d["type"] == "ByteLevel"]
    if byte_level:
        state["decoder"] = byte_level[0]
    return json.dumps({**state, "padding": None, "truncation": None})


def _of_schema(schema: Mapping[str, Any], strict: bool) -> str:
    return LLMatcher.grammar_from_json_schema(_ours(schema, strict))


def _ours(schema: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """Without choices of the client's in how llguidance reads it."""
    return {**schema, "x-guidance": {**_SPACED, "lenient": not strict}}


def _parameters(tool: Tool) -> dict[str, Any]:
    given = tool.function.parameters
    return _ours(_NOTHING if given is None else given, bool(tool.function.strict))


def _head(tool: Tool) -> str:
    return f'{{"name": {json.dumps(tool.function.name)}, "arguments": '


def _lark_call(tool: Tool) -> str:
    return f'{json.dumps(_head(tool))} %json {json.dumps(_parameters(tool))} "}}"'
