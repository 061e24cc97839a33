"""How things are measured: one outside clock, pairs in one run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvboost import KVBoost
from kvboost.bench import systems
from kvboost.bench.record import machine as described
from kvboost.bench.request import Request
from kvboost.types import Document


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@dataclass(frozen=True)
class Reference:
    """What plain transformers answers: seconds to the first token, greedy ids, their logits."""

    ttft: float
    ids: list[int]
    logits: Tensor


class Plain:
    """Plain transformers, as `kvboost bench` runs it, asked with a text and documents."""

    def __init__(self, boost: KVBoost) -> None:
        self._plain, self._prompts = systems.Plain(boost), systems.Prompts(boost.tokenizer)

    def ttft(self, text: str, documents: Sequence[Document] = ()) -> float:
        return self.answer(text, documents).ttft

    def answer(self, text: str, documents: Sequence[Document] = ()) -> Reference:
        """The greedy answer, up to its end or 16 tokens."""
        request = Request("", tuple(chat(text)), tuple(documents))
        begun = self._plain.begin(self._prompts.make(request))
        assert begun.reference is not None
        return Reference(begun.ttft, begun.reference.ids, begun.reference.logits)


def first_token(boost: KVBoost, text: str, **options: Any) -> tuple[float, float]:
    """Seconds from the call to the first token in our hands, and until all is stored."""
    _wait()
    start = time.perf_counter()
    stream = boost.stream(chat(text), max_new_tokens=1, **options)
    for _ in stream:
        break
    ttft = time.perf_counter() - start
    for _ in stream:
        pass
    assert stream.completion is not None
    return max(ttft, stream.completion.timing.ttft), time.perf_counter() - start


def machine(boost: KVBoost, model: str, n: int) -> dict[str, Any]:
    """What a record of a run says of where it ran."""
    stats = boost.stats()
    return {"model": model, "n": n, **described(stats.dtype, torch.device(stats.device))}
