"""What torch.export would leave out of a program, gradients made by hand, is refused; operators that have theirs are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.errors import TraceError
from autopar.options import Parallelism
from autopar.planner import plan
from autopar.tracing import trace
from autopar.verifier import verify
from cost_models import Cluster

INPUTS = {"x": torch.randn(4, 8)}


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is the negative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Between(nn.Module):
    """Something between a layer and the loss."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self.layer, self.layer(x)).square().mean()


def with_hook(layer: nn.Module, h: Tensor) -> Tensor:
    h.register_hook(lambda gradient: -gradient)
    return h


class Clipped(Reversed):
    """Its backward is not linear."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e-3, 1e-3)


class Signed(Reversed):
    """Its backward is not linear, and has a derivative of zero."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.sign()


class Added(Reversed):
    """Its backward adds a gradient of its own, as losses do that ride along."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + 1.0


class Constant(Reversed):
    """Its backward does not look at the gradient that it is given."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.ones_like(gradient)


class Rounded(torch.autograd.Function):
    """Rounds; the gradient passes where the argument is small. A second output has a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, limit: float) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, scale)
        ctx.limit = limit
        ctx.mark_non_differentiable(x > 0)
        return (x / scale).round() * scale, x @ x.T, x > 0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        first, second, _ = gradients
        small = torch.where(x.abs() < ctx.limit, first, torch.zeros_like(first))
        return small + 0.5 * (second + second.T) @ x, (first * x / scale).sum(), None


class Dropped(torch.autograd.Function):
    """Draws a mask for the forward that its backward needs again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        kept = torch.rand_like(x) > 0.5
        ctx.save_for_backward(kept)
        return x * kept

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


class Rounding(nn.Module):
    """A model that trains through :class:`Rounded`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, positive = Rounded.apply(self.layer(x), self.scale, 0.5)
        return (first * positive).square().mean() + second.sin().mean()


@pytest.mark.parametrize("data", [1, 2])
def test_a_backward_that_is_linear_is_written_in_plain_operators(data: int) -> None:
    torch.manual_seed(0)
    cluster = Cluster.local(2, memory_bytes=2**30, num_cores=2)
    parallelism = Parallelism(data=data, tensor=2 // data)
    for model in (Rounding(), Between(lambda layer, h: Reversed.apply(h))):
        made = plan(model, cluster, INPUTS, parallelism=parallelism)
        verify(model, made, INPUTS).require()


@pytest.mark.parametrize(
    ("between", "fact"),
    [
        (lambda layer, h: Clipped.apply(h), r"calls the autograd function Clipped \(it is not seen to be linear"),
        (lambda layer, h: Signed.apply(h), r"calls the autograd function Signed \(it is not seen to return zero"),
        (lambda layer, h: Added.apply(h), r"calls the autograd function Added \(it is not seen to return zero"),
        (lambda layer, h: Constant.apply(h), r"calls the autograd function Constant \(a gradient that it returns"),
        (lambda layer, h: Dropped.apply(h), r"calls the autograd function Dropped \(it draws random numbers"),
        (lambda layer, h: checkpoint(layer, h, use_reentrant=True), r"CheckpointFunction \(it starts a backward pass"),
        (with_hook, "puts a hook on a gradient"),
    ],
)
def test_gradients_made_by_hand_are_refused(between: Callable[[nn.Module, Tensor], Tensor], fact: str) -> None:
    with pytest.raises(TraceError, match=fact):
        trace(Between(between), INPUTS)
    assert torch.autograd.Function.apply.__func__ is vars(torch.autograd.Function)["apply"].__func__
    x = torch.ones(2, requires_grad=True)
    Reversed.apply(x).sum().backward()  # afterwards all is as before
    assert x.grad is not None and x.grad.tolist() == [-1.0, -1.0]


def test_the_line_is_named() -> None:
    with pytest.raises(TraceError, match=r"test_own_gradients.py:\d+ calls the autograd function Clipped"):
        trace(Between(lambda layer, h: Clipped.apply(h)), INPUTS)


def test_a_function_that_no_gradient_passes_is_traced() -> None:
    trace(Between(lambda layer, h: h * Reversed.apply(h.detach())), INPUTS)
    trace(Between(lambda layer, h: checkpoint(layer, h, use_reentrant=False)), INPUTS)


def test_hooks_of_the_model_are_refused() -> None:
    model = Between(lambda layer, h: h)
    handle = model.layer.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(TraceError, match=r"the parameter layer.weight has a hook on its gradient"):
        trace(model, INPUTS)
    handle.remove()
    model.layer.register_full_backward_hook(lambda *given: None)
    with pytest.raises(TraceError, match="the module layer has a backward hook"):
        trace(model, INPUTS)


def test_a_registered_operator_keeps_its_gradient() -> None:
    with torch.library._scoped_library("autopar_own_gradients_test", "DEF") as library:
        library.define("reversed(Tensor x) -> Tensor")
        library.impl("reversed", lambda x: x.clone(), "CPU")
        library.impl("reversed", lambda x: torch.empty_like(x), "Meta")
        library.impl("reversed", Inside.apply, "Autograd")
        graph = trace(Between(lambda layer, h: torch.ops.autopar_own_gradients_test.reversed(h)), INPUTS).graph
    assert "autopar_own_gradients_test.reversed.default" in {operator.target for operator in graph.operators}


class Inside(torch.autograd.Function):
    """The gradient of the registered operator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.autopar_own_gradients_test.reversed(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient
