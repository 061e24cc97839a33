"""KVBoost: reuse the KV cache of text a model has seen before, wherever it stands in the prompt."""

from kvboost.boost import KVBoost, Score, Stats, Stream
from kvboost.config import Config
from kvboost.errors import (
    ConfigError,
    KVBoostError,
    ModelFileError,
    ModelNotFoundError,
    PromptError,
    PromptTooLongError,
    UnsupportedModelError,
)
from kvboost.explain import Explanation
from kvboost.recompute import (
    AutoRecompute,
    CacheBlendRecompute,
    DriftRecompute,
    FullRecompute,
    NoRecompute,
    QueryRecompute,
    RecomputePolicy,
    SelectiveRecompute,
)
from kvboost.types import Completion, Document, ForwardPass, Timing, Usage

__version__ = "0.1.0"

__all__ = [
    "AutoRecompute",
    "CacheBlendRecompute",
    "Completion",
    "Config",
    "ConfigError",
    "Document",
    "DriftRecompute",
    "Explanation",
    "ForwardPass",
    "FullRecompute",
    "KVBoost",
    "KVBoostError",
    "ModelFileError",
    "ModelNotFoundError",
    "NoRecompute",
    "PromptError",
    "PromptTooLongError",
    "QueryRecompute",
    "RecomputePolicy",
    "Score",
    "SelectiveRecompute",
    "Stats",
    "Stream",
    "Timing",
    "UnsupportedModelError",
    "Usage",
    "__version__",
]
