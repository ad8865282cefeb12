"""Which tensors of a program surely lie in memory in the order of their dims, so that a view of them is one.

A change of layout leaves a contiguous copy where the model had, say, a transposed tensor; seen through another transpose
it is out of order where the model's own was not. Whatever may be so is reshaped, which copies where it must.
"""

from __future__ import annotations

from autopar.graph import Operator, OpGraph

# Results that are in order whatever the inputs are; all others are as out of order as what they are computed from.
FRESH = frozenset(
    "linear addmm mm bmm baddbmm layer_norm rms_norm embedding contiguous zeros ones full arange one_hot".split()
)
PERMUTING = frozenset(
    "transpose swapaxes swapdims permute movedim moveaxis t numpy_T mT mH adjoint matrix_H expand expand_as broadcast_to "
    "broadcast_tensors unfold diagonal scaled_dot_product_attention conv1d conv2d conv3d einsum matmul meshgrid".split()
)


def values_in_order(graph: OpGraph) -> frozenset[str]:
    """Ids of the values whose tensors are contiguous, or a part of a contiguous one with the dims in the same order."""
    if "in_order" not in graph._cache:
        graph._cache["in_order"] = _found(graph)
    found: frozenset[str] = graph._cache["in_order"]
    return found


def _found(graph: OpGraph) -> frozenset[str]:
    ordered = graph.values.keys() - graph.producer_of.keys()
    for operator in graph.operators:
        kind = operator.target.split(".")[1]
        keeps = kind not in PERMUTING and ordered.issuperset(operator.inputs)
        if keeps or kind in FRESH or _copies(operator, kind, graph):
            ordered.update(operator.outputs)
    return frozenset(ordered - {""})


def _copies(operator: Operator, kind: str, graph: OpGraph) -> bool:
    """Whether a reshape makes a copy."""
    if kind not in ("reshape", "flatten"):
        return False
    output = operator.outputs[0]
    return graph.values[output].storage in ("", output)
