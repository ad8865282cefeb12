"""A mixture of experts as a call of the runtime, and what an expert does to its rows as a function of the program.

    def experts(x, gate_up_proj, down_proj):
        h1 = gate_up_proj.linear(x)
        h2, h3 = h1.chunk(2, -1)
        ...

The function is the same wherever the mixture is split: widths inside it are those of the local parameters.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Sequence

from autopar.codegen.called import Called, joined
from autopar.codegen.local_sizes import cuts_of
from autopar.codegen.scope import Scope
from autopar.graph import Operator, OpGraph
from autopar.layout import REPLICATED, Layout
from autopar.mesh import Mesh
from autopar.strategies.experts import BIAS, LINEAR, MATMUL, NUM_ROUTING, Step, body_steps, rows_graph

Write = Callable[[Operator, Sequence[str], Sequence[Layout], Sequence[Layout], OpGraph, Mesh, Scope], str]


def mixture(called: Called, write: Write) -> str:
    """``experts(body, x, ids, weights, parameters..., split=, exchange=)``. ``write`` writes an operator of the body."""
    operator, scope = called.operator, called.scope
    arguments = [scope.function("experts_body", _body(called, write)), *called.names]
    shared = cuts_of(called.input_layouts[NUM_ROUTING], 0, scope)
    if shared:
        arguments.append(f"split={scope.split(called.input_shape(NUM_ROUTING)[0], shared, 'experts_split')}")
    with_tokens = {axis for axis, _ in called.input_cuts(0)} & {axis for axis, _ in shared}
    assert len(with_tokens) < 2, "tokens travel along one axis"
    arguments += [f"exchange={scope.axis(axis)}" for axis in with_tokens]
    if operator.args[5] is not None:
        arguments.append(f"dtype={called.literal(operator.args[5])}")
    return joined(scope.runtime("experts"), arguments)


def _body(called: Called, write: Write) -> tuple[str, ...]:
    """The lines of the function, its name left open as ``{}``."""
    operator, scope = called.operator, called.scope
    inside = rows_graph(operator, called.graph)
    parameters = _parameter_names(called)
    lines = [f"def {{}}({', '.join(['x', *parameters])}):"]
    *steps, last = body_steps(operator)
    for step in steps:
        results = ", ".join(_row(number) for number in step.results)
        lines.append(f"    {results} = {_step(step, parameters, inside, scope, write)}")
    return (*lines, f"    return {_step(last, parameters, inside, scope, write)}")


def _row(number: int) -> str:
    return f"h{number}" if number else "x"


def _step(step: Step, parameters: Sequence[str], inside: OpGraph, scope: Scope, write: Write) -> str:
    rows = [_row(number) for number in step.rows()]
    if step.parameter is not None:
        calls = {LINEAR: f".linear({', '.join(rows)})", MATMUL: f".matmul({', '.join(rows)})", BIAS: ".rows"}
        return parameters[step.parameter] + calls[step.target]
    operator = inside.operator_of[f"r{step.results[0]}"]
    whole: Layout = (REPLICATED,) * scope.mesh.num_axes
    return write(operator, rows, [whole] * len(rows), [whole] * len(operator.outputs), inside, scope.mesh, scope)


def _parameter_names(called: Called) -> list[str]:
    """The last parts of the parameters' own names, where these are names and differ."""
    found: list[str] = []
    for index, value in enumerate(called.operator.inputs[NUM_ROUTING:]):
        name = value.rpartition(".")[2]
        usable = name.isidentifier() and not keyword.iskeyword(name) and name not in ("x", "F", "torch", "mesh", *found)
        found.append(name if usable else f"w{index}")
    return found
