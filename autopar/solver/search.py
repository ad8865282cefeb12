"""The two methods for real problems, end to end: what every answer goes through besides the optimisation itself.

    Problem -> network -> structure (blocks) -> domains -> `memory.search` -> limit on variants -> Assignment
    Problem -> `ilp.solve_ilp`                                            -> limit on variants -> Assignment
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from autopar.solver.domains import NothingLeft, consistent_domains
from autopar.solver.ilp import solve_ilp
from autopar.solver.memory import Found, Limits, search
from autopar.solver.network import network_of
from autopar.solver.problem import Assignment, FloatArray, Problem, Status, answer, no_answer
from autopar.solver.repetition import plain_structure, structure_of
from autopar.solver.variants import Choices, limit_variants


def solve_elimination(problem: Problem, limits: Limits) -> Assignment:
    """Elimination with multipliers, splicing, pruning and a small integer program; see `memory`."""
    try:
        found = _search(problem, limits)
    except NothingLeft as nothing:
        return no_answer(Status.INFEASIBLE, math.inf, str(nothing))
    if found.best is None:
        status = Status.INFEASIBLE if found.lower_bound_seconds == math.inf else Status.TIMED_OUT
        return no_answer(status, found.lower_bound_seconds, found.message, found.smallest_budgets_bytes)
    best = tuple(int(choice) for choice in found.best)
    known = [best, *(tuple(point.choices.tolist()) for point in found.points)]
    return _within_variants(problem, known, found.lower_bound_seconds, found.message)


def _search(problem: Problem, limits: Limits) -> Found:
    network = network_of(problem)
    structure = structure_of(problem, network) if problem.repeats else plain_structure(problem, network)
    return search(problem, structure, consistent_domains(problem, structure), limits)


def solve_integer(problem: Problem, time_limit_seconds: float | None) -> Assignment:
    """The integer program alone."""
    found = solve_ilp(problem, time_limit_seconds=time_limit_seconds)
    if found.status is Status.INFEASIBLE:
        smallest = _smallest_by_ilp(problem)
        return found if smallest is None else replace(found, smallest_budgets_bytes=smallest)
    if found.choices is None:
        return found
    return _within_variants(problem, [found.choices], found.lower_bound_seconds, found.message)


def _smallest_by_ilp(problem: Problem) -> tuple[float, ...] | None:
    """Per row the least total, with the row's bytes in place of the costs; None if nothing is offered at all."""
    smallest = []
    for row in range(problem.num_rows):

        def bytes_of(costs: FloatArray, memory: FloatArray | None, row: int = row) -> FloatArray:
            used = np.zeros(costs.shape) if memory is None else memory[row]
            return np.where(np.isinf(costs), np.inf, used)

        nodes = tuple(bytes_of(c, m) for c, m in zip(problem.node_costs_seconds, problem.node_memory_bytes))
        edges = tuple(
            replace(edge, costs_seconds=bytes_of(edge.costs_seconds, edge.memory_bytes), memory_bytes=None)
            for edge in problem.edges
        )
        found = solve_ilp(Problem(nodes, (None,) * len(nodes), edges, np.zeros(0), (), problem.names))
        if found.choices is None:
            return None
        smallest.append(found.cost_seconds)
    return tuple(smallest) if smallest else None


def _within_variants(problem: Problem, known: list[Choices], lower_bound: float, message: str) -> Assignment:
    """The answer `known[0]`, or if it has too many variants of a repeat, a restricted one; the bound stays."""
    if problem.within_variants(known[0]):
        return answer(problem, known[0], lower_bound, message)
    chosen = limit_variants(problem, known, _solve_small)
    if chosen is None:
        return no_answer(Status.TIMED_OUT, lower_bound, "no choices were found that keep to the limit on variants")
    return answer(problem, chosen, lower_bound, message or "restricted to the limit on variants")


def _solve_small(problem: Problem) -> Choices | None:
    try:
        found = _search(problem, Limits(small_ilp_pairs=0, ilp_pairs=0))
    except NothingLeft:
        return None
    return None if found.best is None else tuple(int(choice) for choice in found.best)
