"""Operators of a user's own library, none of which has a rule: for the prober, and for plans that compute them replicated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _own(body: Callable[..., Any]) -> Callable[..., Any]:
    """``own::NAME``: the body as one operator; its backward is what autograd makes of the body."""
    operator = torch.library.custom_op(f"own::{body.__name__}", body, mutates_args=())
    operator.register_fake(body)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.given = inputs

    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            again = [
                a.detach().requires_grad_(a.is_floating_point()) if isinstance(a, Tensor) else a for a in ctx.given
            ]
            made = body(*again)
            outputs = [made] if isinstance(made, Tensor) else list(made)
            pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad and g is not None]
            wanted = [a for a in again if isinstance(a, Tensor) and a.requires_grad]
            found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
        return tuple(next(found) if isinstance(a, Tensor) and a.requires_grad else None for a in again)

    operator.register_autograd(backward, setup_context=setup_context)
    return operator


@_own
def scaled_linear(x: Tensor, weight: Tensor) -> Tensor:
    return 0.5 * (x @ weight.T)


@_own
def gated(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)


@_own
def row_softmax(x: Tensor, temperature: float) -> Tensor:
    return torch.softmax(x / temperature, -1)


@_own
def distances(x: Tensor, y: Tensor) -> Tensor:
    return ((x[:, :, None] - y[:, None]) ** 2).sum(-1)


@_own
def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


@_own
def low_and_high(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.amin(1) * 1.0, x.amax(1) * 1.0


@_own
def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum(1)


@_own
def with_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ weight + bias


@_own
def over_its_norm(x: Tensor) -> Tensor:
    return x / x.norm()


@_own
def rolled(x: Tensor) -> Tensor:
    return torch.roll(x, 1, 0) + torch.roll(x, 1, 1)


@_own
def looked_up(table: Tensor, places: Tensor) -> Tensor:
    return table[places]
