"""``torch.cond``: an operator with two branches, computed replicated; other higher-order operators are refused by name."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop

import autopar
from autopar.codegen import generate
from autopar.costing import build, prepare
from autopar.graph import check
from autopar.mesh import Mesh
from autopar.micro_batches import coupling
from autopar.options import PlanOptions
from autopar.tracing import trace
from cost_models import Cluster, CostModel
from tests.support.random_plans import random_plan


class Choosing(nn.Module):
    """Two results of two branches, each with a parameter that the other does not read; ``sign`` says which is taken."""

    def __init__(self, sign: int, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 4)
        self.scale, self.shift = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.sign = sign

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.second(self.first(x).relu())

        def scaled(h: Tensor) -> tuple[Tensor, Tensor]:
            return F.relu(h.view(-1, 2, 2)).flatten(1) * self.scale, h.sum(0)

        def shifted(h: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(h) - self.shift, h.mean(0) * 2

        y, z = torch.cond(h.square().sum() * self.sign > 0, scaled, shifted, (h,))
        return {"loss": (y * y).mean() + 0.1 * z.sum(), "y": y}


def choosing(sign: int) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Choosing(sign).train(), {"x": torch.randn(6, 4)}


@pytest.mark.parametrize(("sign", "forced"), [(1, {"data": 2, "zero": 3}), (-1, {"pipeline": 2})], ids=str)
def test_equal_to_one_device_whichever_branch_is_taken(sign: int, forced: dict[str, int]) -> None:
    model, inputs = choosing(sign)
    plan = autopar.plan(model, Cluster.local(2), inputs, parallelism=autopar.Parallelism(**forced))
    autopar.verify(model, plan, inputs, count_collectives=True).require()


def test_equal_under_a_random_plan() -> None:
    model, inputs = choosing(-1)
    graph = trace(model, inputs).graph
    check(graph)
    plan = random_plan(graph, Mesh((2, 2), ("data", "tensor")), 0)
    autopar.verify(model, plan, inputs, count_collectives=True).require()


def test_the_program_has_a_function_for_each_branch() -> None:
    model, inputs = choosing(1)
    traced = trace(model, inputs)
    text = generate(random_plan(traced.graph, Mesh((2,), ("data",)), 0), traced.graph)
    assert re.search(r"cond\(\w+, chosen_if_true, chosen_if_false, \(", text), text
    assert "def chosen_if_true(x, x_2, x_3):" in text and ".tanh()" in text.partition("def chosen_if_false")[2]


def test_priced_by_the_dearer_branch() -> None:
    """The work of a branch counts, whichever of the two it is."""

    class Dear(nn.Module):
        def __init__(self, dear_first: bool) -> None:
            super().__init__()
            self.weight, self.dear_first = nn.Parameter(torch.randn(64, 64)), dear_first

        def forward(self, x: Tensor) -> Tensor:
            branches = [lambda x: x @ self.weight @ self.weight, torch.sin]
            return torch.cond(x.sum() > 0, *(branches if self.dear_first else branches[::-1]), (x,)).square().mean()

    found = []
    for dear_first in (True, False):
        graph = trace(Dear(dear_first), {"x": torch.randn(8, 64)}).graph
        mesh = Mesh((2,), ("data",))
        cluster = Cluster.homogeneous(num_nodes=1, devices_per_node=2)
        costed = build(prepare(graph), mesh, ("free",), CostModel(cluster), PlanOptions())
        choice = next(operator.id for operator in graph.operators if operator.target == "higher_order.cond")
        found.append(costed.operator_table(choice).flops[0])
    forward = 2 * 2 * 8 * 64 * 64
    assert found[0] == found[1] == 3 * forward - forward / 2, found  # the first factor has no gradient


def test_a_choice_by_the_whole_batch_is_made_in_one_piece() -> None:
    model, inputs = choosing(1)
    graph = trace(model, inputs).graph
    assert any("higher_order.cond" in reason for reason in coupling(graph)), coupling(graph)


class Refused(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        if self.kind == "loop":
            zero = torch.zeros((), dtype=torch.int64)
            _, h = while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h * 0.5), (zero, h))
        elif self.kind == "dropout":
            h = torch.cond(h.sum() > 0, lambda h: F.dropout(h, 0.5), torch.sin, (h,))
        return h.square().mean()


@pytest.mark.parametrize(
    ("kind", "words"),
    [("loop", r"test_branches.py:\d+ it uses the higher-order operator while_loop"),
     ("dropout", r"test_branches.py:\d+ it draws random numbers \(aten.dropout.default\) in a branch of torch.cond")],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused_with_its_line(kind: str, words: str) -> None:
    with pytest.raises(autopar.TraceError, match=words):
        trace(Refused(kind), {"x": torch.randn(6, 4)})
