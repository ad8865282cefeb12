"""Plan + OpGraph -> the source text of one program.

Enters: a plan and its graph. Leaves: Python text that imports torch and ``autopar.runtime`` only: a class for each kind of
repeated block, a class for each stage, and what the runtime must know of inputs, outputs, batch and schedule. The same
plan and graph give the same text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.batching import micro_batch_sizes
from autopar.codegen import text
from autopar.codegen.batch import BatchDims, programs_multiple
from autopar.codegen.boundaries import argument_names, stage_rows
from autopar.codegen.classes import StageWriter
from autopar.codegen.counts import count_texts
from autopar.codegen.inputs import input_names
from autopar.codegen.merging import class_lines
from autopar.codegen.scope import Scope
from autopar.codegen.stages import Part, num_pipeline_ranks, parts, terms_of
from autopar.codegen.summary import docstring
from autopar.errors import InputError
from autopar.graph import OpGraph
from autopar.micro_batches import combined, coupling
from autopar.plans import Plan, check_fingerprint
from autopar.strategies.registry import signature_of


def generate(plan: Plan, graph: OpGraph) -> str:
    """The program's source.

    Raises PlanFileError when the plan was made for another graph, and InputError when the model cannot be computed in the
    plan's micro-batches: its samples depend on one another, or they differ in size though it works for one size only.
    """
    check_fingerprint(plan, graph)
    _check_samples_apart(plan, graph)
    stages = parts(plan, graph)
    dims = [BatchDims(part.graph) for part in stages]
    multiple = programs_multiple([(part.graph, part.wiring.resolved) for part in stages], dims)
    names = argument_names(graph, stages)
    batch = None if multiple is None else "mesh.batch"
    reserved: frozenset[str] = frozenset()
    while True:
        scope = Scope(
            plan.stages[0].mesh, plan.micro_batch_size, batch, num_micro_batches=plan.num_micro_batches,
            terms=terms_of(plan, graph), forms=_forms(plan),
        )  # fmt: skip
        writers = [StageWriter(part, scope, names, reserved) for part in stages]
        classes, class_names = class_lines(writers, graph)
        counts = count_texts(stages, scope, names, reserved, class_names)
        rows = stage_rows(stages, names, scope) if len(stages) > 1 else []
        local_names = counts.local_names.union(*(writer.local_names for writer in writers))
        taken = {*scope.runtime_names, *scope.splits.values(), *scope.functions.values()} & local_names
        if not taken:
            break
        reserved |= taken  # a variable must not hide a name of the module: write again without these names
    if scope.fixed_batch:
        multiple = None
    _check_sizes(plan, multiple)
    trailer = _trailer(plan, graph, stages, dims, multiple, {"STAGES": rows, "COUNTS": counts.rows})
    header = _header(plan, graph, stages, scope, dims)
    return "\n".join([*header, *classes, *counts.classes, "", "", *trailer]) + "\n"


def _forms(plan: Plan) -> dict[str, str]:
    """The operators that are not computed in the usual way."""
    return {name: chosen.form for stage in plan.stages for name, chosen in stage.operators.items() if chosen.form}


def _check_samples_apart(plan: Plan, graph: OpGraph) -> None:
    reasons = coupling(graph) if plan.num_micro_batches > 1 else ()
    if reasons:
        more = f"; and {len(reasons) - 2} more" if len(reasons) > 2 else ""
        raise InputError(
            f"{graph.model} cannot be computed in {plan.num_micro_batches} micro-batches: {'; '.join(reasons[:2])}{more}; "
            "plan it with one"
        )


def _check_sizes(plan: Plan, multiple: int | None) -> None:
    sizes = set(micro_batch_sizes(plan.batch_size, plan.num_micro_batches, plan.micro_batch_unit))
    if len(sizes) > 1 and (multiple is None or any(size % multiple for size in sizes)):
        raise InputError(
            f"the micro-batches of the plan have {sorted(sizes)} samples, and its program takes "
            + (f"multiples of {multiple} only" if multiple else f"{max(sizes)} only")
            + "; choose a number of micro-batches that divides the batch"
        )


def _header(plan: Plan, graph: OpGraph, stages: Sequence[Part], scope: Scope, dims: Sequence[BatchDims]) -> list[str]:
    lines = [*docstring(plan, graph, stages, dims)]
    lines += ["import torch"]
    if scope.uses_functional:
        lines.append("import torch.nn.functional as F")
    lines += ["from torch import nn", ""]
    lines += _imports(
        sorted({"Input", "Mesh", "Output", *scope.runtime_names}, key=lambda name: (name[0].islower(), name))
    )
    lines += ["", f"mesh = {_mesh_text(plan)}", *scope.constants()]
    return lines


def _imports(names: list[str]) -> list[str]:
    short = f"from autopar.runtime import {', '.join(names)}"
    return (
        [short] if len(short) <= text.LINE_LENGTH else text.line(f"from autopar.runtime import ({', '.join(names)})", 0)
    )


def _mesh_text(plan: Plan) -> str:
    mesh = plan.stages[0].mesh
    sizes = [f"{name}={size}" for name, size in zip(mesh.names, mesh.shape, strict=True)]
    if num_pipeline_ranks(plan) > 1:
        sizes.append(f"stages={num_pipeline_ranks(plan)}")
    if plan.rank_order and plan.rank_order != tuple(range(plan.num_devices)):
        sizes.append(f"ranks={plan.rank_order!r}")
    return f"Mesh({', '.join(sizes)})"


def _trailer(
    plan: Plan,
    graph: OpGraph,
    stages: Sequence[Part],
    dims: Sequence[BatchDims],
    multiple: int | None,
    tables: Mapping[str, Sequence[str]],
) -> list[str]:
    together = combined(graph) if plan.num_micro_batches > 1 else {}
    lines = _table("INPUTS", input_lines(graph, stages))
    lines += _table("OUTPUTS", output_lines(graph, stages, dims, together))
    lines += [f"BATCH = {plan.micro_batch_size}"]
    lines += [f"BATCH_MULTIPLE = {multiple}"]
    if len(stages) > 1 or plan.num_micro_batches > 1:
        lines += [
            f"SCHEDULE = {text.quoted(plan.schedule)}",
            f"MICRO_BATCHES = {plan.num_micro_batches}",
            f"GLOBAL_BATCH = {plan.batch_size}",
            f"MICRO_BATCH_UNIT = {plan.micro_batch_unit}",
        ]
    if _draws_of_generators(graph):
        lines += ["DRAWS_ALIKE = True  # all ranks draw the same random numbers"]
    lines += _table("COUNTS", tables["COUNTS"]) if tables["COUNTS"] else []
    lines += _table("STAGES", tables["STAGES"]) if tables["STAGES"] else ["STAGES = (Stage0,)"]
    return [*lines, f"FINGERPRINT = {text.quoted(plan.fingerprint)}"]


def _draws_of_generators(graph: OpGraph) -> bool:
    """Whether some operator draws numbers that do not follow from its elements' places."""
    rules = (signature_of(operator, graph) for operator in graph.operators)
    return any(rule is not None and rule.random and not rule.counted for rule in rules)


