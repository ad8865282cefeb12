"""How a dim is cut over mesh axes, and how its pieces are taken out of the whole and put together again.

A dim is a row of segments, each cut on its own at multiples of its unit (GPT-2's fused q-k-v: three segments, units of one
head); pieces differ by one unit at the most, the longer ones first (6 in 4: 2, 2, 1, 1). Where several
axes cut one dim, the first cuts the whole and the next one cuts its piece.

Held indices are kept as ascending, disjoint intervals, so that nothing here grows with the length of the dim.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from autopar.runtime.errors import ProgramError
from autopar.runtime.mesh import Axis

Interval = tuple[int, int]  # start, stop
Run = tuple[int, int, int]  # how many segments, elements in each, elements in a unit
Cut = tuple[Run, ...]

_MAX_PARTS_TO_JOIN = 64  # beyond this many intervals one index_select is cheaper than a torch.cat


def parse_cut(text: str | None, size: int) -> Cut:
    """``"3x768/64+1x10/1"`` as runs; None is the plain cut, one segment that may be cut anywhere."""
    if text is None:
        return ((1, size, 1),) if size else ()
    runs = []
    for part in text.split("+"):
        match = re.fullmatch(r"(\d+)x(\d+)/(\d+)", part)
        if not match:
            raise ProgramError(f"not a cut: {text!r}; it is written like '3x768/64' or '1x768/64+2x256/64'")
        runs.append((int(match[1]), int(match[2]), int(match[3])))
    if sum(count * length for count, length, _ in runs) != size:
        raise ProgramError(f"the cut {text!r} does not have the {size} elements of its dim")
    return tuple(runs)


@lru_cache(maxsize=65536)
def held(size: int, cuts: tuple[tuple[Cut, int, int], ...]) -> tuple[Interval, ...]:
    """Intervals of a dim of ``size`` that are left after ``(cut, parts, place)``, outermost first."""
    intervals: list[Interval] = [(0, size)] if size else []
    for cut, parts, place in cuts:
        kept: list[Interval] = []
        start = 0
        for count, length, unit in cut:
            for _ in range(count):
                kept += _piece_of_segment(intervals, start, start + length, unit, parts, place)
                start += length
        intervals = _merged(kept)
    return tuple(intervals)


def _piece_of_segment(
    intervals: list[Interval], start: int, stop: int, unit: int, parts: int, place: int
) -> Iterator[Interval]:
    """What piece ``place`` of ``parts`` keeps of the intervals inside one segment."""
    inside = [(max(first, start), min(last, stop)) for first, last in intervals if first < stop and last > start]
    numbered = []  # interval, its first unit, and how many units stand before that one
    num_units, last_unit = 0, -1
    for first, last in inside:
        low, high = (first - start) // unit, (last - 1 - start) // unit
        before = num_units - (low == last_unit)
        numbered.append((first, last, low, before))
        num_units, last_unit = before + high - low + 1, high
    share, longer = divmod(num_units, parts)
    begin = place * share + min(place, longer)
    end = begin + share + (place < longer)
    for first, last, low, before in numbered:
        kept_first = max(first, start + (low + begin - before) * unit)
        kept_last = min(last, start + (low + end - before) * unit)
        if kept_first < kept_last:
            yield kept_first, kept_last


def _merged(intervals: list[Interval]) -> list[Interval]:
    """The same indices with touching intervals made one."""
    merged: list[Interval] = []
    for first, last in intervals:
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return merged


def length(intervals: tuple[Interval, ...]) -> int:
    """How many indices the intervals have."""
    return sum(last - first for first, last in intervals)


class Split:
    """``Split(4800, (mesh.tensor, "3x1600/64"))``: how a dim of global ``size`` is cut, outermost axis first.

    The second item of a pair is the text of a cut, or None for a plain one.
    """

    def __init__(self, size: int, *cuts: tuple[Axis, str | None]) -> None:
        self.size = size
        self.cuts = tuple((axis, parse_cut(text, size)) for axis, text in cuts)
        self._pieces: dict[int, Pieces] = {}
        self._own: tuple[Interval, ...] | None = None
        if len({axis.index for axis, _ in self.cuts}) != len(self.cuts):
            raise ProgramError(f"an axis cuts a dim once: {[axis.name for axis, _ in self.cuts]}")

    def prepare(self) -> None:
        """Work out what is worked out once: a compiled program may not do so inside a part that is computed again."""
        self.intervals()
        for axis in self.axes:
            self.pieces(axis)

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(axis for axis, _ in self.cuts)

    @property
    def local(self) -> int:
        """How many elements this rank holds."""
        return length(self.intervals())

    def intervals(self, places: dict[int, int] | None = None, without: Axis | None = None) -> tuple[Interval, ...]:
        """Global indices held here, or where ``places`` (axis index -> place) says; as if ``without`` did not cut."""
        if places is None and without is None:
            if self._own is None:
                self._own = self.intervals({})
            return self._own
        places = places or {}
        cuts = tuple(
            (cut, axis.size, places.get(axis.index, axis.place))
            for axis, cut in self.cuts
            if without is None or axis.index != without.index
        )
        return held(self.size, cuts)

    def pieces(self, axis: Axis) -> Pieces:
        """The pieces along ``axis`` of what this rank holds when ``axis`` does not cut."""
        if axis.index not in self._pieces:
            if axis.index not in [other.index for other in self.axes]:
                raise ProgramError(f"axis {axis.name!r} does not cut this dim, only {[a.name for a in self.axes]} do")
            whole = self.intervals(without=axis)
            parts = tuple(self.intervals({axis.index: place}) for place in range(axis.size))
            self._pieces[axis.index] = make_pieces(whole, parts)
        return self._pieces[axis.index]

    def take(self, x: Tensor, dim: int, places: dict[int, int] | None = None) -> Tensor:
        """This rank's share of a whole tensor, cut along ``dim``; a view where the share is one interval."""
        return take(x, dim, self.intervals(places))

    def __repr__(self) -> str:
        return f"Split({self.size}, {', '.join(axis.name for axis in self.axes)})"


