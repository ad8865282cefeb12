"""Min-plus arithmetic on shared tables: the straight-line program that an elimination is.

    m(y) = min_x sum_t f_t(x, y restricted to the scope of t)                  one `Op`, `forward`
    marginal of t at (x, y_t) = min over all else of the grand total           `backward`, the same ops in reverse

Ops are numbered by what they read (`Recorder.record`): the same tables met in the same way give the same number, so
a block that occurs a hundred times is computed once, and a product of equal matrices is computed once. The backward
pass then yields, for a table that is used in many places, the least over these places, which is what pruning needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autopar.solver.network import Table, weighted
from autopar.solver.problem import FloatArray

# One numpy pass over less than this many numbers is not worth splitting (half of a typical second-level cache).
_CHUNK_ENTRIES = 1 << 15
# What one op costs besides its arithmetic, in numbers added and compared at one nanosecond each.
OP_OVERHEAD = 20_000


@dataclass(frozen=True, eq=False)
class Term:
    """An input of an op: its table, its axes among the op's variables, and how to align it with all of them."""

    table: int
    axes: tuple[int, ...]
    permutation: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Op:
    """Eliminates variable 0 of `sizes` from the sum of `terms`; `groups` are terms that are added up first."""

    terms: tuple[Term, ...]
    groups: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    result: int

    @property
    def work(self) -> int:
        """Numbers touched."""
        return math.prod(self.sizes) * (1 if len(self.groups) == 1 else 2) + OP_OVERHEAD

    @property
    def num_entries(self) -> int:
        """Entries of the resulting table."""
        return math.prod(self.sizes[1:])


