"""Plans made by hand, for tests of what reads plans."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.codegen.batch import BatchDims
from autopar.graph import Operator, OpGraph
from autopar.layout import PARTIAL, REPLICATED, SUMMED_GRADIENT, Cut, Layout, Shard
from autopar.mesh import Mesh
from autopar.plans import OperatorPlan, ParameterPlan, Plan, StagePlan
from autopar.sharing import sharing_groups
from autopar.strategies.registry import signature_of
from autopar.strategies.rule import letters_of


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
        operator.id: OperatorPlan(label, (whole,) * len(operator.inputs), (whole,) * len(operator.outputs))
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
    return Plan(graph.model, mesh.num_devices, graph.fingerprint, "by hand", {}, (stage,), batch_size=graph.batch_size)


def data_parallel_plan(graph: OpGraph, mesh: Mesh, zero: int = 0) -> Plan:
    """A chain of layers with the batch split over every axis of the mesh; the loss is then a sum of terms."""
    dims = BatchDims(graph)
    summed: Layout = (SUMMED_GRADIENT,) * mesh.num_axes

    def layout(value: str) -> Layout:
        if graph.values[value].kind == "parameter":
            return summed
        if value == graph.loss:
            return (PARTIAL,) * mesh.num_axes
        dim = min(dims.of(value))
        return (Shard(dim, Cut.plain(graph.values[value].shape[dim])),) * mesh.num_axes

    def storage(value: str) -> Layout:
        if not zero:
            return (REPLICATED,) * mesh.num_axes
        return (Shard(0, Cut.plain(graph.values[value].shape[0])),) * mesh.num_axes

    def letter(operator: Operator) -> str:
        rule = signature_of(operator, graph)
        assert rule is not None, f"{operator.id} has no rule"
        index = next(index for index, value in enumerate(operator.inputs) if dims.of(value))
        return letters_of((rule.inputs[index][min(dims.of(operator.inputs[index]))],))[0]

    operators = {
        operator.id: OperatorPlan(
            " ".join([letter(operator)] * mesh.num_axes),
            tuple(map(layout, operator.inputs)),
            tuple(map(layout, operator.outputs)),
        )
        for operator in graph.operators
    }
    parameters = {entry.value: ParameterPlan(summed, storage(entry.value), zero) for entry in graph.parameters}
    return make_plan(graph, mesh, operators, parameters, {entry.value: layout(entry.value) for entry in graph.inputs})
