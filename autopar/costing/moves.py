"""The ways between many layouts at once: which steps each pair takes, every distinct step listed once.

Enters: the layouts that a tensor may have and those that its readers want. Leaves: :class:`Moves`. A way depends only on
which states of the two layouts are equal and how their cuts nest (``reshard.path``), and such patterns are few where pairs
are many: arrays find each pair's pattern, and the way is asked for once per pattern.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.layout import Layout, Shard, State, local_size, splits_of
from autopar.reshard import APART, COLLECTIVES, INDEPENDENT, WHOLES, CollectiveKind, path, relation

IntArray = NDArray[np.int64]

STEP_NAMES = tuple(COLLECTIVES)
_NUMBER = {name: number for number, name in enumerate(STEP_NAMES)}

# Of each step, by its number, whether it runs a kind of collective, (forward and backward, steps).
_RUNS: Mapping[CollectiveKind, NDArray[np.bool_]] = {
    kind: np.array([[kinds[way] == kind for kinds in COLLECTIVES.values()] for way in (0, 1)])
    for kind in dict.fromkeys(kind for kinds in COLLECTIVES.values() for kind in kinds if kind)
}


@dataclass(frozen=True)
class Running:
    """A kind of collective on an axis: the moves that run it, and in which passes they do, forward and backward
    (2, moves)."""

    axis: int
    kind: CollectiveKind
    places: IntArray
    passes: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Ways:
    """Distinct steps from layout to layout, and the ways made of them, whatever the states are.

    A layout is a row of numbers of states. Of each move: ``before`` and ``after`` (moves, axes), ``axis`` and ``name``
    (moves,), a place in :data:`STEP_NAMES`. ``taken`` (longest way, pairs) are the moves of each pair in their order, those
    of the first source first; a shorter way ends in -1.
    """

    before: IntArray
    after: IntArray
    axis: IntArray
    name: IntArray
    taken: IntArray
    _alike: dict[bytes, tuple[IntArray, IntArray]] = field(default_factory=dict)

    @cached_property
    def running(self) -> tuple[Running, ...]:
        """All collectives."""
        found = []
        for axis in range(self.before.shape[1]):
            here = np.flatnonzero(self.axis == axis)
            for kind, runs in _RUNS.items():
                running = runs[:, self.name[here]]
                chosen = running.any(axis=0)
                if chosen.any():
                    found.append(Running(axis, kind, here[chosen], running[:, chosen]))
        return tuple(found)

    def alike(self, cutting: NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
        """Of the layouts before and then after all moves the first of each kind, and the kind of every one: of one kind are
        those that agree in the states that are ``cutting``."""
        key = cutting.tobytes()
        if key not in self._alike:
            layouts = np.concatenate([self.before, self.after])
            rows = np.where(cutting[layouts], layouts, 0).T
            self._alike[key] = _distinct(rows, [len(cutting)] * len(rows))
        return self._alike[key]


@dataclass(frozen=True, eq=False)
class Moves:
    """Ways between layouts of these ``states``; ``dims`` are those that the states cut, -1 where a state is whole."""

    states: tuple[State, ...]
    dims: IntArray
    ways: Ways

    def local_sizes(self, shape: Sequence[int], mesh_shape: Sequence[int]) -> tuple[IntArray, IntArray]:
        """Sizes (moves, dims) on the first device of a tensor of global ``shape``, before and after each move."""
        before, after = self.ways.before, self.ways.after
        sizes: IntArray = np.empty((len(before) + len(after), len(shape)), dtype=np.int64)
        for dim, size in enumerate(shape):
            first, which = self.ways.alike(self.dims == dim)
            rows = (before[row] if row < len(before) else after[row - len(before)] for row in first)
            splits = (
                splits_of(tuple(self.states[place] for place in row), dim, mesh_shape, (0,) * len(mesh_shape)) for row in rows
            )
            sizes[:, dim] = np.array([local_size(size, cuts) for cuts in splits], dtype=np.int64)[which]
        return sizes[: len(before)], sizes[len(before) :]


def moves(sources: Sequence[Layout], targets: Sequence[Layout]) -> Moves:
    """The ways from each of ``sources`` to each of ``targets``."""
    states = tuple(dict.fromkeys((*WHOLES, *itertools.chain(*sources, *targets))))
    place = {state: number for number, state in enumerate(states)}
    starts, ends = (
        np.array([[place[state] for state in layout] for layout in layouts], dtype=np.int16) for layouts in (sources, targets)
    )
    related = np.array([[relation(one, other) for other in states] for one in states], dtype=np.int8)
    dims = np.array([state.dim if isinstance(state, Shard) else -1 for state in states], dtype=np.int64)
    return Moves(states, dims, _ways(starts.tobytes(), ends.tobytes(), related.tobytes(), len(sources[0]), len(states)))


@lru_cache(maxsize=512)  # about as many as the meshes of a search have
def _ways(source: bytes, target: bytes, relations: bytes, num_axes: int, num_states: int) -> Ways:
    """The ways, from arrays of 16 bits (layouts, axes) and of 8 bits (states, states): the same for tensors of many shapes, and
    for other sizes of batch and mesh."""
    starts, ends = (np.frombuffer(held, dtype=np.int16).reshape(-1, num_axes).astype(np.int64) for held in (source, target))
    current, wanted = np.repeat(starts, len(ends), axis=0).T.copy(), np.tile(ends, (len(starts), 1)).T.copy()
    related = np.frombuffer(relations, dtype=np.int8).reshape(num_states, num_states)
    coded = _coded_paths(np.concatenate([current, wanted]), related)
    radices = (num_states,) * num_axes + (num_axes, num_states, len(STEP_NAMES))  # a layout, and a move from it
    nothing = math.prod(radices)  # larger than the code of every move
    taken = _walked(coded, current, wanted, num_states, nothing)
    found, which = np.unique(np.append(taken, nothing), return_inverse=True)
    which = np.where(which == len(found) - 1, -1, which)[:-1].reshape(taken.shape).astype(np.int32)
    *layout, axis, state, name = np.unravel_index(found[:-1], radices)
    before = np.stack(layout, axis=1)
    after = before.copy()
    after[np.arange(len(after)), axis] = state
    return Ways(before, after, axis, name, which)


def _walked(coded: IntArray, source: IntArray, wanted: IntArray, num_states: int, nothing: int) -> IntArray:
    """Codes of the moves (longest way, pairs) on the way from ``source`` to ``wanted`` (axes, pairs); ``nothing`` after the
    last. A code has, as digits, the layout before the move, the axis, the state after it and the step's name."""
    current = source.copy()
    num_axes = len(current)
    weights = num_states ** np.arange(num_axes)[::-1]
    layout = weights @ current
    taken: IntArray = np.full(coded.shape, nothing, dtype=np.int64)
    for position, codes in enumerate(coded):
        pairs = np.flatnonzero(codes >= 0)
        axis, name = np.divmod(codes[pairs], len(STEP_NAMES))
        state = np.where(name == _NUMBER["gather"], 0, wanted[axis, pairs])  # as of reshard.state_after
        taken[position, pairs] = ((layout[pairs] * num_axes + axis) * num_states + state) * len(STEP_NAMES) + name
        layout[pairs] += (state - current[axis, pairs]) * weights[axis]
        current[axis, pairs] = state
    return taken


