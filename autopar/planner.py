"""plan(): from a model and a cluster to the best plan, with its certificate.

Reads top to bottom as the data flows: trace, search (`autopar.search`), compare with what people write by hand, explain.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autopar.collection import without_collection
from autopar.costing import Costed
from autopar.costing.operators import Role, sequence_letters
from autopar.detection import check_profile
from autopar.errors import InputError
from autopar.forcing import check_degrees, check_forced, meshes
from autopar.graph import OpGraph, check
from autopar.mesh import Mesh
from autopar.micro_batches import coupling
from autopar.options import PRECISIONS, Parallelism, PlanOptions
from autopar.plans import Plan
from autopar.report import details
from autopar.search.clock import Clock
from autopar.search.evaluate import Evaluated, Evaluator
from autopar.search.infeasible import infeasible
from autopar.search.joint import JointSearch
from autopar.search.space import Frame, Grid
from autopar.search.stages import Solved
from autopar.solver import Assignment, Limits, Problem, Status, solve
from cost_models import Cluster, CostModel, Profile

if TYPE_CHECKING:
    from torch import nn

Progress = Callable[[str], None]
LARGE = 600  # nodes of a stage's problem, above which it is solved to QUICK_GAP rather than to the end
QUICK_GAP = 3e-3
FAR_FROM_FITTING = 2.0  # times a device's memory: activations that are not worth pricing
MANY_OPERATORS = 1000  # of a model whose exported program takes so much memory that looking for it pays


@without_collection()
def plan(
    model: nn.Module,
    cluster: Cluster,
    example_inputs: Any = None,
    *,
    options: PlanOptions | None = None,
    parallelism: Parallelism | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    profile: Profile | str | Path | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The best plan found for training ``model`` on ``cluster``, with a proof of how good it is.

    ``example_inputs``: a tuple, a dict, or (tuple, dict) of tensors of the *global* batch; may be left out where the model
    has ``dummy_inputs``. The model may be on the meta device; nothing of it is run or changed. ``parallelism`` is short
    for ``options=PlanOptions(parallelism=...)``. ``profile``: what :func:`autopar.profile` measured on the cluster, or its
    file; costs are then those measured, where there are any.

    Raises TraceError (the forward depends on data), InputError (inputs, options), ProfileError (the profile is damaged, or
    of another machine), InfeasibleError (no plan fits; the message names the smallest memory and number of devices that
    would do).

    >>> plan(model, Cluster.homogeneous(num_nodes=1, devices_per_node=8), {"input_ids": ids, "labels": ids})
    """
    from autopar.tracing import trace  # torch is loaded only where a model is traced

    if not isinstance(cluster, Cluster):
        raise InputError(
            f"cluster= is a {type(cluster).__name__}: give an autopar.Cluster (Cluster.load, .homogeneous, .local), and "
            "the batch as example_inputs="
        )
    chosen = merged_options(options, parallelism)
    check_degrees(cluster.num_devices, chosen)  # contradictions are found before the model is traced
    measured = loaded_profile(profile, cluster)
    start = time.perf_counter()
    policy = PRECISIONS[chosen.precision]
    graph = trace(model, example_inputs, batch_dims=batch_dims, loss_fn=loss_fn, precision=policy, outputs=chosen.outputs).graph
    if len(graph.operators) > MANY_OPERATORS:
        gc.collect()  # what torch.export made refers to itself in circles
    seconds = time.perf_counter() - start
    return plan_graph(graph, cluster, chosen, profile=measured, progress=progress, tracing_seconds=seconds)


def loaded_profile(profile: Profile | str | Path | None, cluster: Cluster) -> Profile | None:
    """The profile, read where it is a file. Raises ProfileError where it cannot be of the cluster."""
    if profile is None:
        return None
    found = profile if isinstance(profile, Profile) else Profile.load(profile)
    check_profile(found, cluster)
    return found


def merged_options(options: PlanOptions | None, parallelism: Parallelism | None) -> PlanOptions:
    """The options with ``parallelism`` put in; giving both is a contradiction unless the options' own is free."""
    options = options or PlanOptions()
    if parallelism is None:
        return options
    if not options.parallelism.is_free:
        raise InputError(f"parallelism is given twice: {options.parallelism} in the options and {parallelism}; give one")
    return replace(options, parallelism=parallelism)


@without_collection()
def plan_graph(
    graph: OpGraph,
    cluster: Cluster,
    options: PlanOptions | None = None,
    *,
    profile: Profile | None = None,
    progress: Progress | None = None,
    tracing_seconds: float = 0.0,
    compare: bool = True,
) -> Plan:
    """The best plan for a traced model; see :func:`plan`. ``compare``: with what people write by hand, for the report."""
    options = options or PlanOptions()
    check(graph)
    check_degrees(cluster.num_devices, options)
    check_forced(graph, options)
    clock = Clock({"trace": tracing_seconds})
    search = Search(graph, CostModel(cluster, profile), options, clock, progress or (lambda message: None))
    found = search.run()
    if found.best is None:
        raise infeasible(search)
    with clock.phase("alternatives"):
        rivals = search.rivals() if compare else {}
    best = replace(found.best, stages=named_axes(found.best.stages))
    frame = best.frame
    plan = Plan(
        model=graph.model,
        num_devices=cluster.num_devices,
        graph_fingerprint=graph.fingerprint,
        cluster_fingerprint=cluster.fingerprint(),
        options=options.to_json(),
        stages=tuple(stage.plan for stage in best.stages),
        schedule=frame.schedule,
        num_micro_batches=frame.num_micro_batches,
        cuts=best.cuts,
        batch_size=graph.batch_size,
        rank_order=rank_order(frame),
    )
    with clock.phase("report"):
        document = details(plan, graph, cluster, options, replace(found, best=best), rivals)
    return replace(plan, details=document, timings=clock.seconds)


