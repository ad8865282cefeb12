"""Sizes on one device as program text: a number where all devices agree, else the local size of a named cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from autopar.codegen.scope import AxisCuts, Scope
from autopar.layout import Cut, Layout, Shard, local_size
from autopar.strategies.cuts import restrict


def cuts_of(layout: Layout, dim: int, scope: Scope) -> AxisCuts:
    """The axes that cut a dim, outermost first; axes of one device cut nothing."""
    return tuple(
        (axis, state.cut)
        for axis, state in enumerate(layout)
        if isinstance(state, Shard) and state.dim == dim and scope.mesh.shape[axis] > 1
    )


def num_parts(cuts: AxisCuts, scope: Scope) -> int:
    """Into how many pieces a dim is cut."""
    parts = 1
    for axis, _ in cuts:
        parts *= scope.mesh.shape[axis]
    return parts


def same_everywhere(cuts: Sequence[AxisCuts], of: Callable[[Sequence[int]], int], scope: Scope) -> int | None:
    """A number that depends on a device's place along the axes of ``cuts``: its value if it is the same on all."""
    axes = sorted({axis for some in cuts for axis, _ in some})
    place = [0] * scope.mesh.num_axes
    found = set()
    for places in itertools.product(*(range(scope.mesh.shape[axis]) for axis in axes)):
        for axis, coordinate in zip(axes, places, strict=True):
            place[axis] = coordinate
        found.add(of(place))
        if len(found) > 1:
            return None
    return found.pop()


def size_at(size: int, cuts: AxisCuts, place: Sequence[int], scope: Scope) -> int:
    """Local size of a dim on the device at ``place``."""
    splits = tuple((cut or Cut.plain(size), scope.mesh.shape[axis], place[axis]) for axis, cut in cuts)
    return local_size(size, splits)


def even_size(size: int, cuts: AxisCuts, scope: Scope) -> int | None:
    """The local size if every device has as much."""
    return same_everywhere([cuts], lambda place: size_at(size, cuts, place, scope), scope)


def size_text(size: int, cuts: AxisCuts, scope: Scope) -> str:
    """The local size of a dim of ``size``."""
    even = even_size(size, cuts, scope)
    return f"{scope.split(size, cuts)}.local" if even is None else str(even)


def ratio_text(size: int, cuts: AxisCuts, divisor: int, divisor_cuts: AxisCuts, scope: Scope) -> str:
    """The quotient of two local sizes."""
    even = same_everywhere(
        [cuts, divisor_cuts],
        lambda place: size_at(size, cuts, place, scope) // max(1, size_at(divisor, divisor_cuts, place, scope)),
        scope,
    )
    if even is not None:
        return str(even)
    return f"{size_text(size, cuts, scope)} // {size_text(divisor, divisor_cuts, scope)}"


def part_cuts(cuts: AxisCuts, size: int, start: int, length: int) -> AxisCuts:
    """How a part of a cut dim is cut, where each cut cuts the part on its own."""
    found = []
    for axis, cut in cuts:
        part = restrict(cut or Cut.plain(size), start, length)
        assert part is not None, f"a cut {cut} of {size} reaches over the border of the part at {start} of {length}"
        found.append((axis, part))
    return tuple(found)
