"""Stages in full: which of them are taken for alike."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from autopar.options import PlanOptions
from autopar.planner import Search
from autopar.search.clock import Clock
from autopar.search.space import Frame, Grid
from autopar.solver import Assignment, Problem, Status
from autopar.tracing import trace
from cost_models import Cluster, CostModel


class HalfFrozen(nn.Module):
    """Eight layers alike, of which the first four are frozen; a gradient flows through them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(8))
        for layer in self.layers[:4]:
            layer.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


def test_a_stage_of_frozen_layers_is_not_like_one_of_trained_layers() -> None:
    graph = trace(HalfFrozen(), torch.ones(8, 16)).graph
    search = Search(graph, CostModel(Cluster.local(4)), PlanOptions(), Clock({}), lambda message: None)
    frame = Frame(Grid(4, (1,), ("free",), (0, 1, 2, 3)), 4, "gpipe", 4)
    starts = {operator.module: operator.id for operator in reversed(graph.operators)}
    cuts = [starts[f"layers.{index}.0"] for index in (2, 4, 6)]
    found = search.evaluator.evaluate(frame, search.graph_of(frame), cuts, ("whole",))
    frozen, trained = (stage.times.once_seconds for stage in found.stages[1:3])
    assert frozen == 0.0 < trained  # what the optimizer takes


def test_stages_alike_are_solved_once() -> None:
    model = HalfFrozen().requires_grad_(True)
    graph = trace(model, torch.ones(8, 16)).graph
    search = Search(graph, CostModel(Cluster.local(4)), PlanOptions(), Clock({}), lambda message: None)
    solved = []
    solve = search.evaluator.solve
    search.evaluator.solve = lambda problem: solved.append(problem) or solve(problem)  # type: ignore[func-returns-value]
    frame = Frame(Grid(4, (1,), ("free",), (0, 1, 2, 3)), 4, "gpipe", 4)
    starts = {operator.module: operator.id for operator in reversed(graph.operators)}
    cuts = [starts[f"layers.{index}.0"] for index in (2, 4, 6)]
    found = search.evaluator.evaluate(frame, search.graph_of(frame), cuts, ("whole",))
    assert found.fits and len(solved) == 3  # the first, both in the middle, the last
    assert found.stages[1].times == found.stages[2].times


def test_a_stage_that_fits_is_solved_without_recomputation_alone() -> None:
    """Also where the solver leaves a gap: recomputing could not make it faster."""
    graph = trace(HalfFrozen().requires_grad_(True), torch.ones(8, 16)).graph
    search = Search(graph, CostModel(Cluster.local(4)), PlanOptions(), Clock({}), lambda message: None)
    solved = []
    solve = search.evaluator.solve

    def nearly(problem: Problem) -> Assignment:
        solved.append(problem)
        found = solve(problem)
        return replace(found, lower_bound_seconds=0.99 * found.cost_seconds, status=Status.FEASIBLE)

    search.evaluator.solve = nearly
    frame = Frame(Grid(1, (4,), ("free",), (0,)), 1, "single", 1)
    found = search.evaluator.evaluate(frame, search.graph_of(frame), (), ("whole",))
    assert found.fits and len(solved) == 1
