"""What clients may send, and how it is written down in the OpenAPI document.

Unknown fields are refused. Where OpenAI's API has a field that can't be honoured here, it is
listed as `Unsupported`, so that the refusal can say so.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvboost.types import Reuse

TAG = "~"
"""Begins the names of union members, which have no place in an error's `param`."""


def wrong(message: str, param: str = "") -> PydanticCustomError:
    """param: the field below the one that is being checked."""
    return PydanticCustomError("refused", "{text}", {"text": message, "param": param})


def _unsupported(value: object) -> None:
    if value is not None:
        raise wrong("this server can't honour it: leave it out")


def _kind(value: object) -> str:
    """Of a field that is a text or a list."""
    if isinstance(value, list):
        first = value[0] if value else None
        return "~ids" if isinstance(first, int) else "~list"
    return "~text"


def _choice_kind(value: object) -> str:
    return "~mode" if isinstance(value, str) else "~named"


Unsupported = Annotated[None, BeforeValidator(_unsupported)]
_Text = Annotated[str, Tag("~text")]


class Strict(BaseModel):
    """Takes no unknown field, and no text for a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Body(Strict):
    """All of what a client sent."""

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, value: object) -> object:
        """JSON can write what UTF-8 can't; templates, tokenizers and grammars break at it."""
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            before = error.object[max(0, error.start - 20) : error.start]
            raise wrong(
                f"after {before!r} there is half of a surrogate pair, no character"
            ) from None
        except RecursionError:
            raise wrong("it is nested too deeply") from None
        except TypeError:  # bytes: it was not sent as JSON
            raise wrong("send JSON, with the header Content-Type: application/json") from None
        return value


class CacheControl(Strict):
    """As Anthropic's: the prompt up to here stays in memory for that long."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> float:
        return 3600.0 if self.ttl == "1h" else 300.0


class Part(Strict):
    """A piece of a message: text only."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class CalledFunction(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    """A call that the model made. `arguments`: a JSON object, as text."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


_Parts = Annotated[list[Part], Tag("~list")]
Content = Annotated[_Text | _Parts, Discriminator(_kind)]


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.tool_calls is not None and self.role != "assistant":
            raise wrong(f"a message of role {self.role} has no tool_calls", "tool_calls")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise wrong(
                "tool_call_id belongs to messages of role tool, and each of them needs it",
                "tool_call_id",
            )
        if self.content is None and not self.tool_calls:
            raise wrong("content is missing", "content")
        return self

    @property
    def parts(self) -> list[Part]:
        if isinstance(self.content, str):
            return [Part(type="text", text=self.content)]
        return self.content or []


class Function(Strict):
    """parameters: a JSON schema. strict: the arguments must keep to all of it."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class Schema(Strict):
    """A JSON schema that the answer must keep to. strict: to all of it, or the request is refused;
    else keywords that can't be kept to are passed over."""

    name: str
    description: str | None = None
    json_schema: dict[str, JsonValue] = Field(alias="schema", default_factory=dict)
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]


class JsonFormat(Strict):
    type: Literal["json_object"]


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: Schema


class Titled(Strict):
    title: str = ""
    text: str


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


DocumentIn = Annotated[
    _Text | Annotated[Titled, Tag("~titled")],
    Discriminator(lambda value: "~text" if isinstance(value, str) else "~titled"),
]
Mode = Annotated[Literal["none", "auto", "required"], Tag("~mode")]
ToolChoice = Annotated[Mode | Annotated[NamedTool, Tag("~named")], Discriminator(_choice_kind)]
_Stops = Annotated[list[Annotated[str, Field(min_length=1)]], Tag("~list"), Field(max_length=16)]
Stop = Annotated[Annotated[str, Tag("~text"), Field(min_length=1)] | _Stops, Discriminator(_kind)]
ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Positive = Annotated[int, Field(ge=1)]


class Reused(Body):
    """What the cache may do for a request: fields of our own."""

    reuse: Reuse = "auto"
    recompute: str | None = None
    max_divergence: float | None = Field(None, gt=0)
    documents: list[DocumentIn] = []


class Ask(Reused):
    """What chat and plain completions have in common. `user` and what is like it changes nothing
    in an answer and is not kept."""

    model: str
    n: int | None = Field(None, ge=1, le=128)
    max_tokens: Positive | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Bias] | None = None
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise wrong("it is for streams: set stream to true too", "stream_options")
        if self.prompt_cache_retention and not self.prompt_cache_key:
            raise wrong("it needs prompt_cache_key: give that too", "prompt_cache_retention")
        return self


class ChatAsk(Ask):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1)] | None = None
    audio: Unsupported = None
    function_call: Unsupported = None
    functions: Unsupported = None
    moderation: Unsupported = None
    prediction: Unsupported = None
    prompt_cache_options: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.max_tokens and self.max_completion_tokens:
            raise wrong("it says the same as max_completion_tokens: give one", "max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("it needs logprobs: set that to true", "top_logprobs")
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise wrong("two functions have the same name", "tools")
        choice = self.tool_choice
        if not names and choice not in (None, "none", "auto"):
            raise wrong("it needs tools", "tool_choice")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise wrong(f"{choice.function.name!r} is not among tools", "tool_choice")
        if names and choice != "none" and not isinstance(self.response_format, TextFormat | None):
            raise wrong(
                'it can\'t be kept to while tools may be called: set tool_choice to "none"',
                "response_format",
            )
        return self


Prompts = Annotated[
    _Text
    | Annotated[list[TokenId], Tag("~ids"), Field(min_length=1)]
    | Annotated[list[str], Tag("~list"), Field(min_length=1)],
    Discriminator(_kind),
]


class TextAsk(Ask):
    """POST /v1/completions. `prompt`: a text, token ids, or texts, each with answers of its own."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=5)
    best_of: Unsupported = None
    suffix: Unsupported = None

    @model_validator(mode="after")
    def _echo_goes_alone(self) -> Self:
        if self.echo and self.logprobs is not None:
            raise wrong("logprobs of the prompt are not computed: leave it out", "echo")
        if self.echo and self.documents:
            raise wrong("it repeats the prompt alone: leave it or documents out", "echo")
        return self


OnePrompt = Annotated[_Text | Annotated[list[TokenId], Tag("~ids")], Discriminator(_kind)]


class Warm(Body):
    """POST /v1/cache/warm: documents, or the beginning of a chat, to be computed ahead. pin:
    seconds for which they stay in memory."""

    documents: list[DocumentIn] = []
    messages: list[Message] = []
    pin: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.documents and not self.messages:
            raise wrong("give documents or messages to warm")
        return self


class Explain(Reused):
    """POST /v1/cache/explain: a prompt or messages."""

    prompt: OnePrompt | None = None
    messages: list[Message] = []

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise wrong("give either prompt or messages")
        return self


class Pin(Explain):
    """POST /v1/cache/pin: compute the prompt if need be, and keep it in memory for `seconds`."""

    seconds: float = Field(gt=0)
