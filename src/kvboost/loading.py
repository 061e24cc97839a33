"""How transformers reads and writes models, and where its exceptions are mapped.

Knows nothing of where models lie (`hub.py` does) nor of reuse.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFReader
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_gguf_pytorch_utils,
)
from transformers.utils import logging

from kvboost.errors import ConfigError, ModelFileError, ModelNotFoundError, UnsupportedModelError

# transformers keeps GGUF weights quantised unless told otherwise since it has this class.
GgufConfig = getattr(transformers, "GgufConfig", None)
# What its readers raise on a file that isn't what it claims to be.
_BROKEN = (
    *(ValueError, LookupError, RuntimeError, TypeError, ImportError),
    *(struct.error, SafetensorError, StrictDataclassError),
)


def read_model(
    folder: Path | str,
    gguf_file: str | None,
    dtype: torch.dtype,
    device: torch.device | str,
    attn_implementation: str | None,
) -> PreTrainedModel:
    """Load a causal language model from a local folder or a Hugging Face id, ready to run.

    A `gguf_file` (in `folder`) is dequantised. Raises ModelNotFoundError, ModelFileError,
    UnsupportedModelError, or ConfigError for another attention than "sdpa" and "eager".
    """
    if attn_implementation not in (None, "sdpa", "eager"):
        raise ConfigError(f"attention {attn_implementation!r}: choose 'sdpa' or 'eager'")
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation}
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
        if GgufConfig is not None:
            options["quantization_config"] = GgufConfig(dequantize=True)
    with _border(folder):
        if gguf_file is None:
            options["config"] = _read_config(folder)
        model = _read(AutoModelForCausalLM, folder, **options)
    return model.to(device).eval()


def read_tokenizer(folder: Path | str, gguf_file: str | None) -> PreTrainedTokenizerBase:
    """Load the tokenizer beside a model; raises as `read_model` does."""
    options = {} if gguf_file is None else {"gguf_file": gguf_file}
    with _border(folder):
        tokenizer = _read(AutoTokenizer, folder, **options)
        if gguf_file is not None and GgufConfig is None:
            _repair_special_tokens(tokenizer, Path(folder) / gguf_file)
    return tokenizer


def write_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path | str
) -> None:
    """Write both as safetensors and JSON into `folder`; OSError if the disk refuses."""
    with _quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _read(kind: Any, folder: Path | str, **options: Any) -> Any:
    """From disk if all is there: without a network, asking Hugging Face first takes minutes."""
    options["trust_remote_code"] = False
    if not Path(folder).exists():
        cached = try_to_load_from_cache(str(folder), "config.json")
        if isinstance(cached, str):
            with suppress(OSError, ValueError):  # a download that was cut short
                return kind.from_pretrained(Path(cached).parent, **options)
    return kind.from_pretrained(folder, **options)


def _read_config(folder: Path | str) -> PretrainedConfig:
    try:
        config = _read(AutoConfig, folder)
    except ValueError as error:
        raise UnsupportedModelError(f"{folder}: {_first_line(error)}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            f"{folder} is a {config.model_type!r} model; KVBoost runs causal language models"
        )
    return config


def _repair_special_tokens(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Set them as the file says: transformers before GgufConfig swaps BOS and EOS, forces a BOS."""
    fields = GGUFReader(path).fields
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if field := fields.get(f"tokenizer.ggml.{theirs}_token_id"):
            token = tokenizer.convert_ids_to_tokens(int(field.parts[-1][0]))
            setattr(tokenizer, f"{ours}_token", token)
    if field := fields.get("tokenizer.ggml.add_bos_token"):
        tokenizer.add_bos_token = bool(field.parts[-1][0])


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


@contextmanager
def _border(folder: Path | str) -> Iterator[None]:
    """Run transformers quietly and turn what it raises into errors of ours."""
    try:
        with _quiet():
            yield
    except OSError as error:
        if Path(folder).exists():
            raise ModelFileError(f"can't read {folder}: {_first_line(error)}") from error
        raise ModelNotFoundError(
            f"no model {str(folder)!r} here or at Hugging Face ({_first_line(error)}). "
            f"To install it: hf download {folder}"
        ) from error
    except _BROKEN as error:
        raise ModelFileError(f"{folder} is broken: {_first_line(error)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide loading bars and advice a user can't act on; download bars stay."""
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    downloads = not are_progress_bars_disabled()
    gguf_bar = modeling_gguf_pytorch_utils.tqdm  # has no switch of its own
    modeling_gguf_pytorch_utils.tqdm = lambda items, **_: items
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if downloads:
        enable_progress_bars()
    try:
        yield
    finally:
        modeling_gguf_pytorch_utils.tqdm = gguf_bar
        logging.set_verbosity(level)
        if bars and downloads:
            logging.enable_progress_bar()