def _table(name: str, rows: Sequence[str]) -> list[str]:
    return (
        [f"{name} = (", *(line for row in rows for line in text.line(f"{row},", 4)), ")"] if rows else [f"{name} = ()"]
    )


def input_lines(graph: OpGraph, stages: Sequence[Part]) -> list[str]:
    """One ``Input(...)`` for each input of the model, in order, for one micro-batch."""
    rows = []
    for entry, name in zip(graph.inputs, input_names(graph), strict=True):
        taking = next((part for part in stages if entry.value in part.graph.values), None)
        if taking is None:
            continue
        value = taking.graph.values[entry.value]
        words = text.words(taking.wiring.layout(entry.value))
        batch = "" if entry.batch_dim is None else f", batch_dim={entry.batch_dim}"
        rows.append(f"Input({text.quoted(name)}, {value.shape!r}, torch.{value.dtype}, {text.quoted(words)}{batch})")
    return rows


def output_lines(
    graph: OpGraph, stages: Sequence[Part], dims: Sequence[BatchDims], together: Mapping[str, str]
) -> list[str]:
    """The loss first, then the outputs by their paths, each as the stage that returns it leaves it.

    ``together`` says how an output of the batch is made from those of micro-batches (``micro_batches.combined``).
    """
    wiring = stages[-1].wiring
    rows = []
    if graph.loss is not None:
        rows.append(f'Output("loss", (), {text.quoted(text.words(wiring.whole))})')
    for output in graph.outputs:
        if output.path == "loss" and graph.loss is not None:
            continue
        at = next(at for at, part in enumerate(stages) if output in part.graph.outputs)
        value = stages[at].graph.values[output.value]
        layout = wiring.whole if output.value == graph.loss else stages[at].wiring.layout(output.value)
        batch = dims[at].whole_dim(output.value)
        if batch is None and together.get(output.value) == "concatenate":
            batch = value.batch_dims[0]  # rows of samples, in order
        written = "" if batch is None else f", batch_dim={batch}"
        usual = "same" if batch is None else "concatenate"
        if together.get(output.value, usual) != usual:
            written += f", combine={text.quoted(together[output.value])}"
        rows.append(f"Output({text.quoted(output.path)}, {value.shape!r}, {text.quoted(text.words(layout))}{written})")
    return rows
