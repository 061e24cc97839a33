"""Adapter for llama.cpp, with what its server calls the prompt cache.

`LlamaRAMCache` also keeps the logits of a whole batch with every prompt (300 MB for a vocabulary
of 150,000), so states are kept here by llama.cpp's own functions, which take the KV alone.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable
from os import environ
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from peer_protocol import CACHE_BYTES, serve


class PromptCache:
    """The states after past answers; the one that was not used for longest goes first."""

    def __init__(self, llama: llama_cpp.Llama) -> None:
        self._llama = llama
        self._states: OrderedDict[tuple[int, ...], ctypes.Array[ctypes.c_uint8]] = OrderedDict()

    def restore(self, ids: list[int]) -> int:
        """Make the state that shares most with a prompt the current one; return those tokens."""
        llama = self._llama
        shared = {key: _shared(key, ids) for key in self._states}
        best = max(shared, key=shared.__getitem__, default=())
        current = _shared(llama.input_ids[: llama.n_tokens], ids)
        if shared.get(best, 0) <= current:
            return current
        self._states.move_to_end(best)
        state = self._states[best]
        llama.reset()
        llama_cpp.llama_state_seq_set_data(llama.ctx, state, len(state), 0)
        llama.input_ids[: len(best)] = best
        llama.n_tokens = len(best)
        return shared[best]

    def keep(self) -> None:
        """Keep the current state."""
        llama = self._llama
        key = tuple(llama.input_ids[: llama.n_tokens].tolist())
        state = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(llama.ctx, 0))()
        llama_cpp.llama_state_seq_get_data(llama.ctx, state, len(state), 0)
        self._states.pop(key, None)
        self._states[key] = state
        while sum(map(len, self._states.values())) > CACHE_BYTES:
            self._states.popitem(last=False)


def _shared(a: Any, b: Any) -> int:
    """Tokens with which both begin."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(differ[0]) if len(differ) else n


class LlamaCpp:
    def __init__(self, model: str, dtype: str, window: int) -> None:
        threads = int(environ["OMP_NUM_THREADS"])
        self._llama = llama_cpp.Llama(
            model, n_ctx=window, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self._vocab = llama_cpp.llama_model_get_vocab(self._llama.model)
        self._cache = PromptCache(self._llama)
        self.version = llama_cpp.__version__
        self.note = f"weights of {Path(model).name}"

    def answer(
        self, ids: list[int], text: str, n: int, first: Callable[[int], None]
    ) -> dict[str, Any]:
        window = self._llama.n_ctx()
        if len(ids) + n > window:
            raise ValueError(f"{len(ids)} tokens and {n} more are over the window of {window}")
        cached = min(self._cache.restore(ids), len(ids) - 1)
        answer: list[int] = []
        for token in self._llama.generate(ids, temp=0.0):
            if not answer:
                first(token)
            answer.append(token)
            ended = llama_cpp.llama_vocab_is_eog(self._vocab, token)
            if ended or len(answer) == n:
                break
        self._cache.keep()
        shown = answer[:-1] if ended else answer
        return {
            "text": self._llama.detokenize(shown, prev_tokens=ids).decode(errors="ignore"),
            "ids": answer if len(answer) == n else None,
            "cached": cached,
        }


if __name__ == "__main__":
    serve(LlamaCpp)
