"""A causal LM as a function of rows: token rows in, KV buffer filled, logits out.

Everything the engine does to a model is one of the three passes here. How the model is called is
`model.py`'s business, which rows are wanted is the policy's.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvboost.drift import Patch
from kvboost.kv import KVBuffer
from kvboost.mask import layer_masks, step_masks
from kvboost.model import (
    BatchCache,
    Mask,
    PreTrainedModel,
    RowCache,
    attends_by_products,
    observed_attention,
    run,
    run_steps,
)
from kvboost.plan import QUESTION
from kvboost.recompute import Look
from kvboost.support import Support, probe_support

_locks: WeakKeyDictionary[PreTrainedModel, threading.Lock] = WeakKeyDictionary()
"""For each model, whose runners share it: a pass may switch how its attention is called."""


class ModelRunner:
    """Runs rows of a prompt through a model. One pass at a time: who runs one holds `lock`."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Probes the model; raises UnsupportedModelError if its KV can't be kept at all."""
        self.model = model
        self.lock = _locks.setdefault(model, threading.Lock())
        self.support: Support = probe_support(model)
        self.layout = self.support.layout
        self.layers = self.layout.layers
        with self.lock:
            self.products = not self.support.reason and attends_by_products(model)
        config = model.config.get_text_config()
        self.vocabulary: int = config.vocab_size
        self.shape = f"{config.model_type}-{self.layers}x{config.hidden_size}"

    def new_buffer(self, capacity: int) -> KVBuffer:
        return KVBuffer(self.layout, capacity)

    def forward(
        self,
        buffer: KVBuffer,
        ids: Sequence[int],
        rows: Sequence[int],
        keep: int = 1,
        patches: Sequence[Patch] = (),
    ) -> Tensor:
        """Compute `rows` (sorted; ids[row] is row's token; ids is as long as the prompt so far) on
        top of what the buffer holds, corrected by `patches`: logits of the last `keep` rows,
        float32 `[keep, vocab]`."""
        cache, mask, tokens, positions = self._prepare(buffer, ids, rows)
        cache.correct(patches)
        logits = run(self.model, tokens, positions, mask, cache, keep)
        assert logits is not None
        return logits.float()

    def steps(self, buffers: Sequence[KVBuffer], ids: Sequence[Sequence[int]]) -> Tensor:
        """Compute the last token of each of several requests on top of what their buffers hold, in
        one pass where the model allows: logits, float32 `[requests, vocab]`. All must be of one
        rope regime."""
        device, lengths = self.layout.device, [len(mine) for mine in ids]
        tokens = torch.tensor([mine[-1:] for mine in ids], device=device)
        positions = torch.tensor(lengths, device=device)[:, None] - 1
        mask = step_masks(positions, max(lengths), self.layout.dtype, self.support.windows)
        logits = run_steps(self.model, tokens, positions, mask, BatchCache(buffers, lengths))
        if logits is not None:
            return logits.float()
        each = zip(buffers, ids, strict=True)
        return torch.cat(
            [self.forward(b, mine, range(len(mine) - 1, len(mine))) for b, mine in each]
        )

    def deviation(
        self, buffer: KVBuffer, ids: Sequence[int], rows: Sequence[int], layer: int
    ) -> Tensor:
        """Compute `rows` below `layer`; how far fresh K and V there are from the buffer's,
        float32 `[rows]`."""
        cache, mask, tokens, positions = self._prepare(buffer, ids, rows)
        cache.stop_at(layer, compare=True)
        run(self.model, tokens, positions, mask, cache, 1)
        assert cache.deviation is not None
        return cache.deviation

    def attention(
        self,
        buffer: KVBuffer,
        ids: Sequence[int],
        rows: Sequence[int],
        look: Look,
        patches: Sequence[Patch] = (),
    ) -> Tensor:
        """Compute `rows` as deep as `look` says; the attention mass that its queries give each
        position in its layers, float32 `[len(ids)]`. Zero if the model hides its attention."""
        cache, mask, tokens, positions = self._prepare(buffer, ids, rows, masked=True)
        cache.stop_at(look.depth)
        cache.correct(patches)
        mass = torch.zeros(len(ids), device=self.layout.device)
        last = min(len(look.queries), QUESTION)

        def observe(layer: int, q: Tensor, k: Tensor, mask: Tensor | None, scaling: float) -> None:
            if layer in look.layers:
                mass.add_(_attention_mass(q[:, :, -last:], k, mask, scaling))

        with observed_attention(self.model, observe):
            run(self.model, tokens, positions, mask, cache, 1)
        return mass

    def _prepare(
        self, buffer: KVBuffer, ids: Sequence[int], rows: Sequence[int], *, masked: bool = False
    ) -> tuple[RowCache, Mask, Tensor, Tensor]:
        length, device = len(ids), self.layout.device
        first = rows[0]
        suffix = rows[-1] == length - 1 and len(rows) == length - first
        positions = torch.tensor(rows, device=device)
        tokens = torch.tensor([ids[row] for row in rows], device=device)
        cache = RowCache(buffer, range(first, length) if suffix else positions, length)
        # A suffix takes the model's own path, mask and all, where that costs less than ours.
        mask: Mask = None
        if masked or not suffix or (self.products and len(rows) > 1):
            mask = layer_masks(positions, length, self.layout.dtype, self.support.windows)
        return cache, mask, tokens[None], positions[None]


def _attention_mass(q: Tensor, k: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention summed over heads and queries, `[T]`. q `[1, Hq, Q, D]`, k `[1, H, T, D]`."""
    queries, heads = q.shape[2], k.shape[1]
    grouped = q[0].reshape(heads, -1, q.shape[-1])
    score = (grouped @ k[0].transpose(1, 2)).float() * scaling
    score = score.view(-1, queries, k.shape[2])
    if mask is not None:
        score = score + mask[0, :, -queries:].float()
    return score.softmax(-1).sum((0, 1))
