"""Plans made by hand, for tests of what reads plans."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.graph import OpGraph
from autopar.layout import REPLICATED, Layout
from autopar.mesh import Mesh
from autopar.plans import OperatorPlan, ParameterPlan, Plan, StagePlan
from autopar.sharing import sharing_groups


def make_plan(
    graph: OpGraph,
    mesh: Mesh,
    operators: Mapping[str, OperatorPlan] | None = None,
    parameters: Mapping[str, ParameterPlan] | None = None,
    sources: Mapping[str, Layout] | None = None,
    shared: Mapping[str, Layout] | None = None,
) -> Plan:
    """A plan in which all that is not given is replicated. Shared layouts follow from the operators given."""
    whole: Layout = (REPLICATED,) * mesh.num_axes
    label = " ".join("R" * mesh.num_axes)
    planned = {
        operator.id: OperatorPlan(
            label, (whole,) * len(operator.inputs), (whole,) * sum(bool(value) for value in operator.outputs)
        )
        for operator in graph.operators
    }
    planned.update(operators or {})
    groups = {
        f"{graph.operator_of[name].inputs[index]}{group}": planned[name].inputs[index]
        for (name, index), group in sharing_groups(graph).items()
    }
    resting = {parameter.value: ParameterPlan(whole, whole) for parameter in graph.parameters}
    given = {entry.value: whole for entry in (*graph.inputs, *graph.buffers, *graph.constants)}
    stage = StagePlan(
        mesh=mesh,
        operators=planned,
        parameters={**resting, **(parameters or {})},
        sources={**given, **(sources or {})},
        shared={**groups, **(shared or {})},
        variants={group.name: (0,) * len(group.blocks) for group in graph.block_groups},
    )
    return Plan(graph.model, mesh.num_devices, graph.fingerprint, "by hand", {}, (stage,))
