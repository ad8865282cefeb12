"""What random programs (``python -m tests.random_programs``) have found, each cut down to a model of a few lines.

Most were wrong counts of what is sent (law 1): the plan's list had a collective that the program did not issue.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.mesh import Mesh
from autopar.tracing import trace
from autopar.verifier import verify_traced
from tests.support.pipelines import random_pipeline
from tests.support.random_plans import random_plan

aten = torch.ops.aten


class NormOfInput(nn.Module):
    """No gradient flows into a batch norm's input: its backward pass sums nothing over the devices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).square().mean()


class WrittenOver(nn.Module):
    """No gradient reaches what is written over, so that nothing is sent for it in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(5, 8), nn.Linear(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        h, other = self.layer(x), self.other(x)
        return (aten.fill.Scalar(h, 0.7) * h * aten.fill.Tensor(h, other.mean())).mean()


class RoundedQuotient(nn.Module):
    """A quotient that is rounded has a gradient of zero, and autograd keeps the divisor all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.divisor = nn.Linear(4, 6), nn.Parameter(torch.rand(4, 6) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return (torch.div(h, self.divisor, rounding_mode="trunc") + h).sin().mean()


class ScaledInput(nn.Module):
    """A weight beside a tensor without gradient is not kept for backward: it is gathered once under ZeRO-3."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.mixed = nn.Parameter(torch.rand(4)), nn.Bilinear(4, 4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (4,), self.scale).square().mean() + self.mixed(x, x.sin()).square().mean()


MODELS = {
    "norm of input": (NormOfInput, (6, 3, 5)),
    "written over": (WrittenOver, (4, 5)),
    "rounded quotient": (RoundedQuotient, (4, 4)),
    "scaled input": (ScaledInput, (6, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_random_plans(name: str) -> None:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model, inputs = build().double().train(), {"x": torch.randn(shape, dtype=torch.float64)}
    traced = trace(model, inputs)
    for seed in range(4):
        mesh = Mesh((2,), ("data",)) if seed else Mesh((2, 2), ("data", "tensor"))
        verify_traced(model, traced, random_plan(traced.graph, mesh, seed), count_collectives=True).require()


class ForItsSize(nn.Module):
    """An input of which only the size is read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).view(like.shape[0], -1).square().mean()


def test_stages_take_an_input_that_no_operator_reads() -> None:
    model, inputs = ForItsSize(), {"x": torch.randn(4, 4), "like": torch.randn(4, 2)}
    traced = trace(model, inputs)
    cut = next(o.id for o in reversed(traced.graph.operators) if o.target == "aten.linear.default")
    plan = random_pipeline(traced.graph, (cut,), Mesh((1,), ("data",)), 0, "gpipe", 1)
    verify_traced(model, traced, plan, count_collectives=True).require()


class Squeezing(nn.Module):
    """Dims of size 1 are dropped, which in a micro-batch of one sample the batch is too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return (h.squeeze() * h.squeeze(0).squeeze(1)).square().mean()


def test_a_micro_batch_of_one_sample_keeps_its_batch_dim() -> None:
    model, inputs = Squeezing(), {"x": torch.randn(3, 1, 5)}
    traced = trace(model, inputs)
    plan = random_pipeline(traced.graph, (), Mesh((2,), ("data",)), 0, "single", 3)
    verify_traced(model, traced, plan, count_collectives=True).require()


class _Passing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * torch.tanh(x.detach())


class Passing(nn.Module):
    """Blocks of which backward needs nothing that they compute: nothing of them is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.blocks = nn.Linear(4, 6), nn.ModuleList(_Passing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        for block in self.blocks:
            h = block(h)
        return h.square().mean()


def test_what_backward_does_not_need_is_not_computed_again() -> None:
    model, inputs = Passing(), {"x": torch.randn(4, 4)}
    traced = trace(model, inputs)
    modes = set()
    for seed in range(5):
        plan = random_pipeline(traced.graph, (), Mesh((2,), ("data",)), seed, "single", 1)
        modes.update(mode for group in plan.stages[0].recompute.values() for mode in group)
        verify_traced(model, traced, plan, count_collectives=True).require()
    assert "full" in modes


class HalfAGrid(nn.Module):
    """Of a grid that is read in one direction alone, the other one's parameter has no gradient: none is summed for it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Parameter(torch.rand(2)), nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        _, columns = torch.meshgrid(self.rows, self.columns, indexing="ij")
        rows, _ = torch.broadcast_tensors(self.rows[:1], self.columns)
        return (x @ columns.cos().T).square().mean() + 0 * rows.detach().sum()


@pytest.mark.parametrize("seed", range(4))
def test_a_direction_of_a_grid_that_nobody_reads_has_no_gradient(seed: int) -> None:
    model, inputs = HalfAGrid(), {"x": torch.randn(4, 6)}
    traced = trace(model, inputs)
    plan = random_plan(traced.graph, Mesh((2,), ("data",)), seed)
    verify_traced(model, traced, plan, count_collectives=True).require()


class NormOfImage(nn.Module):
    """Instance norm keeps its weight repeated for every row, and not the parameter: also where space is split, it is gathered
    once under ZeRO-3."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).square().mean()


def test_a_norm_over_split_space_gathers_its_weight_once() -> None:
    torch.manual_seed(0)
    model, inputs = NormOfImage(), {"x": torch.randn(1, 4, 8)}
    traced = trace(model, inputs)
    plan = random_plan(traced.graph, Mesh((2,), ("data",)), 4)
    stage = plan.stages[0]  # the seed is one that splits space, with the weight under ZeRO-3
    assert (stage.operators["norm:instance_norm"].label, stage.parameters["norm.weight"].zero) == ("s0", 3)
    verify_traced(model, traced, plan, count_collectives=True).require()
