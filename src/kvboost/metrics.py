"""The clock of a request, and how far two answers are apart."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor


class Stopwatch:
    """Wall clock of one call, cut into named parts. The device is synchronised at each reading."""

    def __init__(self, device: torch.device, started: float | None = None) -> None:
        """`started`: a reading of time.perf_counter() if the call began before the device was
        known."""
        self._device = device
        self._started = self._last = time.perf_counter() if started is None else started
        self.parts: defaultdict[str, float] = defaultdict(float)

    def lap(self, part: str) -> float:
        """Charge the time since the last reading to `part`; the seconds charged."""
        now = self._now()
        took, self._last = now - self._last, now
        self.parts[part] += took
        return took

    def skip(self) -> None:
        """Charge the time since the last reading to nobody (the caller held the stream)."""
        self._last = self._now()

    def elapsed(self) -> float:
        return self._now() - self._started

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far next-token distributions are from reference ones, over one answer.

    kl_mean, kl_max: KL(reference || other) in nats per token. top1: share of positions where both
    prefer the same token.
    """

    kl_mean: float
    kl_max: float
    top1: float


def divergence(reference: Tensor, other: Tensor) -> Divergence:
    """Compare logits `[tokens, vocab]` of the same teacher-forced answer."""
    p = reference.double().log_softmax(-1)
    q = other.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).clamp_min(0)
    same = p.argmax(-1) == q.argmax(-1)
    return Divergence(float(kl.mean()), float(kl.max()), float(same.double().mean()))
