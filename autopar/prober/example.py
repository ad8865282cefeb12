"""An operator with example arguments: what is run whole and on shards.

Enters: an operator's name and arguments. Leaves: an :class:`Example`, which calls the operator on any tensors in place of
the example's, and the graph of that one call, as rules read it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from autopar.errors import RuleError
from autopar.graph import Operator, OpGraph, Ref, Value
from autopar.strategies.registry import full_target

LOOSE = 1e-4  # relative, where an operator does not take float64
TIGHT = 1e-9


@dataclass(frozen=True, eq=False)
class Example:
    """One call of ``target``: ``call`` takes tensors in place of ``tensors`` and gives the tensors that come out."""

    target: str
    tensors: tuple[torch.Tensor, ...]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    call: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]

    @cached_property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        """What the operator gives on one device."""
        return tuple(self.call(self.tensors))

    @property
    def tolerance(self) -> float:
        """Relative to the largest element."""
        single = any(t.dtype in (torch.float32, torch.complex64) for t in (*self.tensors, *self.outputs))
        return LOOSE if single else TIGHT

    def shuffled(self, seed: int) -> Example:
        """The same call with the elements of each tensor in another order: other numbers that the operator also takes."""
        generator = torch.Generator().manual_seed(seed)
        tensors = tuple(
            t.detach()
            .flatten()[torch.randperm(t.numel(), generator=generator)]
            .view(t.shape)
            .requires_grad_(t.requires_grad)
            for t in self.tensors
        )
        return replace(self, tensors=tensors)

    def operator(self) -> tuple[Operator, OpGraph]:
        """The call as an operator of a graph of its own."""
        inputs = {f"x{index}": tensor for index, tensor in enumerate(self.tensors)}
        outputs = {f"y{index}": tensor for index, tensor in enumerate(self.outputs)}
        values = {
            name: Value(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad)
            for name, tensor in (*inputs.items(), *outputs.items())
        }
        operator = Operator("example", self.target, self.arguments, tuple(self.keywords.items()), tuple(outputs))
        return operator, OpGraph("example", values, (), (), (), (), (operator,), (), None, 1)


def example_of(target: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Example:
    """An example from a user's arguments; floating tensors become float64 where the operator takes it, and want gradients
    where it is differentiable.

    Raises RuleError where the operator is unknown, changes its arguments, draws random numbers, or fails.
    """
    name = full_target(target)
    function = _function(name)
    args, keys = list(arguments), dict(keywords)
    tensors = _tensors((args, keys))
    if not tensors:
        raise RuleError(f"{name}: none of the example's arguments is a tensor; give tensors as they are in your model")

    def call(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        left = iter(given)
        return _tensors(function(*_replaced(args, left), **_replaced(keys, left)))

    names = iter([Ref(f"x{index}") for index in range(len(tensors))])
    named = _tuples(_replaced(args, names)), _tuples(_replaced(keys, names))
    return _checked(_differentiable(_double(Example(name, tuple(t.detach() for t in tensors), *named, call))))


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in lists, tuples and dicts, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _replaced(tree: Any, new: Iterator[Any]) -> Any:
    """The same tree with the next of ``new`` in place of each tensor."""
    if isinstance(tree, torch.Tensor):
        return next(new)
    if isinstance(tree, dict):
        return {name: _replaced(item, new) for name, item in tree.items()}
    return type(tree)(_replaced(item, new) for item in tree) if isinstance(tree, (list, tuple)) else tree


def _function(name: str) -> Any:
    library, operator, overload = name.split(".")
    try:
        function = getattr(getattr(getattr(torch.ops, library), operator), overload)
    except AttributeError:
        raise RuleError(
            f"there is no operator {name} in torch.ops; define it before it is probed (torch.library.custom_op), or mend "
            "the name"
        ) from None
    if function._schema.is_mutable:
        raise RuleError(
            f"{name} changes its arguments; such an operator is computed replicated, give one that returns its result"
        )
    return function


def by_name(target: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, those that are left out as the operator's schema has them."""
    schema = _function(target)._schema.arguments
    named = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    named.update(zip((argument.name for argument in schema), arguments, strict=False))
    return {**named, **keywords}


def _tuples(tree: Any) -> Any:
    """Lists as tuples, as a traced operator has them."""
    if isinstance(tree, (list, tuple)):
        return tuple(_tuples(item) for item in tree)
    return {name: _tuples(item) for name, item in tree.items()} if isinstance(tree, dict) else tree


def _double(example: Example) -> Example:
    """In float64, if the operator takes that."""
    wide = tuple(
        t.to(torch.complex128) if t.is_complex() else t.double() if t.is_floating_point() else t
        for t in example.tensors
    )
    try:
        example.call(wide)
    except (RuntimeError, NotImplementedError, TypeError):
        return example
    return replace(example, tensors=wide)


def _differentiable(example: Example) -> Example:
    """With gradients wanted by all floating tensors, if backward works."""
    wanting = tuple(t.clone().requires_grad_(t.is_floating_point() or t.is_complex()) for t in example.tensors)
    try:
        outputs = [t for t in example.call(wanting) if t.requires_grad]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an operator without a formula for backward warns that it may be wrong
            torch.autograd.grad([t.sum() for t in outputs], [t for t in wanting if t.requires_grad], allow_unused=True)
    except (RuntimeError, NotImplementedError):
        return example
    return replace(example, tensors=wanting)


def _checked(example: Example) -> Example:
    try:
        first = example.call(example.tensors)
    except Exception as error:
        raise RuleError(
            f"{example.target} fails on the example: {error}; give arguments as they are in your model"
        ) from error
    second = example.call(example.tensors)
    if not all(torch.equal(one, other) or bool(one.isnan().any()) for one, other in zip(first, second, strict=True)):
        raise RuleError(f"{example.target} gives other numbers each time: it is random, and computed replicated")
    return example
