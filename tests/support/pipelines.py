"""Plans of several stages and micro-batches, each stage solved on its own, for tests of what reads plans."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from autopar.batching import at_batch, micro_batch_sizes
from autopar.costing import Costed, build, prepare
from autopar.costing.answer import stage_plan
from autopar.costing.operators import Role
from autopar.costing.setting import Setting
from autopar.graph import OpGraph, Value
from autopar.layout import PARTIAL, REPLICATED, Cut, Layout, Shard, without_gradient
from autopar.mesh import Mesh
from autopar.options import Parallelism, PlanOptions
from autopar.plans import ParameterPlan, Plan, Resolved, StagePlan
from autopar.recompute import MODES
from autopar.solver import Problem, solve
from autopar.staging import cut_points, stage_graphs
from cost_models import Cluster, CostModel
from tests.support.random_plans import random_plan

AXES: tuple[Role, ...] = ("data", "tensor")
STAGES_A_RANK = {"interleaved_1f1b": 2, "interleaved_zero_bubble": 2, "zbv": 2, "dualpipev": 2}

Recompute = str | Sequence[str] | Mapping[str, str]  # a mode for all blocks, for those of each stage, or by block path
Rest = tuple[Layout, int]  # how a parameter is stored, and its ZeRO level


def even_cuts(graph: OpGraph, num_stages: int) -> tuple[str, ...]:
    """Cut points that share the operators about evenly."""
    points = [point.operator for point in cut_points(graph)]
    place = {operator.id: at for at, operator in enumerate(graph.operators)}
    wanted = [len(graph.operators) * stage // num_stages for stage in range(1, num_stages)]
    cuts = [min(points, key=lambda name: abs(place[name] - at)) for at in wanted]
    assert len(set(cuts)) == num_stages - 1, f"{graph.model} cannot be cut evenly into {num_stages} stages"
    return tuple(cuts)


def pipeline_plan(
    graph: OpGraph,
    cuts: Sequence[str],
    mesh_shape: tuple[int, ...] = (1,),
    schedule: str = "1f1b",
    num_micro_batches: int = 4,
    recompute: Recompute = "none",
    parallelism: Parallelism | None = None,
    cluster: Cluster | None = None,
    *,
    roles: Sequence[Role] | None = None,
    unit: int | None = None,
    num_ranks: int | None = None,
    rank_order: tuple[int, ...] = (),
) -> Plan:
    """A plan with stages cut at ``cuts``, all on meshes of ``mesh_shape`` with the axes data and tensor.

    ``roles`` are those of the axes (by default what their names say); of ``parallelism`` the ZeRO level counts. ``unit``:
    the micro-batches' sizes are multiples of it (by default of the size of the data axis, where the batch is).
    ``num_ranks``: pipeline ranks, by default as many as the schedule wants for the stages.
    """
    mesh = Mesh(mesh_shape, AXES[: len(mesh_shape)])
    if unit is None:
        unit = mesh_shape[0] if graph.batch_size % mesh_shape[0] == 0 else 1
    size = micro_batch_sizes(graph.batch_size, num_micro_batches, unit)[0]
    graphs = stage_graphs(at_batch(graph, size), cuts)
    ranks = num_ranks or len(graphs) // STAGES_A_RANK.get(schedule, 1)
    options = PlanOptions(parallelism=parallelism or Parallelism())
    model = CostModel(cluster or Cluster.homogeneous(num_nodes=ranks, devices_per_node=mesh.num_devices))
    boundary = {value: boundary_of(stage.values[value], mesh) for stage in graphs for value in stage.sent}
    priced = []
    for index, stage in enumerate(graphs):
        modes = modes_of(stage, index, recompute)
        setting = Setting(num_micro_batches, 1, modes, {v: boundary[v] for v in (*stage.received, *stage.sent)})
        priced.append(build(prepare(stage), mesh, roles or AXES[: mesh.num_axes], model, options, setting))
    return Plan(
        model=graph.model,
        num_devices=ranks * mesh.num_devices,
        graph_fingerprint=graph.fingerprint,
        cluster_fingerprint=model.cluster.fingerprint(),
        options=options.to_json(),
        stages=_solved(priced),
        schedule=schedule,
        num_micro_batches=num_micro_batches,
        cuts=tuple(cuts),
        batch_size=graph.batch_size,
        micro_batch_unit=unit,
        rank_order=rank_order,
    )


def boundary_of(value: Value, mesh: Mesh) -> Layout:
    """The batch over the axis data, where it divides."""
    found: Layout = (REPLICATED,) * mesh.num_axes
    if value.batch_dims and value.shape[value.batch_dims[0]] % mesh.shape[0] == 0 and mesh.shape[0] > 1:
        dim = value.batch_dims[0]
        found = (Shard(dim, Cut.plain(value.shape[dim])), *found[1:])
    return found


def modes_of(graph: OpGraph, stage: int, recompute: Recompute) -> dict[str, str]:
    paths = [block.path for group in graph.block_groups for block in group.blocks]
    if isinstance(recompute, Mapping):
        return {path: recompute.get(path, "none") for path in paths}
    return dict.fromkeys(paths, recompute if isinstance(recompute, str) else recompute[stage])


def _solved(priced: Sequence[Costed]) -> tuple[StagePlan, ...]:
    """Each stage's best plan. Parameters of several stages rest alike in all: as the first likes best, else otherwise."""
    common: dict[str, list[Rest]] = {}
    for costed in priced:
        for parameter in costed.prepared.graph.parameters:
            ways = dict.fromkeys((c.storage, c.zero) for c in costed.parameter_table(parameter.value).choices)
            known = common.get(parameter.value)
            common[parameter.value] = list(ways) if known is None else [way for way in known if way in ways]
    names = [parameter.value for costed in priced for parameter in costed.prepared.graph.parameters]
    tied = {value: common[value] for value in dict.fromkeys(names) if names.count(value) > 1}
    attempts = max(map(len, tied.values()), default=0)
    for attempt in range(-1, attempts):
        rests = {value: ways[attempt % len(ways)] for value, ways in tied.items()} if attempt >= 0 else {}
        found = _attempted(priced, tied, rests)
        if found is not None:
            return found
    raise AssertionError(f"{sorted(tied)} find no common storage")


