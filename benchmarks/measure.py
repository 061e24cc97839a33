"""How things are measured: one outside clock, pairs in one run, medians of ratios."""

from __future__ import annotations

import inspect
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

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
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "model": model,
        "n": n,
        "dtype": boost.stats().dtype,
        "device": boost.stats().device,
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit.stdout.strip(),
    }