def _coded_paths(slots: IntArray, related: NDArray[np.int8]) -> IntArray:
    """Steps (longest way, pairs) as ``axis * len(STEP_NAMES) + name``, -1 after the last one. ``slots`` (2 axes, pairs): the
    states of source and target; ``related``: how two states go together."""
    combinations = list(itertools.combinations(range(len(slots)), 2))
    rows = np.array([*_in_order_of_appearance(slots), *(related[slots[one], slots[other]] for one, other in combinations)])
    bases = [len(WHOLES) + len(slots)] * len(slots) + [INDEPENDENT - APART + 1] * len(combinations)
    first, which = _distinct(rows, bases)
    coded = [_coded_path(tuple(row[: len(slots)]), tuple(row[len(slots) :])) for row in rows[:, first].T.tolist()]
    longest = max(map(len, coded), default=0)
    padded = [codes + (-1,) * (longest - len(codes)) for codes in coded]
    return np.ascontiguousarray(np.array(padded, dtype=np.int64).reshape(len(padded), longest)[which].T)


@lru_cache(maxsize=1 << 16)
def _coded_path(pattern: tuple[int, ...], relations: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis * len(STEP_NAMES) + _NUMBER[name] for axis, name in path(pattern, relations))


def _in_order_of_appearance(slots: IntArray) -> IntArray:
    """Shards numbered anew in each pair, in the order in which they appear in it."""
    numbers: IntArray = slots.copy()
    following = np.full(slots.shape[1], len(WHOLES))
    for slot, states in enumerate(slots):
        new = states >= len(WHOLES)
        for earlier in range(slot):
            same = slots[earlier] == states
            numbers[slot] = np.where(same, numbers[earlier], numbers[slot])
            new &= ~same
        numbers[slot] = np.where(new, following, numbers[slot])
        following += new
    return numbers


def _distinct(rows: IntArray, bases: Sequence[int]) -> tuple[IntArray, IntArray]:
    """Of the columns of ``rows`` the first of each kind, and which kind every column is; row i is below ``bases[i]``."""
    code, bound = np.zeros(rows.shape[1], dtype=np.int64), 1
    for row, base in zip(rows, bases, strict=True):
        if bound > 2**62 // base:
            kinds, code = np.unique(code, return_inverse=True)
            bound = len(kinds)
        code, bound = code * base + row, bound * base
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    return first, which
