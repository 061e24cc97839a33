"""Tiny random models of many families: real architectures, weights of no meaning."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, wraps
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from kvboost import AutoRecompute, KVBoost
from kvboost.keys import KeySpace
from kvboost.recompute import LADDER, MEASURED_AT, Profile

VOCABULARY = 512
WINDOW = 24  # of sliding layers: smaller than any prompt here

_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # so that attention is sharp and logits differ
    "tie_word_embeddings": False,
}
_GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "initializer_range": 0.2}
_NTK = {"rope_type": "dynamic", "factor": 4.0}
_LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0 + 0.02 * i for i in range(8)],
    "long_factor": [1.5 + 0.5 * i for i in range(8)],
}

# Whose KV can be moved.
MOVABLE: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama3-rope": {
        "model_type": "llama",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "qwen2-yarn": {
        "model_type": "qwen2",
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "mistral-sliding": {"model_type": "mistral", "sliding_window": WINDOW},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 6,
    },
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
    "gpt-neox": {"model_type": "gpt_neox", "rotary_pct": 0.5, "use_parallel_residual": True},
    "glm": {"model_type": "glm", "head_dim": 16, "pad_token_id": 0},
    "cohere": {"model_type": "cohere", "pad_token_id": 0, "logit_scale": 1.0},
    "cohere2": {
        "model_type": "cohere2",
        "head_dim": 16,
        "pad_token_id": 0,
        "logit_scale": 1.0,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}

# Positions that aren't a rotation of the keys: exact prefixes only.
FIXED: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", **_GPT2},
    "opt": {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2},
    "bloom": {"model_type": "bloom", "n_layer": 3, "n_head": 4},
}

# Frequencies that depend on the prompt's length, beyond 128 tokens.
VARYING: dict[str, dict[str, Any]] = {
    "llama-ntk": {"model_type": "llama", "max_position_embeddings": 128, "rope_scaling": _NTK},
    "phi3-longrope": {
        "model_type": "phi3",
        "pad_token_id": 0,
        "original_max_position_embeddings": 128,
        "rope_scaling": _LONGROPE,
    },
}

ALL = MOVABLE | FIXED | VARYING


KEYS = KeySpace("fingerprint")
# Each step leaves half of what the one before it leaves, and "none" the damage itself.
PROFILE = Profile(
    {step: (0.5**n * MEASURED_AT[0], 0.5**n * MEASURED_AT[1]) for n, step in enumerate(LADDER)}
)
AUTO = AutoRecompute(PROFILE, 0.02)
ATTENTIONS = ("sdpa", "eager")


def cases(families: Iterable[str]) -> list[tuple[str, str]]:
    """(family, attention) pairs; BLOOM has its own attention only."""
    return [(f, a) for f in families for a in ATTENTIONS if (f, a) != ("bloom", "sdpa")]


@cache
def model(family: str, attention: str = "sdpa") -> Any:
    """A tiny fp32 model that never ends its answer; shared, so leave it as it was."""
    options = deepcopy(_SMALL | ALL[family])
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.float32
        ).eval()
    made.generation_config.eos_token_id = None
    made.generation_config.pad_token_id = 0
    return made.requires_grad_(False)


@cache
def tokenizer() -> Any:
    """Words w0, w1, ... are token ids; nothing is special."""
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def boost(family: str, attention: str = "sdpa", **config: Any) -> KVBoost:
    """A KVBoost of small chunks around a tiny model, with an empty store."""
    return KVBoost(model(family, attention), tokenizer(), **{"chunk_tokens": 32, **config})


def tokens(count: int, seed: int) -> list[int]:
    """The same random token ids for the same seed."""
    source = random.Random(seed)
    return [source.randrange(VOCABULARY) for _ in range(count)]


@cache
def generated(
    family: str, attention: str, ids: tuple[int, ...], count: int = 64
) -> tuple[int, ...]:
    """What transformers' own generate() answers, greedily."""
    prompt = torch.tensor([ids])
    out = model(family, attention).generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=count
    )
    return tuple(out[0, len(ids) :].tolist())


def logits(family: str, attention: str, ids: list[int], answer: list[int]) -> Tensor:
    """What one plain forward pass of transformers predicts for each token of an answer."""
    with torch.inference_mode():
        out = model(family, attention)(torch.tensor([[*ids, *answer[:-1]]]))
    return out.logits[0, len(ids) - 1 :].float()


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """Rows that enter each forward pass."""
    rows: list[int] = []
    forward = model.forward

    @wraps(forward)
    def count(*args: Any, **kwargs: Any) -> Any:
        rows.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    model.forward = count
    try:
        yield rows
    finally:
        del model.forward
