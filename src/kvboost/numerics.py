"""Which device and number format this machine is fast at."""

from __future__ import annotations

import math
import time
from functools import cache

import torch

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
    """On the CPU, at one matrix product of a prefill's shape: best of ten, in turns, so that other
    work on the machine slows both."""
    best = {torch.bfloat16: math.inf, torch.float32: math.inf}
    factors = {d: (torch.ones(256, 1024, dtype=d), torch.ones(1024, 1024, dtype=d)) for d in best}
    for _ in range(11):  # the first of each prepares its kernel
        for dtype, (a, b) in factors.items():
            start = time.perf_counter()
            a @ b
            best[dtype] = min(best[dtype], time.perf_counter() - start)
    return best[torch.bfloat16] < best[torch.float32]
