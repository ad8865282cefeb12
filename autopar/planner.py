"""plan(): from a model and a cluster to the best plan, with its certificate.

Reads top to bottom as the data flows: trace, prepare, then for every mesh cost and solve, then choose. The lower bound of
the search is the least of the bounds over all meshes: no plan of the searched space is faster under the cost model.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from autopar.costing import Costed, Prepared, build, prepare
from autopar.costing.candidate import Candidate, SearchResult
from autopar.costing.operators import Role
from autopar.errors import InfeasibleError, InputError
from autopar.fitting import fit, unlimited
from autopar.graph import OpGraph, check
from autopar.mesh import Mesh, factorizations
from autopar.options import Parallelism, PlanOptions
from autopar.plans import Plan, StagePlan
from autopar.report import details
from autopar.solver import Assignment, Problem, Status, solve
from cost_models import Cluster, CostModel

if TYPE_CHECKING:
    from torch import nn

Progress = Callable[[str], None]



def plan(
    model: nn.Module,
    cluster: Cluster,
    example_inputs: Any = None,
    *,
    options: PlanOptions | None = None,
    parallelism: Parallelism | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The best plan found for training ``model`` on ``cluster``, with a proof of how good it is.

    ``example_inputs``: a tuple, a dict, or (tuple, dict) of tensors of the *global* batch; may be left out where the model
    has ``dummy_inputs``. The model may be on the meta device; nothing of it is run or changed. ``parallelism`` is short
    for ``options=PlanOptions(parallelism=...)``.

    Raises TraceError (the forward depends on data), InputError (inputs, options), InfeasibleError (no plan fits; the
    message names the smallest memory and number of devices that would do).

    >>> plan(model, Cluster.homogeneous(num_nodes=1, devices_per_node=8), {"input_ids": ids, "labels": ids})
    """
    from autopar.tracing import trace  # torch is loaded only where a model is traced

    if not isinstance(cluster, Cluster):
        raise InputError(
            f"cluster= is a {type(cluster).__name__}: give an autopar.Cluster (Cluster.load, .homogeneous, .local), and "
            "the batch as example_inputs="
        )
    chosen = merged_options(options, parallelism)
    list(meshes(cluster.num_devices, chosen))  # contradictions are found before the model is traced
    start = time.perf_counter()
    graph = trace(model, example_inputs, batch_dims=batch_dims, loss_fn=loss_fn).graph
    seconds = time.perf_counter() - start
    return plan_graph(graph, cluster, chosen, progress=progress, tracing_seconds=seconds)


def merged_options(options: PlanOptions | None, parallelism: Parallelism | None) -> PlanOptions:
    """The options with ``parallelism`` put in; giving both is a contradiction unless the options' own is free."""
    options = options or PlanOptions()
    if parallelism is None:
        return options
    if not options.parallelism.is_free:
        raise InputError(f"parallelism is given twice: {options.parallelism} in the options and {parallelism}; give one")
    return replace(options, parallelism=parallelism)


def plan_graph(
    graph: OpGraph,
    cluster: Cluster,
    options: PlanOptions | None = None,
    *,
    progress: Progress | None = None,
    tracing_seconds: float = 0.0,
) -> Plan:
    """The best plan for a traced model; see :func:`plan`."""
    options = options or PlanOptions()
    say = progress or (lambda message: None)
    check(graph)
    clock = _Clock({"trace": tracing_seconds})
    cost_model = CostModel(cluster)
    with clock.phase("prepare"):
        prepared = prepare(graph)
    search = _Search(prepared, cost_model, options, clock, say)
    candidates = search.candidates(list(meshes(cluster.num_devices, options)))
    best = _best(candidates)
    if best is None or best.stage is None:
        raise _infeasible(candidates, search, cluster)
    with clock.phase("alternatives"):
        rivals = search.rivals(cluster)
    stage = named_axes(best.stage, best.costed, best.assignment)
    result = SearchResult(
        best=replace(best, stage=stage),
        candidates=tuple(candidates),
        rivals=rivals,
        lower_bound_seconds=min(candidate.lower_bound_seconds for candidate in candidates),
    )
    plan = Plan(
        model=graph.model,
        num_devices=cluster.num_devices,
        graph_fingerprint=graph.fingerprint,
        cluster_fingerprint=cluster.fingerprint(),
        options=options.to_json(),
        stages=(stage,),
    )
    with clock.phase("report"):
        document = details(plan, graph, cluster, options, result)
    return replace(plan, details=document, timings=clock.seconds)


