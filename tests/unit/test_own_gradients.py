"""What torch.export would leave out of a program, gradients made by hand, is refused; operators that have theirs are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.errors import TraceError
from autopar.tracing import trace

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


@pytest.mark.parametrize(
    ("between", "fact"),
    [
        (lambda layer, h: Reversed.apply(h), "calls the autograd function Reversed"),
        (lambda layer, h: checkpoint(layer, h, use_reentrant=True), "use_reentrant=False"),
        (with_hook, "puts a hook on a gradient"),
    ],
)
def test_gradients_made_by_hand_are_refused(between: Callable[[nn.Module, Tensor], Tensor], fact: str) -> None:
    with pytest.raises(TraceError, match=rf"test_own_gradients.py:\d+.*{fact}|{fact}"):
        trace(Between(between), INPUTS)
    assert torch.autograd.Function.apply.__func__ is vars(torch.autograd.Function)["apply"].__func__
    x = torch.ones(2, requires_grad=True)
    Reversed.apply(x).sum().backward()  # afterwards all is as before
    assert x.grad is not None and x.grad.tolist() == [-1.0, -1.0]


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
