"""What clients get, for the OpenAPI document. `answers.py` writes it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class PromptTokensDetails(BaseModel):
    """Every token of the prompt is in one of these. cached: reused exactly. moved: reused from
    another place in a prompt. recomputed: moved and repaired. computed: nothing stored was used."""

    cached_tokens: int
    moved_tokens: int
    recomputed_tokens: int
    computed_tokens: int


class UsageAnswer(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TokenChance(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenChances(TokenChance):
    top_logprobs: list[TokenChance]


class ChatLogprobs(BaseModel):
    content: list[TokenChances]
    refusal: None


class FunctionAnswer(BaseModel):
    name: str
    arguments: str


class CallAnswer(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionAnswer


class MessageAnswer(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[CallAnswer] | None = None


class ChatChoice(BaseModel):
    index: int
    message: MessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class _Envelope(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: UsageAnswer


class ChatAnswer(_Envelope):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextAnswer(_Envelope):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["kvboost"] = "kvboost"


class Models(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    """waiting: requests in the queue. running: answers being decoded, of so many slots."""

    status: Literal["ok"] = "ok"
    waiting: int
    running: int
    slots: int
