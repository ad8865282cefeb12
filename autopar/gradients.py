"""Through which values a gradient flows.

Enters: the traced graph. Leaves: the ids of the values whose gradient the backward pass computes. Costing prices backward
conversions of exactly these values, and codegen's ledger counts them.
"""

from __future__ import annotations

from collections.abc import Set

from autopar.graph import Operator, OpGraph

# Each result is made of one input alone, so that one that nobody reads has no gradient to give.
_ONE_BY_ONE = ("aten.meshgrid.default", "aten.meshgrid.indexing", "aten.broadcast_tensors.default")


def has_gradient(graph: OpGraph) -> frozenset[str]:
    """Values that require grad and reach the loss, or what the next stage reads, along values that require grad.

    A graph without either has none: nothing is differentiated by the program itself.
    """
    return graph.of_structure("has_gradient", _has_gradient)


def _has_gradient(graph: OpGraph) -> frozenset[str]:
    ends = [*graph.sent, *([graph.loss] if graph.loss else [])]
    reached = {value for value in ends if graph.values[value].requires_grad}
    for operator in reversed(graph.operators):
        reached.update(value for value in _led_to(operator, reached) if graph.values[value].requires_grad)
    return frozenset(reached)


def _led_to(operator: Operator, reached: Set[str]) -> list[str]:
    """The inputs to which gradients of an operator's results lead."""
    if operator.target in _ONE_BY_ONE:
        return [value for value, made in zip(operator.inputs, operator.outputs, strict=True) if made in reached]
    return list(operator.inputs) if not reached.isdisjoint(operator.outputs) else []
