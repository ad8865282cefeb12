"""What an operator is on one device: the key under which a profile has it, and its measured price.

Enters: an operator with the layouts that its strategies give its tensors. Leaves: :class:`LocalCalls`, one call for each
distinct set of local shapes, and seconds by strategy. The profiler measures the same calls that costing asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from autopar.costing.conversions import Conversions, FloatArray
from autopar.costing.prepare import Prepared
from autopar.graph import BatchLiteral, DeviceArgument, Operator, Ref, TorchName
from autopar.layout import Layout, local_shape
from autopar.strategies.rule import Signature

Shape = tuple[int, ...]

# Operators whose literal sizes are those of their result: what a device runs has its own in their place.
SIZED = frozenset(
    f"aten.{name}.default"
    for name in "view reshape _unsafe_view expand zeros ones full new_zeros new_ones new_full new_empty".split()
)


class Column(Protocol):
    """The layouts that an operator's strategies give a tensor; see :class:`autopar.costing.operators.LayoutColumn`."""

    @property
    def distinct(self) -> tuple[Layout, ...]: ...

    @property
    def which(self) -> np.ndarray: ...


@dataclass(frozen=True)
class LocalCall:
    """An operator as the first device of a mesh runs it: shapes of its tensor inputs and results."""

    key: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]


@dataclass(frozen=True, eq=False)
class LocalCalls:
    """The distinct calls of an operator's strategies, and for each strategy which of them it is."""

    distinct: tuple[LocalCall, ...]
    which: np.ndarray


def local_calls(
    operator: Operator,
    prepared: Prepared,
    mesh_shape: Shape,
    inputs: Sequence[Column],
    outputs: Sequence[Column],
) -> LocalCalls:
    """The calls that the strategies behind these columns make."""
    values = [value for value in (*operator.inputs, *operator.outputs) if value]
    columns = (*inputs, *outputs)
    local = [
        [_local(prepared.graph.values[value].shape, layout, mesh_shape) for layout in column.distinct]
        for value, column in zip(values, columns, strict=True)
    ]
    count = len(columns[0].which) if columns else 1
    rows = np.array([column.which for column in columns], dtype=np.intp).T.reshape(count, len(columns))
    place: dict[tuple[Shape, ...], int] = {}
    which = np.empty(count, dtype=np.intp)
    for strategy, row in enumerate(rows):
        shapes = tuple(choices[chosen] for choices, chosen in zip(local, row, strict=True))
        which[strategy] = place.setdefault(shapes, len(place))
    described = _Described(operator, prepared)
    num_inputs = len(operator.inputs)
    calls = (LocalCall(described.key(shapes), shapes[:num_inputs], shapes[num_inputs:]) for shapes in place)
    return LocalCalls(tuple(calls), which)


def _local(shape: Shape, layout: Layout, mesh_shape: Shape) -> Shape:
    return local_shape(shape, layout, mesh_shape)


class _Described:
    """The parts of an operator's key that do not depend on how it is split."""

    def __init__(self, operator: Operator, prepared: Prepared) -> None:
        values = prepared.graph.values
        outputs = [value for value in operator.outputs if value]
        self.target = operator.target
        self.inputs = [
            (values[value].dtype, "g" if prepared.flows(operator, index) else "")
            for index, value in enumerate(operator.inputs)
        ]
        self.outputs = [values[value].dtype for value in outputs]
        literals = (operator.args, tuple(value for _, value in operator.kwargs))
        self.literals = "" if operator.target in SIZED else " ".join(_literals(literals))

    def key(self, shapes: Sequence[Shape]) -> str:
        """The key of a call with these shapes of inputs and outputs."""
        ins, outs = shapes[: len(self.inputs)], shapes[len(self.inputs) :]
        left = ", ".join(f"{dtype}{_text(s)}{flows}" for (dtype, flows), s in zip(self.inputs, ins, strict=True))
        right = ", ".join(f"{dtype}{_text(s)}" for dtype, s in zip(self.outputs, outs, strict=True))
        return f"{self.target}({left}) -> {right}" + (f" | {self.literals}" if self.literals else "")


def _text(shape: Shape) -> str:
    return f"[{','.join(map(str, shape))}]"


def _literals(tree: Any) -> list[str]:
    """The arguments that are no tensors, in order. Sizes that follow the batch are left out: the shapes say them."""
    if isinstance(tree, tuple):
        return [text for item in tree for text in _literals(item)]
    if isinstance(tree, (Ref, BatchLiteral, DeviceArgument)):
        return []
    return [tree.name if isinstance(tree, TorchName) else repr(tree)]


def kind_of_call(signature: Signature | None) -> str:
    """The kind under which a profile notes an operator: how its estimate is made."""
    kind = signature.kind if signature else "elementwise"
    return "view" if kind in ("view", "free") else kind


def measured_seconds(
    operator: Operator,
    prepared: Prepared,
    signature: Signature | None,
    conversions: Conversions,
    columns: tuple[Sequence[Column], Sequence[Column]],
    estimated: tuple[FloatArray, FloatArray],
) -> tuple[FloatArray, FloatArray]:
    """Seconds of the forward and of the backward pass, by strategy, where the cost model has a profile.

    ``columns``: layouts of inputs and outputs; ``estimated``: seconds of both passes without the profile.
    """
    measured = conversions.cost_model.operators
    assert measured is not None, "only a cost model with a profile has measured operators"
    calls = local_calls(operator, prepared, conversions.mesh.shape, *columns)
    first = np.unique(calls.which, return_index=True)[1]
    keys = [call.key for call in calls.distinct]
    differentiated = any(value in prepared.gradient for value in operator.outputs)
    ahead, back = measured.seconds(keys, kind_of_call(signature), estimated[0][first], estimated[1][first])
    return ahead[calls.which], back[calls.which] if differentiated else np.zeros(len(calls.which))


def provenance_of_call(
    operator: Operator,
    prepared: Prepared,
    conversions: Conversions,
    columns: tuple[Sequence[Column], Sequence[Column]],
    choice: int,
) -> str:
    """How an operator is priced under one of its strategies: ``measured``, ``corrected`` or ``estimated``."""
    measured = conversions.cost_model.operators
    if measured is None:
        return "estimated"
    calls = local_calls(operator, prepared, conversions.mesh.shape, *columns)
    return "corrected" if measured.entry(calls.distinct[calls.which[choice]].key) is None else "measured"
