"""Operators that must know the mesh: their local part alone is not the local part of the whole result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime import collectives
from autopar.runtime.mesh import Axis
from autopar.runtime.split import Split

_MAX_RANGES = 4  # beyond this many intervals a table is cheaper than comparing with each


def local_index(index: Tensor, split: Split) -> tuple[Tensor, Tensor]:
    """Where global indices stand in this rank's share (0 where they do not), and whether they are here."""
    intervals = split.intervals()
    if len(intervals) > _MAX_RANGES:
        table = torch.full((split.size,), -1, dtype=index.dtype, device=index.device)
        held = torch.cat([torch.arange(first, last, device=index.device) for first, last in intervals])
        table[held] = torch.arange(len(held), dtype=index.dtype, device=index.device)
        local = table[index.clamp(0, split.size - 1)]
        here = (local >= 0) & (index >= 0) & (index < split.size)
        return local.clamp(min=0), here
    local, here, at = torch.zeros_like(index), torch.zeros_like(index, dtype=torch.bool), 0
    for first, last in intervals:
        inside = (index >= first) & (index < last)
        local = torch.where(inside, index - (first - at), local)
        here = here | inside
        at += last - first
    return local, here


def vocab_embedding(ids: Tensor, weight: Tensor, split: Split, padding_idx: int | None = None) -> Tensor:
    """Rows of a vocabulary of which this rank holds a share: ``ids [...]`` (global) -> ``[..., width]``.

    Rows that are elsewhere give zeros, so the result is partial over the axes of ``split``. Backward: the gradient of the
    rows that are here; none for the row ``padding_idx``.
    """
    if weight.shape[0] == 0:
        return weight.new_zeros(*ids.shape, weight.shape[1]) + weight.sum() * 0
    local, here = local_index(ids, split)
    padding = None
    if padding_idx is not None and padding_idx >= 0:
        at = 0
        for first, last in split.intervals():
            if first <= padding_idx < last:
                padding = at + padding_idx - first
            at += last - first
    rows = F.embedding(local, weight, padding)
    return torch.where(here.unsqueeze(-1), rows, rows.new_zeros(()))


def sum_over(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """``x`` summed over axes, without gradient."""
    with torch.no_grad():
        for axis in axes:
            x = collectives.all_reduce(x, axis)
    return x


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *,
    axes: Sequence[Axis] = (),
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Batch norm of ``x [rows, channels, ...]`` whose rows are split over ``axes``: (y, new running mean and variance).

    In training the statistics are those of all rows: per axis one all-reduce of sums and count ``[channels + 1]`` and one of
    squared deviations ``[channels]``, and in backward one of ``[2, channels]``. The gradients of ``weight`` and ``bias`` are
    this rank's terms of a sum.
    """
    axes = [axis for axis in axes if axis.size > 1]
    if not training or not axes:
        mean = running_mean.clone() if running_mean is not None else None
        var = running_var.clone() if running_var is not None else None
        return F.batch_norm(x, mean, var, weight, bias, training, momentum, eps), mean, var
    y, mean, var, count = _BatchNorm.apply(x, weight, bias, eps, axes)  # type: ignore[no-untyped-call]
    if running_mean is None or running_var is None:
        return y, running_mean, running_var
    with torch.no_grad():
        unbiased = var * (count / (count - 1))
        new_mean = torch.lerp(running_mean, mean.to(running_mean.dtype), momentum)
        new_var = torch.lerp(running_var, unbiased.to(running_var.dtype), momentum)
    return y, new_mean, new_var


def _channels(x: Tensor, like: Tensor) -> Tensor:
    """``[channels]`` as ``[1, channels, 1, ...]``."""
    return x.view(1, -1, *(1 for _ in range(like.dim() - 2)))


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, axes: Sequence[Axis]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        dims = [dim for dim in range(x.dim()) if dim != 1]
        num_rows = wide.new_full((1,), x.numel() // x.shape[1])
        sums = sum_over(torch.cat([wide.sum(dims), num_rows]), axes)
        mean, count = sums[:-1] / sums[-1], sums[-1]
        centered = wide - _channels(mean, x)
        var = sum_over(centered.square().sum(dims), axes) / count
        inverse = (var + eps).rsqrt()
        y = centered * _channels(inverse, x)
        if weight is not None:
            y = y * _channels(weight.to(wide.dtype), x)
        if bias is not None:
            y = y + _channels(bias.to(wide.dtype), x)
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.axes, ctx.dims = axes, dims
        ctx.mark_non_differentiable(mean, var, count)
        return y.to(x.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        wide = gradient.to(mean.dtype)
        normalized = (x.to(mean.dtype) - _channels(mean, x)) * _channels(inverse, x)
        sums = torch.stack([wide.sum(ctx.dims), (wide * normalized).sum(ctx.dims)])
        for_x = None
        if ctx.needs_input_grad[0]:
            means = sum_over(sums, ctx.axes) / count
            scale = inverse if weight is None else inverse * weight.to(mean.dtype)
            for_x = wide - _channels(means[0], x) - normalized * _channels(means[1], x)
            for_x = (for_x * _channels(scale, x)).to(x.dtype)
        for_weight = sums[1].to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        for_bias = sums[0].to(gradient.dtype if weight is None else weight.dtype) if ctx.needs_input_grad[2] else None
        return for_x, for_weight, for_bias, None, None


def partial_mean(
    x: Tensor, dim: int | Sequence[int] | None, keepdim: bool, count: int, dtype: torch.dtype | None = None
) -> Tensor:
    """This rank's term of a mean over ``count`` elements in all: the local sum over ``dim`` (None: all dims) / ``count``."""
    if dim is None:
        return x.sum(tuple(range(x.dim())), keepdim=keepdim, dtype=dtype) / count
    return x.sum(dim if isinstance(dim, int) else tuple(dim), keepdim=keepdim, dtype=dtype) / count
