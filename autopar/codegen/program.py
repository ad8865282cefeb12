"""Plan + OpGraph -> the source text of one program.

Enters: a plan and its graph. Leaves: Python text that imports torch and ``autopar.runtime`` only: a class for each kind of
repeated block, a class for the stage, and what the runtime must know of inputs, outputs and batch. The same plan and
graph give the same text.
"""

from __future__ import annotations

from autopar.codegen import text
from autopar.codegen.arrange import Arrangement
from autopar.codegen.batch import BatchDims, batch_multiple
from autopar.codegen.classes import ClassWriter
from autopar.codegen.conversions import Wiring
from autopar.codegen.inputs import input_names
from autopar.codegen.scope import Scope
from autopar.codegen.summary import docstring
from autopar.graph import OpGraph
from autopar.mesh import Mesh
from autopar.plans import Plan, Resolved, check_fingerprint


def generate(plan: Plan, graph: OpGraph) -> str:
    """The program's source. Raises PlanFileError when the plan was made for another graph."""
    check_fingerprint(plan, graph)
    assert len(plan.stages) == 1, f"this version writes programs of one stage, the plan has {len(plan.stages)}"
    resolved = Resolved(plan.stages[0], graph)
    arrangement = Arrangement(Wiring(graph, resolved))
    dims = BatchDims(graph)
    multiple = batch_multiple(graph, resolved, dims)
    reserved: frozenset[str] = frozenset()
    while True:
        scope = Scope(resolved.stage.mesh, graph.batch_size, None if multiple is None else "mesh.batch")
        writer = ClassWriter(arrangement, scope, reserved)
        classes = writer.classes()
        taken = {*scope.runtime_names, *scope.splits.values()} & writer.local_names
        if not taken:
            break
        reserved |= taken  # a variable must not hide a name of the module: write again without these names
    trailer = _trailer(plan, arrangement, scope, dims, None if scope.fixed_batch else multiple)
    return "\n".join([*_header(plan, graph, scope, dims), *classes, "", "", *trailer]) + "\n"


def _header(plan: Plan, graph: OpGraph, scope: Scope, dims: BatchDims) -> list[str]:
    mesh = plan.stages[0].mesh
    lines = [*docstring(plan, graph, dims)]
    lines += ["import torch"]
    if scope.uses_functional:
        lines.append("import torch.nn.functional as F")
    lines += ["from torch import nn", ""]
    lines += _imports(
        sorted({"Input", "Mesh", "Output", *scope.runtime_names}, key=lambda name: (name[0].islower(), name))
    )
    lines += ["", f"mesh = {_mesh_text(mesh)}", *scope.constants()]
    return lines


def _imports(names: list[str]) -> list[str]:
    short = f"from autopar.runtime import {', '.join(names)}"
    return (
        [short] if len(short) <= text.LINE_LENGTH else text.line(f"from autopar.runtime import ({', '.join(names)})", 0)
    )


def _mesh_text(mesh: Mesh) -> str:
    sizes = [f"{name}={size}" for name, size in zip(mesh.names, mesh.shape, strict=True)]
    return f"Mesh({', '.join(sizes)})"


def _trailer(plan: Plan, arrangement: Arrangement, scope: Scope, dims: BatchDims, multiple: int | None) -> list[str]:
    graph = arrangement.graph
    lines = _table("INPUTS", input_lines(arrangement))
    lines += _table("OUTPUTS", output_lines(arrangement, dims))
    lines += [f"BATCH = {graph.batch_size}"]
    lines += [f"BATCH_MULTIPLE = {multiple}"]
    lines += ["STAGES = (Stage0,)", f"FINGERPRINT = {text.quoted(plan.fingerprint)}"]
    return lines


def _table(name: str, rows: list[str]) -> list[str]:
    return (
        [f"{name} = (", *(line for row in rows for line in text.line(f"{row},", 4)), ")"] if rows else [f"{name} = ()"]
    )


def input_lines(arrangement: Arrangement) -> list[str]:
    """One ``Input(...)`` for each input of the graph, in order."""
    graph = arrangement.graph
    rows = []
    for entry, name in zip(graph.inputs, input_names(graph), strict=True):
        value = graph.values[entry.value]
        words = text.words(arrangement.wiring.layout(entry.value))
        batch = "" if entry.batch_dim is None else f", batch_dim={entry.batch_dim}"
        rows.append(f"Input({text.quoted(name)}, {value.shape!r}, torch.{value.dtype}, {text.quoted(words)}{batch})")
    return rows


def output_lines(arrangement: Arrangement, dims: BatchDims) -> list[str]:
    """The loss first, then the outputs by their paths."""
    graph, wiring = arrangement.graph, arrangement.wiring
    rows = []
    if graph.loss is not None:
        rows.append(f'Output("loss", (), {text.quoted(text.words(wiring.whole))})')
    for output in graph.outputs:
        if output.path == "loss" and graph.loss is not None:
            continue
        value = graph.values[output.value]
        layout = wiring.whole if output.value == graph.loss else wiring.layout(output.value)
        batch = dims.whole_dim(output.value)
        written = "" if batch is None else f", batch_dim={batch}"
        rows.append(f"Output({text.quoted(output.path)}, {value.shape!r}, {text.quoted(text.words(layout))}{written})")
    return rows
