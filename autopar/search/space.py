"""What the joint search chooses from, beside cuts, recomputation and shardings: pipeline ranks, mesh, micro-batches, schedule.

Enters: a graph, a cluster, options. Leaves: every :class:`Frame` that is allowed. What torch.distributed.pipelining cannot
run is not in the space.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.costing.operators import Role
from autopar.errors import InputError
from autopar.mesh import Mesh
from autopar.options import PlanOptions
from cost_models import Cluster, problem_with

MAX_STAGES_PER_RANK = 4  # virtual stages of the interleaved schedules that are tried: 1, 2, 3, 4
SCHEDULES_OF_ONE_STAGE = ("gpipe", "1f1b", "interleaved_zero_bubble")
V_SHAPED = ("zbv", "dualpipev")
ZERO_BUBBLE = ("interleaved_zero_bubble", *V_SHAPED)


@dataclass(frozen=True)
class Grid:
    """How the devices are arranged: ``num_ranks`` pipeline ranks, each a mesh of ``mesh_shape`` with a role per axis.

    ``order`` gives for each pipeline rank the run of device ranks that it takes.
    """

    num_ranks: int
    mesh_shape: tuple[int, ...]
    roles: tuple[Role, ...]
    order: tuple[int, ...]

    @property
    def mesh(self) -> Mesh:
        """The mesh of one pipeline rank, its axes not named for what they do yet."""
        return Mesh(self.mesh_shape, tuple(f"axis{index}" for index in range(len(self.mesh_shape))))


@dataclass(frozen=True)
class Frame:
    """A grid with a number of micro-batches and a schedule of ``num_stages`` stages."""

    grid: Grid
    num_micro_batches: int
    schedule: str
    num_stages: int


Meshes = Callable[[int], Sequence[tuple[tuple[int, ...], tuple[Role, ...]]]]


def grids(cluster: Cluster, options: PlanOptions, num_units: int, meshes: Meshes) -> list[Grid]:
    """All arrangements of the cluster's devices; a pipeline rank has at least one unit of the model."""
    forced = options.parallelism.pipeline
    found: list[Grid] = []
    for num_ranks in range(1, min(num_units, cluster.num_devices) + 1):
        if cluster.num_devices % num_ranks or (forced is not None and num_ranks != forced):
            continue
        size = cluster.num_devices // num_ranks
        for shape, roles in meshes(size):
            found.extend(Grid(num_ranks, shape, roles, order) for order in orders(cluster, num_ranks))
    if not found:
        raise InputError(
            f"pipeline={forced} cannot be had: it must divide the {cluster.num_devices} devices, and the model has "
            f"{num_units} places to be cut into stages at"
        )
    return found


def orders(cluster: Cluster, num_ranks: int) -> Iterator[tuple[int, ...]]:
    """Orders of the equal runs of devices: runs of one kind together, the kinds in every order; one order if all are alike."""
    kinds: dict[object, list[int]] = {}
    size = cluster.num_devices // num_ranks
    for index in range(num_ranks):
        kinds.setdefault(kind_of(cluster, index * size, size), []).append(index)
    tried = itertools.permutations(kinds.values()) if len(kinds) <= 3 else [tuple(kinds.values())]
    plain = tuple(range(num_ranks))
    yield from dict.fromkeys([plain, *(tuple(itertools.chain(*runs)) for runs in tried)])


def kind_of(cluster: Cluster, first: int, count: int) -> tuple[object, ...]:
    """What the prices on a run of devices depend on: runs of one kind have the same."""
    found: list[object] = []
    begin = 0
    for node in cluster.nodes:
        low, high = max(first, begin), min(first + count, begin + node.num_devices)
        if low < high:
            found.append((node.device, node.link, high - low, node.num_devices))
        begin += node.num_devices
    return tuple(found)


def micro_batch_counts(batch_size: int, options: PlanOptions, may_split: bool) -> list[int]:
    """Numbers of micro-batches: every one that divides the batch, or the one that is forced."""
    size = options.parallelism.micro_batch_size
    if size is not None:
        count = math.ceil(batch_size / min(size, batch_size))
        if count > 1 and not may_split:
            raise InputError(f"micro_batch_size={size}: this model cannot be run in several micro-batches")
        return [count]
    return [count for count in range(1, batch_size + 1) if batch_size % count == 0] if may_split else [1]


def counts_of(grid: Grid, counts: Sequence[int], batch_size: int) -> list[int]:
    """Of the numbers of micro-batches, those whose samples the data axes of a grid share out evenly; where none does, those
    that have a sample for every share, or else the least."""
    shares = math.prod(size for size, role in zip(grid.mesh_shape, grid.roles, strict=True) if role == "data")
    sizes = {count: math.ceil(batch_size / count) for count in counts}
    even = [count for count in counts if sizes[count] % shares == 0]
    return even or [count for count in counts if sizes[count] >= shares] or [min(counts)]


def frames(grid: Grid, counts: Sequence[int], num_units: int, options: PlanOptions) -> Iterator[Frame]:
    """All schedules on a grid that can run, for each number of micro-batches."""
    forced = options.parallelism.schedule
    for count in counts:
        for schedule, num_stages in _schedules(grid.num_ranks, num_units):
            if forced is None and is_tried_after(schedule, grid.num_ranks, num_stages, count, options):
                continue
            if forced is not None and schedule != forced:
                continue
            if problem_with(schedule, grid.num_ranks, num_stages, count) is None:
                yield Frame(grid, count, schedule, num_stages)


def is_tried_after(schedule: str, num_ranks: int, num_stages: int, num_micro_batches: int, options: PlanOptions) -> bool:
    """Whether a schedule is only tried with the best plans of others.

    Of several stages a rank no bound is known that counts what they keep together and is good enough to leave many out.
    Where a gap is allowed, zero-bubble schedules come afterwards too, since what they save depends on what is recomputed;
    and GPipe is left to where 1F1B cannot run: it takes as long and keeps more. The certificate does not cover what is
    tried after, unless it is forced.
    """
    if num_stages > num_ranks:
        return True
    dominated = schedule == "gpipe" and problem_with("1f1b", num_ranks, num_stages, num_micro_batches) is None
    return bool(options.gap) and (schedule in ZERO_BUBBLE or dominated)


def tried_after(frame: Frame, num_units: int, options: PlanOptions) -> Iterator[Frame]:
    """A frame with the schedules that are tried afterwards."""
    for schedule, num_stages in _schedules(frame.grid.num_ranks, num_units):
        count = frame.num_micro_batches
        runs = problem_with(schedule, frame.grid.num_ranks, num_stages, count) is None
        if runs and schedule != "gpipe" and is_tried_after(schedule, frame.grid.num_ranks, num_stages, count, options):
            yield replace(frame, schedule=schedule, num_stages=num_stages)


def _schedules(num_ranks: int, num_units: int) -> Iterator[tuple[str, int]]:
    """Schedules with their numbers of stages, as far as the model has places to cut."""
    if num_ranks == 1:
        yield "single", 1
        return
    yield from ((schedule, num_ranks) for schedule in SCHEDULES_OF_ONE_STAGE)
    for each in range(2, MAX_STAGES_PER_RANK + 1):
        if each * num_ranks <= num_units:
            yield from ((schedule, each * num_ranks) for schedule in ("interleaved_1f1b", "interleaved_zero_bubble"))
    if 2 * num_ranks <= num_units:
        yield from ((schedule, 2 * num_ranks) for schedule in V_SHAPED)
