"""What operators whose windows reach over the border of a piece read from the pieces beside it.

A dim is cut into pieces that lie in the order of the ranks of one axis. :func:`halo` puts around a piece the elements next to
it that the neighbours hold, and in backward sends their gradients home:

    rank 0          rank 1          rank 2
    . [0 1 2 3] 4   3 [4 5 6 7] 8   7 [8 9 10 11] .        halo(x, 2, mesh.spatial, 1, 1); a dot is what lies beyond the border

Several dims are done one after the other, so that the corners come along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.runtime import collectives
from autopar.runtime.errors import ProgramError
from autopar.runtime.mesh import Axis


def halo(x: Tensor, dim: int, axis: Axis, before: int, after: int, edge: float | str = 0.0) -> Tensor:
    """``x`` with ``before`` elements of the previous rank's piece and ``after`` of the next one's along ``dim``.

    Every piece along ``axis`` has at least as many elements as its neighbours want of it. Beyond the borders of the whole
    dim there is ``edge``: a number, or ``"repeat"`` for the outermost element again. Forward: one message of at most
    ``max(before, after)`` rows to each neighbour. Backward: one each with the gradient of those rows, which is added to that
    of the piece.

    Raises ProgramError for a piece that is shorter than what its neighbours want.
    """
    wanted = max(before, after)
    if x.shape[dim] < wanted:
        raise ProgramError(
            f"dim {dim} of a tensor of shape {tuple(x.shape)} has {x.shape[dim]} elements on this rank, its neighbours want "
            f"{wanted}: split the dim over fewer ranks"
        )
    return _Halo.apply(x, dim, axis, before, after, edge)  # type: ignore[no-untyped-call, no-any-return]


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis, before: int, after: int, edge: float | str) -> Tensor:
        ctx.dim, ctx.axis, ctx.before, ctx.after, ctx.edge = dim, axis, before, after, edge
        size = x.shape[dim]
        first, last = x.narrow(dim, 0, after), x.narrow(dim, size - before, before)
        previous, following = collectives.exchange_with_neighbours(first, last, last.shape, first.shape, axis)
        made = x.new_empty(_with_size(x.shape, dim, before + size + after))  # in plain order, unlike some torch.cat
        parts = made.split((before, size, after), dim)
        parts[0].copy_(_beyond(x, dim, 0, edge) if previous is None else previous)
        parts[1].copy_(x)
        parts[2].copy_(_beyond(x, dim, size - 1, edge) if following is None else following)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        dim, axis, before, after = ctx.dim, ctx.axis, ctx.before, ctx.after
        size = gradient.shape[dim] - before - after
        previous, own, following = gradient.split((before, size, after), dim)
        to_first, to_last = collectives.exchange_with_neighbours(
            previous, following, following.shape, previous.shape, axis
        )
        if to_first is None and ctx.edge == "repeat":
            to_first = previous.sum(dim, keepdim=True)
        if to_last is None and ctx.edge == "repeat":
            to_last = following.sum(dim, keepdim=True)
        own = own.clone(memory_format=torch.contiguous_format)
        if to_first is not None:
            own.narrow(dim, 0, to_first.shape[dim]).add_(to_first)
        if to_last is not None:
            own.narrow(dim, size - to_last.shape[dim], to_last.shape[dim]).add_(to_last)
        return own, None, None, None, None, None


def _beyond(x: Tensor, dim: int, border: int, edge: float | str) -> Tensor:
    """What every row beyond a border of the whole dim is, the outermost of which is row ``border`` of the piece."""
    return x.narrow(dim, border, 1) if edge == "repeat" else x.new_full((), float(edge))


def _with_size(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])
