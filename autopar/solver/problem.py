"""The question and the answer of every solver: one choice per node, costs and memory on nodes and edges.

    minimise    sum_i c_i(x_i) + sum_(i,j) c_ij(x_i, x_j)                            `Problem.cost_of`
    subject to  sum_i m_ri(x_i) + sum_(i,j) m_rij(x_i, x_j) <= budget_r  for all r   `Problem.memory_of`
                at most `max_variants` different tuples of choices in each Repeat    `Problem.variants_of`

What enters are arrays of seconds and bytes; a solver knows nothing of operators. An infinite cost means that the
choice, or the pair of choices, is absent; it is never a penalty. What leaves is an `Assignment`: the choices, what
they cost, a proven lower bound, and a `Status` that is read first. `check` judges an assignment from the problem
alone, with none of the solvers' code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InputError

FloatArray = NDArray[np.float64]

# Two sums of the same numbers in another order differ by rounding only; costs are compared at this relative width.
RELATIVE_TOLERANCE = 1e-9


@dataclass(frozen=True, eq=False)
class Edge:
    """Costs of a pair of choices: `costs_seconds` is (k_source, k_target), `memory_bytes` (rows, k_source, k_target).

    A cost of infinity says that this pair is not offered. Several edges between two nodes add up.
    """

    source: int
    target: int
    costs_seconds: FloatArray
    memory_bytes: FloatArray | None = None

    def __post_init__(self) -> None:
        where = f"edge {self.source} -> {self.target}"
        _check_array(self.costs_seconds, 2, f"costs_seconds of {where}")
        if self.memory_bytes is not None:
            _check_array(self.memory_bytes, 3, f"memory_bytes of {where}")
            if self.memory_bytes.shape[1:] != self.costs_seconds.shape:
                raise InputError(
                    f"memory_bytes of {where} has shape {self.memory_bytes.shape}, its last two dims must be those of"
                    f" costs_seconds, {self.costs_seconds.shape}"
                )


@dataclass(frozen=True, eq=False)
class Repeat:
    """A block that occurs several times: `instances[i][p]` is the node at position p of occurrence i, in chain order.

    It is a promise that costs and inner edges are the same in each occurrence (verified), which makes solving fast,
    and a wish: among the occurrences at most `max_variants` different tuples of choices (None: no limit).
    """

    instances: tuple[tuple[int, ...], ...]
    max_variants: int | None = 4

    def __post_init__(self) -> None:
        if not self.instances or not self.instances[0]:
            raise InputError("a Repeat needs at least one instance with at least one node")
        lengths = sorted({len(instance) for instance in self.instances})
        if len(lengths) > 1:
            raise InputError(
                f"the instances of a Repeat must be aligned position by position, their lengths: {lengths}"
            )
        if self.max_variants is not None and self.max_variants < 1:
            raise InputError(f"max_variants must be at least 1 or None, it is {self.max_variants}")


@dataclass(frozen=True, eq=False)
class Problem:
    """One choice for each node, at least cost, within each memory row's budget.

    node_costs_seconds: (k_i,) per node; node_memory_bytes: (rows, k_i) per node or None; memory_budgets_bytes: (rows,),
    infinity where a row has no limit. `names` are for messages only.

    Example: `Problem((np.array([1.0, 2.0]),), (None,), (), np.zeros(0))` is one node of two choices and no memory.
    """

    node_costs_seconds: tuple[FloatArray, ...]
    node_memory_bytes: tuple[FloatArray | None, ...]
    edges: tuple[Edge, ...]
    memory_budgets_bytes: FloatArray
    repeats: tuple[Repeat, ...] = ()
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        num_nodes = len(self.node_costs_seconds)
        if len(self.node_memory_bytes) != num_nodes:
            raise InputError(
                f"{num_nodes} nodes have costs, {len(self.node_memory_bytes)} have memory (None is allowed)"
            )
        if self.names and len(self.names) != num_nodes:
            raise InputError(f"{len(self.names)} names for {num_nodes} nodes")
        _check_array(self.memory_budgets_bytes, 1, "memory_budgets_bytes")
        if np.isnan(self.memory_budgets_bytes).any():
            raise InputError("memory_budgets_bytes has NaN; use infinity for a row without a limit")
        self._check_nodes()
        self._check_edges()
        self._check_repeats()

    def _check_nodes(self) -> None:
        rows, seen = self.num_rows, set[int]()
        for node, (costs, memory) in enumerate(zip(self.node_costs_seconds, self.node_memory_bytes)):
            if id(costs) not in seen:
                _check_array(costs, 1, f"costs_seconds of {self.name(node)}")
                if not costs.size:
                    raise InputError(f"{self.name(node)} has no choice; give it at least one")
                _check_costs(costs, self.name(node))
                seen.add(id(costs))
            if memory is None:
                continue
            if id(memory) not in seen:
                _check_array(memory, 2, f"memory_bytes of {self.name(node)}")
                _check_memory(memory, self.name(node))
                seen.add(id(memory))
            if memory.shape != (rows, costs.size):
                raise InputError(
                    f"memory_bytes of {self.name(node)} has shape {memory.shape}, expected (rows, choices) ="
                    f" {(rows, costs.size)}"
                )

    def _check_edges(self) -> None:
        sizes = [costs.size for costs in self.node_costs_seconds]
        rows, seen = self.num_rows, set[int]()
        for edge in self.edges:
            if not (0 <= edge.source < len(sizes) and 0 <= edge.target < len(sizes)):
                raise InputError(f"edge {edge.source} -> {edge.target} leaves the {len(sizes)} nodes")
            costs, memory = edge.costs_seconds, edge.memory_bytes
            if costs.shape != (sizes[edge.source], sizes[edge.target]):
                raise InputError(
                    f"costs_seconds of {self.edge_name(edge)} has shape {costs.shape}, its nodes have"
                    f" {(sizes[edge.source], sizes[edge.target])} choices"
                )
            if id(costs) not in seen:
                _check_costs(costs, self.edge_name(edge))
                seen.add(id(costs))
            if memory is not None and id(memory) not in seen:
                _check_memory(memory, self.edge_name(edge))
                seen.add(id(memory))
            if memory is not None and memory.shape[0] != rows:
                raise InputError(f"memory_bytes of {self.edge_name(edge)} has {memory.shape[0]} rows, expected {rows}")

    def _check_repeats(self) -> None:
        seen = set[int]()
        for repeat in self.repeats:
            for instance in repeat.instances:
                for node in instance:
                    if not 0 <= node < self.num_nodes:
                        raise InputError(f"a Repeat names node {node}, there are {self.num_nodes}")
                    if node in seen:
                        raise InputError(f"{self.name(node)} is in two places of the repeats; instances are disjoint")
                    seen.add(node)

    @property
    def num_nodes(self) -> int:
        return len(self.node_costs_seconds)

    @property
    def num_rows(self) -> int:
        return int(self.memory_budgets_bytes.size)

    def name(self, node: int) -> str:
        """How messages call a node."""
        return f"node {node} ({self.names[node]!r})" if self.names else f"node {node}"

    def edge_name(self, edge: Edge) -> str:
        """How messages call an edge."""
        return f"edge {self.name(edge.source)} -> {self.name(edge.target)}"

    def cost_of(self, choices: tuple[int, ...]) -> float:
        """Seconds of these choices, infinity when one of them or a pair of them is absent."""
        parts = [float(costs[choice]) for costs, choice in zip(self.node_costs_seconds, choices, strict=True)]
        parts += [float(edge.costs_seconds[choices[edge.source], choices[edge.target]]) for edge in self.edges]
        return math.fsum(parts) if all(map(math.isfinite, parts)) else math.inf

    def memory_of(self, choices: tuple[int, ...]) -> tuple[float, ...]:
        """Bytes of these choices, row by row."""
        parts = [memory[:, choice] for memory, choice in zip(self.node_memory_bytes, choices) if memory is not None]
        parts += [
            edge.memory_bytes[:, choices[edge.source], choices[edge.target]]
            for edge in self.edges
            if edge.memory_bytes is not None
        ]
        return tuple(math.fsum(float(part[row]) for part in parts) for row in range(self.num_rows))

    def fits(self, memory_bytes: tuple[float, ...]) -> bool:
        """Whether totals of memory are within the budgets (rounding of the sums aside)."""
        slack = [float(budget) + 1e-12 * abs(float(budget)) for budget in self.memory_budgets_bytes]
        return all(used <= limit for used, limit in zip(memory_bytes, slack, strict=True))

    def variants_of(self, choices: tuple[int, ...]) -> tuple[int, ...]:
        """How many different tuples of choices the instances of each repeat take."""
        return tuple(
            len({tuple(choices[node] for node in instance) for instance in repeat.instances}) for repeat in self.repeats
        )

    def within_variants(self, choices: tuple[int, ...]) -> bool:
        """Whether each repeat keeps to its `max_variants`."""
        return all(
            repeat.max_variants is None or variants <= repeat.max_variants
            for repeat, variants in zip(self.repeats, self.variants_of(choices))
        )


class Status(Enum):
    """What a solve found; read it before the values."""

    OPTIMAL = "the choices are proved optimal; nothing to do"
    FEASIBLE = "the choices are allowed and within the stated gap of the optimum; raise the limits to close the gap"
    INFEASIBLE = "no choices are allowed; raise the budgets to smallest_budgets_bytes or offer more choices"
    TIMED_OUT = "the limits ran out before any choices were found, which proves nothing; raise the limits"
    ERROR = "the solver failed or misbehaved; the message has its words, use another method"


@dataclass(frozen=True)
class Assignment:
    """The answer to a Problem. `choices` is None, and the cost infinite, unless status is OPTIMAL or FEASIBLE.

    `lower_bound_seconds` holds for the problem without the limit on variants, so the cost of that limit is in `gap`.
    `smallest_budgets_bytes`, for an INFEASIBLE memory: per row the least total with the other rows unlimited.
    """

    choices: tuple[int, ...] | None
    cost_seconds: float
    lower_bound_seconds: float
    status: Status
    memory_bytes: tuple[float, ...] = ()
    smallest_budgets_bytes: tuple[float, ...] | None = None
    message: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        found = self.status in (Status.OPTIMAL, Status.FEASIBLE)
        if found != (self.choices is not None) or found != math.isfinite(self.cost_seconds):
            raise InputError(f"status {self.status.name} does not go with choices {self.choices is not None}")
        if self.status is Status.OPTIMAL and self.gap > RELATIVE_TOLERANCE:
            raise InputError(f"status OPTIMAL does not go with a gap of {self.gap}")

    @property
    def gap(self) -> float:
        """(cost - lower bound) / |cost|: by how much, at most, the optimum is cheaper. Infinite without choices."""
        if self.choices is None:
            return math.inf
        missing = self.cost_seconds - self.lower_bound_seconds
        return 0.0 if missing <= 0.0 else missing / max(abs(self.cost_seconds), 1e-300)


def answer(problem: Problem, choices: tuple[int, ...], lower_bound_seconds: float, message: str = "") -> Assignment:
    """The Assignment of allowed choices: cost and memory are computed here, the status follows from the gap."""
    cost = problem.cost_of(choices)
    bound = min(lower_bound_seconds, cost)
    close = cost - bound <= RELATIVE_TOLERANCE * abs(cost)
    status = Status.OPTIMAL if close else Status.FEASIBLE
    return Assignment(choices, cost, bound, status, problem.memory_of(choices), None, message)


def no_answer(
    status: Status, lower_bound_seconds: float, message: str, smallest_budgets_bytes: tuple[float, ...] | None = None
) -> Assignment:
    """The Assignment of a solve that found no choices."""
    return Assignment(None, math.inf, lower_bound_seconds, status, (), smallest_budgets_bytes, message)


def check(problem: Problem, assignment: Assignment) -> None:
    """Raise InputError, with the facts, unless the assignment's statements about itself hold for this problem."""
    choices = assignment.choices
    if choices is None:
        return
    sizes = [costs.size for costs in problem.node_costs_seconds]
    if len(choices) != len(sizes):
        raise InputError(f"{len(choices)} choices for {len(sizes)} nodes")
    for node, (choice, size) in enumerate(zip(choices, sizes)):
        if not 0 <= choice < size:
            raise InputError(f"{problem.name(node)} takes choice {choice} of {size}")
        if not math.isfinite(problem.node_costs_seconds[node][choice]):
            raise InputError(f"{problem.name(node)} takes choice {choice}, which is absent")
    for edge in problem.edges:
        pair = choices[edge.source], choices[edge.target]
        if not math.isfinite(edge.costs_seconds[pair]):
            raise InputError(f"{problem.edge_name(edge)} takes the pair {pair}, which is absent")
    _check_totals(problem, assignment, choices)
    for repeat, variants in zip(problem.repeats, problem.variants_of(choices)):
        if repeat.max_variants is not None and variants > repeat.max_variants:
            raise InputError(
                f"the repeat of {problem.name(repeat.instances[0][0])} has {variants} variants, allowed are"
                f" {repeat.max_variants}"
            )


