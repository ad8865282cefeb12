"""Operators that must know the mesh: their local part alone is not the local part of the whole result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime import collectives
from autopar.runtime.errors import ProgramError
from autopar.runtime.mesh import Axis
from autopar.runtime.split import Split
from autopar.runtime.steps import reduce_from

_MAX_RANGES = 4  # beyond this many intervals a table is cheaper than comparing with each


def _local_index(index: Tensor, split: Split) -> tuple[Tensor, Tensor]:
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
    local, here = _local_index(ids, split)
    padding = None
    if padding_idx is not None and padding_idx >= 0:
        at = 0
        for first, last in split.intervals():
            if first <= padding_idx < last:
                padding = at + padding_idx - first
            at += last - first
    rows = F.embedding(local, weight, padding)
    return torch.where(here.unsqueeze(-1), rows, rows.new_zeros(()))


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    batch_axes: Sequence[Axis] = (),
    vocab: Split | None = None,
    count: Tensor | None = None,
) -> Tensor:
    """``F.cross_entropy`` of this rank's rows ``[rows, classes, ...]`` or ``[classes]``.

    ``batch_axes``: axes over which the rows are split: a mean divides by the global number (or weight) of valid labels, and
    the result is partial over them. ``count``: that number, found beforehand for the rows of all devices and micro-batches:
    a mean divides by it, and is this call's term of a sum (zero where all labels are ignored). ``vocab``: how the class
    dim of ``logits`` is split; the largest logit, the sum of exponentials and the label's logit are exchanged, and the result
    is replicated over its axes. ``weight`` is always whole. Backward: the gradient of the local logits, without traffic.
    """
    batch_axes = [axis for axis in batch_axes if axis.size > 1]
    if vocab is not None and all(axis.size == 1 for axis in vocab.axes):
        vocab = None
    if vocab is None and (reduction != "mean" or not (batch_axes or count is not None)):
        return F.cross_entropy(logits, labels, weight, None, ignore_index, None, reduction, label_smoothing)
    if vocab is not None and labels.is_floating_point():
        raise ProgramError("cross_entropy over a split class dim takes class indices, not probabilities")
    if vocab is None:
        total = _total(logits, labels, weight, ignore_index, label_smoothing)
    else:
        losses = _split_losses(logits, labels, weight, ignore_index, label_smoothing, vocab)
        if reduction == "none":
            return losses.to(logits.dtype)
        total = losses.sum()
    if reduction == "mean":
        own = _count(labels, weight, ignore_index, total.dtype) if count is None else count
        total = total / (_sum_over(own, batch_axes) if count is None else own.to(total.dtype))
    return total.to(logits.dtype)


def _total(logits: Tensor, labels: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float) -> Tensor:
    """The sum of all rows' losses. In half precision the rows' own are summed in float32: their sum may be too large."""
    if logits.dtype in (torch.float16, torch.bfloat16):
        rows = F.cross_entropy(logits, labels, weight, None, ignore_index, None, "none", label_smoothing)
        return rows.sum(dtype=torch.float32)
    return F.cross_entropy(logits, labels, weight, None, ignore_index, None, "sum", label_smoothing)


def _count(labels: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """Number of valid labels here (int64), or the sum of their weights; of class probabilities every row counts."""
    if labels.is_floating_point():
        return torch.tensor(labels.numel() // labels.shape[min(1, labels.dim() - 1)], device=labels.device)
    valid = labels != ignore_index
    if weight is None:
        return valid.sum()
    return (weight[torch.where(valid, labels, 0)] * valid).sum().to(dtype)


def _sum_over(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """``x`` summed over axes, without gradient."""
    with torch.no_grad():
        for axis in axes:
            x = collectives.all_reduce(x, axis)
    return x


def _split_losses(
    logits: Tensor, labels: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, vocab: Split
) -> Tensor:
    """Loss of every row, zero where the label is ignored, in float32 or better; replicated over the axes of ``vocab``."""
    if weight is not None and weight.shape != (vocab.size,):
        raise ProgramError(f"class weights are wanted whole, [{vocab.size}], not {list(weight.shape)}")
    logits = logits.movedim(1, -1) if logits.dim() > 1 else logits
    if logits.shape[-1] != vocab.local:
        raise ProgramError(f"this rank holds {vocab.local} of {vocab.size} classes, its logits have {logits.shape[-1]}")
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    axes = [axis for axis in vocab.axes if axis.size > 1]
    with torch.no_grad():
        largest = logits.amax(-1) if vocab.local else logits.new_full(logits.shape[:-1], -torch.inf)
        for axis in axes:
            largest = collectives.all_reduce(largest, axis, "max")
    exponentials = (logits - largest.unsqueeze(-1)).exp().sum(-1)
    valid = labels != ignore_index
    local, here = _local_index(torch.where(valid, labels, 0), vocab)
    if vocab.local:
        picked = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1)
        picked = torch.where(here, picked, picked.new_zeros(()))
    else:
        picked = logits.sum(-1)  # zeros, connected to the empty logits
    exponentials, picked = _sum_with_gradient(exponentials, axes), _sum_with_gradient(picked, axes)
    log_sum = exponentials.log() + largest
    losses = log_sum - picked
    if weight is not None:
        losses = losses * weight[torch.where(valid, labels, 0)]
    if label_smoothing:
        losses = (1 - label_smoothing) * losses + label_smoothing * _smooth_losses(logits, log_sum, weight, vocab, axes)
    return torch.where(valid, losses, losses.new_zeros(()))


def _smooth_losses(
    logits: Tensor, log_sum: Tensor, weight: Tensor | None, vocab: Split, axes: Sequence[Axis]
) -> Tensor:
    """Mean over all classes of the loss that each would give as a label."""
    if weight is None:
        return log_sum - _sum_with_gradient(logits.sum(-1), axes) / vocab.size
    mine = vocab.take(weight, 0).to(logits.dtype)
    return (log_sum * weight.sum() - _sum_with_gradient((logits * mine).sum(-1), axes)) / vocab.size


def _sum_with_gradient(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    for axis in axes:
        x = reduce_from(x, axis)
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
        sums = _sum_over(torch.cat([wide.sum(dims), num_rows]), axes)
        mean, count = sums[:-1] / sums[-1], sums[-1]
        centered = wide - _channels(mean, x)
        var = _sum_over(centered.square().sum(dims), axes) / count
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
            means = _sum_over(sums, ctx.axes) / count
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
