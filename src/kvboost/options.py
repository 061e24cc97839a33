"""What a caller may say of a request: as it is typed, and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypedDict, TypeVar, cast, get_args

from kvboost.errors import ConfigError
from kvboost.prompt import DocumentLike
from kvboost.recompute import AutoRecompute, RecomputePolicy, policy
from kvboost.sampling import LogitsProcessor, Sampling
from kvboost.types import Reuse

T = TypeVar("T")


class PromptOptions(TypedDict, total=False):
    """How a prompt is made and what of it is reused.

    documents: context pieces, texts or {title, text}. tools: functions as JSON schemas, for the
    chat template. segments: borders in raw prompts. reuse: "auto" anywhere in the prompt, "exact"
    prefixes only, "off" neither looks up nor stores. recompute: "auto", "none", "selective",
    "drift", "cacheblend", "query", "full", or a policy object. max_divergence: for "auto" in this
    request, instead of `Config.max_divergence`.
    """

    documents: Iterable[DocumentLike]
    tools: Sequence[Mapping[str, Any]]
    segments: Iterable[str | int]
    reuse: Reuse
    recompute: str | RecomputePolicy
    max_divergence: float


class GenerateOptions(PromptOptions, total=False):
    """PromptOptions, and how tokens are picked: see `Sampling` for defaults."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    processors: Sequence[LogitsProcessor]
    stop: str | Sequence[str]
    seed: int | None


@dataclass(frozen=True, slots=True)
class Options:
    """PromptOptions and sampling, checked."""

    policy: RecomputePolicy
    sampling: Sampling = field(default_factory=Sampling)
    documents: Iterable[DocumentLike] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    segments: Iterable[str | int] = ()
    reuse: Reuse = "auto"

    def __post_init__(self) -> None:
        if self.reuse not in get_args(Reuse):
            raise ConfigError(
                f"reuse must be one of {', '.join(get_args(Reuse))}, not {self.reuse!r}"
            )

    @classmethod
    def of(cls, given: PromptOptions | GenerateOptions, auto: AutoRecompute) -> Self:
        """Raises ConfigError for what is unknown or bad."""
        prompt = {k: v for k, v in given.items() if k in PromptOptions.__annotations__}
        sampling = checked(Sampling, {k: v for k, v in given.items() if k not in prompt})
        choice = cast(str, prompt.pop("recompute", "auto"))
        if "max_divergence" in prompt:
            if choice != "auto":
                raise ConfigError('max_divergence chooses the repair: it needs recompute="auto"')
            auto = replace(auto, limit=cast(float, prompt.pop("max_divergence")))
        chosen = auto if choice == "auto" else policy(choice)
        return cls(chosen, sampling, **cast(dict[str, Any], prompt))


def checked(kind: type[T], given: Mapping[str, Any]) -> T:
    """A configuration object; an unknown option is an error that names the known ones."""
    known = [f.name for f in fields(cast(Any, kind))]
    if unknown := sorted(set(given) - set(known)):
        raise ConfigError(f"unknown option {', '.join(unknown)}: known are {', '.join(known)}")
    return kind(**given)
