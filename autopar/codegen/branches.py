"""``torch.cond`` in a program: a function of the module for each branch, and a call that chooses by the predicate.

Enters: the operator and how any operator is written (``calls.call``). Leaves: the call; the functions are the scope's. Every
device has all operands whole, and computes the branch for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.codegen import text
from autopar.codegen.called import Called, joined
from autopar.codegen.naming import GLOBALS, kind_name, unique
from autopar.graph import OpGraph, Subgraph
from autopar.layout import REPLICATED

COND = "higher_order.cond"
NAMES = ("chosen_if_true", "chosen_if_false")
Write = Callable[..., str]


def conditional(called: Called, write: Write) -> str:
    """``cond(predicate, chosen_if_true, chosen_if_false, operands)``."""
    scope = called.scope
    _, *branches, _ = called.operator.args
    if any(called.graph.values[value].batch_dims for value in called.operator.inputs):
        scope.fixed_batch = True  # sizes in a branch are those of the planned batch
    functions = [
        scope.function(name, tuple(_lines(branch, called, write))) for name, branch in zip(NAMES, branches, strict=True)
    ]
    operands = text.tuple_text(called.names[1:]) if called.names[1:] else "()"
    return joined(scope.runtime("cond"), [called.names[0], *functions, operands])


def _lines(branch: Subgraph, called: Called, write: Write) -> list[str]:
    """A function's lines, its own name left open."""
    scope = called.scope
    graph: OpGraph = replace(
        called.graph, values={value.id: value for value in branch.values}, operators=branch.operators, _cache={}
    )
    taken = [*GLOBALS, *scope.runtime_names]
    names: dict[str, str] = {}
    for value in branch.inputs:
        names[value] = unique("x", [*names.values(), *taken])
    lines = [f"def {{}}({', '.join(names.values())}):"]
    for operator in branch.operators:
        whole = [(REPLICATED,) * scope.mesh.num_axes] * (len(operator.inputs) + len(operator.outputs))
        given = [names[value] for value in operator.inputs]
        expression = write(operator, given, whole[: len(given)], whole[len(given) :], graph, scope.mesh, scope)
        for index, value in enumerate(operator.outputs):
            names[value] = unique(kind_name(operator, index), [*names.values(), *taken])
        made = ", ".join(names[value] for value in operator.outputs)
        lines += text.line(f"{made} = {expression}", 4)
    return [*lines, *text.line(f"return {', '.join(names[value] for value in branch.outputs)}", 4)]
