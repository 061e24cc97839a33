"""How transformers runs a model on KV of ours: its caches, attention and logits processors.

This file and `loading.py` are the border: nothing else imports transformers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache as remembered
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from kvboost.attention import attend
from kvboost.drift import Patch
from kvboost.kv import KVBuffer
from kvboost.numerics import products_are_faster

Mask = Tensor | Mapping[str, Tensor | None] | None


class _StopForward(Exception):
    """Leaves a forward pass once the layers that were wanted have run."""


class _BufferLayer(CacheLayerMixin):
    """One layer of a cache of ours."""

    is_sliding = False
    is_compileable = False

    def __init__(self, cache: RowCache | BatchCache, layer: int) -> None:
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
    # Without a mask the model builds its own; observed attention attends as this does.
    ours = mask is not None and _implementation(model) == "sdpa"
    try:
        with _attention(model, _attend) if ours else nullcontext():
            output = model(input_ids=ids, attention_mask=mask, use_cache=True, **options)
    except _StopForward:
        return None
    return cast(Tensor, output.logits[0, -keep:])


def run_steps(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, mask: Mask, cache: BatchCache
) -> Tensor | None:
    """One forward pass over a token of each request: logits `[B, vocab]`. ids, positions: `[B, 1]`;
    mask: `[B, 1, 1, T]`, or None where all that is stored may be seen. None if the model's
    attention does not go through transformers' registry: then nothing useful was computed."""
    options = {_cache_argument(model): cache, "position_ids": positions}
    with _attention(model, _apart, cache):
        output = model(input_ids=ids, attention_mask=mask, use_cache=True, **options)
    return output.logits[:, -1] if cache.attended == len(cache.layers) else None


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


