"""What a block computes again in backward instead of keeping it.

    none        nothing
    selective   runs of cheap operators and attention: what they read is kept, what they hold inside is not
    full        the whole block: only what enters it is kept

A run is emitted as one function under ``torch.utils.checkpoint``, so its members lie together in the order of the graph.
Operators that multiply by a parameter are never in a run: they are what is expensive.
(Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost"; Korthikanti et al., 2023, section 5, for the
selective kind.)
"""

from __future__ import annotations

from autopar.graph import Block, OpGraph
from autopar.strategies.registry import signature_of

MODES = ("none", "selective", "full")
MIN_RUN = 2  # operators; a single one keeps about as much as it reads


def runs(graph: OpGraph, block: Block) -> tuple[tuple[str, ...], ...]:
    """The runs of operators of a block that ``selective`` computes again, in order."""
    led_to = {parameter.value for parameter in graph.parameters}
    found: list[list[str]] = [[]]
    for name in block.operators:
        operator = graph.operator_of[name]
        of_parameters = bool(operator.inputs) and all(value in led_to for value in operator.inputs)
        if of_parameters:  # a view or a cast of a parameter
            led_to.update(operator.outputs)
        if of_parameters or _multiplies(graph, name, led_to):
            found.append([])
        else:
            found[-1].append(name)
    return tuple(tuple(run) for run in found if len(run) >= MIN_RUN)


def _multiplies(graph: OpGraph, name: str, parameters: set[str]) -> bool:
    """Whether an operator is a contraction with a parameter."""
    operator = graph.operator_of[name]
    if parameters.isdisjoint(operator.inputs):
        return False
    signature = signature_of(operator, graph)
    return signature is None or signature.kind == "matmul"