def _check_totals(problem: Problem, assignment: Assignment, choices: tuple[int, ...]) -> None:
    cost, bound, memory = problem.cost_of(choices), assignment.lower_bound_seconds, problem.memory_of(choices)
    width = RELATIVE_TOLERANCE * max(abs(cost), 1e-300)
    if abs(cost - assignment.cost_seconds) > width:
        raise InputError(f"cost_seconds says {assignment.cost_seconds}, the choices cost {cost}")
    if not bound <= cost + width:
        raise InputError(f"lower_bound_seconds {bound} is above the cost {cost} of the choices")
    if len(assignment.memory_bytes) != problem.num_rows:
        raise InputError(f"memory_bytes has {len(assignment.memory_bytes)} rows, the problem {problem.num_rows}")
    for row, (says, used) in enumerate(zip(assignment.memory_bytes, memory)):
        budget = float(problem.memory_budgets_bytes[row])
        if abs(says - used) > RELATIVE_TOLERANCE * max(abs(used), 1.0):
            raise InputError(f"memory_bytes of row {row} says {says}, the choices take {used}")
        if used > budget + RELATIVE_TOLERANCE * abs(budget):
            raise InputError(f"memory row {row} takes {used} bytes, its budget is {budget}")


def _check_array(array: FloatArray, num_dims: int, what: str) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != np.float64 or array.ndim != num_dims:
        facts = f"{array.dtype} with {array.ndim} dims" if isinstance(array, np.ndarray) else type(array).__name__
        raise InputError(f"{what} must be a float64 array with {num_dims} dims, it is {facts}")


def _check_costs(costs: FloatArray, what: str) -> None:
    if np.isnan(costs).any() or np.isneginf(costs).any():
        raise InputError(f"costs_seconds of {what} has NaN or -inf; use +inf for what is absent")


def _check_memory(memory: FloatArray, what: str) -> None:
    if not np.isfinite(memory).all():
        raise InputError(f"memory_bytes of {what} is not finite; an absent choice is an infinite cost")
