"""Blocks eliminated once and composed give what plain elimination of the whole graph gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.errors import InputError
from autopar.solver import Edge, Problem, Repeat, Status, check, solve
from autopar.solver.elimination import compile_program
from autopar.solver.network import network_of
from autopar.solver.repetition import structure_of
from tests.unit.solver.random_problems import block_problem, tightened


@pytest.mark.parametrize("num_instances", [1, 2, 3, 7, 96])
@pytest.mark.parametrize("hubs", [(), (3,), (3, 4)])
def test_composition_equals_plain_elimination(num_instances: int, hubs: tuple[int, ...]) -> None:
    problem = block_problem(num_instances, hubs=hubs, seed=num_instances)
    composed, plain = solve(problem), solve(replace(problem, repeats=()))
    check(problem, composed)
    assert composed.status is plain.status is Status.OPTIMAL
    assert composed.cost_seconds == pytest.approx(plain.cost_seconds, rel=1e-9)


def test_a_block_is_computed_once() -> None:
    ops = []
    for num_instances in (40, 80):
        problem = block_problem(num_instances)
        network = network_of(problem)
        structure = structure_of(problem, network)
        domains = {role: np.arange(network.sizes[role]) for role in set(structure.roles)}
        ops.append(len(compile_program(structure, domains).recorder.ops))
    assert ops[1] <= ops[0] + 45, "only the chain of frontiers may grow, by at most one op per instance"


@pytest.mark.parametrize("num_instances", [3, 12])
def test_memory_with_blocks(num_instances: int) -> None:
    problem = tightened(block_problem(num_instances), 0.4)
    composed, plain = solve(problem), solve(replace(problem, repeats=()))
    check(problem, composed)
    assert max(composed.lower_bound_seconds, plain.lower_bound_seconds) <= min(
        composed.cost_seconds, plain.cost_seconds
    ) * (1 + 1e-9)
    assert composed.gap < 0.01


@pytest.mark.parametrize("max_variants", [1, 2, 4])
def test_variants_are_limited_and_the_gap_shows_it(max_variants: int) -> None:
    free = tightened(block_problem(12, seed=5), 0.4)
    repeats = (Repeat(free.repeats[0].instances, max_variants),)
    problem = replace(free, repeats=repeats)
    found = solve(problem)
    check(problem, found)
    assert found.choices is not None
    assert problem.variants_of(found.choices)[0] <= max_variants
    assert found.lower_bound_seconds == pytest.approx(solve(free).lower_bound_seconds, rel=0.02)


def test_variants_against_the_oracle() -> None:
    for seed in range(20):
        problem = block_problem(3, num_body=3, num_leaves=0, sizes=(2, 3), hubs=(2,), seed=seed, max_variants=1)
        oracle, found = solve(problem, "exhaustive"), solve(problem)
        check(problem, found)
        assert found.cost_seconds == pytest.approx(oracle.cost_seconds, rel=1e-9)
        assert found.lower_bound_seconds == pytest.approx(oracle.lower_bound_seconds, rel=1e-9)


def test_parallel_branches_need_not_chain() -> None:
    random = np.random.default_rng(0)
    table, read, write = random.random(3), random.random((4, 3)), random.random((3, 4))
    costs = (random.random(4), *(table for _ in range(6)), random.random(4))
    edges = tuple(Edge(0, node, read) for node in range(1, 7)) + tuple(Edge(node, 7, write) for node in range(1, 7))
    problem = Problem(costs, (None,) * 8, edges, np.zeros(0), (Repeat(tuple((n,) for n in range(1, 7))),))
    found = solve(problem)
    check(problem, found)
    assert found.cost_seconds == pytest.approx(solve(problem, "exhaustive").cost_seconds)


def test_other_surroundings_are_no_error() -> None:
    problem = block_problem(5)
    extra = Edge(problem.repeats[0].instances[2][1], problem.num_nodes - 1, np.ones((2, 5)))
    size = problem.node_costs_seconds[extra.source].size
    extra = replace(extra, costs_seconds=np.random.default_rng(1).random((size, 5)))
    problem = replace(problem, edges=(*problem.edges, extra))
    found = solve(problem)
    check(problem, found)
    assert found.cost_seconds == pytest.approx(solve(replace(problem, repeats=())).cost_seconds, rel=1e-9)


def test_a_false_promise_names_the_nodes() -> None:
    problem = block_problem(4)
    instance = problem.repeats[0].instances[2]
    costs = list(problem.node_costs_seconds)
    costs[instance[1]] = costs[instance[1]] + 1.0
    named = tuple(f"n{node}" for node in range(problem.num_nodes))
    with pytest.raises(InputError, match=f"'n{instance[1]}'"):
        solve(replace(problem, node_costs_seconds=tuple(costs), names=named))
    missing = next(e for e in problem.edges if e.source == instance[0] and e.target == instance[1])
    with pytest.raises(InputError, match=f"'n{instance[0]}'"):
        solve(replace(problem, edges=tuple(e for e in problem.edges if e is not missing), names=named))