def meshes(num_devices: int, options: PlanOptions) -> Iterator[tuple[tuple[int, ...], tuple[Role, ...]]]:
    """Every mesh to try, with the role of each of its axes (``free`` where nothing is forced)."""
    if options.mesh_shape is not None:
        if math.prod(options.mesh_shape) != num_devices:
            raise InputError(
                f"mesh_shape={options.mesh_shape} has {math.prod(options.mesh_shape)} devices, the cluster {num_devices}; "
                "give a shape of as many devices as the cluster has, or leave it out"
            )
        shapes = [options.mesh_shape]
    else:
        shapes = factorizations(num_devices, options.max_mesh_axes)
    forced = options.parallelism
    data, tensor = forced.data, forced.tensor
    if data is None and tensor is None:
        for shape in shapes:
            yield shape, free_roles(shape)
        return
    found = False
    for shape in shapes:
        for roles in itertools.product(("data", "tensor"), repeat=len(shape)):
            degrees = {role: math.prod(s for s, r in zip(shape, roles, strict=True) if r == role) for role in roles}
            if degrees.get("data", 1) == (data or degrees.get("data", 1)) and degrees.get("tensor", 1) == (
                tensor or degrees.get("tensor", 1)
            ):
                found = True
                yield shape, roles  # type: ignore[misc]
    if not found:
        raise InputError(
            f"data={data} x tensor={tensor} cannot be laid out on {num_devices} devices"
            f"{'' if options.mesh_shape is None else f' as a mesh of {options.mesh_shape}'}: the product of the forced "
            f"degrees must be {num_devices} (a degree that is left out takes the rest)"
        )


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def free_roles(shape: Sequence[int]) -> tuple[Role, ...]:
    """Axes on which nothing is forced."""
    return tuple("free" for _ in shape)


