"""Finds out, by running a few tokens, what can be done with a model's KV.

No table of model names: keys of the same tokens at two places must agree after our rotation, and a
pass over scattered rows must give what a plain pass gives. What fails gets exact prefixes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvboost.errors import UnsupportedModelError
from kvboost.kv import KVBuffer, KVLayout, LayerGroup
from kvboost.mask import layer_masks
from kvboost.model import PreTrainedModel, RowCache, layer_kv, plain_cache, run
from kvboost.rope import KeyShifter, Rotation

_TOKENS = 12
_DELTA = 29


@dataclass(frozen=True, slots=True)
class Support:
    """What a model's KV allows. `reason` says why it can't be moved, "" if it can.

    windows: sliding window of each kind of layer, None for full attention. max_tokens: the
    model's context window, None if it names none. static_until: rotation frequencies are others
    for longer prompts (`scaling`: "longrope" has one other set, "dynamic" one for each length),
    None if never.
    """

    layout: KVLayout
    reason: str
    windows: dict[str, int | None]
    max_tokens: int | None
    static_until: int | None
    scaling: str = ""

    def movable(self, length: int) -> bool:
        """Whether KV may be moved in a prompt of this length."""
        return not self.reason and (self.static_until is None or length <= self.static_until)

    def regime(self, length: int) -> str | None:
        """Names the rotation frequencies of a prompt; KV is never shared between regimes. None
        where they depend on what else the model has run (dynamic NTK): KV is not shared at all."""
        if self.static_until is None or length <= self.static_until:
            return ""
        return "long" if self.scaling == "longrope" else None


@torch.inference_mode()
def probe_support(model: PreTrainedModel) -> Support:
    """Run the probes. Raises UnsupportedModelError for models without a usable KV cache."""
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            "this is an encoder-decoder model: KVBoost works on causal language models"
        )
    seeded = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (1, _TOKENS), generator=seeded).to(model.device)
    here, logits = _keys_at(model, ids, 0)
    there, _ = _keys_at(model, ids, _DELTA)
    rotations, reason = _rotations(model, [k for k, _ in here], [k for k, _ in there])
    layout = KVLayout(_groups(here, rotations), here[0][0].dtype, model.device)
    windows = _windows(config)
    if not reason and not _rows_agree(model, layout, windows, ids[0], logits):
        reason = "a pass over scattered rows does not give what a plain pass gives"
    scaling, static_until, factor = _scaling(config)
    window = getattr(config, "max_position_embeddings", None)
    return Support(
        layout=layout,
        reason=reason,
        windows=windows,
        max_tokens=window and int(window * factor),
        static_until=static_until,
        scaling=scaling,
    )


def _keys_at(
    model: PreTrainedModel, ids: Tensor, position: int
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """K and V `[H, T, D]` of every layer for the tokens at `position`, and the last logits."""
    cache = plain_cache(model)
    rows = torch.arange(position, position + ids.shape[1], device=ids.device)[None]
    try:
        logits = run(model, ids, rows, None, cache, 1)
    except (TypeError, ValueError, AttributeError) as error:
        raise UnsupportedModelError(
            f"this model does not run with transformers' plain KV cache: {error}"
        ) from error
    layers = layer_kv(cache)
    if layers is None or logits is None:
        raise UnsupportedModelError(
            "this model keeps no keys and values per token (recurrent or linear-attention layers): "
            "there is nothing KVBoost could reuse"
        )
    return layers, logits


def _rotations(
    model: PreTrainedModel, here: Sequence[Tensor], there: Sequence[Tensor]
) -> tuple[list[Rotation | None], str]:
    """The rotation that carries each layer's keys from one place to the other."""
    buffers = [b for name, b in model.named_buffers() if name.endswith("inv_freq")]
    found: list[Rotation] = []
    for buffer in buffers:
        inv_freq = buffer.detach().double().cpu()
        if not any(torch.equal(inv_freq, r.inv_freq) for r in found):
            found += [Rotation(inv_freq), Rotation(inv_freq, interleaved=True)]
    candidates: list[Rotation | None] = [None, *found]
    limit = 1e-3 if here[0].dtype == torch.float32 else 0.1
    chosen: list[Rotation | None] = []
    for layer, (a, b) in enumerate(zip(here, there, strict=True)):
        errors = [_shift_error(c, a, b) for c in candidates]
        best = min(range(len(errors)), key=errors.__getitem__)
        if errors[best] > limit:
            return [None] * len(here), f"keys of layer {layer} don't move by rotation"
        chosen.append(candidates[best])
    return chosen, ""


