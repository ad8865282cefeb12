"""A dropless mixture of experts: every token goes to the experts that its router has chosen, wherever they are.

Rows, one for each token and choice, are sorted by expert, so that each expert's stand together; its layers are applied to
them, and the results are put back and added up by the router's weights. How many rows an expert gets is known when they are
sorted: the numbers go to the host once a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autopar.runtime import collectives
from autopar.runtime.mesh import Axis
from autopar.runtime.split import Interval, Split, length


class Groups:
    """Rows that are sorted by expert: how many each expert has."""

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self.counts = tuple(counts)
        self._device = device

    @cached_property
    def experts(self) -> Tensor:
        """The expert of each row."""
        experts = torch.arange(len(self.counts), device=self._device)
        counts = torch.tensor(self.counts, device=self._device)
        return experts.repeat_interleave(counts, output_size=sum(self.counts))


class Stack:
    """A parameter of all experts on this rank, ``[experts, ...]``, for rows that are sorted by expert."""

    def __init__(self, parameter: Tensor, groups: Groups) -> None:
        self._parameter = parameter
        self._groups = groups

    def linear(self, rows: Tensor) -> Tensor:
        """Each row by its expert's weights: ``[rows, in]``, parameter ``[experts, out, in]`` -> ``[rows, out]``."""
        return self._product(rows, self._parameter.transpose(1, 2))

    def matmul(self, rows: Tensor) -> Tensor:
        """The same for a parameter ``[experts, in, out]``."""
        return self._product(rows, self._parameter)

    def _product(self, rows: Tensor, matrices: Tensor) -> Tensor:
        found: Tensor = _Product.apply(rows, matrices, self._groups.counts)  # type: ignore[no-untyped-call]
        return found

    @property
    def rows(self) -> Tensor:
        """The entry of each row's expert: ``[experts, width]`` -> ``[rows, width]``."""
        return self._parameter[self._groups.experts]


Body = Callable[..., Tensor]  # (rows [rows, width], a Stack for each parameter) -> [rows, width]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def experts(
    body: Body,
    tokens: Tensor,
    ids: Tensor,
    weights: Tensor,
    *parameters: Tensor,
    split: Split | None = None,
    exchange: Axis | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The sum over each token's chosen experts of weight times result: ``[tokens, width] -> [tokens, width]``.

    ``tokens [tokens, width]``, ``ids`` (of all experts) and ``weights [tokens, k]`` are this rank's. ``body`` is what an
    expert does to rows; it gets them sorted by expert, and a :class:`Stack` for each of ``parameters [experts, ...]``.
    ``split``: how the experts are cut, of which ``parameters`` are this rank's. Then either all ranks that share the experts
    have the same tokens, and the result is a term of a sum over them; or ``exchange`` is the axis along which tokens and
    experts are cut both: rows travel to their experts and back, with their numbers first. ``dtype``: the type in which the
    weighted rows are added up, by default their own.

    Backward: gradients of tokens, weights and parameters; along ``exchange`` those of the parameters are complete. Two
    collectives bring the gradients of results and rows the same ways.
    """
    if exchange is not None and split is not None and exchange.size > 1:
        found, order = _travelled(body, tokens, ids, parameters, split, exchange)
    else:
        order, counts = _sorted_here(ids, parameters[0].shape[0], split)
        rows = tokens[order // ids.shape[1]]
        groups = Groups(counts, ids.device)
        found = body(rows, *(Stack(parameter, groups) for parameter in parameters))
    weighted = found * weights.reshape(-1)[order].unsqueeze(-1)
    if dtype is not None:
        weighted = weighted.to(dtype)
    placed = weighted.new_zeros(ids.numel(), weighted.shape[1]).index_put((order,), weighted)
    return placed.view(*ids.shape, weighted.shape[1]).sum(1)


def _sorted_here(ids: Tensor, num_experts: int, split: Split | None) -> tuple[Tensor, list[int]]:
    """Which choices (of all tokens, flat) are of experts on this rank, sorted by expert, and how many of each."""
    chosen = ids.reshape(-1)
    if split is not None:
        chosen = _positions(split.intervals(), split.size, chosen)
    counts: list[int] = torch.bincount(chosen, minlength=num_experts + 1)[:num_experts].tolist()
    return chosen.argsort(stable=True)[: sum(counts)], counts


def _positions(intervals: Sequence[Interval], size: int, ids: Tensor) -> Tensor:
    """Where ids stand among those of the intervals, which follow each other; after all of these where they are not there."""
    device = ids.device
    held = torch.cat([torch.arange(first, last, device=device) for first, last in intervals])
    table = torch.full((size,), len(held), device=device)
    table[held] = torch.arange(len(held), device=device)
    return table[ids]


@dataclass(frozen=True)
class _Route:
    """How many rows go to each rank of an axis, and come from each; ``num_own`` of this rank's tokens are on the way."""

    axis: Axis
    sent: tuple[int, ...]
    received: tuple[int, ...]
    num_own: int

    def back(self) -> _Route:
        """The way back."""
        return replace(self, sent=self.received, received=self.sent)


