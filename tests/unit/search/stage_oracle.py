"""A stage's optimum by plain means: an ILP for every division of blocks and every amount that may be held for a moment."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from autopar.costing import Costed
from autopar.search.stages import StageSolver
from autopar.solver import Problem, solve

Held = list[tuple[int, np.ndarray]]  # nodes with the bytes that each of their choices holds for a moment


def least_stage_seconds(solver: StageSolver) -> float:
    """The fastest way to run the stage that fits; infinite where nothing does."""
    available = solver.site.available_bytes
    return min(_least_seconds(solver.costed(counts), available) for counts in solver.allowed())


def _least_seconds(costed: Costed, available_bytes: float) -> float:
    """The least over how much the largest operator, and the largest gathered parameters, may hold beside what is kept."""
    least = math.inf
    operators, parameters = _held(costed)
    for most in _amounts(operators):
        for gathered in _amounts(parameters):
            budget = available_bytes - most - gathered
            if budget >= 0:
                found = solve(_restricted(costed.problem, [(operators, most), (parameters, gathered)], budget), "ilp")
                least = min(least, found.cost_seconds if found.choices is not None else math.inf)
    return least


def _held(costed: Costed) -> tuple[Held, Held]:
    graph, nodes = costed.prepared.graph, costed.nodes
    operators = [(nodes[op.id], costed.operator_table(op.id).transient_bytes) for op in graph.operators]
    parameters = [(nodes[p.value], 2.0 * costed.parameter_table(p.value).transient_bytes) for p in graph.parameters]
    return operators, parameters


def _amounts(held: Held) -> Iterator[float]:
    """Every amount that the largest of these can be, from the least that some choice of each allows."""
    least = max((float(num_bytes.min()) for _, num_bytes in held), default=0.0)
    found = {least, *(float(value) for _, num_bytes in held for value in num_bytes if value > least)}
    return iter(sorted(found))


def _restricted(problem: Problem, limits: list[tuple[Held, float]], budget_bytes: float) -> Problem:
    costs = list(problem.node_costs_seconds)
    for held, most in limits:
        for node, num_bytes in held:
            costs[node] = np.where(num_bytes <= most, costs[node], np.inf)
    return replace(problem, node_costs_seconds=tuple(costs), memory_budgets_bytes=np.array([budget_bytes]))
