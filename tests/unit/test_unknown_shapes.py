"""What depends on the values of tensors in its shape: dropped where only assertions look at it, written in operators of fixed
shape where its use has one, refused with its line elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.errors import TraceError
from autopar.options import Parallelism
from autopar.planner import plan
from autopar.tracing import trace
from autopar.verifier import verify
from cost_models import Cluster

IDS = torch.tensor([[1, 2, 3, 1, 5], [2, 2, 2, 2, 1], [1, 1, 1, 3, 4], [2, 1, 2, 1, 2]])  # 2, 1, 3 and 2 ones
INPUTS = {"ids": IDS, "labels": torch.tensor([0, 1, 2, 0])}
Head = Callable[["Words", Tensor, Tensor], Tensor]


class Words(nn.Module):
    """Embedded words, a head that makes one row of each sample, a class."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.embedding, self.classes = nn.Embedding(9, 8), nn.Linear(8, 3)
        self.inner, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.head = head

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classes(self.head(self, self.embedding(ids), ids)), labels)


def asserted(model: Words, x: Tensor, ids: Tensor) -> Tensor:
    counts = ids.eq(1).sum(1)
    torch._check(counts.max().item() <= 9)
    torch._check(torch.unique_consecutive(counts).numel() > 0)
    return x.mean(1)


def reshaped_in_place(model: Words, x: Tensor, ids: Tensor) -> Tensor:
    weights = ids.float()
    alias = weights[:2]
    weights.unsqueeze_(2)
    weights.mul_(2.0)  # seen through the alias
    weights.transpose_(1, 2)
    return (weights @ x).squeeze(1) + alias.mean()


def last_selected(model: Words, x: Tensor, ids: Tensor) -> Tensor:
    return x[ids.eq(1), :].view(ids.shape[0], -1, 8)[:, -1, :]


def adapted(model: Words, x: Tensor, ids: Tensor) -> Tensor:
    h = x.mean(1)
    chosen = ids[:, 0] == 2
    result = h * 0.5
    rows = h[chosen]
    result[chosen] = rows + F.gelu(model.norm(model.inner(rows)))
    return result


@pytest.mark.parametrize("head", [asserted, reshaped_in_place, last_selected, adapted])
@pytest.mark.parametrize("axes", [{"data": 2}, {"tensor": 2}])
def test_uses_with_a_fixed_shape_equal_one_device(head: Head, axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = Words(head)
    made = plan(model, Cluster.local(2, memory_bytes=2**30, num_cores=2), INPUTS, parallelism=Parallelism(**axes))
    verify(model, made, INPUTS).require()


def number_used(model: Words, x: Tensor, ids: Tensor) -> Tensor:
    return x.mean(1) * ids.max().item()


def another_row(model: Words, x: Tensor, ids: Tensor) -> Tensor:
    return x[ids.eq(1)].view(ids.shape[0], -1, 8)[:, 0]


def mixed_rows(model: Words, x: Tensor, ids: Tensor) -> Tensor:
    h, chosen = x.mean(1), ids[:, 0] == 2
    result = h * 1.0
    result[chosen] = h[chosen].softmax(0)
    return result


def another_mask(model: Words, x: Tensor, ids: Tensor) -> Tensor:
    h = x.mean(1)
    result = h * 1.0
    result[ids[:, 0] == 1] = h[ids[:, 1] == 2]
    return result


def whole_batch_of_rows(model: Words, x: Tensor, ids: Tensor) -> Tensor:
    h, chosen = x.mean(1), ids[:, 0] == 2
    result = h * 1.0
    result[chosen] = F.layer_norm(h[chosen], h[chosen].shape)
    return result


@pytest.mark.parametrize("head", [number_used, another_row, mixed_rows, another_mask, whole_batch_of_rows])
def test_other_uses_are_refused_at_their_line(head: Any) -> None:
    with pytest.raises(TraceError, match=r"test_unknown_shapes.py:\d+ .*depends on the values"):
        trace(Words(head), INPUTS)
