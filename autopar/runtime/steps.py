"""The steps that change a tensor's layout on one mesh axis, each with its own backward.

Each is a pair of plain functions, one for the value and one for its gradient:

====================  =======================  ===================  ==================
step                  from -> to               forward              backward
====================  =======================  ===================  ==================
copy_to               R -> G                   nothing              all-reduce
reduce_from           P -> R                   all-reduce           nothing
all_reduce            P -> G                   all-reduce           all-reduce
gather                S -> R                   all-gather           slice
all_gather            S -> G                   all-gather           reduce-scatter
reduce_scatter        P -> S                   reduce-scatter       all-gather
all_to_all            S -> S of another dim    all-to-all           all-to-all
scatter               R -> S                   slice                all-gather
take_shard            G -> S                   slice                pad with zeros
keep_first            R -> P                   zero but on first    nothing
keep_first_both       G -> P                   zero but on first    zero but on first
keep_first_gradient   G -> R                   nothing              zero but on first
pad_shard             S -> P                   pad with zeros       slice
====================  =======================  ===================  ==================

R: replicated, gradient replicated; G: replicated, gradient a sum of terms; P: value a sum of terms; S: sharded.
Uneven pieces travel padded to the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.runtime import collectives
from autopar.runtime.errors import ProgramError
from autopar.runtime.mesh import Axis
from autopar.runtime.split import Pieces, Split, even_pieces, join_pieces, pad, put_piece, stack_pieces, take_piece


class Move(NamedTuple):
    """Where a step acts: on ``axis``, along ``dim`` cut by ``split``; an all-to-all joins ``dim`` and cuts ``other_dim``."""

    axis: Axis
    dim: int = 0
    split: Split | None = None
    other_dim: int = 0
    other_split: Split | None = None


def _joined(x: Tensor, dim: int, split: Split | None, axis: Axis) -> Pieces:
    """The pieces of ``dim``, which ``x`` holds one of."""
    return split.pieces(axis) if split is not None else even_pieces(x.shape[dim] * axis.size, axis.size)


def _whole(x: Tensor, dim: int, split: Split | None, axis: Axis) -> Pieces:
    """The pieces of ``dim``, which ``x`` holds all of."""
    return split.pieces(axis) if split is not None else even_pieces(x.shape[dim], axis.size)


def _nothing(x: Tensor, move: Move) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, move: Move) -> Tensor:
    return collectives.all_reduce(x, move.axis) if move.axis.size > 1 else x.view_as(x)


def _join(x: Tensor, move: Move) -> Tensor:
    """Piece -> whole, by an all-gather."""
    axis, dim, split = move[:3]
    pieces = _joined(x, dim, split, axis)
    _check_length(x, dim, pieces.sizes[axis.place])
    return join_pieces(collectives.all_gather(pad(x, dim, pieces.largest), axis), dim, pieces)


def _fold(x: Tensor, move: Move) -> Tensor:
    """Terms of a sum -> piece of the sum, by a reduce-scatter."""
    axis, dim, split = move[:3]
    pieces = _whole(x, dim, split, axis)
    _check_length(x, dim, pieces.length)
    mine = collectives.reduce_scatter(stack_pieces(x, dim, pieces), axis)[0]
    return _shortened(mine, dim, pieces.sizes[axis.place])


def _cut(x: Tensor, move: Move) -> Tensor:
    """Whole -> piece."""
    axis, dim, split = move[:3]
    pieces = _whole(x, dim, split, axis)
    _check_length(x, dim, pieces.length)
    return take_piece(x, dim, pieces, axis.place)


def _put(x: Tensor, move: Move) -> Tensor:
    """Piece -> zeros with the piece in its place."""
    axis, dim, split = move[:3]
    pieces = _joined(x, dim, split, axis)
    _check_length(x, dim, pieces.sizes[axis.place])
    return put_piece(x, dim, pieces, axis.place)


def _first(x: Tensor, move: Move) -> Tensor:
    # A copy, not a view: autograd keeps the same thing on every rank, so a parameter under ZeRO-3 is gathered again by all.
    return x.clone() if move.axis.place == 0 else torch.zeros_like(x)


def _exchange(x: Tensor, move: Move) -> Tensor:
    """Piece along ``dim`` -> piece along ``other_dim``, by an all-to-all."""
    axis, dim, split, other_dim, other_split = move
    joined, cut = _joined(x, dim, split, axis), _whole(x, other_dim, other_split, axis)
    _check_length(x, dim, joined.sizes[axis.place])
    _check_length(x, other_dim, cut.length)
    received = collectives.all_to_all(stack_pieces(pad(x, dim, joined.largest), other_dim, cut), axis)
    return _shortened(join_pieces(received, dim, joined), other_dim, cut.sizes[axis.place])


def _exchange_back(x: Tensor, move: Move) -> Tensor:
    axis, dim, split, other_dim, other_split = move
    return _exchange(x, Move(axis, other_dim, other_split, dim, split))


def _shortened(x: Tensor, dim: int, size: int) -> Tensor:
    return x if x.shape[dim] == size else x.narrow(dim, 0, size).contiguous()


def _check_length(x: Tensor, dim: int, wanted: int) -> None:
    if x.shape[dim] != wanted:
        raise ProgramError(
            f"dim {dim} of a tensor of shape {tuple(x.shape)} has {x.shape[dim]} elements, its split {wanted}"
        )


Plain = Callable[[Tensor, Move], Tensor]

# step -> (function of the value, function of the gradient)
PAIRS: dict[str, tuple[Plain, Plain]] = {
    "copy_to": (_nothing, _sum),
    "reduce_from": (_sum, _nothing),
    "all_reduce": (_sum, _sum),
    "gather": (_join, _cut),
    "all_gather": (_join, _fold),
    "reduce_scatter": (_fold, _join),
    "all_to_all": (_exchange, _exchange_back),
    "scatter": (_cut, _join),
    "take_shard": (_cut, _put),
    "keep_first": (_first, _nothing),
    "keep_first_both": (_first, _first),
    "keep_first_gradient": (_nothing, _first),
    "pad_shard": (_put, _cut),
}


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, move: Move) -> Tensor:
        ctx.name, ctx.move = name, move
        return PAIRS[name][0](x, move)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return PAIRS[ctx.name][1](gradient, ctx.move), None, None


def take_step(name: str, x: Tensor, move: Move) -> Tensor:
    """The step ``name`` of :data:`PAIRS`, with its gradient."""
    return _Step.apply(x, name, move)  # type: ignore[no-untyped-call, no-any-return]


def _along(x: Tensor, axis: Axis, dim: int, split: Split | None) -> Move:
    return Move(axis, dim % x.dim(), split)


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """``x`` as it is; backward: all-reduce of the gradient (Megatron's f)."""
    return take_step("copy_to", x, Move(axis))


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Sum of ``x`` over the axis; backward: the gradient as it is (Megatron's g)."""
    return take_step("reduce_from", x, Move(axis))


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum of ``x`` over the axis; backward: sum of the gradients."""
    return take_step("all_reduce", x, Move(axis))


def keep_first(x: Tensor, axis: Axis) -> Tensor:
    """``x`` on the first rank of the axis, zeros on the others; backward: the gradient as it is."""
    return take_step("keep_first", x, Move(axis))


def keep_first_both(x: Tensor, axis: Axis) -> Tensor:
    """``x`` on the first rank of the axis, zeros on the others; backward: the same with the gradient."""
    return take_step("keep_first_both", x, Move(axis))


def keep_first_gradient(x: Tensor, axis: Axis) -> Tensor:
    """``x`` as it is; backward: the gradient on the first rank of the axis, zeros on the others."""
    return take_step("keep_first_gradient", x, Move(axis))


def gather(x: Tensor, axis: Axis, dim: int, split: Split | None = None) -> Tensor:
    """The whole dim from its pieces; backward: this rank's slice of the gradient."""
    return take_step("gather", x, _along(x, axis, dim, split))


def all_gather(x: Tensor, axis: Axis, dim: int, split: Split | None = None) -> Tensor:
    """The whole dim from its pieces; backward: reduce-scatter of the gradient."""
    return take_step("all_gather", x, _along(x, axis, dim, split))


def reduce_scatter(x: Tensor, axis: Axis, dim: int, split: Split | None = None) -> Tensor:
    """This rank's slice of the sum over the axis; backward: all-gather of the gradient."""
    return take_step("reduce_scatter", x, _along(x, axis, dim, split))


def scatter(x: Tensor, axis: Axis, dim: int, split: Split | None = None) -> Tensor:
    """This rank's slice; backward: all-gather of the gradient."""
    return take_step("scatter", x, _along(x, axis, dim, split))


def take_shard(x: Tensor, axis: Axis, dim: int, split: Split | None = None) -> Tensor:
    """This rank's slice; backward: the gradient with zeros around it, no traffic."""
    return take_step("take_shard", x, _along(x, axis, dim, split))


def pad_shard(x: Tensor, axis: Axis, dim: int, split: Split | None = None) -> Tensor:
    """The piece with zeros around it, a term of the whole; backward: this rank's slice of the gradient."""
    return take_step("pad_shard", x, _along(x, axis, dim, split))


def all_to_all(
    x: Tensor,
    axis: Axis,
    source_dim: int,
    target_dim: int,
    source_split: Split | None = None,
    target_split: Split | None = None,
) -> Tensor:
    """From pieces of ``source_dim`` to pieces of ``target_dim``; backward: the other way."""
    return take_step(
        "all_to_all", x, Move(axis, source_dim % x.dim(), source_split, target_dim % x.dim(), target_split)
    )
