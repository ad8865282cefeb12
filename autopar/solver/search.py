"""The two methods for real problems, end to end: what every answer goes through besides the optimisation itself.

Problem -> network -> structure (blocks) -> domains -> multipliers -> branch and bound -> variants -> Assignment
Problem -> `ilp.solve_ilp`                                                            -> variants -> Assignment
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from autopar.solver.branch import LEAST_EVALUATIONS, branch_and_bound
from autopar.solver.domains import NothingLeft, consistent_domains
from autopar.solver.elimination import Program
from autopar.solver.ilp import solve_ilp
from autopar.solver.memory import Lagrangian, Limits, OutOfTime, Point
from autopar.solver.network import IntArray, network_of
from autopar.solver.problem import Assignment, FloatArray, Problem, Status, answer, no_answer
from autopar.solver.reduction import reduced
from autopar.solver.repetition import Structure, plain_structure, structure_of
from autopar.solver.splitting import within_limits
from autopar.solver.variants import Choices, limit_variants


@dataclass(frozen=True, eq=False)
class _Found:
    """What a search knows at its end; `points` are other assignments that it met."""

    best: Choices | None
    lower_bound_seconds: float
    points: tuple[Choices, ...] = ()
    smallest_budgets_bytes: tuple[float, ...] | None = None
    message: str = ""


def solve_elimination(
    problem: Problem, limits: Limits, time_limit_seconds: float | None = None, near: float | None = None
) -> Assignment:
    """Elimination with multipliers, splicing, pruning, and branch and bound on the rest; see `memory`, `branch`."""
    stop_at = math.inf if time_limit_seconds is None else time.monotonic() + time_limit_seconds
    found = _search(problem, limits, stop_at, near)
    if found.best is None:
        status = Status.INFEASIBLE if found.lower_bound_seconds == math.inf else Status.TIMED_OUT
        return no_answer(status, found.lower_bound_seconds, found.message, found.smallest_budgets_bytes)
    enough = found.lower_bound_seconds * (1 + limits.gap_target)
    return _within_variants(problem, [found.best, *found.points], found.lower_bound_seconds, found.message, enough)


@dataclass(frozen=True, eq=False)
class _Read:
    """A problem without its budgets, ready to be solved."""

    structure: Structure
    domains: dict[int, IntArray]
    program: Program


class _Tables:
    """The tables of a problem, the same as another's if they are the same objects."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        tables = (problem.node_costs_seconds, problem.node_memory_bytes, problem.edges, problem.repeats)
        self._key = tuple(map(id, tables))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Tables) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@lru_cache(maxsize=2)
def _read(tables: _Tables) -> _Read:
    """Problems that differ only in their budgets, as those of one stage in less and less memory, are read once."""
    problem = tables.problem
    network = network_of(problem)
    structure = structure_of(problem, network) if problem.repeats else plain_structure(problem, network)
    domains = consistent_domains(problem, structure)
    return _Read(structure, domains, within_limits(structure, domains))


def _search(problem: Problem, limits: Limits, stop_at: float, near: float | None = None) -> _Found:
    try:
        read = _read(_Tables(problem))
    except NothingLeft as nothing:
        return _Found(None, math.inf, (), None, str(nothing))
    state = Lagrangian(problem, read.structure, read.domains, limits, stop_at, read.program)
    smallest: tuple[float, ...] | None = None
    message = ""
    try:
        known = near is not None and problem.num_rows == 1 and state.bracket_near(near)
        if not known and state.dual(np.zeros(problem.num_rows)) == math.inf:
            return _Found(None, math.inf, (), None, "no combination of choices is offered")
        if not state.closed and not _is_good_enough(state):
            state.settle()
            if not _fits_at_once(state):
                bounds, smallest = state.smallest_budgets()
                slack = 1e-12 * np.abs(state.budgets)
                over = np.flatnonzero(np.array(bounds) > state.budgets + slack).tolist()
                if over:
                    facts = ", ".join(f"row {row} needs {smallest[row]:g}, has {state.budgets[row]:g}" for row in over)
                    return _Found(None, math.inf, (), smallest, f"memory budgets are too small, in bytes: {facts}")
            _rounds(state)
        if not state.closed:
            message = _finish(state)
    except OutOfTime:
        message = "stopped at the time limit"
    best = None if state.best is None else tuple(state.best.tolist())
    points = tuple(tuple(point.choices.tolist()) for point in state.points)
    lower = math.inf if best is None and state.lower == math.inf else state.lower
    return _Found(best, lower, points, smallest, message)


