"""The fingerprint changes with what KV depends on and with nothing else."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kvboost.errors import UnsupportedModelError
from kvboost.fingerprint import fingerprint, weights_version
from kvboost.hub import load


def tiny(**changes: Any) -> LlamaForCausalLM:
    options: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**options | changes))


@pytest.fixture(scope="module")
def tokenizer(default_model: tuple[Any, Any]) -> Any:
    return copy.deepcopy(default_model[1])


def test_same_content_is_the_same_wherever_it_lies(tmp_path: Path, tokenizer: Any) -> None:
    model = tiny()
    prints = {fingerprint(model, tokenizer)}
    for folder in (tmp_path / "here", tmp_path / "there"):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for attention in ("sdpa", "eager"):
            prints.add(fingerprint(*load(folder, torch.float32, "cpu", attention)))
    assert len(prints) == 1
    assert len(prints.pop()) == 64


def test_running_the_model_and_padding_text_change_nothing(tokenizer: Any) -> None:
    model = tiny()
    before, version = fingerprint(model, tokenizer), weights_version(model)
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3]]))
    tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=2)
    tokenizer.chat_template = "{{ messages }}"
    assert fingerprint(model, tokenizer) == before
    assert weights_version(model) == version


def test_dtype_changes_it(tokenizer: Any) -> None:
    model = tiny()
    before = fingerprint(model, tokenizer)
    assert fingerprint(model.to(torch.bfloat16), tokenizer) != before


def test_rope_parameters_change_it(tokenizer: Any) -> None:
    model = tiny()
    before = fingerprint(model, tokenizer)
    other = tiny(rope_theta=500_000.0)
    scaled = tiny(rope_scaling={"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0})
    assert len({before, fingerprint(other, tokenizer), fingerprint(scaled, tokenizer)}) == 3


def test_a_low_rank_change_of_any_matrix_changes_it(tokenizer: Any) -> None:
    model = tiny()
    seen = {fingerprint(model, tokenizer)}
    matrices = [p for p in model.parameters() if p.ndim == 2]
    for matrix in matrices:
        rows, columns = matrix.shape
        with torch.no_grad():
            matrix += 1e-4 * torch.randn(rows, 2) @ torch.randn(2, columns)
        seen.add(fingerprint(model, tokenizer))
    assert len(seen) == 1 + len(matrices)


def test_a_change_of_one_column_or_row_changes_it(tokenizer: Any) -> None:
    model = tiny()
    seen = {fingerprint(model, tokenizer)}
    weight = model.model.layers[1].self_attn.q_proj.weight
    with torch.no_grad():
        weight[:, 3] += 1
        seen.add(fingerprint(model, tokenizer))
        weight[5] += 1
        seen.add(fingerprint(model, tokenizer))
    assert len(seen) == 3


def test_the_tokenizer_changes_it(tokenizer: Any) -> None:
    model, other = tiny(), copy.deepcopy(tokenizer)
    other.add_tokens(["<kvboost>"])
    assert fingerprint(model, other) != fingerprint(model, tokenizer)


def test_weights_out_of_memory_are_refused(tokenizer: Any) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny().config)
    with pytest.raises(UnsupportedModelError, match="not in memory"):
        fingerprint(model, tokenizer)


def test_version_sees_edits_replacement_and_loading() -> None:
    model = tiny()
    weight = model.lm_head.weight
    seen = [weights_version(model)]
    with torch.no_grad():
        weight[0, 0] += 1
    seen.append(weights_version(model))
    model.lm_head.weight = nn.Parameter(weight.detach().clone())
    seen.append(weights_version(model))
    model.load_state_dict(tiny().state_dict())
    seen.append(weights_version(model))
    assert len(set(seen)) == 4


class Adapter(nn.Module):
    """Shaped like a PEFT layer: its switches are properties of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.active = ["default"]
        self.merged_adapters: list[str] = []
        self.scaling = {"default": 1.0, "other": 2.0}

    @property
    def active_adapters(self) -> list[str]:
        return self.active

    @property
    def merged(self) -> bool:
        return bool(self.merged_adapters)


def test_both_see_adapters_switched_merged_and_scaled(tokenizer: Any) -> None:
    model = tiny()
    model.adapter = Adapter()
    seen = [(fingerprint(model, tokenizer), weights_version(model))]
    model.adapter.active = ["other"]
    seen.append((fingerprint(model, tokenizer), weights_version(model)))
    model.adapter.merged_adapters = ["other"]
    seen.append((fingerprint(model, tokenizer), weights_version(model)))
    model.adapter.scaling["other"] = 0.5
    seen.append((fingerprint(model, tokenizer), weights_version(model)))
    assert [len(set(column)) for column in zip(*seen, strict=True)] == [4, 4]


def best_seconds(function: Any, *args: Any) -> float:
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        function(*args)
        best = min(best, time.perf_counter() - start)
    return best


def test_both_are_quick(default_model: tuple[Any, Any]) -> None:
    model, tokenizer = default_model
    assert best_seconds(fingerprint, model, tokenizer) < 0.3
    assert best_seconds(weights_version, model) < 0.003
