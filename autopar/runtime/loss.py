"""Cross-entropy of this rank's rows and classes, of logits or, by chunks of rows, of what they are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime import collectives
from autopar.runtime.errors import ProgramError
from autopar.runtime.mesh import Axis
from autopar.runtime.operators import local_index, sum_over
from autopar.runtime.split import Split
from autopar.runtime.steps import reduce_from


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
        total = _averaged(total, labels, weight, ignore_index, batch_axes, count)
    return total.to(logits.dtype)


def _averaged(
    total: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    batch_axes: Sequence[Axis],
    count: Tensor | None,
) -> Tensor:
    """A sum over rows divided by the number (or weight) of valid labels of all ranks."""
    if count is not None:
        return total / count.to(total.dtype)
    return total / sum_over(_count(labels, weight, ignore_index, total.dtype), batch_axes)


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
    local, here = local_index(torch.where(valid, labels, 0), vocab)
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


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    rows: int,
    dtype: torch.dtype | None = None,
    batch_axes: Sequence[Axis] = (),
    vocab: Split | None = None,
    count: Tensor | None = None,
) -> Tensor:
    """:func:`cross_entropy` of ``F.linear(x, weight, bias)``, whose result is never whole: ``rows`` at a time.

    ``x [..., width]`` and ``labels [...]`` are this rank's rows, ``weight [classes, width]``, ``bias [classes]`` its classes.
    ``dtype``: the type that logits are brought to, by default their own; sums are in float32 at least. The rest is as of
    :func:`cross_entropy`, what is exchanged too: once for all rows. Backward computes the logits again, and gives the gradients
    of ``x`` (over split classes a term of a sum), ``weight`` and ``bias``, without traffic. ``torch.compile`` leaves it out.
    """
    if labels.is_floating_point():
        raise ProgramError("linear_cross_entropy takes class indices, not probabilities")
    batch_axes = [axis for axis in batch_axes if axis.size > 1]
    num_classes = weight.shape[0] if vocab is None else vocab.size
    if class_weight is not None and class_weight.shape != (num_classes,):
        raise ProgramError(f"class weights are wanted whole, [{num_classes}], not {list(class_weight.shape)}")
    options = _ByChunks(rows, dtype or x.dtype, ignore_index, label_smoothing, vocab, num_classes)
    flat, labels = x.reshape(-1, x.shape[-1]), labels.reshape(-1)
    total: Tensor = _LinearCrossEntropy.apply(flat, weight, bias, labels, class_weight, options)  # type: ignore[no-untyped-call]
    if reduction == "mean":
        total = _averaged(total, labels, class_weight, ignore_index, batch_axes, count)
    return total.to(dtype or x.dtype)


class _ByChunks(NamedTuple):
    """How rows are taken, and what the loss is."""

    rows: int
    dtype: torch.dtype
    ignore_index: int
    label_smoothing: float
    vocab: Split | None
    num_classes: int

    @property
    def wide(self) -> torch.dtype:
        """In which losses and gradients are summed."""
        return torch.float32 if self.dtype in (torch.float16, torch.bfloat16) else self.dtype

    @property
    def axes(self) -> list[Axis]:
        """Those that split the classes."""
        return [] if self.vocab is None else [axis for axis in self.vocab.axes if axis.size > 1]

    def chunks(self, num_rows: int) -> Iterator[slice]:
        """All rows."""
        return (slice(start, min(start + self.rows, num_rows)) for start in range(0, max(num_rows, 1), self.rows))

    def logits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Of some rows, for the sums; a tensor of its own."""
        found = F.linear(x, weight, bias)
        return found.to(self.dtype).to(self.wide)

    def places(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Where the labels of some rows stand among this rank's classes, and whether they are there and count."""
        valid = labels != self.ignore_index
        local = torch.where(valid, labels, 0)
        if self.vocab is None:
            return local, valid
        local, here = local_index(local, self.vocab)
        return local, here & valid

    def own(self, class_weight: Tensor | None) -> Tensor | None:
        """The weights of this rank's classes."""
        if class_weight is None:
            return None
        mine = class_weight if self.vocab is None else self.vocab.take(class_weight, 0)
        return mine.to(self.wide)

    def factors(self, labels: Tensor, class_weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Of each row: what its label's logarithm counts for, all classes' together, and each class's (before its weight)."""
        valid = labels != self.ignore_index
        counts = valid.to(self.wide)
        for_label = counts * (1 - self.label_smoothing)
        for_each = counts * (self.label_smoothing / self.num_classes)
        total = for_each * self.num_classes
        if class_weight is not None:
            weights = class_weight.to(self.wide)
            for_label, total = for_label * weights[torch.where(valid, labels, 0)], for_each * weights.sum()
        return for_label, for_label + total, for_each


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum of all rows' losses.

    With ``f`` the factors of a row (``_ByChunks.factors``), ``z`` its logits, ``s`` the logarithm of the sum of their
    exponentials: loss = f_all s - f_label z[label] - f_each sum_c(w_c z_c), whose gradient is f_all exp(z - s), less f_label
    at the label, less f_each w.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        class_weight: Tensor | None,
        by: _ByChunks,
    ) -> Tensor:
        found = (_statistics(x[rows], weight, bias, labels[rows], class_weight, by) for rows in by.chunks(x.shape[0]))
        largest, exponentials, picked, spread = (torch.cat(parts) for parts in zip(*found, strict=True))
        if by.axes:
            own = largest
            for axis in by.axes:
                largest = collectives.all_reduce(largest, axis, "max")
            exponentials = sum_over(exponentials * (own - largest).exp(), by.axes)
            picked = sum_over(picked, by.axes)
            spread = sum_over(spread, by.axes) if by.label_smoothing else spread
        log_sum = exponentials.log() + largest
        for_label, for_all, for_each = by.factors(labels, class_weight)
        ctx.by = by
        # The bias is small: a copy is kept, so that a gathered one is not gathered again.
        ctx.save_for_backward(x, weight, None if bias is None else bias.clone(), labels, class_weight, log_sum)
        losses = torch.where(labels != by.ignore_index, for_all * log_sum - for_label * picked - for_each * spread, 0.0)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, weight, bias, labels, class_weight, log_sum = ctx.saved_tensors
        by: _ByChunks = ctx.by
        for_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        for_weight = torch.zeros_like(weight, dtype=by.wide) if ctx.needs_input_grad[1] else None
        for_bias = torch.zeros_like(bias, dtype=by.wide) if bias is not None and ctx.needs_input_grad[2] else None
        for rows in by.chunks(x.shape[0]):
            along = _gradient(x[rows], weight, bias, labels[rows], class_weight, log_sum[rows], gradient, by)
            if for_bias is not None:
                for_bias += along.sum(0)
            along = along.to(x.dtype)
            if for_x is not None:
                torch.mm(along, weight, out=for_x[rows])
            if for_weight is not None:
                _add_product(for_weight, along.t(), x[rows])
        return (
            for_x,
            None if for_weight is None else for_weight.to(weight.dtype),
            None if for_bias is None else for_bias.to(weight.dtype),
            None,
            None,
            None,
        )


def _statistics(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, class_weight: Tensor | None, by: _ByChunks
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each of some rows: the largest logit here, the sum of exponentials less that, the label's logit, and where labels are
    smoothed the weighed sum of all; zeros where labels are elsewhere."""
    logits = by.logits(x, weight, bias)
    local, here = by.places(labels)
    picked = torch.where(here, logits.gather(1, local.unsqueeze(1)).squeeze(1), 0.0)
    mine = by.own(class_weight)
    if not by.label_smoothing:
        spread = picked.new_zeros(picked.shape)
    else:
        spread = logits.sum(1) if mine is None else logits @ mine
    largest = logits.amax(1)
    return largest, logits.sub_(largest.unsqueeze(1)).exp_().sum(1), picked, spread


def _gradient(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, class_weight: Tensor | None, log_sum: Tensor,
    gradient: Tensor, by: _ByChunks,
) -> Tensor:  # fmt: skip
    """Of the logits of some rows."""
    found = by.logits(x, weight, bias).sub_(log_sum.unsqueeze(1)).exp_()
    counts = labels != by.ignore_index  # where none does, a mean's gradient is infinite
    factors = by.factors(labels, class_weight)
    for_label, for_all, for_each = (torch.where(counts, factor * gradient, 0.0) for factor in factors)
    found *= for_all.unsqueeze(1)
    local, here = by.places(labels)
    found.scatter_add_(1, local.unsqueeze(1), torch.where(here, -for_label, 0.0).unsqueeze(1))
    if by.label_smoothing:
        mine = by.own(class_weight)
        found -= for_each.unsqueeze(1) if mine is None else for_each.unsqueeze(1) * mine
    return found


def _add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """Add a product to a sum that may be of a wider type."""
    if total.dtype == one.dtype:
        total.addmm_(one, other)
    else:
        total += torch.mm(one, other)
