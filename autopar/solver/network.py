"""A Problem with what is the same stored once, and read many times.

Deep models repeat: a thousand edges carry a few hundred different matrices. `network_of` gives equal arrays one
number (a *table*), so that later steps can see by comparing numbers that two places are the same, and so that costs
of a whole assignment are gathered table by table instead of edge by edge:

    totals(x) = (sum of costs, sum of memory row 0, row 1, ...)                          `Network.totals`

The weights w = (w_0, lambda_1, ..., lambda_rows) of a Lagrangian turn each table into one array of numbers,
w_0 c + sum_r lambda_r m_r, where c is finite, and infinity elsewhere                    `weighted`
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.solver.problem import FloatArray, Problem

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Table:
    """Costs and memory of one node (one dim) or one edge (two dims); memory has a leading dim of rows."""

    costs_seconds: FloatArray
    memory_bytes: FloatArray | None

    def restricted(self, domains: tuple[IntArray, ...]) -> Table:
        """The table with only the choices of `domains`, one array of indices per dim."""
        if all(domain.size == size for domain, size in zip(domains, self.costs_seconds.shape)):
            return self
        memory = self.memory_bytes
        return Table(_select(self.costs_seconds, domains), None if memory is None else _select(memory, domains))

    def squeezed(self) -> Table:
        """The table without dims of one choice."""
        shape = tuple(size for size in self.costs_seconds.shape if size > 1)
        if shape == self.costs_seconds.shape:
            return self
        memory = self.memory_bytes
        return Table(
            self.costs_seconds.reshape(shape), None if memory is None else memory.reshape(memory.shape[0], *shape)
        )


def _select(array: FloatArray, domains: tuple[IntArray, ...]) -> FloatArray:
    """The entries of the last dims at these indices."""
    first = array.ndim - len(domains)
    for position, domain in enumerate(domains):
        array = array.take(domain, axis=first + position)
    return array


def weighted(table: Table, weights: FloatArray) -> FloatArray:
    """w_0 c + sum_r lambda_r m_r, infinite where c is."""
    costs = table.costs_seconds
    if weights[0] == 0.0:
        costs = np.where(np.isinf(costs), np.inf, 0.0)
    elif weights[0] != 1.0:
        costs = costs * weights[0]
    if table.memory_bytes is None or not weights[1:].any():
        return costs
    result: FloatArray = costs + np.tensordot(weights[1:], table.memory_bytes, axes=1)
    return result


@dataclass(frozen=True, eq=False)
class Places:
    """Where tables are used, as arrays: use u has its entries from `offsets[u]` of the flat tables on.

    An edge's entry (a, b) is at offset + a * strides + b; a node's is at offset + b, its two ends being that node.
    """

    ends: IntArray
    offsets: IntArray
    strides: IntArray

    def index(self, first: IntArray, second: IntArray) -> IntArray:
        """Flat indices with the choices `first` at the first ends and `second` at the second ends."""
        return self.offsets + first * self.strides + second


@dataclass(frozen=True, eq=False)
class Network:
    """Tables and where they lie: `unary` as (node, table), `edges` as (source, target, table).

    `flat` is all tables one after the other, (1 + rows, entries), and `places` all their uses.
    """

    tables: tuple[Table, ...]
    sizes: tuple[int, ...]
    unary: tuple[tuple[int, int], ...]
    edges: tuple[tuple[int, int, int], ...]
    num_rows: int
    flat: FloatArray
    places: Places

    def totals(self, choices: IntArray) -> FloatArray:
        """(1 + rows,): cost, then memory per row, of one choice per node."""
        chosen = choices[self.places.ends]
        result: FloatArray = self.flat[:, self.places.index(chosen[0], chosen[1])].sum(axis=1)
        return result


class _Interner:
    """Gives equal arrays one number: first by object, then by content."""

    def __init__(self) -> None:
        self.by_object: dict[int, int] = {}
        self.by_content: dict[tuple[tuple[int, ...], int], list[tuple[int, FloatArray]]] = {}
        self.count = 0

    def number(self, array: FloatArray | None) -> int:
        if array is None:
            return -1
        known = self.by_object.get(id(array))
        if known is None:
            known = self.by_object[id(array)] = self._by_content(array)
        return known

    def _by_content(self, array: FloatArray) -> int:
        bucket = self.by_content.setdefault((array.shape, hash(array.tobytes())), [])
        for number, other in bucket:
            if np.array_equal(array, other):
                return number
        bucket.append((self.count, array))
        self.count += 1
        return self.count - 1


def network_of(problem: Problem) -> Network:
    """The network of a problem; an edge from a node to itself becomes a cost of that node."""
    interner = _Interner()
    tables: list[Table] = []
    numbers: dict[tuple[int, int, bool], int] = {}
    objects: dict[tuple[int, int, bool], int] = {}

    def place(costs: FloatArray, memory: FloatArray | None, loop: bool = False) -> int:
        same = id(costs), id(memory), loop
        if same not in objects:
            objects[same] = numbered(costs, memory, loop)
        return objects[same]

    def numbered(costs: FloatArray, memory: FloatArray | None, loop: bool) -> int:
        key = interner.number(costs), interner.number(memory), loop
        number = numbers.get(key)
        if number is None:
            number = numbers[key] = len(tables)
            if loop:
                costs = np.diagonal(costs).copy()
                memory = None if memory is None else np.diagonal(memory, axis1=1, axis2=2).copy()
            tables.append(Table(costs, memory))
        return number

    unary = [
        (node, place(costs, memory))
        for node, (costs, memory) in enumerate(zip(problem.node_costs_seconds, problem.node_memory_bytes))
    ]
    edges = []
    for edge in problem.edges:
        ends = (edge.source, edge.target)
        if edge.source == edge.target:
            unary.append((edge.source, place(edge.costs_seconds, edge.memory_bytes, loop=True)))
        else:
            edges.append((*ends, place(edge.costs_seconds, edge.memory_bytes)))
    sizes = tuple(costs.size for costs in problem.node_costs_seconds)
    flat, places = _flatten(tables, unary, edges, problem.num_rows)
    return Network(tuple(tables), sizes, tuple(unary), tuple(edges), problem.num_rows, flat, places)


def _flatten(
    tables: list[Table], unary: list[tuple[int, int]], edges: list[tuple[int, int, int]], rows: int
) -> tuple[FloatArray, Places]:
    starts = np.concatenate([[0], np.cumsum([table.costs_seconds.size for table in tables], dtype=np.int64)])
    flat = np.zeros((1 + rows, int(starts[-1])))
    for table, start in zip(tables, starts):
        part = slice(int(start), int(start) + table.costs_seconds.size)
        flat[0, part] = table.costs_seconds.reshape(-1)
        if table.memory_bytes is not None:
            flat[1:, part] = table.memory_bytes.reshape(rows, table.costs_seconds.size)
    uses = np.array([*((node, node, table) for node, table in unary), *edges], dtype=np.int64).reshape(-1, 3).T
    strides = np.array([t.costs_seconds.shape[1] if t.costs_seconds.ndim == 2 else 0 for t in tables], dtype=np.int64)
    return flat, Places(uses[:2].copy(), starts[uses[2]], strides[uses[2]])