def take(x: Tensor, dim: int, intervals: tuple[Interval, ...]) -> Tensor:
    """The elements of ``x`` along ``dim`` that lie in ``intervals``."""
    if len(intervals) == 1:
        first, last = intervals[0]
        return x.narrow(dim, first, last - first)
    if not intervals:
        return x.narrow(dim, 0, 0)
    if len(intervals) <= _MAX_PARTS_TO_JOIN:
        return torch.cat([x.narrow(dim, first, last - first) for first, last in intervals], dim)
    index = torch.cat([torch.arange(first, last, device=x.device) for first, last in intervals])
    return x.index_select(dim, index)


@dataclass(frozen=True)
class Pieces:
    """The pieces of a dim of ``length`` along one axis, as positions in the joined dim.

    ``segments``: where all pieces are alike and regular, the number of segments of equal length that each is made of (the
    joined dim is then ``[segments, parts, size / segments]``); else 0, and ``intervals`` is used.
    """

    length: int
    sizes: tuple[int, ...]
    segments: int
    intervals: tuple[tuple[Interval, ...], ...] = ()

    @property
    def parts(self) -> int:
        return len(self.sizes)

    @property
    def largest(self) -> int:
        """Length that pieces are padded to."""
        return max(self.sizes)


def even_pieces(size: int, parts: int) -> Pieces:
    """The pieces of a dim that ``parts`` divides, each contiguous."""
    if size % parts:
        raise ProgramError(f"a dim of {size} elements has no {parts} equal pieces: give the step its split=")
    return Pieces(size, (size // parts,) * parts, 1)


def make_pieces(whole: tuple[Interval, ...], parts: tuple[tuple[Interval, ...], ...]) -> Pieces:
    """Pieces of the indices ``whole`` from the global indices of each part."""
    positions = tuple(tuple(_merged(list(_positions(part, whole)))) for part in parts)
    total = length(whole)
    sizes = tuple(length(part) for part in positions)
    if sum(sizes) != total or sizes != tuple(length(part) for part in parts):
        raise ProgramError(
            f"the pieces {parts} do not make up {whole}: an axis that cuts this one's piece is still there"
        )
    return Pieces(total, sizes, _regular_segments(positions, sizes), positions)


def _positions(part: tuple[Interval, ...], whole: tuple[Interval, ...]) -> Iterator[Interval]:
    """Where the indices of ``part`` stand within ``whole``."""
    offset, at = 0, 0
    for first, last in whole:
        while at < len(part) and part[at][0] < last:
            low, high = max(part[at][0], first), min(part[at][1], last)
            if low < high:
                yield offset + low - first, offset + high - first
            if part[at][1] > last:
                break
            at += 1
        offset += last - first


def _regular_segments(positions: tuple[tuple[Interval, ...], ...], sizes: tuple[int, ...]) -> int:
    """The number of segments if piece k is ``[:, k, :]`` of ``[segments, parts, size]``, else 0."""
    parts, size = len(sizes), sizes[0]
    if not size or len(set(sizes)) != 1:
        return 0
    # With one part, or where neighbours touch, intervals have been merged: one segment then does as well.
    segments = len(positions[0])
    step = size // segments
    for place, part in enumerate(positions):
        wanted = tuple(((at * parts + place) * step, (at * parts + place + 1) * step) for at in range(segments))
        if part != wanted:
            return 0
    return segments


def stack_pieces(x: Tensor, dim: int, pieces: Pieces) -> Tensor:
    """``x`` of ``pieces.length`` along ``dim`` as ``[parts, ...]``, each piece padded with zeros to the largest."""
    if pieces.segments:
        shape = (*x.shape[:dim], pieces.segments, pieces.parts, pieces.largest // pieces.segments, *x.shape[dim + 1 :])
        stacked = x.reshape(shape).movedim(dim + 1, 0)
        return stacked.reshape(pieces.parts, *x.shape[:dim], pieces.largest, *x.shape[dim + 1 :])
    return torch.stack([pad(take(x, dim, part), dim, pieces.largest) for part in pieces.intervals])


def join_pieces(stacked: Tensor, dim: int, pieces: Pieces) -> Tensor:
    """The inverse of :func:`stack_pieces`, contiguous; ``dim`` counts without the first dim of ``stacked``."""
    return _joined(stacked, dim, pieces).contiguous()  # cat keeps a channels-last order, also one that only sizes of 1 make


def _joined(stacked: Tensor, dim: int, pieces: Pieces) -> Tensor:
    if pieces.segments:
        before, after = stacked.shape[1 : dim + 1], stacked.shape[dim + 2 :]
        cut = stacked.reshape(pieces.parts, *before, pieces.segments, pieces.largest // pieces.segments, *after)
        return cut.movedim(0, dim + 1).reshape(*before, pieces.length, *after)
    ordered = sorted(_sources(pieces))
    if len(ordered) <= _MAX_PARTS_TO_JOIN:
        return torch.cat([stacked[place].narrow(dim, at, size) for _, place, at, size in ordered], dim)
    flat = torch.cat([stacked[place].narrow(dim, 0, size) for place, size in enumerate(pieces.sizes)], dim)
    index = torch.empty(pieces.length, dtype=torch.int64)
    starts = [sum(pieces.sizes[:place]) for place in range(pieces.parts)]
    for target, place, at, size in ordered:
        index[target : target + size] = torch.arange(starts[place] + at, starts[place] + at + size)
    return flat.index_select(dim, index.to(flat.device))


def _sources(pieces: Pieces) -> Iterator[tuple[int, int, int, int]]:
    """Of each interval: position in the joined dim, piece, position in the piece, length."""
    for place, part in enumerate(pieces.intervals):
        at = 0
        for first, last in part:
            yield first, place, at, last - first
            at += last - first
    if not pieces.length:
        yield 0, 0, 0, 0


def take_piece(x: Tensor, dim: int, pieces: Pieces, place: int) -> Tensor:
    """A copy of one piece of ``x``."""
    if pieces.segments == 1:
        size = pieces.sizes[place]
        piece = x.narrow(dim, place * size, size)
    elif pieces.segments:
        piece = _strided_piece(x, dim, pieces, place)
    else:
        piece = take(x, dim, pieces.intervals[place])
    return piece.clone(memory_format=torch.contiguous_format)


def _strided_piece(x: Tensor, dim: int, pieces: Pieces, place: int) -> Tensor:
    shape = (*x.shape[:dim], pieces.segments, pieces.parts, pieces.largest // pieces.segments, *x.shape[dim + 1 :])
    return x.reshape(shape).select(dim + 1, place).reshape(*x.shape[:dim], pieces.largest, *x.shape[dim + 1 :])


def put_piece(piece: Tensor, dim: int, pieces: Pieces, place: int) -> Tensor:
    """Zeros of ``pieces.length`` along ``dim`` with ``piece`` in its place."""
    whole = piece.new_zeros(*piece.shape[:dim], pieces.length, *piece.shape[dim + 1 :])
    if pieces.segments:
        step = pieces.largest // pieces.segments
        intervals: tuple[Interval, ...] = tuple(
            ((at * pieces.parts + place) * step, (at * pieces.parts + place + 1) * step)
            for at in range(pieces.segments)
        )
    else:
        intervals = pieces.intervals[place]
    at = 0
    for first, last in intervals:
        whole.narrow(dim, first, last - first).copy_(piece.narrow(dim, at, last - first))
        at += last - first
    return whole


def pad(x: Tensor, dim: int, size: int) -> Tensor:
    """``x`` with zeros appended along ``dim`` up to ``size``."""
    missing = size - x.shape[dim]
    if not missing:
        return x
    return torch.cat([x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim)
