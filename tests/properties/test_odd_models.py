"""Models that lend shapes, permute dims, read memory as complex numbers, count ids: equal under any legal plan (laws 1, 2)."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.mesh import Mesh
from autopar.options import Parallelism, PlanOptions
from autopar.planner import plan_graph
from autopar.tracing import Traced, trace
from autopar.verifier import verify
from cost_models import Cluster
from tests.support.random_plans import random_plan


class Lending(nn.Module):
    """Tensors that only lend their shape; of tensors broadcast together not all are used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        h = F.normalize(self.layer(x), dim=-1)
        wide, _ = torch.broadcast_tensors(self.scale, h)
        return (self.scale.expand_as(h) * x).square().mean() + (h.view_as(x) * x).sum() + wide.sin().sum()


class Permuting(nn.Module):
    """Channels first and last by turns: views of tensors that are in order only in the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.layer = nn.Conv2d(4, 8, 3, padding=1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.convolution(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        rows = y.permute(0, 2, 3, 1).view(x.shape[0], -1, 8)
        return rows.square().mean() + y.relu().permute(0, 2, 3, 1).view(-1).square().mean()


class Rotating(nn.Module):
    """Pairs of numbers read as complex ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)
        self.register_buffer("turns", torch.polar(torch.ones(5, 4), torch.rand(5, 4)))

    def forward(self, x: Tensor) -> Tensor:
        pairs = self.layer(x).view(x.shape[0], 5, 2, 8).reshape(x.shape[0], 5, 2, 4, 2)
        turned = torch.view_as_complex(pairs) * self.get_buffer("turns")[None, :, None]
        return torch.view_as_real(turned).flatten(3).square().mean()


class Counting(nn.Module):
    """An embedding whose gradient is divided by how often each id occurs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8, scale_grad_by_freq=True, padding_idx=3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids).square().sum()


MODELS = {
    "lending": (Lending, {"x": torch.randn(6, 8)}),
    "permuting": (Permuting, {"x": torch.randn(6, 4, 2, 4)}),
    "rotating": (Rotating, {"x": torch.randn(6, 5, 8)}),
    "counting": (Counting, {"ids": torch.tensor([[1, 1, 1, 2], [3, 4, 4, 7], [8, 8, 11, 0], [1, 5, 6, 9]])}),
}


@cache
def traced(name: str) -> tuple[nn.Module, dict[str, Tensor], Traced]:
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    model = build().train()
    return model, inputs, trace(model, inputs)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_random_plan(name: str, sizes: tuple[int, ...], seed: int) -> None:
    model, inputs, found = traced(name)
    plan = random_plan(found.graph, Mesh(sizes, ("data", "tensor")[: len(sizes)]), seed)
    verify(model, plan, inputs, count_collectives=True).require()


class Transposed(nn.Module):
    """A parameter that is no contiguous tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 12).t())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).square().mean() + self.weight.reshape(-1).sin().sum()


def test_a_parameter_that_is_not_contiguous_is_gathered_as_often_as_planned() -> None:
    model, inputs = Transposed(), {"x": torch.randn(6, 8)}
    options = PlanOptions(parallelism=Parallelism(data=2, zero=3, pipeline=1, micro_batch_size=6))
    plan = plan_graph(trace(model, inputs).graph, Cluster.local(2), options)
    verify(model, plan, inputs, count_collectives=True).require()
