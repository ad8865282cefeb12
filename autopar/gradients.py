"""Through which values a gradient flows.

Enters: the traced graph. Leaves: the ids of the values whose gradient the backward pass computes. Costing prices backward
conversions of exactly these values, and codegen's ledger counts them.
"""

from __future__ import annotations

from autopar.graph import OpGraph


def has_gradient(graph: OpGraph) -> frozenset[str]:
    """Values that require grad and reach the loss, or what the next stage reads, along values that require grad.

    A graph without either has none: nothing is differentiated by the program itself.
    """
    ends = [*graph.sent, *([graph.loss] if graph.loss else [])]
    reached = {value for value in ends if graph.values[value].requires_grad}
    for operator in reversed(graph.operators):
        if any(value in reached for value in operator.outputs):
            reached.update(value for value in operator.inputs if graph.values[value].requires_grad)
    return frozenset(reached)