class Recorder:
    """Numbers base tables and ops; everything recorded twice is stored once."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.bases: dict[int, Table] = {}
        self.ops: list[Op] = []
        self._base_numbers: dict[object, int] = {}
        self._op_numbers: dict[object, int] = {}

    def base(self, key: object, table: Table) -> int:
        """The number of an input table, known by `key`."""
        number = self._base_numbers.get(key)
        if number is None:
            number = self._base_numbers[key] = len(self.shapes)
            self.shapes.append(table.costs_seconds.shape)
            self.bases[number] = table
        return number

    def known_base(self, key: object) -> int | None:
        """The number of a base recorded under `key`, if any."""
        return self._base_numbers.get(key)

    def copy(self) -> Recorder:
        """The same records, to be continued in another way."""
        other = Recorder()
        other.shapes, other.bases, other.ops = list(self.shapes), dict(self.bases), list(self.ops)
        other._base_numbers, other._op_numbers = dict(self._base_numbers), dict(self._op_numbers)
        return other

    def record(self, inputs: tuple[tuple[int, tuple[int, ...]], ...], num_axes: int) -> int:
        """The number, in `ops`, of eliminating axis 0 from the sum of (table, axes) inputs."""
        number = self._op_numbers.get(inputs)
        if number is not None:
            return number
        sizes = [0] * num_axes
        terms = []
        for table, axes in inputs:
            for axis, size in zip(axes, self.shapes[table]):
                sizes[axis] = size
            permutation = tuple(sorted(range(len(axes)), key=axes.__getitem__))
            terms.append((table, axes, permutation))
        aligned = tuple(
            Term(table, axes, permutation, tuple(sizes[axis] if axis in axes else 1 for axis in range(num_axes)))
            for table, axes, permutation in terms
        )
        op = Op(aligned, _groups(aligned, sizes), tuple(sizes), len(self.shapes))
        self.shapes.append(tuple(sizes[1:]))
        self._op_numbers[inputs] = len(self.ops)
        self.ops.append(op)
        return len(self.ops) - 1


def _groups(terms: tuple[Term, ...], sizes: list[int]) -> tuple[tuple[int, ...], ...]:
    """Terms whose axes lie within those of a larger one are added to it before anything is combined.

    Not to one as large as all axes together, if it is too large for the cache: that is read once, piece by piece.
    """
    everything = math.prod(sizes)
    groups: list[list[int]] = []
    for index in sorted(range(len(terms)), key=lambda index: -len(terms[index].axes)):
        axes = set(terms[index].axes)
        home = None
        for group in groups:
            leader = terms[group[0]]
            if axes <= set(leader.axes) and not _CHUNK_ENTRIES < everything == math.prod(leader.shape):
                home = group
                break
        if home is None:
            groups.append([index])
        else:
            home.append(index)
    return tuple(map(tuple, groups))


def _aligned_groups(op: Op, values: list[FloatArray]) -> list[FloatArray]:
    result = []
    for group in op.groups:
        total = None
        for index in reversed(group):  # the smallest first, so that one sum only is as large as the group
            term = op.terms[index]
            value = values[term.table].transpose(term.permutation).reshape(term.shape)
            total = value if total is None else total + value
        assert total is not None, "a group has at least one term"
        result.append(total)
    return result


def _eliminate(op: Op, groups: list[FloatArray]) -> FloatArray:
    if len(groups) == 1:
        result: FloatArray = groups[0].min(axis=0)
        return result
    chunk = max(1, _CHUNK_ENTRIES // max(1, op.num_entries))
    best: FloatArray | None = None
    for start in range(0, op.sizes[0], chunk):
        total = groups[0][start : start + chunk] + groups[1][start : start + chunk]
        for group in groups[2:]:
            total = total + group[start : start + chunk]
        least = total[0] if total.shape[0] == 1 else total.min(axis=0)
        best = least if best is None else np.minimum(best, least, out=best)
    assert best is not None, "a variable has at least one choice"
    return best


def forward(recorder: Recorder, weights: FloatArray, overrides: dict[int, FloatArray]) -> list[FloatArray]:
    """The values of all tables, by number, under Lagrangian weights; `overrides` replaces base tables."""
    nothing = np.zeros(0)
    values: list[FloatArray] = [nothing] * len(recorder.shapes)
    for number, table in recorder.bases.items():
        values[number] = overrides[number] if number in overrides else weighted(table, weights)
    for op in recorder.ops:
        values[op.result] = _eliminate(op, _aligned_groups(op, values))
    return values


def backward(recorder: Recorder, values: list[FloatArray], scalars: tuple[int, ...]) -> dict[int, FloatArray]:
    """Min-marginals of the base tables, by number: the least grand total with that entry, over all uses of the table.

    `scalars` are the tables without variables left whose sum is the grand total.
    """
    total = sum(float(values[number]) for number in scalars)
    context: list[FloatArray | None] = [None] * len(values)
    for number in set(scalars) - recorder.bases.keys():
        context[number] = np.array(total - float(values[number]))
    for op in reversed(recorder.ops):
        outer = context[op.result]
        if outer is None:
            continue
        groups = _aligned_groups(op, values)
        for members, least in zip(op.groups, _marginals(op, groups, outer)):
            for index in members:
                _push(op.terms[index], least, values, context)
        context[op.result] = None
    result = {}
    for number in recorder.bases:
        outer = context[number]
        if outer is not None:
            result[number] = outer + values[number]
    return result


def _marginals(op: Op, groups: list[FloatArray], outer: FloatArray) -> list[FloatArray]:
    """Per group, the least of outer + all groups over the axes that the group lacks."""
    if len(groups) == 1:
        return [groups[0] + outer]
    missing = [tuple(axis for axis, size in enumerate(group.shape) if size != op.sizes[axis]) for group in groups]
    chunk = max(1, _CHUNK_ENTRIES // max(1, op.num_entries))
    parts: list[list[FloatArray]] = [[] for _ in groups]
    for start in range(0, op.sizes[0], chunk):
        total = outer[None] + groups[0][start : start + chunk]
        for group in groups[1:]:
            total = total + group[start : start + chunk]
        for part, axes in zip(parts, missing):
            part.append(total.min(axis=axes, keepdims=True) if axes else total)
    return [np.concatenate(part, axis=0) for part in parts]


def _push(term: Term, least: FloatArray, values: list[FloatArray], context: list[FloatArray | None]) -> None:
    """Take the term itself out of its marginal and keep the least over the uses of its table."""
    axes = tuple(axis for axis, size in enumerate(least.shape) if size != term.shape[axis])
    least = least.min(axis=axes, keepdims=True) if axes else least
    inverse = np.argsort(term.permutation)
    kept = least.reshape([least.shape[axis] for axis in sorted(term.axes)]).transpose(inverse)
    own = values[term.table]
    with np.errstate(invalid="ignore"):
        outer = np.where(np.isinf(own), np.inf, kept - own)
    known = context[term.table]
    context[term.table] = outer if known is None else np.minimum(known, outer)


def best_choice(op: Op, values: list[FloatArray], others: tuple[int, ...]) -> int:
    """The choice of an op's variable given those of its other variables; of equal ones the first.

    Equal means up to rounding: sums of the same numbers in another order must not decide between choices.
    """
    total: FloatArray | None = None
    for term in op.terms:
        index = tuple(slice(None) if axis == 0 else others[axis - 1] for axis in term.axes)
        value = values[term.table][index]
        total = value if total is None else total + value
    assert total is not None, "an op has at least one term"
    least = float(total.min())
    return int(np.argmax(total <= least + 1e-13 * abs(least)))
