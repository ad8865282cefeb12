"""``torch.cond`` with a gradient that does not depend on which branch was taken.

Torch's own gives every operand a gradient, of zeros where the branch taken does not use it. So does this one: what follows in
backward (collectives of layout changes, reductions) is then the same whatever was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Branch = Callable[..., Any]


class _Joined(torch.autograd.Function):
    """The results as they are; every operand is given a gradient of zeros beside that which comes through them."""

    @staticmethod
    def forward(ctx: Any, num_results: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.operands = [(operand.shape, operand.dtype, operand.device) for operand in tensors[num_results:]]
        results = tuple(result.view_as(result) for result in tensors[:num_results])
        ctx.mark_non_differentiable(*(result for result in results if not _has_gradient(result)))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (
            torch.zeros(shape, dtype=dtype, device=device) if wanted else None
            for (shape, dtype, device), wanted in zip(
                ctx.operands, ctx.needs_input_grad[1 + len(gradients) :], strict=True
            )
        )
        return (None, *gradients, *zeros)


def cond(predicate: Tensor, if_true: Branch, if_false: Branch, operands: Sequence[Tensor]) -> Any:
    """What the chosen branch makes of ``operands``; a tensor, or a tuple of several. ``predicate``: one boolean."""
    found = (if_true if bool(predicate) else if_false)(*operands)
    several = isinstance(found, tuple)
    results = _Joined.apply(len(found) if several else 1, *(found if several else (found,)), *operands)  # type: ignore[no-untyped-call]
    return results if several else results[0]


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
