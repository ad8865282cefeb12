"""How a tensor lies on a mesh: for each axis sharded, replicated or partial, for the value and for its gradient.

A layout is a tuple with one state per mesh axis:

=====================  ==================  ==================
state                  value               gradient
=====================  ==================  ==================
``Shard(dim, cut)``    sharded             sharded alike
``REPLICATED``         replicated          replicated
``SUMMED_GRADIENT``    replicated          partial (each rank has a term of the sum)
``PARTIAL``            partial             replicated
=====================  ==================  ==================

A :class:`Cut` says where a dim may be cut: a dim is a row of segments, and each segment is cut on its own at multiples of
its unit (GPT-2's fused q-k-v is three segments with units of one head). Pieces differ by one unit at the most, the longer
ones first: 6 units in 4 are 2, 2, 1 and 1 (not the 2, 2, 2 and 0 of ``torch.chunk``: no device is left without work).
Where several axes shard one dim, the axis with the lower index cuts first and the next one cuts its piece.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from autopar.errors import InputError

Run = tuple[int, int, int]  # how many segments, elements in each, elements in a unit


@dataclass(frozen=True, order=True)
class Cut:
    """Where a dim may be cut: runs of ``(count, size, unit)``, in the order of the dim.

    >>> Cut(((3, 768, 64),))        # q, k and v side by side, cut between heads of 64
    """

    runs: tuple[Run, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.runs))
        for count, size, unit in self.runs:
            if count < 1 or size < 1 or unit < 1 or size % unit:
                raise InputError(f"a segment's size is a multiple of its unit: {count} x {size} by {unit}")

    def __hash__(self) -> int:  # cuts and states are looked up millions of times
        return self._hash  # type: ignore[attr-defined, no-any-return]

    @staticmethod
    def plain(size: int) -> Cut:
        """One segment that may be cut anywhere."""
        return Cut(((1, size, 1),)) if size else Cut(())

    @property
    def size(self) -> int:
        """Elements of the whole dim."""
        return sum(count * size for count, size, _ in self.runs)

    @property
    def is_plain(self) -> bool:
        return len(self.runs) == 1 and self.runs[0][0] == 1 and self.runs[0][2] == 1

    @cached_property
    def num_units(self) -> int:
        """Into how many pieces the dim can be cut at the most."""
        return min((size // unit for _, size, unit in self.runs), default=0)

    def lifted(self, outer: int, inner: int) -> Cut:
        """The cut of ``(outer d inner)`` that cuts ``d`` as this one does."""
        if outer == inner == 1:
            return self
        runs = tuple((count, size * inner, unit * inner) for count, size, unit in self.runs)
        if len(runs) == 1:
            return Cut(((runs[0][0] * outer, *runs[0][1:]),))
        return Cut(runs * outer)

    def lowered(self, outer: int, inner: int) -> Cut | None:
        """The cut of ``d`` whose :meth:`lifted` is this one, or None."""
        if outer == inner == 1:
            return self
        if any(size % inner or unit % inner for _, size, unit in self.runs):
            return None
        if len(self.runs) == 1:
            count, size, unit = self.runs[0]
            return Cut(((count // outer, size // inner, unit // inner),)) if count % outer == 0 else None
        if len(self.runs) % outer or self.runs != self.runs[: len(self.runs) // outer] * outer:
            return None
        runs = self.runs[: len(self.runs) // outer]
        return Cut(tuple((count, size // inner, unit // inner) for count, size, unit in runs))

    def normalized(self, parts: int) -> Cut:
        """The simplest cut with the same pieces whenever the number of parts divides ``parts``."""
        runs = tuple((count, size, 1 if size // unit % parts == 0 else unit) for count, size, unit in self.runs)
        return Cut(runs)

    def divides(self, parts: int) -> bool:
        """Whether all of ``parts`` pieces are equally long."""
        return all(size // unit % parts == 0 for _, size, unit in self.runs)

    def __str__(self) -> str:
        return "+".join(f"{count}x{size}/{unit}" for count, size, unit in self.runs)

    @staticmethod
    def parse(text: str) -> Cut:
        """The inverse of ``str``."""
        runs = []
        for part in text.split("+"):
            match = re.fullmatch(r"(\d+)x(\d+)/(\d+)", part)
            if not match:
                raise InputError(f"not a cut: {text!r}; write it as '3x768/64'")
            runs.append((int(match[1]), int(match[2]), int(match[3])))
        return Cut(tuple(runs))


@dataclass(frozen=True, order=True)
class Shard:
    """Cut along ``dim`` into one piece per device of the axis."""

    dim: int
    cut: Cut

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.dim, self.cut)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def __str__(self) -> str:
        return f"S{self.dim}[{self.cut}]"


@dataclass(frozen=True)
class Whole:
    """Every device of the axis holds a tensor of full size: see the module's table for the three members."""

    name: str

    def __hash__(self) -> int:
        return hash(self.name)  # a string keeps its own

    def __str__(self) -> str:
        return self.name


