"""The errors KVBoost raises. Imports nothing of ours.

KVBoostError(Exception)
├── ConfigError(ValueError)       an option you can correct: unknown, wrong type, bad value
├── PromptError(ValueError)       a prompt you can correct: empty, or over the model's window
├── ModelNotFoundError            no such model here; the message says which command installs it
├── ModelFileError                a model file is there but broken (GGUF, safetensors, JSON)
└── UnsupportedModelError         the model is sound, but not of a kind we can run

Foreign exceptions are mapped to these once, at the border (`model.py`), with the original as
`__cause__`. A broken promise among our own modules is an `AssertionError`, not one of these.
"""

from __future__ import annotations


class KVBoostError(Exception):
    """The root of everything KVBoost raises on purpose."""


class ConfigError(KVBoostError, ValueError):
    """An option is unknown, of the wrong type or out of range; the message says how to fix it."""


class PromptError(KVBoostError, ValueError):
    """The prompt is empty, malformed, or longer than the model's window."""


class PromptTooLongError(PromptError):
    """The prompt has more tokens than the model's window, or than a server takes."""


class ModelNotFoundError(KVBoostError):
    """The model is not on this machine; the message says which command installs it."""


class ModelFileError(KVBoostError):
    """A model's file exists but can't be read: truncated, corrupt, or not what its name says."""


class UnsupportedModelError(KVBoostError):
    """The model is of a kind KVBoost can't run: no causal language model, or no KV cache."""
