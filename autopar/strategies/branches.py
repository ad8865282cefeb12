"""What an operator with branches computes: as much as the dearer one. It has no rule; every device computes it whole."""

from __future__ import annotations

from dataclasses import replace

from autopar.graph import Operator, OpGraph, Subgraph
from autopar.strategies.registry import signature_of


def branch_flops(operator: Operator, graph: OpGraph) -> tuple[float, float]:
    """FLOPs of the forward and of the backward pass of the branch that has most of them; 0 for an operator without any."""
    work = [(0.0, 0.0)]
    for branch in (argument for argument in operator.args if isinstance(argument, Subgraph)):
        values = {value.id: value for value in branch.values}
        inner = replace(graph, values=values, operators=branch.operators, block_groups=(), _cache={})
        rules = [(signature_of(each, inner), branch_flops(each, inner)) for each in branch.operators]
        work.append(
            (
                sum(rule.flops if rule else nested[0] for rule, nested in rules),
                sum(rule.backward_flops if rule else nested[1] for rule, nested in rules),
            )
        )
    return max(work, key=sum)
