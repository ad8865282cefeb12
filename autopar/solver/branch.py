"""Branch and bound on what pruning leaves, with the Lagrangian dual as its bound.

    node: domains, and the multipliers and points of its parent                         `_Node`
    bound: max over lambda of L on these domains; prune choices as at the root          `_bounded`
    branch: on a node where the two solutions that bracket the budget differ            `_branches`

The linear relaxation of the integer program is weaker than the dual that elimination evaluates (which is exact on the
graph, whatever its cycles) and takes longer, so this closes gaps that the integer program takes many times as long
for. Best bound first; the limit is counted in elimination ops.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from autopar.solver.domains import NothingLeft, consistent_domains
from autopar.solver.memory import Lagrangian, Limits, Point
from autopar.solver.network import IntArray, network_of
from autopar.solver.problem import FloatArray, Problem
from autopar.solver.repetition import Structure, plain_structure
from autopar.solver.splitting import Oracle

Domains = dict[int, IntArray]

# One node takes some ten probes of the bound and as much for pruning; a search of fewer than a few nodes is in vain.
LEAST_EVALUATIONS = 40


@dataclass(frozen=True, eq=False)
class _Node:
    domains: Domains
    multipliers: FloatArray
    points: tuple[Point, ...]


@dataclass(frozen=True, eq=False)
class Closed:
    """The bound that was proved, and a better assignment than the one known if there is one."""

    lower_bound_seconds: float
    better: tuple[int, ...] | None


def branch_and_bound(
    problem: Problem,
    known: tuple[int, ...] | None,
    upper: float,
    multipliers: FloatArray,
    limits: Limits,
    most_ops: int,
    stop_at: float,
) -> Closed:
    """Prove `upper`, the cost of a known assignment, or find a better one.

    `known` is that assignment where it is among this problem's, `multipliers` are those to begin with. The problem has
    no repeats (see `reduction`).
    """
    network = network_of(problem)
    structure = plain_structure(problem, network)
    try:
        domains = consistent_domains(problem, structure)
    except NothingLeft:
        return Closed(upper, None)
    if LEAST_EVALUATIONS * Oracle(structure, domains).ops_per_evaluation > most_ops:
        return Closed(-math.inf, None)
    tree = _Tree(problem, structure, limits, stop_at, upper)
    points: tuple[Point, ...] = ()
    if known is not None:
        choices = np.array(known, dtype=np.int64)
        points = (Point(choices, network.totals(choices)),)
    heap: list[tuple[float, int, _Node]] = [(-math.inf, 0, _Node(domains, multipliers, points))]
    count = 1
    while heap and tree.num_ops < most_ops:
        bound, _, node = heapq.heappop(heap)
        if bound >= tree.cut:
            heap.clear()
            break
        for child_bound, child in tree.expand(node):
            heapq.heappush(heap, (max(bound, child_bound), count, child))
            count += 1
    lower = min((entry[0] for entry in heap), default=tree.upper)
    better = None if tree.best is None else tuple(int(choice) for choice in tree.best)
    return Closed(min(lower, tree.upper), better)


class _Tree:
    """What the nodes of one search share: the incumbent and the count of work."""

    best: IntArray | None

    def __init__(self, problem: Problem, structure: Structure, limits: Limits, stop_at: float, upper: float) -> None:
        self.problem, self.structure, self.limits, self.stop_at = problem, structure, limits, stop_at
        self.upper, self.best = upper, None
        self.num_ops = 0

    @property
    def cut(self) -> float:
        """A bound from here on is as good as proved."""
        return self.upper - 1e-10 * abs(self.upper)

    def expand(self, node: _Node) -> list[tuple[float, _Node]]:
        """The children of a node with their bounds, none if it is closed; the incumbent may improve."""
        state = Lagrangian(self.problem, self.structure, node.domains, self.limits, self.stop_at)
        state.upper = self.upper
        state.points = [point for point in node.points if state.in_domains(point)]
        still_open = self._bounded(state, node.multipliers)
        self.num_ops += state.num_ops
        if state.upper < self.upper:
            self.upper, self.best = state.upper, state.best
        if not still_open or state.lower >= self.cut:
            return []
        return [
            (state.lower, _Node({**state.domains, role: domain}, state.at, tuple(state.points)))
            for role, domain in self._branches(state)
        ]

    def _bounded(self, state: Lagrangian, multipliers: FloatArray) -> bool:
        """Bound and prune; False if nothing better is in these domains."""
        if state.dual(multipliers) >= self.cut:
            return False
        if not any(state.fits(point.totals) for point in state.points):
            smallest, _ = state.smallest_budgets()
            if any(least > budget + 1e-12 * abs(budget) for least, budget in zip(smallest, state.budgets)):
                return False
        if all(state.fits(point.totals) for point in state.points):
            state.dual(np.zeros(self.problem.num_rows))
        for _ in range(3):
            settled = state.ascend(6)
            if state.closed or state.lower >= self.cut:
                return False
            state.improve(3)
            if not state.prune() and settled:
                break
        return not state.closed and state.lower < self.cut

    def _branches(self, state: Lagrangian) -> list[tuple[int, IntArray]]:
        """A node and the parts of its domain: where the best two points differ, most in the bytes that are scarce."""
        best = sorted(state.points, key=state.excess)
        first = best[0] if best else None
        second = next((p for p in best if state.fits(p.totals) != state.fits(best[0].totals)), first)
        sizes = {node: domain.size for node, domain in state.domains.items() if domain.size > 1}
        if not sizes:
            return []
        scores = {}
        for node in sizes:
            if first is None or second is None or first.choices[node] == second.choices[node]:
                continue
            memory = self.problem.node_memory_bytes[node]
            change = 0.0
            if memory is not None:
                change = float(np.abs(state.at @ (memory[:, first.choices[node]] - memory[:, second.choices[node]])))
            scores[node] = change
        if scores and first is not None and second is not None:
            chosen = max(scores, key=lambda node: (scores[node], -node))
            picks = sorted({int(first.choices[chosen]), int(second.choices[chosen])})
        else:
            chosen = min(sizes, key=lambda node: (sizes[node], node))
            picks = [int(state.domains[chosen][0])]
        domain = state.domains[chosen]
        picks = [pick for pick in picks if pick in domain]
        rest = domain[~np.isin(domain, picks)]
        parts = [np.array([pick], dtype=np.int64) for pick in picks]
        return [(chosen, part) for part in (*parts, rest) if part.size]
