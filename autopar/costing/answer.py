"""The solver's choices as a ``StagePlan``."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.costing.problem import Costed, block_nodes
from autopar.graph import Operator
from autopar.layout import REPLICATED, Layout
from autopar.plans import OperatorPlan, ParameterPlan, StagePlan


def stage_plan(costed: Costed, choices: Sequence[int]) -> StagePlan:
    """What the solver chose, as a plan: like blocks with like choices are one variant."""
    prepared, graph = costed.prepared, costed.prepared.graph
    chosen = {name: choices[node] for name, node in costed.nodes.items()}
    variants: dict[str, tuple[int, ...]] = {}
    recompute: dict[str, tuple[str, ...]] = {}
    left_out: set[str] = set()
    for group in graph.block_groups:
        kinds: dict[tuple[object, ...], int] = {}
        numbers = []
        recompute[group.name] = tuple(costed.setting.recompute.get(block.path, "none") for block in group.blocks)
        for block in group.blocks:
            names = block_nodes(prepared, costed.nodes, block)
            key = (costed.setting.recompute.get(block.path), *(chosen[name] for name in names))
            if key in kinds:
                left_out.update(names)
            numbers.append(kinds.setdefault(key, len(kinds)))
        variants[group.name] = tuple(numbers)
    whole: Layout = (REPLICATED,) * costed.mesh.num_axes
    sources = {value: column.distinct[chosen[value]] for value, column in costed.input_columns.items()}
    sources.update((buffer.value, whole) for buffer in graph.buffers)
    sources.update((constant.value, whole) for constant in graph.constants)
    operators, parameters, shared = {}, {}, {}
    for name, choice in chosen.items():
        if name in left_out or name in sources:
            continue
        if name in graph.operator_of:
            strategy = costed.operator_table(name).strategies[choice]
            outputs = _all_outputs(graph.operator_of[name], strategy.outputs, whole)
            operators[name] = OperatorPlan(strategy.label, strategy.inputs, outputs, strategy.form)
        elif name in graph.values:
            kept = costed.parameter_table(name).choices[choice]
            parameters[name] = ParameterPlan(kept.use, kept.storage, kept.zero, kept.offload)
        else:
            value, _, rest = name.partition("|")
            shared[name] = costed.shared_columns[f"{prepared.name(value)}|{rest}"].distinct[choice]
    sent = {value: costed.setting.boundary[value] for value in graph.sent}
    return StagePlan(costed.mesh, operators, parameters, sources, shared, variants, recompute, sent)


def _all_outputs(operator: Operator, layouts: tuple[Layout, ...], whole: Layout) -> tuple[Layout, ...]:
    """One layout per output, those that are no tensors included, so that positions agree with ``Operator.outputs``."""
    rest = iter(layouts)
    return tuple(next(rest) if value else whole for value in operator.outputs)