def _shift_error(rotation: Rotation | None, a: Tensor, b: Tensor) -> float:
    if rotation is not None and 2 * len(rotation.inv_freq) > a.shape[-1]:
        return float("inf")
    moved = torch.empty_like(a)[None]
    KeyShifter([rotation]).shift(a[None], _DELTA, moved)
    return float((moved[0].float() - b.float()).norm() / b.float().norm().clamp_min(1e-9))


def _groups(
    layers: Sequence[tuple[Tensor, Tensor]], rotations: Sequence[Rotation | None]
) -> tuple[LayerGroup, ...]:
    shapes = [(k.shape[0], k.shape[2], v.shape[2]) for k, v in layers]
    groups = []
    for shape in dict.fromkeys(shapes):
        members = tuple(i for i, s in enumerate(shapes) if s == shape)
        groups.append(LayerGroup(members, *shape, KeyShifter([rotations[i] for i in members])))
    return tuple(groups)


def _rows_agree(
    model: PreTrainedModel,
    layout: KVLayout,
    windows: dict[str, int | None],
    ids: Tensor,
    expected: Tensor,
) -> bool:
    """Compute all rows, spoil some, compute those again as scattered rows: same logits?"""
    if not windows:
        return False
    buffer = KVBuffer(layout, len(ids))
    whole = torch.arange(len(ids), device=ids.device)
    run(model, ids[None], whole[None], None, RowCache(buffer, range(len(ids)), len(ids)), 1)
    rows = torch.tensor([1, 4, 5, len(ids) - 1], device=ids.device)
    for tensor in (*buffer.k, *buffer.v):
        tensor[:, :, rows] = 0
    mask = layer_masks(rows, len(ids), layout.dtype, windows)
    try:
        cache = RowCache(buffer, rows, len(ids))
        logits = run(model, ids[rows][None], rows[None], mask, cache, 1)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
        return False  # a model that refuses our mask or positions can't compute scattered rows
    if logits is None:
        return False
    limit = 1e-3 if layout.dtype == torch.float32 else 0.1
    return bool((logits - expected).norm() <= limit * expected.norm())


def _windows(config: object) -> dict[str, int | None]:
    """Sliding window of each kind of layer; empty if there is a kind that we can't mask."""
    window = getattr(config, "sliding_window", None)
    default = "full_attention" if window is None else "sliding_attention"
    kinds = set(getattr(config, "layer_types", None) or [default])
    if kinds - {"full_attention", "sliding_attention"}:
        return {}
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}


def _scaling(config: object) -> tuple[str, int | None, float]:
    """Kind of rotation that changes with the prompt's length, beyond which length, and by how much
    it stretches the window that the configuration names."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    window = getattr(config, "max_position_embeddings", 0)
    for part in [rope, *(part for part in rope.values() if isinstance(part, dict))]:
        kind = part.get("rope_type", part.get("type"))
        if kind == "dynamic":
            # transformers resets the frequencies for shorter prompts only, not at the limit.
            return kind, window - 1, float(part.get("factor", 1))
        if kind == "longrope":
            own = getattr(config, "original_max_position_embeddings", None)
            return kind, own or part.get("original_max_position_embeddings") or window, 1
    return "", None, 1
