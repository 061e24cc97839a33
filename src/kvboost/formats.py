"""Which format a model's KV may be stored in: measured on the loaded model, once.

Models differ: a key bias (the Qwen2 family) makes some channels extreme, and small models are
disturbed by what large ones don't notice (docs/adr/0005).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from pydoc_data.topics import topics
from tempfile import NamedTemporaryFile
from typing import get_args

import torch
from torch import Tensor

from kvboost.config import KVFormat
from kvboost.hub import kvboost_home
from kvboost.kv import KVBuffer
from kvboost.metrics import divergence
from kvboost.runner import ModelRunner
from kvboost.store.codec import encode, place

_CONTEXT, _ANSWER, _CHUNK = 512, 128, 64
"""Tokens read through stored KV, tokens compared, tokens in a chunk."""

STORAGE_SHARE = 1 / 30
"""Of the divergence a user allows (`Config.max_divergence`), what storing may take."""


def choose_format(
    runner: ModelRunner, encode_text: Callable[[str], list[int]], fingerprint: str, limit: float
) -> KVFormat:
    """The smallest format whose divergence stays under `limit` (KL, nats per token). Measured once
    for each fingerprint, in seconds, and kept in KVBoost's folder."""
    cache = kvboost_home() / "formats" / f"{fingerprint}.json"
    try:
        known = {name: float(kl) for name, kl in json.loads(cache.read_bytes()).items()}
    except (OSError, ValueError, AttributeError, TypeError):  # not there, or torn
        known = {**measure_formats(runner, encode_text(topics["with"] + topics["class"]))}
        with suppress(OSError):  # then the next start measures again
            cache.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("w", dir=cache.parent, delete=False) as file:
                json.dump(known, file)
            os.replace(file.name, cache)
    smallest_first = reversed(get_args(KVFormat))
    return next(fmt for fmt in smallest_first if known.get(fmt, inf) <= limit or fmt == "raw")


@torch.inference_mode()
def measure_formats(runner: ModelRunner, ids: Sequence[int]) -> dict[KVFormat, float]:
    """For each format, how far the next tokens are from those on KV as the model made it: mean KL
    in nats per token, above what moving each number by its last bit does (in bfloat16 that alone
    is .001 to .002; in float32 nothing)."""
    ids = ids[: min(_CONTEXT + _ANSWER, runner.support.max_tokens or len(ids))]
    context = max(0, len(ids) - _ANSWER) // _CHUNK * _CHUNK
    if not context:
        return {"raw": 0.0}
    made = runner.new_buffer(len(ids))
    runner.forward(made, ids[:context], range(context))
    rows = range(context, len(ids))

    def answer(buffer: KVBuffer) -> Tensor:
        return runner.forward(buffer, ids, rows, keep=len(rows))

    def stored(fmt: KVFormat) -> KVBuffer:
        buffer = runner.new_buffer(len(ids))
        for start in range(0, context, _CHUNK):
            kv = made.cut(start, start + _CHUNK)
            place(encode(kv, runner.layout, start, fmt), 0, _CHUNK, start, buffer)
        return buffer

    raw, noisy = answer(stored("raw")), stored("raw")
    for x in (*noisy.k, *noisy.v):
        part = x[:, :, :context]
        noise = torch.rand(part.shape, generator=torch.Generator().manual_seed(0))
        part.mul_(1 + torch.finfo(x.dtype).eps * (2 * noise.to(x.device) - 1))
    floor = divergence(raw, answer(noisy)).kl_mean
    apart = {fmt: divergence(raw, answer(stored(fmt))).kl_mean for fmt in get_args(KVFormat)}
    return {fmt: max(0.0, kl - floor) for fmt, kl in apart.items()}
