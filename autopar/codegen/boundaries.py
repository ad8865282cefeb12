"""What stages hand to one another: names, and the rows of ``STAGES``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.codegen import text
from autopar.codegen.inputs import input_names
from autopar.codegen.naming import GLOBALS, ValueNames, kind_name, module_names, unique
from autopar.codegen.scope import Scope
from autopar.codegen.stages import Part
from autopar.graph import OpGraph


def argument_names(graph: OpGraph, parts: Sequence[Part]) -> dict[str, str]:
    """The names of the model's inputs, and of what crosses from stage to stage, by value.

    ``graph`` is the whole model's. What crosses together has different names; the stream that blocks add to is ``x``.
    """
    names = dict(zip((entry.value for entry in graph.inputs), input_names(graph), strict=True))
    taken = {*names.values(), *GLOBALS}
    values = ValueNames(graph)
    modules = module_names(graph.operators, "")
    for part in parts:
        for value in part.graph.sent:
            if value in names:
                continue
            together = {names[other] for other in part.graph.sent if other in names}
            producer = graph.producer_of[value]
            stream = graph.values[value].requires_grad and producer.target.split(".")[1] in ("add", "view", "mul")
            base = None if stream else values.base(value, modules, "")
            index = producer.outputs.index(value)
            names[value] = unique("x" if stream else base or kind_name(producer, index), {*taken, *together})
    return names


def stage_rows(parts: Sequence[Part], names: Mapping[str, str], scope: Scope) -> list[str]:
    """One ``Stage(...)`` for each stage."""
    rows = []
    for part in parts:
        arguments = [f"Stage{part.number}"]
        takes = [text.quoted(names[entry.value]) for entry in part.graph.inputs]
        arguments += [f"takes={text.tuple_text(takes)}"] if takes else []
        sends = [_boundary(part, value, names[value], scope) for value in part.graph.sent]
        arguments += [f"sends={text.tuple_text(sends)}"] if sends else []
        paths = ["loss"] if part.graph.loss is not None else []
        paths += [output.path for output in part.graph.outputs if output.path != "loss" or part.graph.loss is None]
        arguments += [f"outputs={text.tuple_text([text.quoted(path) for path in paths])}"] if paths else []
        rows.append(f"{scope.runtime('Stage')}({', '.join(arguments)})")
    return rows


def _boundary(part: Part, value: str, name: str, scope: Scope) -> str:
    described = part.graph.values[value]
    layout = part.wiring.resolved.stage.sent[value]
    parts = [text.quoted(name), repr(described.shape), f"torch.{described.dtype}", text.quoted(text.words(layout))]
    if described.batch_dims:
        parts.append(f"batch_dims={described.batch_dims!r}")
    if value in part.wiring.gradient:
        parts.append("requires_grad=True")
    return f"{scope.runtime('Boundary')}({', '.join(parts)})"
