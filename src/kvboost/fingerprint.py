"""What a model's KV depends on, as a digest: weights, adapters, dtype, architecture, tokenizer.

Never a model's name or place. Samples every tensor (256 values, spread so that they don't line up
with rows or columns), so a change confined to a few values may go unseen; training, merging or
swapping weights does not. Takes about 40 ms for 135M parameters and hardly more for larger models,
so nothing is cached. Knows nothing of transformers: attributes are looked up by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from kvboost.errors import UnsupportedModelError

_SAMPLES = 256
_GOLDEN = 0.6180339887498949
# Where a model came from, how it is run and what generate() does by default: nothing of its KV.
_VOLATILE = {
    *("transformers_version", "architectures", "dtype", "torch_dtype", "attn_implementation"),
    *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "torchscript"),
    *("id2label", "label2id", "problem_type"),
}


def fingerprint(model: nn.Module, tokenizer: Any) -> str:
    """Hex digest of all that the model's KV for given text depends on.

    Equal for equal content in another folder, on another device or attention backend. Raises
    UnsupportedModelError for weights that are not in memory (meta device).
    """
    config: Any = model.config
    digest = hashlib.blake2b(b"kvboost fingerprint 1", digest_size=32)
    for part in (
        _json(_stable(config.to_dict())),
        _json(list(_adapters(model.modules()))),
        *_weights(model),
        *_tokenizer(tokenizer),
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def weights_version(model: nn.Module) -> int:
    """A token that changes when weights or adapters are replaced, edited in place or switched.

    Well under 1 ms; only comparable within one process. An edit through `.data` that keeps the
    storage goes unseen (PyTorch doesn't count it); merging an adapter does not.
    """
    modules = list(model.modules())
    state: list[Any] = list(_adapters(modules))
    for module in modules:
        for weight in module._parameters.values():
            if weight is not None:
                state.append(weight.data_ptr())
                if not weight.is_inference():
                    state.append(weight._version)
    return hash(tuple(state))


def _weights(model: nn.Module) -> Iterator[bytes]:
    """Names, shapes and dtypes of parameters and persistent buffers, then samples of their values.

    Samples are gathered per device and dtype, so that a GPU is waited for once, not per tensor.
    """
    samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    spread = torch.arange(_SAMPLES, dtype=torch.float64).mul_(_GOLDEN).remainder_(1)
    spread[0], spread[1] = 0, 1
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor):
            continue
        if tensor.is_meta:
            raise UnsupportedModelError(f"weight {name} is not in memory: it was offloaded")
        yield _json([name, list(tensor.shape), str(tensor.dtype)])
        if tensor.numel():
            at = (spread * (tensor.numel() - 1)).long().to(tensor.device)
            flat = tensor.detach().reshape(-1)[at].contiguous()
            samples.setdefault((tensor.device, tensor.dtype), []).append(flat)
    for tensors in samples.values():
        yield torch.cat(tensors).view(torch.uint8).cpu().numpy().tobytes()


def _adapters(modules: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """The state of PEFT layers: which adapters are active, merged and how strong."""
    for index, module in enumerate(modules):
        kind: Any = type(module)
        if _is_adapter(kind):
            scaling = getattr(module, "scaling", None)
            yield (
                index,
                tuple(module.active_adapters),
                bool(module.merged),
                tuple(getattr(module, "merged_adapters", ())),
                bool(getattr(module, "disable_adapters", False)),
                tuple(sorted(scaling.items())) if isinstance(scaling, Mapping) else None,
            )


@lru_cache
def _is_adapter(kind: type) -> bool:
    """Asked of the class: asking a module for what it lacks is slow, and a model lacks a lot."""
    return hasattr(kind, "active_adapters") and hasattr(kind, "merged")


def _tokenizer(tokenizer: Any) -> Iterator[bytes]:
    """What turns text into ids; not the chat template, whose effect is in the ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Padding and truncation come before this key; any padded call changes them.
        yield backend.to_str().partition('"added_tokens"')[2].encode()
    else:
        yield _json(sorted(tokenizer.get_vocab().items()))
    yield _json([len(tokenizer), tokenizer.special_tokens_map])


def _stable(config: Any) -> Any:
    """A configuration without its volatile and private keys, at every depth."""
    if isinstance(config, Mapping):
        return {
            str(key): _stable(value)
            for key, value in config.items()
            if key not in _VOLATILE and not str(key).startswith("_")
        }
    return config


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()