REPLICATED = Whole("R")
SUMMED_GRADIENT = Whole("G")
PARTIAL = Whole("P")

State = Shard | Whole
Layout = tuple[State, ...]


class Layouts(tuple[Layout, ...]):
    """Several layouts, as a key that is looked up often: the hash is kept."""

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


Split = tuple[Cut, int, int]  # a cut, the number of parts, which of them


def without_gradient(layout: Layout) -> Layout:
    """The layout of a value that no gradient flows through: what its gradient would be does not matter."""
    return tuple(REPLICATED if state == SUMMED_GRADIENT else state for state in layout)


def layout_text(layout: Layout) -> str:
    """``S0[1x8/1],R`` and the like: one word per axis."""
    return ",".join(str(state) for state in layout)


def parse_layout(text: str) -> Layout:
    """The inverse of :func:`layout_text`."""
    return tuple(_parse_state(word) for word in text.split(",")) if text else ()


def _parse_state(word: str) -> State:
    for state in (REPLICATED, SUMMED_GRADIENT, PARTIAL):
        if word == state.name:
            return state
    match = re.fullmatch(r"S(\d+)\[(.+)\]", word)
    if not match:
        raise InputError(f"not a layout: {word!r}; write S<dim>[<cut>], R, G or P for each axis")
    return Shard(int(match[1]), Cut.parse(match[2]))


def piece_range(units: int, parts: int, place: int) -> tuple[int, int]:
    """First unit of piece ``place`` of ``parts``, and the one after its last."""
    share, longer = divmod(units, parts)
    start = place * share + min(place, longer)
    return start, start + share + (place < longer)


def indices(size: int, splits: Sequence[Split]) -> np.ndarray:
    """Global indices, ascending, of what one device holds of a dim of ``size`` after ``splits``, outermost first."""
    held = np.arange(size)
    for cut, parts, place in splits:
        kept = []
        start = 0
        for count, length, unit in cut.runs:
            for _ in range(count):
                inside = held[np.searchsorted(held, start) : np.searchsorted(held, start + length)]
                number = (inside - start) // unit
                units = np.unique(number)
                kept.append(inside[np.isin(number, units[slice(*piece_range(len(units), parts, place))])])
                start += length
        held = np.concatenate(kept) if kept else held
    return held


@lru_cache(maxsize=65536)
def local_size(size: int, splits: tuple[Split, ...]) -> int:
    """How many elements of a dim one device holds."""
    parts = math.prod(parts for _, parts, _ in splits)
    if all(cut.divides(parts) for cut, _, _ in splits):
        return size // parts
    if len({cut for cut, _, _ in splits}) == 1:
        return sum(count * _piece(length // unit, splits) * unit for count, length, unit in splits[0][0].runs)
    return len(indices(size, splits))


def _piece(units: int, splits: tuple[Split, ...]) -> int:
    """Length of one piece after cutting ``units`` again and again."""
    for _, parts, place in splits:
        start, stop = piece_range(units, parts, place)
        units = stop - start
    return units


def splits_of(layout: Layout, dim: int, mesh_shape: Sequence[int], place: Sequence[int]) -> tuple[Split, ...]:
    """The cuts of one dim, outermost first, as seen by the device at ``place``."""
    return tuple(
        (state.cut, mesh_shape[axis], place[axis])
        for axis, state in enumerate(layout)
        if isinstance(state, Shard) and state.dim == dim
    )


def local_shape(
    shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int], place: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Shape on the device at ``place``; by default the first device, whose pieces are the largest."""
    place = place or (0,) * len(layout)
    sizes = list(shape)
    for dim in {state.dim for state in layout if isinstance(state, Shard)}:
        sizes[dim] = local_size(shape[dim], splits_of(layout, dim, mesh_shape, place))
    return tuple(sizes)


def independent(first: Cut, second: Cut) -> bool:
    """Whether two cuts of one dim cut different factors of it, so that neither depends on which came first."""
    return _inside(first, second) or _inside(second, first)


def _inside(outer: Cut, inner: Cut) -> bool:
    """Whether all segments of ``inner`` lie within units of ``outer``."""
    lengths = {length for _, length, _ in inner.runs}
    units = {unit for _, _, unit in outer.runs}
    return len(lengths) == 1 and len(units) == 1 and next(iter(units)) % next(iter(lengths)) == 0
