"""The border to transformers: the only file that imports it, and where its exceptions are mapped.

Knows nothing of where models lie (`hub.py` does) nor of reuse.
"""

from __future__ import annotations

import inspect
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from gguf import GGUFReader
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_gguf_pytorch_utils,
)
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.utils import logging

from kvboost.drift import Patch
from kvboost.errors import ConfigError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from kvboost.kv import KVBuffer

Mask = Tensor | dict[str, Tensor] | None

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


class _StopForward(Exception):
    """Leaves a forward pass once the layers that were wanted have run."""


class _BufferLayer(CacheLayerMixin):
    """One layer of a RowCache."""

    is_sliding = False
    is_compileable = False

    def __init__(self, cache: RowCache, layer: int) -> None:
        super().__init__()
        self._cache = cache
        self._layer = layer
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        return self._cache.write(self._layer, key_states, value_states)

    def get_seq_length(self, *_: object) -> int:
        return self._cache.first

    def get_mask_sizes(self, *_: object, **__: object) -> tuple[int, int]:
        return self._cache.length, 0

    def get_max_cache_shape(self) -> int:
        return -1

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, *_: object) -> None: ...


class RowCache(Cache):
    """A KV buffer, seen through transformers' cache interface, for one pass over some rows.

    Each layer writes its fresh K and V at the rows and attends over [0, length). A `range` of rows
    must end at `length`; other rows are an index tensor.
    """

    def __init__(self, buffer: KVBuffer, rows: range | Tensor, length: int) -> None:
        super().__init__(layers=[_BufferLayer(self, n) for n in range(buffer.layout.layers)])
        self.first = rows.start if isinstance(rows, range) else 0
        self.length = length
        self._buffer = buffer
        self._rows = rows
        self._stop: int | None = None
        self._compare = False
        self._patches: Sequence[Patch] = ()
        self.deviation: Tensor | None = None

    def stop_at(self, layer: int, *, compare: bool = False) -> None:
        """End the pass before `layer` writes; `compare` leaves in `deviation` how far its fresh K
        and V are from the buffer's."""
        self._stop, self._compare = layer, compare

    def correct(self, patches: Sequence[Patch]) -> None:
        """In each layer, spread what its fresh K and V tell of the moved, before it attends."""
        self._patches = patches

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k_buffer, v_buffer = self._buffer.layer(layer)
        rows = self._rows
        if layer == self._stop:
            if self._compare:
                at = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
                self.deviation = _distance(k[0], k_buffer[:, at]) + _distance(v[0], v_buffer[:, at])
            raise _StopForward
        for patch in self._patches:
            patch.spread(k[0], k_buffer)
            patch.spread(v[0], v_buffer)
        if not isinstance(rows, range):
            k_buffer.index_copy_(1, rows, k[0])
            v_buffer.index_copy_(1, rows, v[0])
        else:
            k_buffer[:, rows.start : rows.stop] = k[0]
            v_buffer[:, rows.start : rows.stop] = v[0]
            if rows.start == 0:
                return k, v
        return k_buffer[None, :, : self.length], v_buffer[None, :, : self.length]


def _distance(fresh_HTD: Tensor, old_HTD: Tensor) -> Tensor:
    """Squared distance per token, over the mean squared size."""
    fresh = fresh_HTD.float()
    return (fresh - old_HTD.float()).square().sum((0, 2)) / fresh.square().sum((0, 2)).mean()


def run(
    model: PreTrainedModel, ids: Tensor, rows: Tensor, mask: Mask, cache: Cache, keep: int
) -> Tensor | None:
    """One forward pass: logits `[keep, vocab]` of the last rows; None if the cache stopped it.

    ids, rows: `[1, R]` token ids and their positions. Without a mask the model builds its own.
    """
    known = inspect.signature(model.forward).parameters
    options = {_cache_argument(model): cache, "position_ids": rows, "logits_to_keep": keep}
    options = {name: value for name, value in options.items() if name in known}
    try:
        output = model(input_ids=ids, attention_mask=mask, use_cache=True, **options)
    except _StopForward:
        return None
    return cast(Tensor, output.logits[0, -keep:])


def _cache_argument(model: PreTrainedModel) -> str:
    """`past_key_values` became `cache` in transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def plain_cache(model: PreTrainedModel, layers: Sequence[tuple[Tensor, Tensor]] = ()) -> Cache:
    """transformers' own cache, holding these keys and values `[1, H, T, D]` of each layer."""
    cache = DynamicCache(config=model.config)
    for layer, (k, v) in enumerate(layers):
        cache.update(k, v, layer)
    return cache


def layer_kv(cache: Cache) -> list[tuple[Tensor, Tensor]] | None:
    """K and V `[H, T, D]` of each layer of transformers' own cache; None if one keeps none."""
    found = []
    for layer in cache.layers:
        k, v = getattr(layer, "keys", None), getattr(layer, "values", None)
        if k is None or v is None:
            return None
        found.append((k[0], v[0]))
    return found or None


_PROBE = "kvboost_probe"
Observer = Callable[[int, Tensor, Tensor, Tensor | None, float], None]
_observer: ContextVar[tuple[Observer, str]] = ContextVar("observer")


def _observed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    observe, implementation = _observer.get()
    scaling = options.get("scaling") or query.shape[-1] ** -0.5
    observe(cast(int, module.layer_idx), query, key, attention_mask, scaling)
    if implementation == "eager":
        attend = sys.modules[type(module).__module__].eager_attention_forward
    else:
        attend = ALL_ATTENTION_FUNCTIONS[implementation]
    return cast(
        "tuple[Tensor, Tensor | None]", attend(module, query, key, value, attention_mask, **options)
    )


AttentionInterface.register(_PROBE, _observed)


@contextmanager
def observed_attention(model: PreTrainedModel, observe: Observer) -> Iterator[None]:
    """Show `observe` each layer's (index, queries, keys, mask, scaling) while the model runs as
    ever, through transformers' registry of attention functions."""
    config = model.config.get_text_config()
    implementation = config._attn_implementation
    token = _observer.set((observe, implementation))
    config._attn_implementation = _PROBE
    try:
        yield
    finally:
        config._attn_implementation = implementation
        _observer.reset(token)


def logits_processors(
    temperature: float, top_k: int, top_p: float, repetition_penalty: float
) -> LogitsProcessorList:
    """transformers' own processors, in the order its `generate` applies them."""
    processors = LogitsProcessorList()
    if repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
    if temperature > 0:
        if temperature != 1.0:
            processors.append(TemperatureLogitsWarper(temperature))
        if top_k > 0:
            processors.append(TopKLogitsWarper(top_k))
        if top_p < 1.0:
            processors.append(TopPLogitsWarper(top_p))
    return processors
