"""Masks that are the causal triangle, however they are written, are found; all others stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.graph import Operator
from autopar.tracing import causal, trace

Mask = Callable[[Tensor], Tensor]  # from query [batch, heads, length, width]


class Masked(nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=self.mask(x), scale=0.5)


def places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-2], device=x.device)


def compared(x: Tensor) -> Tensor:
    return places(x)[None, :] <= places(x)[:, None]


def for_every_sample(x: Tensor) -> Tensor:
    """As transformers does: indexed by sample and place, with a term that is true everywhere, widened."""
    rows = (places(x) + 0).expand(x.shape[0], -1)
    samples = torch.arange(x.shape[0], device=x.device)[:, None, None, None]
    row, column = rows[samples, places(x)[None, None, :, None]], rows[samples, places(x)[None, None, None, :]]
    same = (rows * 0)[samples, places(x)[None, None, :, None]] == (rows * 0)[samples, places(x)[None, None, None, :]]
    return (row.new_ones((), dtype=torch.bool) & (column <= row) & same).expand(x.shape[0], -1, -1, -1)


def lowest(x: Tensor) -> Tensor:
    length = x.shape[-2]
    return torch.triu(
        torch.full((length, length), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device), diagonal=1
    )


def ones(x: Tensor) -> Tensor:
    return torch.tril(torch.ones(x.shape[-2], x.shape[-2], device=x.device)).bool()[None, None]


def attention(mask: Mask, length: int) -> Operator:
    graph = trace(Masked(mask), (torch.empty(2, 2, length, 4, device="meta", requires_grad=True),)).graph
    return next(operator for operator in graph.operators if "scaled_dot_product" in operator.target)


@pytest.mark.parametrize("mask", [compared, for_every_sample, lowest, ones])
def test_the_triangle_is_found(mask: Mask) -> None:
    operator = attention(mask, 6)
    assert operator.argument(5, "is_causal") is True
    assert len(operator.inputs) == 3
    assert operator.argument(6, "scale") == 0.5


@pytest.mark.parametrize("mask", [compared, for_every_sample])
def test_a_large_one_is_found_without_computing_it(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal, "_MOST_COMPUTED", 64)  # of 32 x 32
    assert attention(mask, 32).argument(5, "is_causal") is True


def window(x: Tensor) -> Tensor:
    return compared(x) & (places(x)[None, :] > places(x)[:, None] - 3)


def strict(x: Tensor) -> Tensor:
    return places(x)[None, :] < places(x)[:, None]


def shifted(x: Tensor) -> Tensor:
    return places(x)[None, :] <= places(x)[:, None] + 1


def upward(x: Tensor) -> Tensor:
    return places(x)[None, :] >= places(x)[:, None]


def by_values(x: Tensor) -> Tensor:
    return compared(x) & (x[:, :, :, 0] > 0)[:, :, None]


def weak(x: Tensor) -> Tensor:
    return torch.triu(torch.full((x.shape[-2],) * 2, -5.0, dtype=x.dtype, device=x.device), diagonal=1)


def everything(x: Tensor) -> Tensor:
    return compared(x) | (places(x) >= 0)


@pytest.mark.parametrize("most", [causal._MOST_COMPUTED, 16])
@pytest.mark.parametrize("mask", [window, strict, shifted, upward, by_values, weak, everything])
def test_other_masks_stay(mask: Mask, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal, "_MOST_COMPUTED", most)
    operator = attention(mask, 6)
    assert not operator.argument(5, "is_causal", False)
    assert len(operator.inputs) == 4


class Alternating(nn.Module):
    """Layers that attend to what came before, and then to everything, each with a mask that all share."""

    def forward(self, x: Tensor) -> Tensor:
        before, all_of_it = compared(x), everything(x)
        for _ in range(8):
            x = F.scaled_dot_product_attention(x, x, x, attn_mask=before)
            x = F.scaled_dot_product_attention(x, x, x, attn_mask=all_of_it)
        return x


def test_masks_that_layers_share_are_not_taken_for_one_another() -> None:
    graph = trace(Alternating(), (torch.empty(2, 2, 6, 4, device="meta", requires_grad=True),)).graph
    found = [op.argument(5, "is_causal", False) for op in graph.operators if "scaled_dot_product" in op.target]
    assert found == [True, False] * 8
