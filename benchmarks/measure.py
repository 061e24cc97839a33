"""How things are measured: one outside clock, pairs in one run."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvboost import KVBoost
from kvboost.bench.record import machine as described
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
    """Plain transformers: the same chat template, one forward pass a step, its own cache."""

    def __init__(self, boost: KVBoost) -> None:
        self._boost = boost
        known = inspect.signature(boost.model.forward).parameters
        self._cache = "cache" if "cache" in known else "past_key_values"

    def ttft(self, text: str, documents: Sequence[Document] = ()) -> float:
        return self.answer(text, documents, 1).ttft

    @torch.inference_mode()
    def answer(self, text: str, documents: Sequence[Document] = (), n: int = 16) -> Reference:
        """The greedy answer of n tokens, end-of-text ones included."""
        boost, model = self._boost, self._boost.model
        _wait()
        start = time.perf_counter()
        whole = "".join(f"Document: {d.title}\n{d.text}\n\n" for d in documents) + text
        rendered = boost.tokenizer.apply_chat_template(
            chat(whole), tokenize=False, add_generation_prompt=True
        )
        tokens = boost.tokenizer(rendered, add_special_tokens=False, return_tensors="pt")
        out = model(tokens["input_ids"].to(model.device), use_cache=True, logits_to_keep=1)
        logits, ids = [out.logits[0, -1:].float()], [int(out.logits[0, -1].argmax())]
        _wait()
        ttft = time.perf_counter() - start
        while len(ids) < n:
            step = torch.tensor([[ids[-1]]], device=model.device)
            out = model(step, **{self._cache: out[self._cache]})
            logits.append(out.logits[0, -1:].float())
            ids.append(int(out.logits[0, -1].argmax()))
        return Reference(ttft, ids, torch.cat(logits))


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