def _travelled(
    body: Body, tokens: Tensor, ids: Tensor, parameters: Sequence[Tensor], split: Split, axis: Axis
) -> tuple[Tensor, Tensor]:
    """Every choice's result, sorted by the expert's rank and place there, and which choice each is of."""
    shares = [split.intervals({axis.index: place}) for place in range(axis.size)]
    position = _positions([interval for share in shares for interval in share], split.size, ids.reshape(-1))
    order = position.argsort(stable=True)
    counts = torch.bincount(position, minlength=split.size)
    sizes = [length(share) for share in shares]
    here = sizes[axis.place]
    arriving = collectives.exchange_rows(counts, sizes, [here] * axis.size, axis, counts.numel()).view(axis.size, here)
    sent = torch.stack([part.sum() for part in counts.split(sizes)])
    numbers: list[int] = torch.cat([sent, arriving.sum(1), arriving.sum(0)]).tolist()  # the one way to the host
    route = _Route(axis, tuple(numbers[: axis.size]), tuple(numbers[axis.size : 2 * axis.size]), ids.numel())
    rows = _carried(tokens[order // ids.shape[1]], route)
    of_expert = torch.arange(here, device=ids.device).repeat(axis.size)
    by_expert = of_expert.repeat_interleave(arriving.reshape(-1), output_size=rows.shape[0]).argsort(stable=True)
    groups = Groups(numbers[2 * axis.size :], ids.device)
    found = body(rows[by_expert], *(Stack(parameter, groups) for parameter in parameters))
    return _carried(found[by_expert.argsort()], route.back()), order


def _carried(rows: Tensor, route: _Route) -> Tensor:
    return _Carried.apply(rows, route)  # type: ignore[no-any-return, no-untyped-call]


class _Carried(torch.autograd.Function):
    """Rows to the ranks that they are for; backward: gradients the other way.

    The ledger has the rows of this rank's own tokens, both ways: what it does for others depends on what they choose.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: _Route) -> Tensor:
        ctx.route = route
        return collectives.exchange_rows(rows, route.sent, route.received, route.axis, route.num_own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        back = ctx.route.back()
        return collectives.exchange_rows(gradient, back.sent, back.received, back.axis, back.num_own), None


class _Product(torch.autograd.Function):
    """Rows sorted by expert, each expert's by its own matrix: ``[rows, in], [experts, in, out] -> [rows, out]``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, matrices if ctx.needs_input_grad[0] else None)
        ctx.counts, ctx.shape = counts, matrices.shape
        out = rows.new_empty(rows.shape[0], matrices.shape[2])
        for expert, (start, end) in _ranges(counts):
            torch.mm(rows[start:end], matrices[expert], out=out[start:end])
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, matrices = ctx.saved_tensors
        for_rows = gradient.new_empty(gradient.shape[0], ctx.shape[1]) if ctx.needs_input_grad[0] else None
        for_matrices = gradient.new_zeros(ctx.shape) if ctx.needs_input_grad[1] else None
        for expert, (start, end) in _ranges(ctx.counts):
            if for_rows is not None:
                torch.mm(gradient[start:end], matrices[expert].t(), out=for_rows[start:end])
            if for_matrices is not None:
                torch.mm(rows[start:end].t(), gradient[start:end], out=for_matrices[expert])
        return for_rows, for_matrices, None


def _ranges(counts: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
    """Each expert that has rows, with the first and the one after the last of them."""
    found, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            found.append((expert, (start, start + count)))
        start += count
    return found
