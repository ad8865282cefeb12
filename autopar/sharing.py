"""Which readers of a value share one conversion of it.

A tensor that several operators want in one other layout (q, k and v read one gathered input) is converted once. Readers
form a group when they are operators of one kind that read the value at the same place; a group wants one layout. Costing
prices the conversion of a group once, codegen writes it once.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.graph import OpGraph

Reader = tuple[str, int]  # an operator's id and the index among its tensor inputs


def sharing_groups(graph: OpGraph) -> Mapping[Reader, str]:
    """The group of every reader that has one: ``|aten.linear.default|0``; with the value's id in front it is unique.

    What a repeated block computes is shared within that block only, so that all blocks of a group stay alike.
    """
    return graph.of_structure("sharing_groups", _sharing_groups)


def _sharing_groups(graph: OpGraph) -> Mapping[Reader, str]:
    home = {
        operator: block.path for group in graph.block_groups for block in group.blocks for operator in block.operators
    }
    found: dict[Reader, str] = {}
    for value, readers in graph.readers_of.items():
        producer = graph.producer_of.get(value)
        block = home.get(producer.id) if producer else None
        kinds: dict[str, list[Reader]] = {}
        for operator, index in readers:
            if block is None or home.get(operator) == block:
                kinds.setdefault(f"|{graph.operator_of[operator].target}|{index}", []).append((operator, index))
        for name, members in kinds.items():
            if len({operator for operator, _ in members}) > 1:
                found.update(dict.fromkeys(members, name))
    return found