def _attempted(
    priced: Sequence[Costed], tied: Mapping[str, object], rests: dict[str, Rest]
) -> tuple[StagePlan, ...] | None:
    plans: list[StagePlan] = []
    for costed in priced:
        assignment = solve(_forced(costed, rests))
        if assignment.choices is None:
            return None
        plans.append(stage_plan(costed, assignment.choices))
        for value in tied.keys() & plans[-1].parameters.keys():
            rests[value] = (plans[-1].parameters[value].storage, plans[-1].parameters[value].zero)
    return tuple(plans)


def _forced(costed: Costed, rests: Mapping[str, Rest]) -> Problem:
    """The stage's problem with the parameters named in ``rests`` stored so."""
    costs = list(costed.problem.node_costs_seconds)
    for value, rest in rests.items():
        if value in costed.nodes:
            node = costed.nodes[value]
            allowed = [(choice.storage, choice.zero) == rest for choice in costed.parameter_table(value).choices]
            costs[node] = np.where(allowed, costs[node], np.inf)
    return replace(costed.problem, node_costs_seconds=tuple(costs))


def random_pipeline(
    graph: OpGraph,
    cuts: Sequence[str],
    mesh: Mesh,
    seed: int,
    schedule: str = "1f1b",
    num_micro_batches: int = 2,
    unit: int = 1,
) -> Plan:
    """A plan with random strategies, boundaries and recomputation: far from good, but it must compute what the model does."""
    draw = random.Random(seed)
    size = micro_batch_sizes(graph.batch_size, num_micro_batches, unit)[0]
    graphs = stage_graphs(at_batch(graph, size), cuts)
    whole: Layout = (REPLICATED,) * mesh.num_axes
    names = [parameter.value for stage in graphs for parameter in stage.parameters]
    tied = {value: ParameterPlan(whole, whole) for value in names if names.count(value) > 1}
    stages: list[StagePlan] = []
    boundary: dict[str, Layout] = {}
    for stage, number in zip(reversed(graphs), range(len(graphs)), strict=True):
        found = random_plan(stage, mesh, seed * 100 + number).stages[0]
        resolved = Resolved(found, stage)
        sent = {value: boundary[value] for value in stage.sent}
        for value in stage.received:
            wanted = [resolved.operator(name).inputs[index] for name, index in stage.readers_of.get(value, ())]
            layouts = [layout for layout in wanted if PARTIAL not in layout]
            drawn = draw.choice([whole, *layouts])
            boundary[value] = drawn if stage.values[value].requires_grad else without_gradient(drawn)
        recompute = {}
        for group in stage.block_groups:
            modes = [draw.choice(MODES) for _ in group.blocks]
            recompute[group.name] = tuple(modes[variant] for variant in found.variants[group.name])
        kept = {value: plan for value, plan in found.parameters.items() if value not in tied}
        own = {value: plan for value, plan in tied.items() if any(p.value == value for p in stage.parameters)}
        sources = {**found.sources, **{value: boundary[value] for value in stage.received}}
        stages.insert(
            0, replace(found, sources=sources, parameters={**kept, **own}, sent=sent, recompute=recompute)
        )
    ranks = len(graphs) // STAGES_A_RANK.get(schedule, 1)
    return Plan(
        model=graph.model,
        num_devices=ranks * mesh.num_devices,
        graph_fingerprint=graph.fingerprint,
        cluster_fingerprint="random",
        options={},
        stages=tuple(stages),
        schedule=schedule,
        num_micro_batches=num_micro_batches,
        cuts=tuple(cuts),
        batch_size=graph.batch_size,
        micro_batch_unit=unit,
    )
