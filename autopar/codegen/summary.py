"""The program's docstring: the model, the mesh, the plan, and in a few words what each axis of the mesh does."""

from __future__ import annotations

from autopar import __version__
from autopar.codegen import text
from autopar.codegen.batch import BatchDims, layouts_of
from autopar.graph import OpGraph
from autopar.layout import Layout, Shard
from autopar.plans import Plan, Resolved, StagePlan


def docstring(plan: Plan, graph: OpGraph, dims: BatchDims) -> list[str]:
    """The lines of the module's docstring."""
    stage = plan.stages[0]
    written = f"Written by autopar {__version__} from plan {plan.fingerprint[:12]}; edits will be overwritten."
    first = f'"""{graph.model} on {stage.mesh}.'
    axes = [line for axis in range(stage.mesh.num_axes) for line in _axis(stage, graph, dims, axis)]
    if not axes:
        return [first, "", written, '"""', ""]
    words = [
        "",
        "Layouts in comments, one word for each axis: S0 sharded along dim 0, R replicated, G replicated with a gradient that",
        "is a sum of terms, P a sum of terms.",
    ]
    return [first, "", written, "", *axes, *words, '"""', ""]


def _axis(stage: StagePlan, graph: OpGraph, dims: BatchDims, axis: int) -> list[str]:
    size, name = stage.mesh.shape[axis], stage.mesh.names[axis]
    if size == 1:
        return []
    does = []
    layouts = list(layouts_of(graph, Resolved(stage, graph)))
    if any(_cuts(layout, axis, dim) for value, layout in layouts for dim in dims.of(value)):
        does.append("splits the batch")
    named = ((parameter.value, stage.parameters.get(parameter.value)) for parameter in graph.parameters)
    known = [(value, plan) for value, plan in named if plan is not None]
    split = [value for value, plan in known if _cuts(plan.use, axis)]
    if split:
        share = sum(graph.values[v].num_bytes for v in split) / sum(graph.values[v].num_bytes for v, _ in known)
        does.append(f"splits operators along dims of their parameters ({100 * share:.0f}% of the parameters' bytes)")
    resting = {plan.zero for _, plan in known if _cuts(plan.storage, axis) and not _cuts(plan.use, axis)}
    does += [f"keeps parameters sharded between steps (ZeRO-{level})" for level in sorted(resting)]
    if not does and any(_cuts(layout, axis) for _, layout in layouts):
        does.append("splits activations")
    return text.line(f"{name}={size}: {'; '.join(does) or 'all devices do the same'}.", 0)


def _cuts(layout: Layout | tuple[()], axis: int, dim: int | None = -1) -> bool:
    """Whether the axis shards the layout (along ``dim``, where one is given)."""
    state = layout[axis] if layout else None
    return isinstance(state, Shard) and dim in (-1, state.dim)