class _Clock:
    """Seconds by phase."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    def phase(self, name: str) -> _Phase:
        return _Phase(self.seconds, name)


@dataclass
class _Phase:
    seconds: dict[str, float]
    name: str
    start: float = 0.0

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds[self.name] = self.seconds.get(self.name, 0.0) + time.perf_counter() - self.start


class _Search:
    """Prices and solves one model on many meshes."""

    def __init__(
        self, prepared: Prepared, cost_model: CostModel, options: PlanOptions, clock: _Clock, say: Progress
    ) -> None:
        self.prepared, self.cost_model, self.options, self.clock, self.say = prepared, cost_model, options, clock, say
        self.started = time.perf_counter()

    def candidates(self, tried: Sequence[tuple[tuple[int, ...], tuple[Role, ...]]]) -> list[Candidate]:
        """The best plan of every mesh. Each is first sought without regard to memory; where that plan does not fit, and
        is not slower anyway than what was found on another mesh, one that fits is sought, the most promising mesh first."""
        found = [self.unlimited(shape, roles) for shape, roles in tried]
        best_seconds = min((c.assignment.cost_seconds for c in found if not c.missing_bytes), default=math.inf)
        for index in sorted(range(len(found)), key=lambda index: found[index].lower_bound_seconds):
            candidate = found[index]
            if not candidate.missing_bytes:
                continue
            if candidate.lower_bound_seconds >= best_seconds:
                found[index] = replace(candidate, stage=None)
                continue
            self.say(f"mesh {_by(candidate.costed.mesh.shape)} within the memory")
            with self.clock.phase("solve"):
                fitted = fit(candidate.costed, candidate.available_bytes, self._solve, best_seconds)
            if fitted.stage is not None:
                best_seconds = min(best_seconds, fitted.assignment.cost_seconds)
            if math.isinf(fitted.peak_bytes):  # nothing that fits is fast enough: what does not fit says more
                fitted = replace(candidate, stage=None, lower_bound_seconds=fitted.lower_bound_seconds)
            found[index] = fitted
        return found

    def unlimited(self, shape: tuple[int, ...], roles: tuple[Role, ...], what: str = "searching mesh") -> Candidate:
        """The best plan on one mesh whether it fits or not. ``what`` is said of the progress."""
        self.say(f"{what} {_by(shape)}")
        names = tuple(f"axis{index}" for index in range(len(shape)))
        with self.clock.phase("cost"):
            costed = build(self.prepared, Mesh(shape, names), roles, self.cost_model, self.options)
        with self.clock.phase("solve"):
            return unlimited(costed, self.cost_model.min_device_memory_bytes(self.options.memory_margin), self._solve)

    def _solve(self, problem: Problem) -> Assignment:
        left = None
        if self.options.time_limit_seconds is not None:
            left = max(self.options.time_limit_seconds - (time.perf_counter() - self.started), 1.0)
        assignment = solve(problem, time_limit_seconds=left)
        if assignment.status is Status.ERROR:
            raise InputError(f"the solver failed: {assignment.message}")
        return assignment

    def rivals(self, cluster: Cluster) -> dict[str, Candidate]:
        """The plans that people would write by hand, priced under the same costs, whether they fit or not.

        Tensor parallelism as Megatron-LM has it: inside the nodes, with data parallelism across them.
        """
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
            options = replace(self.options, parallelism=Parallelism(zero=zero))
            search = _Search(self.prepared, self.cost_model, options, self.clock, self.say)
            found[name] = search.unlimited(shape, roles, f"for comparison: {name}")
        return found


def named_axes(stage: StagePlan, costed: Costed, assignment: Assignment) -> StagePlan:
    """The stage with axes named for what most of the work does along them: ``data``, ``tensor``, or ``replica`` where
    every device does the same."""
    assert assignment.choices is not None
    work = {"data": np.zeros(costed.mesh.num_axes), "tensor": np.zeros(costed.mesh.num_axes)}
    for operator in costed.prepared.graph.operators:
        table = costed.operator_table(operator.id)
        choice = assignment.choices[costed.nodes[operator.id]]
        for axis, chosen in enumerate(table.strategies[choice].axes):
            if chosen.letter is not None:
                work["data" if chosen.splits_batch else "tensor"][axis] += table.flops[choice]
    names: list[str] = []
    for axis in range(costed.mesh.num_axes):
        most = max(work, key=lambda name: float(work[name][axis]))
        name = most if work[most][axis] else "replica"
        same = sum(other.rstrip("23456789") == name for other in names)
        names.append(f"{name}{same + 1}" if same else name)
    return replace(stage, mesh=Mesh(costed.mesh.shape, tuple(names)))


def _best(candidates: Sequence[Candidate]) -> Candidate | None:
    """The fastest candidate that fits; of equal ones the mesh with fewer axes."""
    fitting = [candidate for candidate in candidates if candidate.stage is not None]
    return min(fitting, key=lambda c: (c.assignment.cost_seconds, c.costed.mesh.num_axes), default=None)


def _infeasible(candidates: Sequence[Candidate], search: _Search, cluster: Cluster) -> InfeasibleError:
    """The error for a model that does not fit: the smallest memory per device, and how many such devices would do."""
    needed = min(candidate.peak_bytes for candidate in candidates)
    available = candidates[0].available_bytes
    if needed == math.inf:
        return InfeasibleError("no plan satisfies what is forced, whatever the memory; force less")
    more = _devices_that_do(search, cluster)
    advice = f"{more} of these devices would do" if more else "more of these devices alone would not do"
    smallest = math.ceil(needed / 2**30 * 100) / 100
    return InfeasibleError(
        f"no plan fits: the leanest one needs {smallest:.2f} GiB on each of {cluster.num_devices} devices, which have "
        f"{available / 2**30:.2f} GiB for it (memory less the software's own and the margin); {smallest:.2f} GiB on each "
        f"device would do; {advice}"
    )


def _devices_that_do(search: _Search, cluster: Cluster) -> int | None:
    """The smallest number of devices, by doubling the cluster's last node or its number, on which some plan fits."""
    if not search.options.parallelism.is_free or search.options.mesh_shape is not None:
        return None
    node = cluster.nodes[-1]
    for factor in (2, 4, 8, 16, 32, 64):
        grown = (
            replace(cluster, nodes=(replace(node, num_devices=node.num_devices * factor),))
            if len(cluster.nodes) == 1 and node.num_devices * factor <= 8
            else replace(cluster, nodes=cluster.nodes * factor)
        )
        larger = _Search(search.prepared, CostModel(grown), search.options, search.clock, search.say)
        inside = grown.nodes[0].num_devices
        for shape in dict.fromkeys([(grown.num_devices // inside, inside), (grown.num_devices,)]):
            if larger.candidates([(shape, free_roles(shape))])[0].stage is not None:
                return grown.num_devices
    return None
