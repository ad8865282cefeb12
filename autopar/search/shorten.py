"""A graph with at most three blocks of each repeated group, which has every price that the whole graph has.

Enters: a graph. Leaves: the short graph, and for every operator of the whole one the operator that stands for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.graph import Operator, OpGraph, Ref, Value

MOST_BLOCKS = 3  # the first, which follows something else, one between blocks, and the last


@dataclass(frozen=True)
class Short:
    """``stands_for``: the short graph's operator of each operator of the whole graph."""

    graph: OpGraph
    stands_for: dict[str, str]


def shortened(graph: OpGraph) -> Short:
    """Leave out the blocks of each group but the first two and the last; what reads them reads the second."""
    values: dict[str, str] = {}
    operators = {operator.id: operator.id for operator in graph.operators}
    left_out: set[str] = set()
    groups = []
    for group in graph.block_groups:
        kept = group.blocks if len(group.blocks) <= MOST_BLOCKS else (*group.blocks[:2], group.blocks[-1])
        groups.append(replace(group, blocks=kept))
        for block in group.blocks[2:-1] if len(group.blocks) > MOST_BLOCKS else ():
            left_out.update(block.operators)
            operators.update(zip(block.operators, kept[1].operators, strict=True))
            for here, there in zip(block.operators, kept[1].operators, strict=True):
                pairs = zip(graph.operator_of[here].outputs, graph.operator_of[there].outputs, strict=True)
                values.update(pair for pair in pairs if pair[0])
    if not left_out:
        return Short(graph, operators)
    rest = tuple(_reading(operator, values) for operator in graph.operators if operator.id not in left_out)
    read = {value for operator in rest for value in operator.inputs}
    outputs = tuple(replace(output, value=values.get(output.value, output.value)) for output in graph.outputs)
    buffers = tuple(buffer for buffer in graph.buffers if buffer.value in read)
    short = replace(
        graph,
        values=_values(graph, rest, [*read, *(out.value for out in outputs), *(b.updated for b in buffers if b.updated)]),
        operators=rest,
        parameters=tuple(parameter for parameter in graph.parameters if parameter.value in read),
        buffers=buffers,
        constants=tuple(constant for constant in graph.constants if constant.value in read),
        outputs=outputs,
        block_groups=tuple(groups),
        _cache={},
    )
    return Short(short, operators)


def _values(graph: OpGraph, operators: Sequence[Operator], more: Iterable[str]) -> dict[str, Value]:
    """The values that operators make, those of the inputs, and ``more``, with what their memory belongs to."""
    names = {value for operator in operators for value in operator.outputs if value}
    names.update((entry.value for entry in graph.inputs), graph.received, more)
    names.update(graph.values[name].storage or name for name in tuple(names))
    return {name: value for name, value in graph.values.items() if name in names}


def _reading(operator: Operator, values: dict[str, str]) -> Operator:
    if not any(value in values for value in operator.inputs):
        return operator
    return replace(operator, args=_renamed(operator.args, values), kwargs=_renamed(operator.kwargs, values))


def _renamed(tree: Any, values: dict[str, str]) -> Any:
    if isinstance(tree, Ref):
        return Ref(values.get(tree.value, tree.value))
    if isinstance(tree, tuple):
        return tuple(_renamed(item, values) for item in tree)
    return tree
