"""A smaller problem with the same optimum: what is decided is folded away.

    a node of one choice left        -> into its neighbours' costs
    edge cost a_i + b_j              -> into the costs of its two nodes
    edges between the same two nodes -> one edge

What enters is a problem and the choices that are left of each node, what leaves a `Reduced`: a problem of the
undecided nodes, the constant that folding leaves, and the way back (`Reduced.expand`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.network import IntArray, Table
from autopar.solver.problem import Edge, FloatArray, Problem


@dataclass(frozen=True, eq=False)
class Reduced:
    """`problem` is over the nodes `nodes` of the original, choice c of node n being `domains[n][c]` there.

    Its costs and budgets lack `constant`, (1 + rows,): seconds, then bytes per row.
    """

    problem: Problem
    nodes: tuple[int, ...]
    domains: tuple[IntArray, ...]
    constant: FloatArray

    def expand(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Choices of the original problem from those of the smaller one."""
        result = [int(domain[0]) for domain in self.domains]
        for node, choice in zip(self.nodes, choices):
            result[node] = int(self.domains[node][choice])
        return tuple(result)

    def shrink(self, choices: Sequence[int]) -> tuple[int, ...] | None:
        """Choices of the smaller problem from those of the original; None if they are not among those left."""
        result = []
        for node, domain in enumerate(self.domains):
            at = int(np.searchsorted(domain, choices[node]))
            if at == domain.size or domain[at] != choices[node]:
                return None
            result.append(at)
        return tuple(result[node] for node in self.nodes)


def reduced(problem: Problem, domains: tuple[IntArray, ...]) -> Reduced:
    """Fold what `domains` (sorted indices, none empty) decide."""
    rows = problem.num_rows
    left = [
        _stack(costs, memory, rows)[:, domain]
        for costs, memory, domain in zip(problem.node_costs_seconds, problem.node_memory_bytes, domains)
    ]
    edges = []
    for (source, target), stack in _merged(problem, domains, left).items():
        if stack.shape[1] == 1:
            left[target] = left[target] + stack[:, 0]
        elif stack.shape[2] == 1:
            left[source] = left[source] + stack[:, :, 0]
        elif _separable(stack):
            left[source] = left[source] + stack[:, :, 0]
            left[target] = left[target] + (stack[:, 0] - stack[:, 0, :1])
        else:
            edges.append((source, target, stack))
    nodes = tuple(node for node, domain in enumerate(domains) if domain.size > 1)
    number = {node: index for index, node in enumerate(nodes)}
    fixed = [stack[:, 0] for stack in left if stack.shape[1] == 1]
    constant = np.sum(fixed, axis=0) if fixed else np.zeros(1 + rows)
    small = Problem(
        tuple(left[node][0] for node in nodes),
        tuple(left[node][1:] for node in nodes),
        tuple(Edge(number[s], number[t], stack[0], stack[1:]) for s, t, stack in edges),
        problem.memory_budgets_bytes - constant[1:],
        (),
        tuple(problem.names[node] for node in nodes) if problem.names else (),
    )
    return Reduced(small, nodes, domains, constant)


def _stack(costs: FloatArray, memory: FloatArray | None, rows: int) -> FloatArray:
    memory = np.zeros((rows, *costs.shape)) if memory is None else memory
    return np.concatenate([costs[None], memory])


def _merged(
    problem: Problem, domains: tuple[IntArray, ...], left: list[FloatArray]
) -> dict[tuple[int, int], FloatArray]:
    """One (1 + rows, k, k) stack per pair of nodes; an edge from a node to itself goes to that node."""
    merged: dict[tuple[int, int], FloatArray] = {}
    for edge in problem.edges:
        source, target = edge.source, edge.target
        part = Table(edge.costs_seconds, edge.memory_bytes).restricted((domains[source], domains[target]))
        stack = _stack(part.costs_seconds, part.memory_bytes, problem.num_rows)
        if source == target:
            left[source] = left[source] + np.diagonal(stack, axis1=1, axis2=2)
            continue
        if source > target:
            source, target, stack = target, source, stack.transpose(0, 2, 1)
        known = merged.get((source, target))
        merged[source, target] = stack if known is None else known + stack
    return dict(sorted(merged.items(), key=lambda item: item[0]))


def _separable(stack: FloatArray) -> bool:
    """Whether every layer is a_i + b_j (to rounding of one part in 10^15 of its largest entry)."""
    if not np.isfinite(stack).all():
        return False
    rest = stack - stack[:, :, :1] - stack[:, :1, :] + stack[:, :1, :1]
    largest = np.abs(stack).max(axis=(1, 2), keepdims=True)
    return bool((np.abs(rest) <= 1e-15 * largest).all())