def _fits_at_once(state: Lagrangian) -> bool:
    """Whether something fits at the first multiplier, in a problem so large that a probe for the least bytes is dear."""
    if state.problem.num_rows == 1 and len(state.network.edges) > state.limits.ilp_pairs:
        state.bracket(most_raises=1)
    return any(state.fits(point.totals) for point in state.points)


def _is_good_enough(state: Lagrangian) -> bool:
    """Whether the gap is within its target, in a problem that is too large to be solved to the end."""
    return state.narrow and len(state.network.edges) > state.limits.ilp_pairs


def _rounds(state: Lagrangian) -> None:
    """Ascend, splice, tighten and prune, until the gap is good enough for the problem's size or nothing changes any more."""
    for _ in range(state.limits.rounds):
        split, gap = bool(state.oracle.program.copies), state.upper - state.lower
        settled = state.ascend(state.limits.probes)
        if not state.closed:
            state.improve()
        if state.closed or _is_good_enough(state):
            return
        if split:
            state.tighten()
        shrunk = state.prune()
        promising = split and (not state.oracle.program.copies or state.upper - state.lower < 0.95 * gap)
        if not shrunk and settled and not promising:
            return


def _finish(state: Lagrangian) -> str:
    """Close the gap on the choices that are left: branch and bound, then the integer program if it is small."""
    limits, problem = state.limits, state.problem
    domains = tuple(state.domains[role] for role in state.structure.roles)
    most_ops = limits.branch_ops if state.narrow else limits.wide_branch_ops
    if sum(domain.size > 1 for domain in domains) * LEAST_EVALUATIONS > most_ops:
        return "stopped at the limits of the search"
    small = reduced(problem, domains)
    constant = float(small.constant[0])
    if math.isfinite(state.upper):
        known = None if state.best is None else small.shrink(state.best.tolist())
        closed = branch_and_bound(
            small.problem, known, state.upper - constant, state.at, limits, most_ops, state.stop_at
        )
        if closed.better is not None:
            _accept(state, small.expand(closed.better))
        state.lower = max(state.lower, min(state.upper, closed.lower_bound_seconds + constant))
    pairs = sum(edge.costs_seconds.size for edge in small.problem.edges)
    if state.closed or state.narrow or pairs > limits.ilp_pairs:
        return "" if state.closed else "stopped at the limits of the search"
    left = None if state.stop_at == math.inf else max(0.01, state.stop_at - time.monotonic())
    found = solve_ilp(problem, domains, limits.ilp_nodes, left)
    if found.choices is not None:
        _accept(state, found.choices)
    if found.status in (Status.OPTIMAL, Status.INFEASIBLE):
        state.lower = state.upper
    else:
        state.lower = max(state.lower, min(state.upper, found.lower_bound_seconds))
    return found.message


def _accept(state: Lagrangian, choices: Choices) -> None:
    array = np.array(choices, dtype=np.int64)
    state.offer(Point(array, state.network.totals(array)))


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


def _within_variants(
    problem: Problem, known: list[Choices], lower_bound: float, message: str, enough_seconds: float = -math.inf
) -> Assignment:
    """The answer `known[0]`, or if it has too many variants of a repeat, a restricted one; the bound stays."""
    if problem.within_variants(known[0]):
        return answer(problem, known[0], lower_bound, message)
    chosen = limit_variants(problem, known, _solve_small, enough_seconds)
    if chosen is None:
        return no_answer(Status.TIMED_OUT, lower_bound, "no choices were found that keep to the limit on variants")
    return answer(problem, chosen, lower_bound, message or "restricted to the limit on variants")


def _solve_small(problem: Problem) -> Choices | None:
    return _search(problem, Limits(branch_ops=0, wide_branch_ops=0, ilp_pairs=0), math.inf).best
