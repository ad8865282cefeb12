"""An autograd function with a backward of its own, as plain operators that have the same value and the same gradient.

torch.export writes down what a forward computes and nothing of ``backward``. But a backward is linear in the gradient
``g`` that it is given: ``g -> B g``. With ``t = x - x.detach()``, which is zero, the sum

    forward(x).detach() + B' t        (B' the transpose of B)

has the function's value, and as its gradient for ``x`` the transpose of B', which is B. The transpose is found by
differentiating the backward with respect to ``g``, on tensors without data, and is refused unless it is seen that

* it does not read ``g``: otherwise the backward is not linear (clipped gradients);
* a gradient of zero gives zero: otherwise it adds something of its own (losses smuggled in).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

# Operators that are zero where one of their tensors is; where the first is; where all are.
_PRODUCTS = frozenset("mul mm bmm matmul mv dot".split())
_LINEAR = frozenset(
    "view reshape _unsafe_view permute transpose t expand unsqueeze squeeze slice select clone detach alias neg sum mean "
    "div _to_copy to gather index index_select flip roll contiguous split split_with_sizes unbind cumsum tril triu "
    "_softmax_backward_data tanh_backward sigmoid_backward threshold_backward".split()
)
_SUMS = frozenset("add sub cat stack".split())
_ZEROS = frozenset("zeros zeros_like new_zeros".split())


class NotLinear(Exception):
    """Why a backward is not seen to be linear in the gradient that it is given."""


class _Context:
    """What a function's forward hands to its backward, as torch's own context does."""

    def __init__(self, needs_input_grad: Sequence[bool]) -> None:
        self.needs_input_grad = tuple(needs_input_grad)
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *outputs: Any) -> None:
        """Nothing to note: a backward makes nothing of the gradients of such outputs."""

    def set_materialize_grads(self, value: bool) -> None:
        """Gradients are given for all outputs, whether wanted or not: zeros are as good as none."""

    def mark_dirty(self, *inputs: Any) -> None:
        raise NotLinear("it writes into its inputs")


def with_its_gradient(cls: Any, args: Sequence[Any]) -> Any:
    """The results of ``cls.apply(*args)`` in plain operators whose gradient is that of ``cls.backward``.

    Raises :class:`NotLinear` where the backward is not seen to be linear, and whatever it raises itself when it is run on
    its own.
    """
    kept = [item.detach() if isinstance(item, Tensor) else item for item in args]
    needs = [isinstance(item, Tensor) and item.requires_grad for item in args]
    outputs, several = _forward(cls, kept, _Context(needs))
    tangents = [item - item.detach() for item, needed in zip(args, needs, strict=True) if needed]
    with disable_proxy_modes_tracing():
        transpose = _transpose(cls, kept, needs)
    added = transpose(kept, tangents)
    results = [
        output.detach()
        if isinstance(output, Tensor) and more is None
        else output
        if more is None
        else output.detach() + more
        for output, more in zip(outputs, added, strict=True)
    ]
    return tuple(results) if several else results[0]


def _forward(cls: Any, args: Sequence[Any], context: _Context) -> tuple[list[Any], bool]:
    """The outputs as a list, and whether there are several."""
    if cls.setup_context is not torch.autograd.Function.setup_context:
        output = cls.forward(*args)
        cls.setup_context(context, tuple(args), output)
    else:
        output = cls.forward(context, *args)
    several = isinstance(output, (tuple, list))
    return (list(output) if several else [output]), several


def _transpose(
    cls: Any, args: Sequence[Any], needs: Sequence[bool]
) -> Callable[[Sequence[Any], Sequence[Tensor]], list[Any]]:
    """A function of the arguments and the tangents: what is added to each output, or None."""
    places = [index for index, item in enumerate(args) if isinstance(item, Tensor)]
    given = [torch.empty_like(args[index]) for index in places]
    tangents = [torch.empty_like(item) for item, needed in zip(args, needs, strict=True) if needed]
    outputs, _ = _forward(cls, args, _Context(needs))
    gradients = [torch.empty_like(output) for output in outputs if isinstance(output, Tensor)]
    found: list[bool] = []

    def backward(given: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor | None]:
        whole = list(args)
        for index, tensor in zip(places, given, strict=True):
            whole[index] = tensor.detach()
        context = _Context(needs)
        with torch.no_grad():
            _forward(cls, whole, context)
        with torch.enable_grad():
            result = cls.backward(context, *gradients)
        listed = list(result) if isinstance(result, (tuple, list)) else [result]
        return [item for item, needed in zip(listed, needs, strict=True) if needed]

    def wanted(given: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        return [item for item in backward(given, gradients) if item is not None]

    def transposed(given: Sequence[Tensor], gradients: Sequence[Tensor], tangents: Sequence[Tensor]) -> list[Tensor]:
        leaves = [g.detach().requires_grad_(g.is_floating_point()) for g in gradients]
        pairs = [(r, t) for r, t in zip(backward(given, leaves), tangents, strict=True) if r is not None]
        if not all(result.requires_grad for result, _ in pairs):
            raise NotLinear("a gradient that it returns does not follow from the one that it is given")
        added = torch.autograd.grad(
            [result for result, _ in pairs],
            [leaf for leaf in leaves if leaf.requires_grad],
            [tangent for _, tangent in pairs],
            allow_unused=True,
        )
        found[:] = [item is not None for item in added]
        return [item for item in added if item is not None]

    with _no_backward_pass():
        graph = make_fx(transposed)(given, gradients, tangents)
        plain = make_fx(wanted)(given, gradients)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    if any(node.users for node in _placeholders(graph)[len(given) : len(given) + len(gradients)]):
        raise NotLinear("it is not seen to be linear in the gradient that it is given")
    if any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in plain.graph.nodes):
        raise NotLinear("it draws random numbers, and would draw others for its gradient")
    if any(isinstance(value, torch.nn.Parameter) for value in vars(plain).values()) or plain._parameters:
        raise NotLinear("it uses a parameter that is none of its arguments")
    if not _gives_zero(plain, len(given)):
        raise NotLinear("it is not seen to return zero for a gradient of zero")

    def run(args: Sequence[Any], tangents: Sequence[Tensor]) -> list[Any]:
        unread = [0.0] * len(gradients)
        supply = iter(graph([args[index] for index in places], unread, list(tangents)))
        flows = iter(found)
        return [
            next(supply) if isinstance(output, Tensor) and output.is_floating_point() and next(flows) else None
            for output in outputs
        ]

    return run


@contextmanager
def _no_backward_pass() -> Iterator[None]:
    """A backward that starts another one adds to the gradients of tensors that are none of its arguments."""

    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotLinear("it starts a backward pass of its own")

    saved, torch.autograd.backward = torch.autograd.backward, refused
    try:
        yield
    finally:
        torch.autograd.backward = saved


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _gives_zero(graph: fx.GraphModule, num_given: int) -> bool:
    """Whether all results are zero where the tensors after the first ``num_given`` are."""
    zero = set(_placeholders(graph)[num_given:])
    for node in graph.graph.nodes:
        if node.op == "output":
            return all(item in zero for item in pytree.tree_leaves(node.args[0]))
        if node.op == "call_function" and _is_zero(node, zero):
            zero.add(node)
    return False


def _is_zero(node: fx.Node, zero: set[fx.Node]) -> bool:
    first = node.args[0] if node.args else None
    if node.target is operator.getitem:
        return first in zero
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name, tensors = node.target._schema.name.split("::")[1], node.all_input_nodes
    if name in _PRODUCTS:
        return any(item in zero for item in tensors)
    if name in _SUMS:
        plain = name in ("cat", "stack") or all(isinstance(item, fx.Node) for item in node.args)
        return plain and bool(tensors) and all(item in zero for item in tensors)
    if name in ("full", "scalar_tensor", "full_like"):
        return bool(node.args[-1] == 0)
    if name == "where":
        return all(item in zero for item in node.args[1:])
    if name == "masked_fill":
        return first in zero and bool(node.args[2] == 0)
    return name in _ZEROS or (name in _LINEAR and first in zero)
