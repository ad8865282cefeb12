"""Which operators keep a parameter's memory for backward: those for which ZeRO-3 gathers it again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from autopar.codegen.conversions import Wiring
from autopar.codegen.exchanges import letters_of_label
from autopar.graph import Operator
from autopar.reshard import steps
from autopar.sharing import Reader
from autopar.strategies.attention import RING
from autopar.strategies.registry import signature_of
from autopar.strategies.rule import Signature


def keeps(wiring: Wiring, name: str, index: int) -> bool:
    """Whether an operator keeps the memory of this input for backward: itself, or through views."""
    graph = wiring.graph
    operator = graph.operator_of[name]
    if not any(value in wiring.gradient for value in operator.outputs):
        return False
    read = wiring.reads[name, index]
    shared = wiring.shared.get(read.key)
    changes = [(shared.source, shared.target)] if shared else []
    changes += [(read.source, read.target)] if read.converts else []
    if any(step.name not in ("copy_to", "keep_first_gradient") for pair in changes for step in steps(*pair)):
        return False
    rule = signature_of(operator, graph)
    if rule is None:
        return _keeps_without_rule(wiring, operator, index)
    if index in rule.saved_inputs or _goes_around(wiring, operator, rule):
        return True
    storage = graph.values[operator.inputs[index]].storage
    views = [value for value in operator.outputs if value and graph.values[value].storage == storage]
    readers: Iterable[Reader] = (
        reader for view in views for reader in graph.readers_of.get(view, ()) if reader in wiring.reads
    )
    return any(keeps(wiring, *reader) for reader in readers)


def _goes_around(wiring: Wiring, operator: Operator, rule: Signature) -> bool:
    """Whether this is attention around a ring, which keeps its mask too: backward computes the scores again."""
    return rule.kind == "attention" and RING in letters_of_label(wiring.resolved.operator(operator.id).label, rule)


def _keeps_without_rule(wiring: Wiring, operator: Operator, index: int) -> bool:
    """All are taken to keep what they read, but for tensordot: it keeps a factor for the other one's gradient, and where
    the dims are out of order it multiplies a copy."""
    if operator.target != "aten.tensordot.default":
        return True
    shape = wiring.graph.values[operator.inputs[index]].shape
    contracted = [dim % len(shape) for dim in operator.args[2 + index]]
    free = [dim for dim in range(len(shape)) if dim not in contracted]
    return wiring.flows(operator, 1 - index) and not any(_is_torn(dims, shape) for dims in (free, contracted))


def _is_torn(dims: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether these dims of a contiguous tensor do not lie one behind the other, so that merging them copies."""
    wide = [dim for dim in dims if shape[dim] > 1]
    between = [
        any(shape[dim] > 1 for dim in range(one + 1, other)) for one, other in itertools.pairwise(wide)
    ]
    return any(between) or wide != sorted(wide)