class BatchCache(Cache):
    """The KV buffers of several requests, seen through transformers' cache interface, for one pass
    over the last token of each: it writes each token's K and V into the buffer of its request.

    Attention goes to each request's own buffer (`_apart`), so none is padded or copied, and what
    one request gets does not depend on the others.
    """

    def __init__(self, buffers: Sequence[KVBuffer], lengths: Sequence[int]) -> None:
        super().__init__(layers=[_BufferLayer(self, n) for n in range(buffers[0].layout.layers)])
        self.length = max(lengths)
        self.first = self.length - 1
        self.attended = 0
        self._buffers, self._lengths = buffers, lengths

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        for n, (buffer, length) in enumerate(zip(self._buffers, self._lengths, strict=True)):
            k_buffer, v_buffer = buffer.layer(layer)
            k_buffer[:, length - 1] = k[n, :, 0]
            v_buffer[:, length - 1] = v[n, :, 0]
        return k, v

    def read(self, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """K and V `[1, H, T, D]` of each request; counts the layers that were read."""
        self.attended += 1
        for buffer, length in zip(self._buffers, self._lengths, strict=True):
            k, v = buffer.layer(layer)
            yield k[None, :, :length], v[None, :, :length]


Observer = Callable[[int, Tensor, Tensor, Tensor | None, float], None]
_ELSEWHERE = object()
_hook: ContextVar[Any] = ContextVar("hook", default=_ELSEWHERE)
Attended = tuple[Tensor, Tensor | None]
_Attention = Callable[..., Attended]


def _own(name: str, module: nn.Module, *inputs: Any, **options: Any) -> Attended:
    """What transformers does for a model whose attention is called this."""
    if name == "eager":
        own = sys.modules[type(module).__module__].eager_attention_forward
    else:
        own = ALL_ATTENTION_FUNCTIONS[name]
    return cast(Attended, own(module, *inputs, **options))


def _attend(name: str, module: nn.Module, *inputs: Any, **options: Any) -> Attended:
    """The model's own attention.

    Under a mask, transformers' sdpa copies keys and values for all heads that share them; on a CPU
    torch does without, bit for bit the same in half of the time (254 rows over 4,500, Qwen2.5-0.5B:
    15 of 31 ms a layer), and in bfloat16 matrix products may take half of that (docs/adr/0013).
    """
    query, key, value, mask = inputs
    if name != "sdpa" or mask is None or query.device.type != "cpu":
        return _own(name, module, *inputs, **options)
    scaling = options.get("scaling") or query.shape[-1] ** -0.5
    if products_are_faster(query.device, query.dtype):
        return attend(query, key, value, mask, scaling), None
    out = scaled_dot_product_attention(
        query, key, value, mask, options.get("dropout", 0.0), scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def _observed(name: str, module: nn.Module, *inputs: Any, **options: Any) -> Attended:
    query, key, _, mask = inputs
    scaling = options.get("scaling") or query.shape[-1] ** -0.5
    cast(Observer, _hook.get())(cast(int, module.layer_idx), query, key, mask, scaling)
    return _attend(name, module, *inputs, **options)


def _apart(name: str, module: nn.Module, *inputs: Any, **options: Any) -> Attended:
    """Each request of a batch looks at its own buffer."""
    query, _, _, attention_mask = inputs
    cache = cast(BatchCache, _hook.get())
    outputs = []
    for n, (k, v) in enumerate(cache.read(cast(int, module.layer_idx))):
        mask = None if attention_mask is None else attention_mask[n : n + 1, ..., : k.shape[2]]
        q = query[n : n + 1]
        if name == "sdpa":
            outputs.append(_attend_one(q, k, v, mask, options.get("scaling")))
        else:
            outputs.append(_attend(name, module, q, k, v, mask, **options)[0])
    return torch.cat(outputs), None


def _attend_one(
    q_1Q1D: Tensor, k_1HTD: Tensor, v_1HTD: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """What transformers' sdpa attention gives one query, `[1, 1, heads, D]`. Heads that share keys
    are taken for queries of one head, so that the keys need not be copied for each of them: a step
    of 7 answers of 500 tokens takes .45 of the time (135M, bf16)."""
    heads = k_1HTD.shape[1]
    q = q_1Q1D.reshape(1, heads, -1, q_1Q1D.shape[-1])
    out = scaled_dot_product_attention(q, k_1HTD, v_1HTD, attn_mask=mask, scale=scaling)
    return out.reshape(1, 1, -1, out.shape[-1])


@remembered
def _registered(attention: _Attention, own: str) -> str:
    """What one of the functions above is called in transformers' registries, over a model's own
    attention; masks are then ours. Where another thread runs the model meanwhile, it gets the
    attention and the masks that it would get without us."""
    name = f"kvboost{attention.__name__}_{own}"
    own_mask = ALL_MASK_ATTENTION_FUNCTIONS.get(own)

    def dispatch(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
    ) -> Any:
        chosen = _own if _hook.get() is _ELSEWHERE else attention
        return chosen(own, module, query, key, value, attention_mask, **options)

    def mask(*shape: Any, **options: Any) -> Any:
        return own_mask(*shape, **options) if own_mask and _hook.get() is _ELSEWHERE else None

    AttentionInterface.register(name, dispatch)
    AttentionMaskInterface.register(name, mask)
    return name


def attends_by_products(model: PreTrainedModel) -> bool:
    """Whether a pass with a mask of ours takes no longer than one without."""
    return _implementation(model) == "sdpa" and products_are_faster(model.device, model.dtype)


def _implementation(model: PreTrainedModel) -> str:
    return cast(str, model.config.get_text_config()._attn_implementation)


@contextmanager
def _attention(model: PreTrainedModel, attention: _Attention, hook: Any = None) -> Iterator[None]:
    """Attend in this thread through one of the functions above, by transformers' registry."""
    config = model.config.get_text_config()
    implementation = _implementation(model)
    token = _hook.set(hook)
    config._attn_implementation = _registered(attention, implementation)
    try:
        yield
    finally:
        config._attn_implementation = implementation
        _hook.reset(token)


@contextmanager
def observed_attention(model: PreTrainedModel, observe: Observer) -> Iterator[None]:
    """Show `observe` each layer's (index, queries, keys, mask, scaling) while the model runs as
    ever."""
    with _attention(model, _observed, observe):
        yield


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
