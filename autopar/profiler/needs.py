"""What has to be measured to price the plans of a model: operators at their local shapes, collectives by groups.

Enters: a traced model, a cluster, options. Leaves: :class:`Needs`. Operators are those of every strategy on every mesh and
micro-batch size that the search may look at, like calls once: first those of the whole model on one device, then those on
which a step spends most for what measuring them takes.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.batching import at_batch
from autopar.costing import Prepared, prepare
from autopar.costing.conversions import Conversions
from autopar.costing.measured import Shape, kind_of_call, local_calls
from autopar.costing.operators import operator_table
from autopar.costing.parameters import BUCKET_BYTES
from autopar.forcing import free_roles
from autopar.graph import ITEM_BYTES, Operator, OpGraph
from autopar.mesh import Mesh, factorizations
from autopar.micro_batches import coupling
from autopar.options import PlanOptions
from autopar.profiler.timing import measuring_seconds
from autopar.search.space import micro_batch_counts
from autopar.strategies.choices import share
from cost_models import Cluster, CostModel, axis_groups, groups_key

Groups = tuple[tuple[int, ...], ...]

# What a program sends on the axes of its mesh, and between stages; see autopar.reshard.
ON_AXES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
BETWEEN_STAGES = ("send_recv",)
SMALLEST_BYTES = 1024
LARGEST_BYTES = 64 * 2**20  # beyond it time is in proportion to bytes; two and a half gradient buckets
MOST_COMPUTED_BYTES = 64 * 2**20  # more than the last-level cache of most processors' core complexes
GROWTH = 4  # of a size to the next
MOST_MICRO_BATCH_SIZES = 6  # the largest ones; between those that are measured, prices are interpolated


@dataclass(frozen=True)
class OperatorNeed:
    """One call to measure. ``inputs``: shape, dtype and whether a gradient flows, of each tensor. ``estimated_seconds`` of a
    call, forward and backward; ``step_seconds`` those of all like calls of a step."""

    key: str
    operator: Operator
    inputs: tuple[tuple[Shape, str, bool], ...]
    outputs: tuple[Shape, ...]
    kind: str
    dtype: str
    flops: float
    backward_flops: float
    num_bytes: float
    estimated_seconds: float
    step_seconds: float


@dataclass(frozen=True)
class GroupNeed:
    """Groups that run collectives at the same time, and which kinds; ``key`` as of ``cost_models.groups_key``."""

    key: str
    groups: Groups
    kinds: tuple[str, ...]

    def __str__(self) -> str:
        """The groups for people."""
        shown = " and ".join("ranks " + ", ".join(map(str, group)) for group in self.groups[:4])
        return shown + (f" and {len(self.groups) - 4} groups more" if len(self.groups) > 4 else "")


@dataclass(frozen=True)
class WholeNeed:
    """A share of the batch through the whole model on one device: its graph, and the key of each of its operators' calls."""

    key: str
    graph: OpGraph
    calls: tuple[str, ...]
    estimated_seconds: float


@dataclass(frozen=True)
class Needs:
    """All that is to be measured. ``key`` tells it from what other models, clusters and options need. ``sizes``: bytes of
    collectives and copies; ``parameter_sizes``: bytes of parameters; ``computed_bytes``: what goes through a device's caches
    between two collectives."""

    key: str
    wholes: tuple[WholeNeed, ...]
    operators: tuple[OperatorNeed, ...]
    groups: tuple[GroupNeed, ...]
    sizes: tuple[int, ...]
    parameter_sizes: tuple[int, ...]
    computed_bytes: int
    optimizer: str
    dtype: str


