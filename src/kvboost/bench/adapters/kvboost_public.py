"""Adapter for the `kvboost` that is on PyPI, which shares its name with this project."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from peer_protocol import CACHE_BYTES, serve
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvboost import KVBoost

OPTIONS: dict[str, Any] = {
    "recompute_strategy": "cacheblend",
    "chunk_boundary_window": 16,
    "overlap_k": 16,
    "sink_tokens": 32,
}
"""Those of its own benchmarks, in its README."""


class Public:
    def __init__(self, model: str, dtype: str, window: int) -> None:
        self.version = version("kvboost")
        self.note = ", ".join(f"{name}={value}" for name, value in OPTIONS.items())
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        weights = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._boost = KVBoost(
            weights, self._tokenizer, max_cache_bytes=CACHE_BYTES, max_chunks=10**6, **OPTIONS
        )

    def answer(
        self, ids: list[int], text: str, n: int, first: Callable[[int], None]
    ) -> dict[str, Any]:
        answer: list[int] = []

        def on_token(token: int) -> None:
            if not answer:
                first(int(token))
            answer.append(int(token))

        result = self._boost.generate(text, max_new_tokens=n, on_token=on_token)
        return {
            "text": result.output_text,
            "ids": answer if len(answer) == n else None,
            "cached": result.cached_tokens,
        }


if __name__ == "__main__":
    serve(Public)
