"""Adapter for vLLM on a CPU, with automatic prefix caching."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # threads as OMP_NUM_THREADS says
os.environ["VLLM_NO_USAGE_STATS"] = "1"

from peer_protocol import CACHE_BYTES, serve
from vllm import EngineArgs, LLMEngine, SamplingParams


class VLLM:
    def __init__(self, model: str, dtype: str, window: int) -> None:
        self.version = version("vllm-cpu")
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=model,
                dtype=dtype,
                max_model_len=window,
                enable_prefix_caching=True,
                kv_cache_memory_bytes=CACHE_BYTES,
            )
        )
        block = self._engine.vllm_config.cache_config.block_size
        self.note = f"prefix caching in blocks of {block} tokens"
        self._asked = 0

    def answer(
        self, ids: list[int], text: str, n: int, first: Callable[[int], None]
    ) -> dict[str, Any]:
        sampling = SamplingParams(temperature=0.0, max_tokens=n)
        self._asked += 1
        self._engine.add_request(str(self._asked), {"prompt_token_ids": ids}, sampling)
        outputs = []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if not outputs:
                    first(output.outputs[0].token_ids[0])
                outputs.append(output)
        answer = list(outputs[-1].outputs[0].token_ids)
        return {
            "text": outputs[-1].outputs[0].text,
            "ids": answer if len(answer) == n else None,
            "cached": outputs[-1].num_cached_tokens,
        }


if __name__ == "__main__":
    serve(VLLM)
