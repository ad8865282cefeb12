"""One operator's call on local tensors, with its arguments as program text."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autopar.codegen.local_sizes import cuts_of
from autopar.codegen.scope import AxisCuts, Scope
from autopar.graph import BatchLiteral, DeviceArgument, Operator, OpGraph, Ref, TorchName
from autopar.layout import Layout
from autopar.micro_batches import CLASS_LOSSES, Term

SHARE = "mesh.share"  # samples of this micro-batch, in parts of the step's
_NO_END = 2**63 - 1  # the end of a slice that has none


@dataclass(frozen=True)
class Called:
    """``names`` are expressions for the tensor inputs, in the order of ``operator.inputs``.

    Those that a micro-batch has to scale are given as they are and multiplied here.
    """

    operator: Operator
    names: tuple[str, ...]
    input_layouts: tuple[Layout, ...]
    output_layouts: tuple[Layout, ...]
    graph: OpGraph
    scope: Scope

    def __post_init__(self) -> None:
        scaled = self.term.inputs if self.term else ()
        if scaled:
            names = (f"{atom(name)} * {SHARE}" if at in scaled else name for at, name in enumerate(self.names))
            object.__setattr__(self, "names", tuple(names))

    @property
    def term(self) -> Term | None:
        """How the result is made a term of a sum over micro-batches."""
        return self.scope.terms.get(self.operator.id)

    @property
    def count(self) -> str | None:
        """The number for all micro-batches, computed beforehand, that the operator divides by or that it is itself."""
        if self.term is None or self.term.kind != "count":
            return None
        return f'mesh.count("{self.term.count}")'

    @property
    def stand_in(self) -> str | None:
        """What is written in place of the call: of a sum over the batch that is computed beforehand, its name."""
        return None if self.operator.target in CLASS_LOSSES else self.count

    @cached_property
    def args(self) -> tuple[str, ...]:
        """Positional arguments as text."""
        return self._texts[0]

    @cached_property
    def kwargs(self) -> dict[str, str]:
        """Keyword arguments as text."""
        return self._texts[1]

    @cached_property
    def _texts(self) -> tuple[tuple[str, ...], dict[str, str]]:
        supply = iter(self.names)
        args = tuple(self.literal(argument, supply) for argument in self.operator.args)
        return args, {name: self.literal(argument, supply) for name, argument in self.operator.kwargs}

    def literal(self, argument: Any, supply: Iterator[str] | None = None) -> str:
        """Any argument as text; tensors take the next name of ``supply``."""
        if isinstance(argument, Ref):
            assert supply is not None, "a tensor among literals"
            return next(supply)
        if isinstance(argument, tuple):
            inside = [self.literal(item, supply) for item in argument]
            return f"({inside[0]},)" if len(inside) == 1 else f"({', '.join(inside)})"
        if isinstance(argument, TorchName):
            return argument.name
        if isinstance(argument, DeviceArgument):
            return "mesh.device"
        if isinstance(argument, BatchLiteral):
            return self.scope.batch_literal(argument.value)
        if isinstance(argument, float) and not math.isfinite(argument):
            return f'float("{argument}")'
        if isinstance(argument, str) and argument.isprintable() and not set(argument) & {'"', "\\"}:
            return f'"{argument}"'
        if isinstance(argument, int) and argument == _NO_END:
            return "None"
        return repr(argument)

    def given(self, position: int, name: str, default: Any = None) -> Any:
        return self.operator.argument(position, name, default)

    @property
    def kind(self) -> str:
        """The operator's name without library and overload."""
        return self.operator.target.split(".")[1]

    @cached_property
    def receiver(self) -> str:
        """The first tensor, so written that a method may follow."""
        return atom(self.names[0])

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        return tuple(value for value in self.operator.outputs if value)

    def input_shape(self, index: int = 0) -> tuple[int, ...]:
        return self.graph.values[self.operator.inputs[index]].shape

    def output_shape(self, index: int = 0) -> tuple[int, ...]:
        return self.graph.values[self.outputs[index]].shape

    def input_cuts(self, dim: int, index: int = 0) -> AxisCuts:
        return cuts_of(self.input_layouts[index], dim, self.scope)

    def output_cuts(self, dim: int, index: int = 0) -> AxisCuts:
        return cuts_of(self.output_layouts[index], dim, self.scope)

    def dtype(self, value: str) -> str:
        return self.graph.values[value].dtype


def atom(text: str) -> str:
    """The text in parentheses unless an attribute or operator may follow it as it is."""
    node = ast.parse(text, mode="eval").body
    simple = isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    negated = isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)
    return text if simple or negated or isinstance(node, ast.Constant) else f"({text})"


def joined(callee: str, arguments: Sequence[str]) -> str:
    """A call."""
    return f"{callee}({', '.join(arguments)})"
