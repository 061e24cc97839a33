"""How things are measured: one outside clock, pairs in one run, medians of ratios."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvboost import KVBoost
from kvboost.types import Document


@dataclass(frozen=True)
class Ratio:
    """Median of paired ratios and a 95 % bootstrap interval of it."""

    median: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """Of (ours, theirs) seconds."""
    ratios = [a / b for a, b in pairs]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return Ratio(statistics.median(ratios), medians[50], medians[1949], len(ratios))


def seconds(call: Callable[[], object]) -> float:
    """Wall time of a call; a GPU is waited for on both sides."""
    _wait()
    start = time.perf_counter()
    call()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


class Plain:
    """Plain transformers: the same chat template, one forward pass, the first token."""

    def __init__(self, boost: KVBoost) -> None:
        self._boost = boost

    @torch.inference_mode()
    def first_token(self, text: str, documents: Sequence[Document] = ()) -> int:
        boost = self._boost
        whole = "".join(f"Document: {d.title}\n{d.text}\n\n" for d in documents) + text
        rendered = boost.tokenizer.apply_chat_template(
            chat(whole), tokenize=False, add_generation_prompt=True
        )
        ids = boost.tokenizer(rendered, add_special_tokens=False, return_tensors="pt")
        tokens: Any = ids["input_ids"].to(boost.model.device)
        out = boost.model(input_ids=tokens, use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())


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
