"""The program's docstring: the model, the mesh, the plan, and in a few words what each axis of the mesh does."""

from __future__ import annotations

from collections.abc import Sequence

from autopar import __version__
from autopar.codegen import text
from autopar.codegen.batch import BatchDims, layouts_of
from autopar.codegen.stages import Part, num_pipeline_ranks
from autopar.graph import OpGraph
from autopar.layout import Layout, Shard
from autopar.plans import Plan


def docstring(plan: Plan, graph: OpGraph, stages: Sequence[Part], dims: Sequence[BatchDims]) -> list[str]:
    """The lines of the module's docstring."""
    mesh = plan.stages[0].mesh
    written = f"Written by autopar {__version__} from plan {plan.fingerprint[:12]}; edits will be overwritten."
    ranks = f" x stages={num_pipeline_ranks(plan)}" if num_pipeline_ranks(plan) > 1 else ""
    first = f'"""{graph.model} on {mesh}{ranks}.'
    axes = [line for axis in range(mesh.num_axes) for line in _axis(stages, dims, axis)]
    axes += _schedule(plan)
    if not axes:
        return [first, "", written, '"""', ""]
    words = [
        "",
        "Layouts in comments, one word for each axis: S0 sharded along dim 0, R replicated, G replicated with a gradient that",
        "is a sum of terms, P a sum of terms.",
    ]
    return [first, "", written, "", *axes, *words, '"""', ""]


def _schedule(plan: Plan) -> list[str]:
    """How a step runs through the stages, where it is not one micro-batch through one stage."""
    ranks, count = num_pipeline_ranks(plan), plan.num_micro_batches
    if len(plan.stages) == 1 and count == 1:
        return []
    size = plan.micro_batch_size
    most = "" if plan.batch_size == size * count else "up to "
    samples = f"{most}{size} sample{'s' if size > 1 else ''}"
    batches = f"{count} micro-batches of {samples}" if count > 1 else "one micro-batch"
    if len(plan.stages) == 1:
        return text.line(f"A step runs {batches} one after another; gradients add up.", 0)
    where = f"stages={ranks}: " if ranks > 1 else ""
    many = f"{len(plan.stages)} stages" + (f" on {ranks} groups of devices" if ranks != len(plan.stages) else "")
    return text.line(f"{where}{many}, {batches}, schedule {plan.schedule}.", 0)


def _axis(stages: Sequence[Part], dims: Sequence[BatchDims], axis: int) -> list[str]:
    mesh = stages[0].wiring.resolved.stage.mesh
    size, name = mesh.shape[axis], mesh.names[axis]
    if size == 1:
        return []
    does = []
    layouts = [
        (of, value, layout)
        for part, of in zip(stages, dims, strict=True)
        for value, layout in layouts_of(part.graph, part.wiring.resolved)
    ]
    if any(_cuts(layout, axis, dim) for of, value, layout in layouts for dim in of.of(value)):
        does.append("splits the batch")
    known = [
        (part.graph.values[parameter.value].num_bytes, kept)
        for part in stages
        for parameter in part.graph.parameters
        if (kept := part.wiring.resolved.stage.parameters.get(parameter.value)) is not None
    ]
    split = sum(num_bytes for num_bytes, kept in known if _cuts(kept.use, axis))
    if any(_cuts(kept.use, axis) for _, kept in known):
        share = split / sum(num_bytes for num_bytes, _ in known)
        does.append(f"splits operators along dims of their parameters ({100 * share:.0f}% of the parameters' bytes)")
    resting = {kept.zero for _, kept in known if _cuts(kept.storage, axis) and not _cuts(kept.use, axis)}
    does += [f"keeps parameters sharded between steps (ZeRO-{level})" for level in sorted(resting)]
    if not does and any(_cuts(layout, axis) for _, _, layout in layouts):
        does.append("splits activations")
    return text.line(f"{name}={size}: {'; '.join(does) or 'all devices do the same'}.", 0)


def _cuts(layout: Layout | tuple[()], axis: int, dim: int | None = -1) -> bool:
    """Whether the axis shards the layout (along ``dim``, where one is given)."""
    state = layout[axis] if layout else None
    return isinstance(state, Shard) and dim in (-1, state.dim)
