"""What is too large for exact elimination: bounds stay bounds, and memory stays small."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.solver import Edge, Problem, Status, check, solve, splitting
from tests.unit.solver.random_problems import block_problem, small_problem, tightened


def dense_problem(num_nodes: int, num_choices: int) -> Problem:
    random = np.random.default_rng(num_nodes)
    pairs = [(source, target) for source in range(num_nodes) for target in range(source + 1, num_nodes)]
    edges = tuple(Edge(source, target, random.random((num_choices, num_choices))) for source, target in pairs)
    costs = tuple(random.random(num_choices) for _ in range(num_nodes))
    return Problem(costs, (None,) * num_nodes, edges, np.zeros(0))


@pytest.fixture
def tiny_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "_MOST_WORK", 0)
    monkeypatch.setattr(splitting, "_MOST_WORK_PER_OP", 20_100)
    monkeypatch.setattr(splitting, "_MOST_ENTRIES", 60)


@pytest.mark.usefixtures("tiny_limits")
def test_split_bounds_hold_against_the_oracle() -> None:
    for seed in range(60):
        problem = small_problem(seed)
        oracle, found = solve(problem, "exhaustive"), solve(problem)
        check(problem, found)
        assert (found.choices is None) == (oracle.choices is None)
        if oracle.choices is not None:
            assert found.lower_bound_seconds <= oracle.cost_seconds * (1 + 1e-9) <= found.cost_seconds * (1 + 2e-9)


@pytest.mark.parametrize("hubs", [(6, 5), (4, 3, 5)])
def test_hubs_are_split_and_still_solved(hubs: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    problem = block_problem(12, hubs=hubs, sizes=(4, 7))
    exact = solve(problem)
    assert exact.status is Status.OPTIMAL
    monkeypatch.setattr(splitting, "_MOST_WORK", 0)
    monkeypatch.setattr(splitting, "_MOST_WORK_PER_OP", 21_000)
    found = solve(problem)
    check(problem, found)
    assert found.lower_bound_seconds <= exact.cost_seconds * (1 + 1e-9)
    assert found.cost_seconds == pytest.approx(exact.cost_seconds, rel=0.01)
    limited = tightened(problem, 0.3)
    check(limited, solve(limited))


def test_a_dense_graph_gives_an_honest_bound() -> None:
    problem = dense_problem(12, 8)
    found = solve(problem)
    check(problem, found)
    assert found.choices is not None and found.lower_bound_seconds <= found.cost_seconds
