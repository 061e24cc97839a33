"""Which device and number format this machine is fast at."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache, partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvboost.attention import attend
from kvboost.errors import ConfigError

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def choose_device(name: str) -> torch.device:
    """The named device; for "auto" a GPU if there is one. Raises ConfigError."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}: try auto, cpu, cuda or cuda:1") from error


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The named dtype; for "auto" bfloat16 where the device is faster at it. Raises ConfigError."""
    if name == "auto":
        faster = device.type != "cpu" or _bfloat16_is_faster()
        return torch.bfloat16 if faster else torch.float32
    if name not in _DTYPES:
        raise ConfigError(f"unknown dtype {name!r}: choose auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


@cache
def _bfloat16_is_faster() -> bool:
    """On the CPU, at one matrix product of a prefill's shape."""
    factors = [
        (torch.ones(256, 1024, dtype=d), torch.ones(1024, 1024, dtype=d))
        for d in (torch.bfloat16, torch.float32)
    ]
    bfloat16, float32 = (partial(torch.mm, a, b) for a, b in factors)
    return _is_faster(bfloat16, float32)


def products_are_faster(device: torch.device, dtype: torch.dtype) -> bool:
    """`attend` than torch's own attention. In float32 neither is."""
    return device.type == "cpu" and dtype == torch.bfloat16 and _products_are_faster()


@cache
def _products_are_faster() -> bool:
    """On the CPU, in bfloat16, at 64 rows over 1,024 positions."""
    q = torch.ones(1, 8, 64, 64, dtype=torch.bfloat16)
    k = torch.ones(1, 2, 1024, 64, dtype=torch.bfloat16)
    mask = torch.zeros(1, 1, 64, 1024, dtype=torch.bfloat16)
    own = partial(scaled_dot_product_attention, q, k, k, attn_mask=mask, enable_gqa=True)
    return _is_faster(partial(attend, q, k, k, mask, 0.125), own)


@torch.inference_mode()
def _is_faster(one: Callable[[], object], other: Callable[[], object]) -> bool:
    """At its best of ten times, taken in turns, so that other work on the machine slows both."""
    best = {one: math.inf, other: math.inf}
    for _ in range(11):  # the first of each prepares its kernel
        for call in best:
            start = time.perf_counter()
            call()
            best[call] = min(best[call], time.perf_counter() - start)
    return best[one] < best[other]
