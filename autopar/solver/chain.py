"""Chains of units: the least cost of every interval of a long chain, by composition.

A *unit* is a small problem with a port at either end: the variable that the unit before it ends with, and the variable
that it ends with itself. Eliminating everything else leaves a matrix over the two ports,

    W(s, t) = min over the inside of [ sum of the unit's tables ]                          `Elimination`

and units in a row compose by the min-plus product (`search.pricing`), so no interval of units is solved again. All tables
carry a leading dim of *weights*: the same unit under many prices of memory at once,

    cost = seconds + multiplier x bytes,

from which the dual bound of an interval under a budget follows: max over multipliers of [ chain - multiplier x budget ].
Costs are nonnegative, so leaving a table out, or taking its minimum over a variable, only lowers the result: every
simplification here keeps the result a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.solver.problem import FloatArray

# Tables are summed in float32, which halves their traffic: results are right to about this relative width.
ROUNDING = 2e-6
Table = NDArray[np.float32]
Floats = NDArray[np.floating[Any]]  # of either width

MAX_ENTRIES = 400_000  # of one table, for each weight; a larger one is relaxed


@dataclass(frozen=True, eq=False)
class Factor:
    """A table over variables: `rows` is (rows, size of each variable ...)."""

    variables: tuple[int, ...]
    rows: FloatArray | Table


@dataclass(frozen=True, eq=False)
class Unit:
    """Factors over variables with `sizes`; `entry` and `exit` are the ports (None: an end of the whole chain)."""

    sizes: tuple[int, ...]
    factors: tuple[Factor, ...]
    entry: int | None
    exit: int | None


@dataclass(frozen=True)
class _Read:
    """A table, its dims in the order of a step's, and its `shape` there: 1 where it lacks a variable."""

    table: int
    order: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Step:
    """Tables `reads` are added up over `shape`, small ones first; then the variable in the first dim is minimised over,
    unless this is the last step (`minimises` False). Before that, `relaxed` tables leave their part aside: (table, dim) is
    minimised over that dim into a table of its own."""

    reads: tuple[_Read, ...]
    shape: tuple[int, ...]
    relaxed: tuple[tuple[int, int], ...]
    minimises: bool


def _spread(array: Table, read: _Read, minimises: bool) -> Table:
    """A table over the dims of a step's sum."""
    ordered = array.transpose(0, *(1 + dim for dim in read.order)).reshape(array.shape[0], *read.shape)
    return np.swapaxes(ordered, 0, 1) if minimises else ordered


def _weighted(weights: Table, rows: FloatArray | Table) -> Table:
    """(num weights, size of each variable ...): the rows added up."""
    flat = rows.reshape(len(rows), -1).astype(np.float32, copy=False)
    return np.asarray(np.dot(weights, flat).reshape(len(weights), *rows.shape[1:]))


class _Order:
    """The order in which variables go, found once for all units of one form, whatever their tables hold."""

    def __init__(self, sizes: tuple[int, ...], scopes: Sequence[tuple[int, ...]], ports: tuple[int, ...]) -> None:
        self.sizes = sizes
        self._scopes = list(scopes)
        self.steps: list[_Step] = []
        alive = set(range(len(self._scopes)))
        waiting = {variable for variables in self._scopes for variable in variables} - set(ports)
        near = {variable: self._near(variable, alive) for variable in waiting}
        while waiting:
            variable = min(waiting, key=lambda v: (self._entries(near[v]), v))
            waiting.discard(variable)
            self._step(variable, alive)
            for other in near.pop(variable) & waiting:
                near[other] = self._near(other, alive)
        self.steps.append(self._reading(sorted(alive), ports, (), minimises=False))

    def _near(self, variable: int, alive: set[int]) -> set[int]:
        return {other for table in alive if variable in self._scopes[table] for other in self._scopes[table]}

    def _entries(self, variables: set[int]) -> int:
        return math.prod(self.sizes[other] for other in variables)

    def _step(self, variable: int, alive: set[int]) -> None:
        touching = sorted(table for table in alive if variable in self._scopes[table])
        relaxed = []
        while len(touching) > 1 and self._entries({v for t in touching for v in self._scopes[t]}) > MAX_ENTRIES:
            largest = max(touching, key=lambda table: (self._entries(set(self._scopes[table])), table))
            touching.remove(largest)
            relaxed.append((largest, self._scopes[largest].index(variable)))
        alive -= {*touching, *(table for table, _ in relaxed)}
        for table, dim in relaxed:
            alive.add(len(self._scopes))
            self._scopes.append((*self._scopes[table][:dim], *self._scopes[table][dim + 1 :]))
        scope = tuple(sorted({v for table in touching for v in self._scopes[table]} - {variable}))
        self.steps.append(self._reading(touching, (variable, *scope), tuple(relaxed), minimises=True))
        alive.add(len(self._scopes))
        self._scopes.append(scope)

    def _reading(
        self, tables: Sequence[int], order: tuple[int, ...], relaxed: tuple[tuple[int, int], ...], minimises: bool
    ) -> _Step:
        reads = []
        for table in sorted(tables, key=lambda table: self._entries(set(self._scopes[table]))):
            scope = self._scopes[table]
            ranked = tuple(sorted(range(len(scope)), key=lambda index: order.index(scope[index])))
            shape = tuple(self.sizes[variable] if variable in scope else 1 for variable in order)
            reads.append(_Read(table, ranked, shape))
        return _Step(tuple(reads), tuple(self.sizes[variable] for variable in order), relaxed, minimises)


