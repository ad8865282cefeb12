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

from autopar.costing import Costed, Prepared, build, prepare, stage_plan
from autopar.costing.candidate import Candidate, SearchResult
from autopar.costing.operators import Role
from autopar.errors import InfeasibleError, InputError
from autopar.graph import OpGraph, check
from autopar.mesh import Mesh, factorizations
from autopar.options import Parallelism, PlanOptions
from autopar.plans import Plan, StagePlan
from autopar.report import details
from autopar.solver import Assignment, Status, solve
from cost_models import Cluster, CostModel

if TYPE_CHECKING:
    from torch import nn

Progress = Callable[[str], None]

MAX_RESERVATIONS = 4  # how often a plan is sought again with more memory set aside for what it holds for a moment


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

    start = time.perf_counter()
    graph = trace(model, example_inputs, batch_dims=batch_dims, loss_fn=loss_fn).graph
    seconds = time.perf_counter() - start
    return plan_graph(graph, cluster, merged_options(options, parallelism), progress=progress, tracing_seconds=seconds)


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
    candidates = [search.candidate(shape, roles) for shape, roles in meshes(cluster.num_devices, options)]
    best = _best(candidates)
    if best is None or best.stage is None:
        raise _infeasible(candidates, search, cluster)
    with clock.phase("alternatives"):
        rivals = search.rivals(cluster.num_devices)
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
                f"mesh_shape={options.mesh_shape} has {math.prod(options.mesh_shape)} devices, the cluster {num_devices}"
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

    def candidate(self, shape: tuple[int, ...], roles: tuple[Role, ...], limited: bool = True) -> Candidate:
        """The best plan on one mesh. ``limited``: within the devices' memory."""
        names = tuple(f"axis{index}" for index in range(len(shape)))
        self.say(f"mesh {' x '.join(map(str, shape))}")
        with self.clock.phase("cost"):
            costed = build(self.prepared, Mesh(shape, names), roles, self.cost_model, self.options)
        with self.clock.phase("solve"):
            return self._solved(costed, limited)

    def _solved(self, costed: Costed, limited: bool) -> Candidate:
        """Solve within what is left of the memory after what the plan holds for a moment; that depends on the plan, so a
        plan that turns out too large is sought again with as much set aside. The first bound holds for all."""
        available = self.cost_model.min_device_memory_bytes(self.options.memory_margin)
        if not limited:
            assignment = self._solve(costed, math.inf)
            return self._found(costed, assignment, assignment.lower_bound_seconds, available)
        assignment = self._solve(costed, available)
        bound = assignment.lower_bound_seconds
        candidate = self._found(costed, assignment, bound, available)
        reserved = 0.0
        for _ in range(MAX_RESERVATIONS):
            if candidate.stage is None or candidate.peak_bytes <= available:
                return candidate
            reserved = max(candidate.moment_bytes, reserved * 1.05)
            assignment = self._solve(costed, available - reserved)
            candidate = self._found(costed, assignment, bound, available, reserved)
        return candidate if candidate.peak_bytes <= available else replace(candidate, stage=None)

    def _found(
        self, costed: Costed, assignment: Assignment, bound: float, available: float, reserved: float = 0.0
    ) -> Candidate:
        """The candidate of a solver's answer; without choices it says how much memory the mesh needs at least."""
        if assignment.choices is None:
            smallest = assignment.smallest_budgets_bytes
            needed = (smallest[0] if smallest else math.inf) + reserved
            return Candidate(costed, assignment, None, bound, needed, reserved, available)
        moment = moment_bytes(costed, assignment.choices)
        peak = assignment.memory_bytes[0] + moment
        return Candidate(costed, assignment, stage_plan(costed, assignment.choices), bound, peak, moment, available)

    def _solve(self, costed: Costed, budget: float) -> Assignment:
        problem = replace(costed.problem, memory_budgets_bytes=np.array([budget], dtype=np.float64))
        left = None
        if self.options.time_limit_seconds is not None:
            left = max(self.options.time_limit_seconds - (time.perf_counter() - self.started), 1.0)
        assignment = solve(problem, time_limit_seconds=left)
        if assignment.status is Status.ERROR:
            raise InputError(f"the solver failed on mesh {costed.mesh}: {assignment.message}")
        return assignment

    def rivals(self, num_devices: int) -> dict[str, Candidate]:
        """The plans that people would write by hand, priced under the same costs, whether they fit or not."""
        if num_devices == 1:
            return {}
        forced: dict[str, tuple[Role, int | None]] = {
            "data": ("data", 0),
            "zero-3": ("data", 3),
            "tensor": ("tensor", None),
        }
        found = {}
        for name, (role, zero) in forced.items():
            options = replace(self.options, parallelism=Parallelism(zero=zero))
            search = _Search(self.prepared, self.cost_model, options, self.clock, self.say)
            found[name] = search.candidate((num_devices,), (role,), limited=False)
        return found


def moment_bytes(costed: Costed, choices: Sequence[int]) -> float:
    """Bytes that a step holds for a moment beyond what it keeps: the largest operator's tensors and gradients, and the
    parameters that ZeRO gathers around their use (one in use, one ahead)."""
    graph = costed.prepared.graph
    operators = (
        float(costed.operator_table(operator.id).transient_bytes[choices[costed.nodes[operator.id]]])
        for operator in graph.operators
    )
    gathered = (
        float(costed.parameter_table(parameter.value).transient_bytes[choices[costed.nodes[parameter.value]]])
        for parameter in graph.parameters
    )
    return max(operators, default=0.0) + 2 * max(gathered, default=0.0)


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
    more = _devices_that_do(search, cluster)
    advice = f"{more} of these devices would do" if more else "more of these devices alone would not do"
    return InfeasibleError(
        f"no plan fits: the best one needs {needed / 2**30:.2f} GiB on each of {cluster.num_devices} devices, which have "
        f"{available / 2**30:.2f} GiB for it (memory less the margin); devices with {needed / 2**30:.2f} GiB, or {advice}"
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
            if larger.candidate(shape, free_roles(shape)).stage is not None:
                return grown.num_devices
    return None
