"""Attention by matrix products: the same as torch's, in every shape, and as precise."""

from __future__ import annotations

import families
import pytest
import torch
from families import MOVABLE, VARYING, boost, tokenizer, tokens
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvboost import KVBoost
from kvboost.attention import attend
from kvboost.mask import causal_mask
from kvboost.numerics import products_are_faster
from kvboost.recompute import DriftRecompute, QueryRecompute, RecomputePolicy

SHAPES = [(9, 3, 64, 64), (4, 4, 32, 32), (14, 2, 64, 64), (2, 1, 128, 96)]
ROWS = {
    "one": [699],
    "whole": list(range(700)),
    "suffix": list(range(500, 700)),
    "scattered": [0, 1, *range(60, 100), 313, *range(400, 560), 698],
}


def made(shape: tuple[int, int, int, int], rows: int, length: int) -> tuple[Tensor, ...]:
    """Queries, keys, values; keys have a part in common, as those with a bias do."""
    every, heads, k_dim, v_dim = shape
    seeded = torch.Generator().manual_seed(rows)
    q, k, v = (
        torch.randn(1, size, count, dim, generator=seeded)
        for size, count, dim in (
            (every, rows, k_dim),
            (heads, length, k_dim),
            (heads, length, v_dim),
        )
    )
    return q, k + 3 * torch.randn(1, heads, 1, k_dim, generator=seeded), v


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> Tensor:
    q, k, v = q.double(), k.double(), v.double()
    out = scaled_dot_product_attention(q, k, v, mask.double(), scale=scaling, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.mark.parametrize("window", [None, 5, 200])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_attention(
    shape: tuple[int, int, int, int], rows: list[int], window: int | None
) -> None:
    q, k, v = made(shape, len(rows), 700)
    mask = causal_mask(torch.tensor(rows), 700, torch.float32, window)
    out = attend(q, k, v, mask, 0.2)
    assert out.shape == (1, len(rows), shape[0], shape[3]) and out.is_contiguous()
    torch.testing.assert_close(out.double(), exact(q, k, v, mask, 0.2), atol=1e-4, rtol=1e-4)


def test_takes_queries_as_models_make_them() -> None:
    """A view with heads and rows changed places, of keys that lie in a longer buffer."""
    q, k, v = made((8, 2, 64, 64), 40, 300)
    mask = causal_mask(torch.arange(100, 140), 140, torch.float32)
    out = attend(
        q.transpose(1, 2).contiguous().transpose(1, 2), k[:, :, :140], v[:, :, :140], mask, 0.125
    )
    assert torch.equal(out, attend(q, k[:, :, :140].clone(), v[:, :, :140].clone(), mask, 0.125))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rounding_is_that_of_torch(shape: tuple[int, int, int, int]) -> None:
    """In bfloat16 large scores, as keys with a bias give, would lose their last bits."""
    rows = ROWS["scattered"]
    q, k, v = (t.bfloat16() for t in made(shape, len(rows), 700))
    mask = causal_mask(torch.tensor(rows), 700, torch.bfloat16)
    wanted = exact(q, k, v, mask, 0.2)
    torchs = scaled_dot_product_attention(q, k, v, mask, scale=0.2, enable_gqa=True)
    ours, theirs = (
        float((out.double() - wanted).abs().mean())
        for out in (attend(q, k, v, mask, 0.2), torchs.transpose(1, 2))
    )
    assert ours < 2.5 * theirs
    keys, values = (t.repeat_interleave(shape[0] // shape[1], 1) for t in (k, v))
    naive = (q @ keys.transpose(2, 3) * 0.2 + mask).softmax(-1) @ values
    assert ours < 0.6 * float((naive.transpose(1, 2).double() - wanted).abs().mean())


def scores(made: KVBoost, policy: RecomputePolicy) -> list[Tensor]:
    """The logits of a whole prompt, of one behind its prefix, and of one of moved pieces."""
    first, second, answer = tokens(120, 1), tokens(90, 2), tokens(6, 3)
    asked = [
        ([*first, *second], [120]),
        ([*first, *tokens(100, 4)], [120]),
        ([*tokens(50, 5), *second, *first, *tokens(20, 6)], [50, 140, 260]),
    ]
    found = []
    for ids, segments in asked:
        found.append(made.score(ids, answer, recompute=policy, segments=segments).logits)
        made.prefill(ids, segments=segments)
    return found


@pytest.mark.parametrize("policy", [DriftRecompute(), QueryRecompute()], ids=lambda p: p.name)
@pytest.mark.parametrize("family", [*MOVABLE, *VARYING])
def test_models_answer_as_by_their_own(
    family: str, policy: RecomputePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows in ("_BLOCK", "_PRODUCTS"):
        monkeypatch.setattr(f"kvboost.passes.{rows}", 48)
    wanted = scores(boost(family), policy)
    monkeypatch.setattr("kvboost.model.products_are_faster", lambda *_: True)
    made = boost(family)
    assert made._engine.runner.products
    for mine, theirs in zip(scores(made, policy), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=0)


def test_it_is_taken_where_it_is_faster() -> None:
    assert not products_are_faster(torch.device("cpu"), torch.float32)
    assert not products_are_faster(torch.device("cuda"), torch.bfloat16)
    made = KVBoost.from_pretrained("default", dtype="bfloat16")
    faster = products_are_faster(torch.device("cpu"), torch.bfloat16)
    assert made._engine.runner.products == faster
    assert not KVBoost(families.model("llama", "eager"), tokenizer())._engine.runner.products
