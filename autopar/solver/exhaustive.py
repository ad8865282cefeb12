"""Every assignment priced at once: the oracle of the tests, for problems of a few nodes.

    cost(x_1, ..., x_n), memory_r(x_1, ..., x_n) as arrays with one dim per node      `_grid`

The minimum over the entries that fit is the optimum; there is nothing clever in here on purpose.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InputError
from autopar.solver.problem import Assignment, FloatArray, Problem, Status, answer, no_answer

_MOST_ASSIGNMENTS = 10_000_000


def solve_exhaustive(problem: Problem) -> Assignment:
    """The optimum by looking at all; InputError above ten million assignments."""
    shape = tuple(costs.size for costs in problem.node_costs_seconds)
    count = math.prod(shape)
    if count > _MOST_ASSIGNMENTS or sum(size > 1 for size in shape) > 30:
        raise InputError(f"{count} assignments are too many to try one by one; use method='elimination'")
    costs = _grid(problem, shape, -1)
    memory = [_grid(problem, shape, row) for row in range(problem.num_rows)]
    offered = np.isfinite(costs)
    if not offered.any():
        return no_answer(Status.INFEASIBLE, math.inf, "no combination of choices is offered")
    fits = offered.copy()
    for row, used in enumerate(memory):
        budget = float(problem.memory_budgets_bytes[row])
        fits &= used <= budget + 1e-12 * abs(budget)
    if not fits.any():
        smallest = tuple(float(used[offered].min()) for used in memory)
        return no_answer(Status.INFEASIBLE, math.inf, "no combination of choices fits the memory", smallest)
    bound = float(costs[fits].min())
    fits &= _within_variants(problem, shape)
    if not fits.any():
        return no_answer(Status.INFEASIBLE, bound, "no combination of choices keeps to the limit on variants")
    best = int(np.argmin(np.where(fits, costs, np.inf)))
    return answer(problem, _unravel(best, shape), bound)


def _unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(choice) for choice in np.unravel_index(index, shape)) if shape else ()


def _grid(problem: Problem, shape: tuple[int, ...], row: int) -> FloatArray:
    """Totals of all assignments, flat: of the cost (row -1) or of a memory row."""
    squeezed = {node: axis for axis, node in enumerate(node for node, size in enumerate(shape) if size > 1)}
    total = np.zeros([shape[node] for node in squeezed])

    def add(array: FloatArray, nodes: tuple[int, ...]) -> None:
        nonlocal total
        aligned = [1] * len(squeezed)
        for node in nodes:
            if node in squeezed:
                aligned[squeezed[node]] = shape[node]
        swap = len(nodes) == 2 and nodes[0] > nodes[1]
        total = total + (array.T if swap else array).reshape(aligned)

    for node, costs in enumerate(problem.node_costs_seconds):
        memory = problem.node_memory_bytes[node]
        if row < 0 or memory is not None:
            add(costs if row < 0 or memory is None else memory[row], (node,))
    for edge in problem.edges:
        if row >= 0 and edge.memory_bytes is None:
            continue
        array = edge.costs_seconds if row < 0 or edge.memory_bytes is None else edge.memory_bytes[row]
        if edge.source == edge.target:
            add(np.diagonal(array), (edge.source,))
        else:
            add(array, (edge.source, edge.target))
    return np.asarray(total, dtype=np.float64).reshape(-1)


def _within_variants(problem: Problem, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    count = math.prod(shape)
    result = np.ones(count, dtype=np.bool_)
    if all(repeat.max_variants is None for repeat in problem.repeats):
        return result
    for index in range(count):
        result[index] = problem.within_variants(_unravel(index, shape))
    return result
