"""Normalisation of groups of channels over an image of which each rank holds a piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.runtime import collectives
from autopar.runtime.mesh import Axis


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    count: int,
    axes: Sequence[Axis],
) -> Tensor:
    """``F.group_norm`` of ``x [rows, channels, ...]`` whose space is split over ``axes``; with as many groups as channels,
    instance norm.

    The statistics of a group are those of all its ``count`` elements, here and elsewhere: per axis an all-reduce of sums and
    one of squared deviations, ``[rows, groups]`` each, and in backward one of ``[2, rows, groups]``. Gradients of ``weight``
    and ``bias`` are this rank's terms of a sum. Half precision is computed in float32, as torch does.
    """
    return _GroupNorm.apply(x, num_groups, weight, bias, eps, count, tuple(axes))  # type: ignore[no-untyped-call, no-any-return]


def _sum_over(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    for axis in axes:
        x = collectives.all_reduce(x, axis)
    return x


def _per_channel(of_channels: Tensor, grouped: Tensor) -> Tensor:
    """``[channels]`` beside ``[rows, groups, channels / groups, pixels]``."""
    return of_channels.to(grouped.dtype).view(1, *grouped.shape[1:3], 1)


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        num_groups: int,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        count: int,
        axes: Sequence[Axis],
    ) -> Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        grouped = wide.reshape(x.shape[0], num_groups, x.shape[1] // num_groups, -1)
        mean = _sum_over(grouped.sum((2, 3)), axes) / count
        centered = grouped - mean[:, :, None, None]
        inverse = (_sum_over(centered.square().sum((2, 3)), axes) / count + eps).rsqrt()
        y = centered * inverse[:, :, None, None]
        if weight is not None:
            y = y * _per_channel(weight, y)
        if bias is not None:
            y = y + _per_channel(bias, y)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.count, ctx.axes = count, axes
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y.view(x.shape).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        shape = (*mean.shape, x.shape[1] // mean.shape[1], -1)
        wide = gradient.to(mean.dtype).reshape(shape)
        normalized = (x.to(mean.dtype).reshape(shape) - mean[:, :, None, None]) * inverse[:, :, None, None]
        for_x = for_weight = for_bias = None
        if ctx.needs_input_grad[0]:
            scaled = wide if weight is None else wide * _per_channel(weight, wide)
            sums = torch.stack([scaled.sum((2, 3)), (scaled * normalized).sum((2, 3))])
            means = (_sum_over(sums, ctx.axes) / ctx.count)[..., None, None]
            for_x = (scaled - means[0] - normalized * means[1]) * inverse[:, :, None, None]
            for_x = for_x.view(x.shape).to(x.dtype)
        if ctx.needs_input_grad[2]:
            for_weight = (wide * normalized).sum((0, 3)).flatten().to(weight.dtype)
        if ctx.needs_input_grad[3]:
            for_bias = wide.sum((0, 3)).flatten().to(ctx.bias_dtype)
        return for_x, None, for_weight, for_bias, None, None, None
