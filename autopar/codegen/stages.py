"""The stages of a plan, each wired and arranged for its program.

Enters: a plan and the graph of the whole model. Leaves: a :class:`Part` for each stage. What is decided for all stages
together is decided here: the layout in which an input is handed out, through which values a gradient flows, and which
stage is on which pipeline rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.batching import at_batch
from autopar.codegen.arrange import Arrangement
from autopar.codegen.conversions import Wiring
from autopar.gradients import has_gradient
from autopar.graph import OpGraph
from autopar.layout import REPLICATED, Layout
from autopar.micro_batches import Term, terms
from autopar.plans import Plan, Resolved
from autopar.staging import derived_operators, stage_graphs

MAX_NAMED = 6  # modules that a stage's docstring names
V_SHAPED = ("zbv", "dualpipev")  # schedules in which a pipeline rank has a stage on the way there and one on the way back


@dataclass(frozen=True)
class Part:
    """One stage: its graph for one micro-batch, and its arrangement."""

    number: int
    graph: OpGraph
    arrangement: Arrangement
    all_groups: tuple[str, ...]  # the group of every block of the model
    words: str  # what the stage is, for people

    @property
    def wiring(self) -> Wiring:
        return self.arrangement.wiring


def parts(plan: Plan, graph: OpGraph, micro_batch_size: int | None = None) -> tuple[Part, ...]:
    """Every stage of a plan, for micro-batches of the largest size if none is given."""
    size = plan.micro_batch_size if micro_batch_size is None else micro_batch_size
    graphs = stage_graphs(at_batch(graph, size), plan.cuts)
    assert len(graphs) == len(plan.stages), f"{len(graphs) - 1} cuts for {len(plan.stages)} stages"
    gradient = has_gradient(graph)
    scaled = terms_of(plan, graph)
    given = _handed_out(plan, graphs)
    apart = tied(graphs)
    whole = tuple(group.name for group in graph.block_groups for _ in group.blocks)
    found = []
    for number, (stage_graph, stage) in enumerate(zip(graphs, plan.stages, strict=True)):
        own = {value: layout for value, layout in given.items() if value in stage_graph.values}
        wiring = Wiring(stage_graph, Resolved(stage, stage_graph), gradient, own)
        arrangement = Arrangement(wiring, scaled, apart)
        several = len(graphs) > 1
        words = _holds(number, len(graphs), stage_graph, graph) if several else f"{graph.model}, all of it."
        found.append(Part(number, stage_graph, arrangement, whole if several else tuple(arrangement.groups), words))
    return tuple(found)


def _holds(number: int, num_stages: int, graph: OpGraph, model: OpGraph) -> str:
    """``Stage 1 of 2: transformer.h.4 to transformer.h.7, transformer.ln_f, lm_head.``: modules in the order in which they
    run, blocks of a group together."""
    group_of = {block.path: group.name for group in graph.block_groups for block in group.blocks}
    block_of = {
        name: block.path if block.path in group_of else f"part of {block.path}"
        for group in model.block_groups
        for block in group.blocks
        for name in block.operators
    }
    derived = derived_operators(graph)
    found: list[list[str]] = []
    for operator in graph.operators:
        if operator.id in derived:
            continue
        path = block_of.get(operator.id) or _outer(operator.module)
        if not path or (found and found[-1][-1] == path):
            continue
        group = group_of.get(path)
        if found and group is not None and group_of.get(found[-1][-1]) == group:
            found[-1].append(path)
        elif not any(path in run for run in found):
            found.append([path])
    leaves = [run for run in found if not any(other[0].startswith(f"{run[0]}.") for other in found)]
    runs = [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in leaves]
    if len(runs) > MAX_NAMED:
        runs = [*runs[: MAX_NAMED - 1], f"... {runs[-1]}"]
    return f"Stage {number} of {num_stages}: {', '.join(runs) or graph.model}."


def terms_of(plan: Plan, graph: OpGraph) -> dict[str, Term]:
    """How operators are computed on a micro-batch where there are several."""
    return dict(terms(graph)) if plan.num_micro_batches > 1 else {}


def _outer(module: str) -> str:
    """``encoder.block.0.layer.1.wo`` -> ``encoder.block.0``: up to the first number."""
    parts = module.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def tied(graphs: Sequence[OpGraph]) -> dict[str, tuple[int, ...]]:
    """Parameters that several stages have, with the numbers of these stages."""
    found: dict[str, list[int]] = {}
    for number, graph in enumerate(graphs):
        for parameter in graph.parameters:
            found.setdefault(parameter.value, []).append(number)
    return {value: tuple(numbers) for value, numbers in found.items() if len(numbers) > 1}


def _handed_out(plan: Plan, graphs: Sequence[OpGraph]) -> dict[str, Layout]:
    """The layouts of inputs that several stages want differently: whole, so that each takes its own part."""
    wanted: dict[str, set[Layout]] = {}
    for stage, graph in zip(plan.stages, graphs, strict=True):
        for entry in graph.inputs:
            wanted.setdefault(entry.value, set()).add(stage.sources[entry.value])
    whole: Layout = (REPLICATED,) * plan.stages[0].mesh.num_axes
    return {value: whole for value, layouts in wanted.items() if len(layouts) > 1}


def num_pipeline_ranks(plan: Plan) -> int:
    """Groups of devices, each of which has one stage or several."""
    return plan.num_devices // plan.stages[0].mesh.num_devices


def rank_of_stage(plan: Plan, stage: int) -> int:
    """The group of devices that a stage is on."""
    ranks = num_pipeline_ranks(plan)
    if plan.schedule in V_SHAPED:
        return min(stage, 2 * ranks - 1 - stage)
    return stage % ranks