@lru_cache(maxsize=1024)
def _steps(
    sizes: tuple[int, ...], scopes: tuple[tuple[int, ...], ...], ports: tuple[int, ...]
) -> tuple[_Step, ...]:
    return tuple(_Order(sizes, scopes, ports).steps)


class Elimination:
    """A unit with the order in which its variables go; evaluated under many weights."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        ports = tuple(port for port in dict.fromkeys((unit.entry, unit.exit)) if port is not None)
        self._steps = _steps(unit.sizes, tuple(factor.variables for factor in unit.factors), ports)

    def evaluate(self, weights: Floats) -> Table:
        """(num weights, entry states, exit states): the least cost of the unit between its ports; one state where there is
        none. weights: (num weights, rows), the first row's weight above 0."""
        given = weights.astype(np.float32)
        with np.errstate(invalid="ignore"):  # kernels for some processors fill vectors up with 0, which meets infinity there
            tables = [_weighted(given, factor.rows) for factor in self.unit.factors]
        room = np.empty(len(weights) * self._most_entries, dtype=np.float32)
        total = np.zeros(len(weights), dtype=np.float32)
        for step in self._steps:
            tables.extend(tables[table].min(axis=1 + dim) for table, dim in step.relaxed)
            total = self._sum(step, tables, room) if step.reads else np.zeros(len(weights), dtype=np.float32)
            if step.minimises:
                tables.append(total.min(axis=0))  # the outermost dim: numpy takes whole rows at once
        return self._matrix(total.copy(), len(weights))

    @cached_property
    def _most_entries(self) -> int:
        """Of a step's sum, for one weight."""
        return max((math.prod(step.shape) for step in self._steps), default=1)

    @staticmethod
    def _sum(step: _Step, tables: Sequence[Table], room: Table) -> Table:
        """The sum of a step's tables, in ``room``. Where it is to be minimised, the variable comes before the weights."""
        num_weights = tables[0].shape[0]
        arrays = [_spread(tables[read.table], read, step.minimises) for read in step.reads]
        shape = (num_weights, *step.shape)
        if step.minimises:
            shape = (shape[1], shape[0], *shape[2:])
        total = room[: math.prod(shape)].reshape(shape)
        partial = reduce(np.add, arrays[:-1]) if len(arrays) > 1 else np.float32(0.0)
        return np.asarray(np.add(partial, arrays[-1], out=total))

    def _matrix(self, total: Table, num_weights: int) -> Table:
        """The last sum over (weights, entry, exit)."""
        unit = self.unit
        entry, leaving = (1 if port is None else unit.sizes[port] for port in (unit.entry, unit.exit))
        if unit.entry is not None and unit.entry == unit.exit:
            square = np.full((num_weights, entry, entry), np.inf, dtype=np.float32)
            square[:, range(entry), range(entry)] = total
            return square
        sizes = [unit.sizes[port] for port in (unit.entry, unit.exit) if port is not None]
        spread = total.reshape(num_weights, *(total.shape[1:] or (1,) * len(sizes)))  # 1 where no factor has a port
        return np.broadcast_to(spread, (num_weights, *sizes)).reshape(num_weights, entry, leaving)