def needs_of(graph: OpGraph, cluster: Cluster, options: PlanOptions) -> Needs:
    """What the plans of a model on a cluster need."""
    largest = max((value.num_bytes for value in graph.values.values()), default=SMALLEST_BYTES)
    kinds = Counter[str]()
    for parameter in graph.parameters:
        kinds[parameter.master or graph.values[parameter.value].dtype] += graph.values[parameter.value].num_bytes
    parameters = [graph.values[parameter.value].num_bytes for parameter in graph.parameters]
    wholes, groups = tuple(_wholes(graph, cluster, options)), tuple(_groups(cluster, options))
    first = {key for need in wholes for key in need.calls}  # without all of these the whole model says nothing
    operators = sorted(_operators(graph, cluster, options), key=lambda need: need.key not in first)
    keys = [*(need.key for need in operators), *(need.key for need in groups)]
    asked = "\n".join([options.optimizer, *keys])
    return Needs(
        f"{graph.model} {hashlib.sha256(asked.encode()).hexdigest()[:12]}",
        wholes,
        tuple(operators),
        groups,
        sizes_up_to(max(largest, min(sum(parameters), BUCKET_BYTES))),
        sizes_up_to(max(parameters, default=SMALLEST_BYTES)),
        min(sum(value.num_bytes for value in graph.values.values()) // cluster.num_devices, MOST_COMPUTED_BYTES),
        options.optimizer,
        kinds.most_common(1)[0][0] if kinds else "float32",
    )


def sizes_up_to(largest: int) -> tuple[int, ...]:
    """Bytes that grow by a constant factor, until they reach the largest that is needed, or is worth measuring."""
    count = math.ceil(math.log(max(min(largest, LARGEST_BYTES) / SMALLEST_BYTES, 1), GROWTH))
    return tuple(SMALLEST_BYTES * GROWTH**power for power in range(count + 1))


# -- groups ------------------------------------------------------------------------------------------------------------


def _divisions(num_devices: int, options: PlanOptions) -> Iterator[tuple[int, int]]:
    """Numbers of pipeline ranks and of devices of each."""
    forced = options.parallelism.pipeline
    for ranks in range(1, num_devices + 1):
        if num_devices % ranks == 0 and forced in (None, ranks):
            yield ranks, num_devices // ranks


def _meshes(size: int, options: PlanOptions) -> list[Shape]:
    if options.mesh_shape is not None:
        return [options.mesh_shape] if math.prod(options.mesh_shape) == size else []
    return [tuple(shape) for shape in factorizations(size, options.max_mesh_axes)]


def _groups(cluster: Cluster, options: PlanOptions) -> Iterator[GroupNeed]:
    """The groups that a mesh axis, or two neighbouring pipeline ranks, can make; like ones once, those inside nodes first."""
    found: dict[str, tuple[Groups, dict[str, None]]] = {}

    def add(groups: Sequence[Sequence[int]], kinds: Sequence[str]) -> None:
        known = found.setdefault(groups_key(cluster, groups), (tuple(map(tuple, groups)), {}))
        known[1].update(dict.fromkeys(kinds))

    for ranks, size in _divisions(cluster.num_devices, options):
        for shape in _meshes(size, options):
            mesh = Mesh(shape, tuple(f"axis{index}" for index in range(len(shape))))
            for axis, length in enumerate(shape):
                for first in range(0, cluster.num_devices, size) if length > 1 else ():
                    add(axis_groups(length, mesh.stride(axis), first, size), ON_AXES)
        for rank in range(ranks - 1):
            add([[rank * size + place, (rank + 1) * size + place] for place in range(size)], BETWEEN_STAGES)
    order = sorted(found, key=lambda key: ("+" in key, key))
    yield from (GroupNeed(key, found[key][0], tuple(found[key][1])) for key in order)


# -- the whole model ---------------------------------------------------------------------------------------------------


def _wholes(graph: OpGraph, cluster: Cluster, options: PlanOptions) -> Iterator[WholeNeed]:
    """What a device does of the batch when the devices share it, and half and a quarter of that."""
    sizes = {math.ceil(graph.batch_size / (cluster.num_devices * part)) for part in (1, 2, 4)}
    possible = {
        math.ceil(graph.batch_size / count)
        for count in micro_batch_counts(graph.batch_size, options, may_be_cut(graph))
    }
    for size in sorted(sizes & possible):
        prepared = prepare(at_batch(graph, size))
        calls = {need.operator.id: need for need in _calls_on(prepared, (1,), 1, CostModel(cluster))}
        names = [prepared.name(operator.id) for operator in graph.operators]
        yield WholeNeed(
            f"{graph.model} {graph.fingerprint[:12]}, batch {size}",
            prepared.graph,
            tuple(calls[name].key for name in names),
            sum(calls[name].estimated_seconds for name in names),
        )


def may_be_cut(graph: OpGraph) -> bool:
    """Whether the batch may be cut into micro-batches."""
    return not coupling(graph)


# -- operators ---------------------------------------------------------------------------------------------------------


def _operators(graph: OpGraph, cluster: Cluster, options: PlanOptions) -> list[OperatorNeed]:
    """Every local call, those first on which a step spends most for what measuring it takes."""
    found: dict[str, OperatorNeed] = {}
    counts = micro_batch_counts(graph.batch_size, options, may_be_cut(graph))
    model = CostModel(cluster)
    shapes = {
        shape: ranks for ranks, size in _divisions(cluster.num_devices, options) for shape in _meshes(size, options)
    }
    for count in counts[:MOST_MICRO_BATCH_SIZES]:
        prepared = prepare(at_batch(graph, math.ceil(graph.batch_size / count)))
        for shape, ranks in shapes.items():
            if count > 1 or ranks == 1:  # a pipeline of one micro-batch is worth nothing
                for need in _calls_on(prepared, shape, count, model):
                    found.setdefault(need.key, need)
    return sorted(
        found.values(), key=lambda need: (-need.step_seconds / measuring_seconds(need.estimated_seconds), need.key)
    )


def _calls_on(prepared: Prepared, shape: Shape, num_micro_batches: int, model: CostModel) -> Iterator[OperatorNeed]:
    """The calls of all strategies on one mesh."""
    mesh = Mesh(shape, tuple(f"axis{index}" for index in range(len(shape))))
    conversions = Conversions(mesh, model)
    times = Counter(prepared.name(operator.id) for operator in prepared.graph.operators)
    for name, occurrences in times.items():
        operator = prepared.graph.operator_of[name]
        table = operator_table(operator, prepared, conversions, free_roles(shape))
        calls = local_calls(operator, prepared, shape, table.inputs, table.outputs)
        for call, place in zip(calls.distinct, np.unique(calls.which, return_index=True)[1], strict=True):
            part = share(table.strategies[place])
            seconds = float(table.compute_seconds[place])
            yield _need(
                prepared, operator, call.key, call.inputs, call.outputs, part, seconds, occurrences * num_micro_batches
            )


def _need(
    prepared: Prepared,
    operator: Operator,
    key: str,
    inputs: tuple[Shape, ...],
    outputs: tuple[Shape, ...],
    part: float,
    seconds: float,
    times: int,
) -> OperatorNeed:
    values, signature = prepared.graph.values, prepared.signatures.get(operator.id)
    results = [value for value in operator.outputs if value]
    dtypes = [values[value].dtype for value in (*operator.inputs, *results)]
    moved = sum(math.prod(s) * ITEM_BYTES[dtype] for s, dtype in zip((*inputs, *outputs), dtypes, strict=True))
    floats = [values[value].dtype for value in (*results, *operator.inputs) if "float" in values[value].dtype]
    described = tuple(
        (shape, values[value].dtype, prepared.flows(operator, index))
        for index, (value, shape) in enumerate(zip(operator.inputs, inputs, strict=True))
    )
    return OperatorNeed(
        key, operator, described, outputs, kind_of_call(signature), floats[0] if floats else "float32",
        part * (signature.flops if signature else 0.0), part * (signature.backward_flops if signature else 0.0),
        float(moved), seconds, times * seconds,
    )  # fmt: skip
