"""At most so many different variants of a repeated block: restricting a solution, and what that costs.

    tied:     all instances alike; position p of all instances is one node, whose tables are summed     `tied`
    bundled:  each instance one node, whose choices are whole tuples out of a pool of good ones          `bundled`

The pool holds the tuples of the assignments that the search has met, and where these do not do those of the tied
optimum. The bundled problem is solved again and again, each time without its least used tuple, until the limit is kept.
The result is an upper bound; the lower bound stays that of the unlimited problem, so the gap shows what the limit costs at
most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from autopar.solver.network import IntArray
from autopar.solver.problem import Edge, FloatArray, Problem

# A search finds a few tuples per multiplier; the least used beyond this many never mattered where measured.
_MOST_TUPLES = 16

Choices = tuple[int, ...]
Solver = Callable[[Problem], Choices | None]


class _Builder:
    """Adds tables of an original problem up to a smaller one; sums are kept per pair of new nodes."""

    def __init__(self, problem: Problem, sizes: list[int]) -> None:
        self.rows = problem.num_rows
        self.nodes = [np.zeros((1 + self.rows, size)) for size in sizes]
        self.edges: dict[tuple[int, int], FloatArray] = {}

    def stack(self, costs: FloatArray, memory: FloatArray | None) -> FloatArray:
        return np.concatenate([costs[None], np.zeros((self.rows, *costs.shape)) if memory is None else memory])

    def add_edge(self, source: int, target: int, stack: FloatArray) -> None:
        if source == target:
            self.nodes[source] += np.diagonal(stack, axis1=1, axis2=2)
            return
        if source > target:
            source, target, stack = target, source, stack.transpose(0, 2, 1)
        known = self.edges.get((source, target))
        self.edges[source, target] = stack if known is None else known + stack

    def problem(self, budgets: FloatArray) -> Problem:
        edges = tuple(Edge(s, t, stack[0], stack[1:]) for (s, t), stack in self.edges.items())
        costs, memory = tuple(stack[0] for stack in self.nodes), tuple(stack[1:] for stack in self.nodes)
        return Problem(costs, memory, edges, budgets)


def tied(problem: Problem, limited: tuple[int, ...]) -> tuple[Problem, tuple[int, ...]]:
    """The problem where the instances of these repeats are alike, and the new node of each old one."""
    same = list(range(problem.num_nodes))
    for number in limited:
        for instance in problem.repeats[number].instances:
            for node, first in zip(instance, problem.repeats[number].instances[0]):
                same[node] = first
    numbers = {node: index for index, node in enumerate(sorted(set(same)))}
    home = tuple(numbers[node] for node in same)
    builder = _Builder(problem, [problem.node_costs_seconds[node].size for node in numbers])
    for node, (costs, memory) in enumerate(zip(problem.node_costs_seconds, problem.node_memory_bytes)):
        builder.nodes[home[node]] += builder.stack(costs, memory)
    for edge in problem.edges:
        builder.add_edge(home[edge.source], home[edge.target], builder.stack(edge.costs_seconds, edge.memory_bytes))
    return builder.problem(problem.memory_budgets_bytes), home


def bundled(
    problem: Problem, pools: dict[int, list[Choices]], known: list[Choices]
) -> tuple[Problem, list[tuple[int, ...]], list[int]]:
    """The problem with each instance of the repeats in `pools` as one node that chooses a tuple.

    A node outside these repeats chooses among what it takes in the `known` assignments. Also returns the old nodes of
    each new one, and the repeat of each new node (-1: an ordinary node).
    """
    members: list[tuple[int, ...]] = []
    repeat_of: list[int] = []
    for number in pools:
        members += problem.repeats[number].instances
        repeat_of += [number] * len(problem.repeats[number].instances)
    inside = {node for nodes in members for node in nodes}
    for node in range(problem.num_nodes):
        if node not in inside:
            members.append((node,))
            repeat_of.append(-1)
    tables = {number: np.array(pool).T.copy() for number, pool in pools.items()}
    home: dict[int, int] = {}
    select: dict[int, tuple[tuple[int, int], IntArray]] = {}
    sizes = []
    for new, (nodes, number) in enumerate(zip(members, repeat_of)):
        table = np.array(_taken(known, nodes[0])).T if number < 0 else tables[number]
        sizes.append(table.shape[1])
        for position, (node, column) in enumerate(zip(nodes, table)):
            place = (-1, node) if number < 0 else (number, position)
            home[node], select[node] = new, (place, column)
    builder = _Builder(problem, sizes)
    for node, (costs, memory) in enumerate(zip(problem.node_costs_seconds, problem.node_memory_bytes)):
        builder.nodes[home[node]] += builder.stack(costs, memory)[:, select[node][1]]
    stacks: dict[tuple[object, ...], FloatArray] = {}
    for edge in problem.edges:
        (source, rows), (target, columns) = select[edge.source], select[edge.target]
        key = id(edge.costs_seconds), id(edge.memory_bytes), source, target
        stack = stacks.get(key)
        if stack is None:
            stack = builder.stack(edge.costs_seconds, edge.memory_bytes)[:, rows][:, :, columns]
            stacks[key] = stack
        builder.add_edge(home[edge.source], home[edge.target], stack)
    return builder.problem(problem.memory_budgets_bytes), members, repeat_of


def _taken(known: list[Choices], node: int) -> list[Choices]:
    return [(choice,) for choice in sorted({choices[node] for choices in known})]


def limit_variants(
    problem: Problem, known: list[Choices], solve: Solver, enough_seconds: float = -np.inf
) -> Choices | None:
    """A good assignment that keeps all limits on variants, from `known` ones; None if none is found.

    `solve` returns the choices of a problem without repeats, or None. The tied problem, the largest, is only solved where
    the tuples of the `known` assignments alone do not give one of `enough_seconds`.
    """
    limited = tuple(n for n, repeat in enumerate(problem.repeats) if repeat.max_variants is not None)
    candidates = [choices for choices in known if problem.within_variants(choices) and _allowed(problem, choices)]
    found = _shrink(problem, _pools(problem, limited, [*known, *candidates]), [*known, *candidates], solve)
    if found is not None:
        candidates.append(found)
        if problem.cost_of(found) <= enough_seconds:
            return found
    small, home = tied(problem, limited)
    alike = solve(small)
    if alike is not None:
        candidates.append(tuple(alike[new] for new in home))
        found = _shrink(problem, _pools(problem, limited, [*known, *candidates]), [*known, *candidates], solve)
        candidates += [] if found is None else [found]
    return min(candidates, key=lambda choices: (problem.cost_of(choices), choices)) if candidates else None


def _pools(problem: Problem, limited: tuple[int, ...], known: list[Choices]) -> dict[int, list[Choices]]:
    """The tuples of each limited repeat in some assignments, those used most first."""
    pools = {}
    for number in limited:
        uses: Counter[Choices] = Counter()
        for choices in known:
            uses.update(tuple(choices[node] for node in instance) for instance in problem.repeats[number].instances)
        order = {choices: index for index, choices in enumerate(uses)}
        pools[number] = sorted(uses, key=lambda tuple_: (-uses[tuple_], order[tuple_]))[:_MOST_TUPLES]
    return pools


def _allowed(problem: Problem, choices: Choices) -> bool:
    return problem.cost_of(choices) < np.inf and problem.fits(problem.memory_of(choices))


def _shrink(problem: Problem, pools: dict[int, list[Choices]], known: list[Choices], solve: Solver) -> Choices | None:
    """Solve the bundled problem, drop the less used half of the tuples in excess, until the limits are kept."""
    while True:
        small, members, repeat_of = bundled(problem, pools, known)
        found = solve(small)
        if found is None:
            return None
        uses: dict[int, Counter[Choices]] = {number: Counter() for number in pools}
        result = [0] * problem.num_nodes
        for nodes, number, choice in zip(members, repeat_of, found):
            chosen = pools[number][choice] if number >= 0 else _taken(known, nodes[0])[choice]
            if number >= 0:
                uses[number][chosen] += 1
            for node, value in zip(nodes, chosen):
                result[node] = value
        if problem.within_variants(tuple(result)):
            return tuple(result)
        pools = {number: _most_used(uses[number], problem.repeats[number].max_variants) for number in pools}


def _most_used(uses: Counter[Choices], limit: int | None) -> list[Choices]:
    """The tuples in use, without the less used half of those above the limit."""
    excess = 0 if limit is None else max(0, len(uses) - limit)
    return [choices for choices, _ in uses.most_common(len(uses) - (excess + 1) // 2)]
