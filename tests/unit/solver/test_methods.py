"""Elimination = ILP = exhaustive search on small problems, and certificates on large ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.errors import InputError
from autopar.solver import Assignment, Edge, Problem, Status, check, solve
from tests.unit.solver.random_problems import chain_problem, small_problem, tightened


def assert_methods_agree(problem: Problem) -> Assignment:
    oracle = solve(problem, "exhaustive")
    check(problem, oracle)
    for method in ("ilp", "elimination", "auto"):
        found = solve(problem, method)
        check(problem, found)
        assert found.status is oracle.status, (method, found, oracle)
        if oracle.choices is not None:
            assert found.cost_seconds == pytest.approx(oracle.cost_seconds, rel=1e-9, abs=1e-12)
        assert found.smallest_budgets_bytes == oracle.smallest_budgets_bytes
    return oracle


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_methods_agree_on_small_problems(first: int) -> None:
    for seed in range(first, first + 20):
        assert_methods_agree(small_problem(seed))


@pytest.mark.parametrize("near", [1e-9, 1e-4, 1e-3, 1.0])
def test_a_multiplier_to_start_from_changes_no_answer(near: float) -> None:
    met = set()
    for seed in range(60):
        problem = small_problem(seed)
        if problem.num_rows != 1:
            continue
        oracle, found = solve(problem, "exhaustive"), solve(problem, near=near)
        check(problem, found)
        assert found.status is oracle.status
        assert found.cost_seconds == pytest.approx(oracle.cost_seconds, rel=1e-9, abs=1e-12)
        assert found.smallest_budgets_bytes == oracle.smallest_budgets_bytes
        met.add(found.status)
    assert met == {Status.OPTIMAL, Status.INFEASIBLE}


@pytest.mark.slow
def test_methods_agree_on_500_problems() -> None:
    statuses = {assert_methods_agree(small_problem(seed)).status for seed in range(500)}
    assert statuses == {Status.OPTIMAL, Status.INFEASIBLE}


@pytest.mark.parametrize("num_nodes", [30, 300, pytest.param(3000, marks=pytest.mark.slow)])
def test_certificates_hold_on_large_problems(num_nodes: int) -> None:
    free = solve(chain_problem(num_nodes))
    assert free.status is Status.OPTIMAL
    problem = tightened(chain_problem(num_nodes), 0.3)
    found = solve(problem)
    check(problem, found)
    assert found.cost_seconds > free.cost_seconds
    assert found.gap < 0.005


def test_two_memory_rows_on_a_chain() -> None:
    chain = chain_problem(60)
    random = np.random.default_rng(1)
    memory = tuple(
        np.concatenate([used, np.floor(random.random(used.shape) * 1e6)])
        for used in chain.node_memory_bytes
        if used is not None
    )
    problem = tightened(replace(chain, node_memory_bytes=memory, memory_budgets_bytes=np.full(2, np.inf)), 0.3)
    found = solve(problem)
    check(problem, found)
    assert found.gap < 0.02


def test_same_input_gives_same_output() -> None:
    problem = tightened(chain_problem(40, seed=3), 0.4)
    assert repr(solve(problem)) == repr(solve(problem))


def test_of_equal_choices_the_first_is_taken() -> None:
    problem = Problem((np.zeros(3), np.zeros(2)), (None, None), (Edge(0, 1, np.zeros((3, 2))),), np.zeros(0))
    assert solve(problem).choices == (0, 0)


def test_shapes_that_are_easily_forgotten() -> None:
    one, none = np.array([2.0]), np.zeros(0)
    assert solve(Problem((), (), (), none)).choices == ()
    assert solve(Problem((one, one), (None, None), (), none)).cost_seconds == 4.0
    matrix = np.array([[5.0, 1.0], [1.0, 0.0]])
    twice = (Edge(0, 1, matrix), Edge(1, 0, matrix), Edge(0, 0, np.array([[0.0, 9.0], [9.0, 7.0]])))
    assert_methods_agree(Problem((np.zeros(2), np.zeros(2)), (None, None), twice, none))
    negative = Problem((np.array([-1.0, -3.0]),), (np.array([[0.0, 4.0]]),), (), np.array([3.0]))
    assert assert_methods_agree(negative).choices == (0,)


def test_absent_choices_are_named() -> None:
    gone = np.array([np.inf, np.inf])
    problem = Problem((np.zeros(2), gone), (None, None), (), np.zeros(0), (), ("first", "second"))
    found = solve(problem)
    assert found.status is Status.INFEASIBLE and "second" in found.message
    closed = Edge(0, 1, np.full((2, 2), np.inf))
    found = solve(Problem((np.zeros(2), np.zeros(2)), (None, None), (closed,), np.zeros(0), (), ("first", "second")))
    assert found.status is Status.INFEASIBLE and "'first'" in found.message and "'second'" in found.message


def test_infeasible_memory_says_the_smallest_budget() -> None:
    problem = Problem((np.array([0.0, 1.0]),), (np.array([[9.0, 5.0]]),), (), np.array([4.0]))
    found = assert_methods_agree(problem)
    assert found.status is Status.INFEASIBLE and found.smallest_budgets_bytes == (5.0,)
    assert solve(replace(problem, memory_budgets_bytes=np.array([5.0]))).choices == (1,)


def test_check_notices_false_statements() -> None:
    problem = Problem((np.array([1.0, 2.0]),), (np.array([[1.0, 5.0]]),), (), np.array([4.0]))
    good = solve(problem)
    check(problem, good)
    for wrong in (
        replace(good, cost_seconds=0.5, lower_bound_seconds=0.5),
        replace(good, choices=(1,), cost_seconds=2.0, memory_bytes=(5.0,), lower_bound_seconds=2.0),
        replace(good, memory_bytes=(0.0,)),
        replace(good, choices=(2,)),
        replace(good, lower_bound_seconds=1.1),
    ):
        with pytest.raises(InputError):
            check(problem, wrong)


def test_malformed_problems_are_refused() -> None:
    zeros = np.zeros(2)
    with pytest.raises(InputError, match="NaN"):
        Problem((np.array([np.nan]),), (None,), (), np.zeros(0))
    with pytest.raises(InputError, match="shape"):
        Problem((zeros, zeros), (None, None), (Edge(0, 1, np.zeros((2, 3))),), np.zeros(0))
    with pytest.raises(InputError, match="leaves"):
        Problem((zeros,), (None,), (Edge(0, 1, np.zeros((2, 2))),), np.zeros(0))
    with pytest.raises(InputError, match="method"):
        solve(Problem((zeros,), (None,), (), np.zeros(0)), "guess")
