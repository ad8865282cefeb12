"""What says itself how a gradient is computed: functions with a backward of their own, and hooks on gradients.

torch.export writes down what the forward computes and nothing of these, so that a program made from it would train with
other gradients, without a word. A function whose backward is linear is written in plain operators instead (``transposed``);
all else is refused. Functions inside an operator are none of the forward's: the operator is written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autopar.errors import TraceError
from autopar.tracing.source import line_of_stack
from autopar.tracing.transposed import NotLinear, with_its_gradient


@contextmanager
def no_own_gradients(model: nn.Module) -> Iterator[None]:
    """While active, the forward raises TraceError where it changes a gradient by hand in a way that cannot be written in
    plain operators; hooks of the model raise at once."""
    _check_hooks(model)
    function, tensor = torch.autograd.Function, torch.Tensor
    saved = [
        (owner, name, vars(owner)[name])
        for owner, name in (
            (function, "apply"),
            (tensor, "register_hook"),
            (tensor, "register_post_accumulate_grad_hook"),
        )
    ]
    function.apply = classmethod(_guarded(function.apply.__func__))  # type: ignore[assignment, attr-defined]
    tensor.register_hook = _refused_hook  # type: ignore[method-assign]
    tensor.register_post_accumulate_grad_hook = _refused_hook  # type: ignore[method-assign]
    try:
        yield
    finally:
        for owner, name, original in saved:
            setattr(owner, name, original)


def _guarded(apply: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(cls: type, *args: Any, **kwargs: Any) -> Any:
        given = pytree.tree_leaves((args, kwargs))
        flows = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in given)
        if flows and get_proxy_mode() is not None:
            return _written_out(cls, args, line_of_stack())
        return apply(cls, *args, **kwargs)

    return guarded


def _written_out(cls: Any, args: Sequence[Any], line: str) -> Any:
    """The function's results in plain operators that have its gradient."""
    try:
        return with_its_gradient(cls, args)
    except Exception as error:
        reason = f" ({error})" if isinstance(error, NotLinear) else ""
        cause = error
    _refuse(
        f"{line} calls the autograd function {cls.__name__}{reason}",
        "write it with plain operators (a checkpoint with use_reentrant=False), or make it an operator with "
        "torch.library.custom_op and register_autograd, and say with autopar.register_rule how to split it",
        cause,
    )


def _refused_hook(tensor: torch.Tensor, hook: Any) -> NoReturn:
    _refuse(f"{line_of_stack()} puts a hook on a gradient", "compute the gradient wanted with plain operators")


def _check_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            _refuse(
                f"the parameter {name} has a hook on its gradient", "remove it, and change gradients after the step"
            )
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            _refuse(f"the module {path or type(module).__name__} has a backward hook", "remove it")


def _refuse(fact: str, advice: str, cause: Exception | None = None) -> NoReturn:
    raise TraceError(
        f"the model cannot be traced: {fact}, which torch.export leaves out of the program, so that gradients would be "
        f"others than the model's; {advice}"
    ) from cause
