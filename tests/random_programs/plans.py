"""Random legal plans of a graph: a mesh, strategies, storage, micro-batches, stages and recomputation.

Strategies are drawn in one of two ways. ``wild``: each operator's on its own, so that nearly every edge converts.
``priced``: the planner's own problem with random prices, solved: an optimum that nobody would want, in which shards travel
far.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.costing import build, prepare
from autopar.costing.answer import stage_plan
from autopar.costing.operators import Role
from autopar.costing.setting import Setting
from autopar.graph import OpGraph
from autopar.mesh import Mesh
from autopar.micro_batches import coupling
from autopar.options import Parallelism, PlanOptions
from autopar.plans import Plan
from autopar.recompute import MODES
from autopar.solver import Edge, Limits, Problem, solve
from autopar.staging import cut_points, stage_graphs
from cost_models import Cluster, CostModel
from tests.support.pipelines import modes_of, random_pipeline
from tests.support.random_plans import random_plan

MESHES: tuple[tuple[int, ...], ...] = (
    *[(2,)] * 5,
    *[(3,)] * 3,
    *[(4,)] * 2,
    *[(2, 2)] * 7,
    (2, 3),
    (3, 2),
    (3, 2),
    (5,),
    (7,),
    (2, 4),
    (4, 2),
    (2, 2, 2),
    (8,),
)  # the larger ones rarely: each rank costs as much as the first
NAMES = ("data", "tensor", "more")


KINDS = ("stages", "micro-batches", "wild", "priced")
CHANCES = (0.2, 0.15, 0.2, 0.45)


def draw_plan(
    graph: OpGraph, seed: str, kind: str | None = None, shape: tuple[int, ...] | None = None
) -> tuple[str, Plan]:
    """How a plan was drawn, and the plan. ``kind`` and ``shape`` of the mesh are drawn where they are not given."""
    draw = random.Random(f"plan {seed}")
    drawn = draw.choices(KINDS, CHANCES)[0], draw.choice(MESHES)
    kind, shape = kind or drawn[0], shape or drawn[1]
    mesh = Mesh(shape, NAMES[: len(shape)])
    number = draw.randrange(10**6)
    free = not coupling(graph) and graph.batch_size > 1
    if kind == "stages" and mesh.num_devices <= 4:
        cuts = _cuts(graph)
        if cuts:
            even = free and graph.batch_size % 2 == 0
            schedule, count = (draw.choice(("gpipe", "1f1b")), 2) if even else ("gpipe", 1)
            return "stages", random_pipeline(graph, (draw.choice(cuts),), mesh, number, schedule, count)
    if kind == "micro-batches" and free:
        count = next(n for n in range(2, graph.batch_size + 1) if graph.batch_size % n == 0)
        return "micro-batches", random_pipeline(graph, (), mesh, number, "single", count)
    if kind != "priced":
        return "wild", random_plan(graph, mesh, number)
    return "priced", priced_plan(graph, mesh, draw)


def _cuts(graph: OpGraph) -> list[str]:
    """Places to cut in two, each with parameters to train on either side."""
    found = []
    for point in cut_points(graph):
        stages = stage_graphs(graph, (point.operator,))
        if all(any(parameter.trainable for parameter in stage.parameters) for stage in stages):
            found.append(point.operator)
    return found


def priced_plan(graph: OpGraph, mesh: Mesh, draw: random.Random) -> Plan:
    """What the solver finds under random prices: of choices at random, of conversions near to what they cost."""
    modes = modes_of(graph, 0, draw.choice(MODES))
    zero = draw.choice((None, None, 1, 2, 3))
    roles: Sequence[Role] = ("free",) * mesh.num_axes
    options = PlanOptions(parallelism=Parallelism(zero=zero))
    cluster = Cluster.homogeneous(num_nodes=1, devices_per_node=mesh.num_devices)
    costed = build(prepare(graph), mesh, roles, CostModel(cluster), options, Setting(recompute=modes))
    choices = solve(shuffled(costed.problem, draw), limits=Limits(ilp_pairs=0, branch_ops=0, wide_branch_ops=0)).choices
    assert choices is not None, "random prices leave something to choose"
    return Plan(
        graph.model, mesh.num_devices, graph.fingerprint, "random", {}, (stage_plan(costed, choices),),
        batch_size=graph.batch_size,
    )  # fmt: skip


def shuffled(problem: Problem, draw: random.Random) -> Problem:
    """The problem with random costs where there are any. Whole layouts are made dear, or the cheapest plan splits nothing."""
    numbers = np.random.default_rng(draw.randrange(2**32))
    known: dict[int, np.ndarray] = {}

    def drawn(costs: np.ndarray, scale: float) -> np.ndarray:
        if id(costs) not in known:  # arrays that like blocks share stay shared
            known[id(costs)] = np.where(np.isfinite(costs), numbers.random(costs.shape) * scale, np.inf)
        return known[id(costs)]

    edges = tuple(
        Edge(e.source, e.target, np.where(e.costs_seconds > 0, drawn(e.costs_seconds, 1.0), e.costs_seconds))
        for e in problem.edges
    )
    return replace(
        problem, node_costs_seconds=tuple(drawn(costs, 2.0) for costs in problem.node_costs_seconds), edges=edges
    )