class Search(JointSearch):
    """The joint search of one model on one cluster, with the plans that people write by hand."""

    def __init__(
        self, graph: OpGraph, cost_model: CostModel, options: PlanOptions, clock: Clock, say: Progress
    ) -> None:
        super().__init__(
            graph, cost_model, options, self._solve, lambda size: list(meshes(size, options)), not coupling(graph), say, clock
        )

    def _solve(self, problem: Problem, near: float | None = None) -> Assignment:
        left = None
        if self.options.time_limit_seconds is not None:
            left = max(self.options.time_limit_seconds - (time.perf_counter() - self.started), 1.0)
        quick = problem.num_nodes > LARGE
        limits = Limits(gap_target=QUICK_GAP, rounds=3, branch_ops=0, wide_branch_ops=0, ilp_pairs=0) if quick else None
        assignment = solve(problem, time_limit_seconds=left, limits=limits, near=near if quick else None)
        if assignment.status is Status.ERROR:
            raise InputError(f"the solver failed: {assignment.message}")
        return assignment

    def rivals(self) -> dict[str, Evaluated]:
        """The plans that people would write by hand, priced under the same costs, whether they fit or not.

        Tensor parallelism as Megatron-LM has it: inside the nodes, with data parallelism across them.
        """
        cluster = self.cost_model.cluster
        devices = cluster.num_devices
        inside = {node.num_devices for node in cluster.nodes}
        nodes = len(cluster.nodes) if len(inside) == 1 and len(cluster.nodes) < devices else 1
        if devices == 1:
            return {}
        by_hand: dict[str, tuple[tuple[int, ...], tuple[Role, ...], int | None]] = {
            "data": ((devices,), ("data",), 0),
            "zero-3": ((devices,), ("data",), 3),
            "tensor": ((devices,), ("tensor",), None) if nodes == 1 else ((nodes, devices // nodes), ("data", "tensor"), 0),
        }
        found = {}
        for name, (shape, roles, zero) in by_hand.items():
            self.say(f"for comparison: {name}")
            options = replace(self.options, parallelism=Parallelism(zero=zero))
            evaluator = Evaluator(self.cost_model, options, self._solve, like=self.evaluator)
            data = math.prod(size for size, role in zip(shape, roles, strict=True) if role == "data")
            for count in self._counts_by_hand(data):
                frame = Frame(Grid(1, shape, roles, (0,)), count, "single", 1)
                found[name] = evaluator.unlimited(frame, self.graph_of(frame))
                if not found[name].stages[0].candidate.missing_bytes:
                    break
        return found

    def _counts_by_hand(self, data: int) -> list[int]:
        """One micro-batch, unless it is far from fitting, or else the most that leave a sample for each of ``data`` shares."""
        most = max((count for count in self.counts if self.graph.batch_size // count >= data), default=1)
        one = [] if self.expected.share_of_memory > FAR_FROM_FITTING else [self.counts[0]]
        return list(dict.fromkeys([*one, most]))


def rank_order(frame: Frame) -> tuple[int, ...]:
    """The device ranks in the order of the pipeline ranks' places; empty where that is their own order."""
    size = math.prod(frame.grid.mesh_shape)
    found = tuple(run * size + place for run in frame.grid.order for place in range(size))
    return () if found == tuple(range(len(found))) else found


def named_axes(stages: Sequence[Solved]) -> tuple[Solved, ...]:
    """The stages with axes named for what most of the work does along them: ``data``, ``tensor``, ``context``, ``spatial``,
    ``expert``, or ``replica`` where every device does the same. All stages have the same names."""
    costed = stages[0].candidate.costed
    work = {name: np.zeros(costed.mesh.num_axes) for name in ("data", "tensor", "context", "spatial", "expert")}
    for stage in stages:
        _add_work(work, stage.candidate.costed, stage.candidate.assignment)
    names: list[str] = []
    for axis in range(costed.mesh.num_axes):
        most = max(work, key=lambda name: float(work[name][axis]))
        name = most if work[most][axis] else "replica"
        same = sum(other.rstrip("23456789") == name for other in names)
        names.append(f"{name}{same + 1}" if same else name)
    mesh = Mesh(costed.mesh.shape, tuple(names))
    return tuple(
        replace(stage, candidate=replace(stage.candidate, stage=replace(stage.plan, mesh=mesh))) for stage in stages
    )


def _add_work(work: dict[str, np.ndarray], costed: Costed, assignment: Assignment) -> None:
    assert assignment.choices is not None
    for operator in costed.prepared.graph.operators:
        table = costed.operator_table(operator.id)
        choice = assignment.choices[costed.nodes[operator.id]]
        signature = costed.prepared.signatures.get(costed.prepared.name(operator.id))
        space = signature.spatial if signature is not None else frozenset()
        context = set() if signature is None else sequence_letters(operator, signature, costed.prepared)
        for axis, chosen in enumerate(table.strategies[choice].axes):
            if chosen.letter is not None:
                other = "context" if chosen.letter in context else "tensor"
                name = "data" if chosen.splits_batch else "spatial" if chosen.letter in space else other
                name = "expert" if signature is not None and chosen.letter in signature.experts else name
                work[name][axis] += table.flops[choice]
