"""A parameter on one mesh: in which layouts its readers may start from it, how it may rest, and what each costs.

Storage is the use layout, sharded further on axes where the gradient is partial: replicated (data parallelism), or
ZeRO-1, 2, 3 (Rajbhandari et al., SC'20, section 5), over all those axes or over some, replicated over the others (hybrid
sharding: FSDP's HYBRID_SHARD; MiCS, Zhang et al., VLDB'22). Gradients are scattered over the axes of the shards once a step,
under ZeRO-2 and 3 once a micro-batch, and what rests is summed over the other axes once a step; ZeRO-3 gathers the parameter
for every micro-batch. With one micro-batch a step ZeRO-2 sends what ZeRO-1 sends and keeps less, so ZeRO-1 is then offered
only where it is forced.

Under a precision policy what rests is a *master*: the working copy is made of it in the type of the value, once a step or
(ZeRO-3) at each gather, which sends the narrower type. Each micro-batch's gradient is brought to the master's type, in
which it is kept, sent and added up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.costing.conversions import Conversions, FloatArray
from autopar.costing.operators import LayoutColumn, Role
from autopar.graph import ITEM_BYTES, Value
from autopar.layout import PARTIAL, REPLICATED, SUMMED_GRADIENT, Cut, Layout, Shard
from autopar.reshard import CollectiveKind, is_in_bucket, steps
from cost_models import AxisCost, optimizer_state_bytes

# Replicated gradients are reduced together in flat buffers of this size, as torch's DistributedDataParallel does
# (its default bucket_cap_mb is 25), and so are shards under ZeRO-1 and 2: a small parameter does not pay a collective's
# latency alone.
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class ParameterChoice:
    """One way to keep a parameter; see :class:`autopar.plans.ParameterPlan`."""

    use: Layout
    storage: Layout
    zero: int
    offload: bool = False


@dataclass(frozen=True, eq=False)
class ParameterTable:
    """The ways to keep a parameter with their costs.

    ``seconds``: gathers, gradient reductions and the optimizer's own update in a step; ``once_seconds``: the part of them
    that does not grow with the number of micro-batches; ``optimizer_seconds``: the update's, and those of casts between
    masters and working copies; ``offload_seconds``: of copies to the host and back;
    ``kept_bytes``: parameter, working copy, gradient and optimizer states; ``parts``: these four, (4, choices);
    ``transient_bytes``: held for a moment around its use; ``host_bytes``: in the host's memory, and ``landed_bytes`` those of
    gradients there where the host's memory is the device's: then they are among ``parts``.
    """

    choices: tuple[ParameterChoice, ...]
    use: LayoutColumn
    seconds: FloatArray
    once_seconds: FloatArray
    optimizer_seconds: FloatArray
    offload_seconds: FloatArray
    kept_bytes: FloatArray
    parts: FloatArray
    transient_bytes: FloatArray
    host_bytes: FloatArray
    landed_bytes: FloatArray


def parameter_table(
    value: Value,
    wanted: Sequence[Layout],
    trainable: bool,
    conversions: Conversions,
    roles: Sequence[Role],
    zero: int | None,
    optimizer: str,
    kept_for_backward: bool = True,
    num_micro_batches: int = 1,
    master: str | None = None,
    zero_size: int | None = None,
    only_partial: bool = False,
) -> ParameterTable:
    """All ways to keep the parameter ``value`` whose readers want the layouts ``wanted``.

    ``kept_for_backward``: some reader needs the parameter in its backward pass, for which ZeRO-3 gathers it again.
    ``master``: the dtype of the copy that rests, where it is kept apart from the working copy (``Precision``).
    ``zero_size``: over how many devices a forced ``zero`` shards. ``only_partial``: a forced ``zero`` leaves no use whose
    gradient is summed where it might be partial.
    """
    uses = dict.fromkeys(tuple(REPLICATED if state == PARTIAL else state for state in layout) for layout in wanted)
    uses.setdefault((REPLICATED,) * conversions.mesh.num_axes)
    choices = []
    for use in _partial(uses) if zero and trainable and only_partial else uses:
        stored = (
            list(_storages(value, use, conversions, roles, zero, zero_size, num_micro_batches)) if trainable else []
        )
        choices.extend(stored or [ParameterChoice(use, _resting(use), 0)])
    parts, transient = _bytes(value, choices, trainable, conversions, optimizer, master)
    each, once, optimizing = _seconds(
        value, choices, trainable, conversions, parts, kept_for_backward, master, optimizer
    )
    if trainable and master:
        cast_each, cast_once = _cast_seconds(value, choices, conversions, kept_for_backward, master)
        each, once = each + cast_each, once + cast_once
        optimizing = optimizing + num_micro_batches * cast_each + cast_once
    nothing = np.zeros(len(choices))
    return ParameterTable(
        tuple(choices),
        LayoutColumn.of([choice.use for choice in choices]),
        num_micro_batches * each + once,
        once,
        optimizing,
        nothing,
        parts.sum(axis=0),
        parts,
        transient,
        nothing,
        nothing,
    )


def _partial(uses: Iterable[Layout]) -> list[Layout]:
    """Without the uses that another one is but for gradients that are partial: where ZeRO is forced, a cast, which would rather
    have gradients summed in the narrower type behind it, reads what rests as forced."""
    found = list(uses)
    pairs = ((REPLICATED, SUMMED_GRADIENT),)

    def is_more(other: Layout, use: Layout) -> bool:
        return other != use and all(a == b or (a, b) in pairs for a, b in zip(use, other, strict=True))

    return [use for use in found if not any(is_more(other, use) for other in found)]


def _resting(use: Layout) -> Layout:
    return tuple(REPLICATED if state == SUMMED_GRADIENT else state for state in use)


def _storages(
    value: Value,
    use: Layout,
    conversions: Conversions,
    roles: Sequence[Role],
    zero: int | None,
    zero_size: int | None,
    num_micro_batches: int,
) -> Sequence[ParameterChoice]:
    """Replicated and ZeRO storage for one use layout. A forced level holds on every axis that could take it, or on as many
    devices as share a parameter where ``zero_size`` says so."""
    axes = [a for a, state in enumerate(use) if state == SUMMED_GRADIENT and conversions.mesh.shape[a] > 1]
    axes = [a for a in axes if roles[a] != "tensor"]
    found = [ParameterChoice(use, _resting(use), 0)]
    offered = (2, 3) if num_micro_batches == 1 else (1, 2, 3)
    levels = offered if zero is None else (zero,) if zero else ()
    sharded: list[ParameterChoice] = []
    for group in _sharing(axes, conversions.mesh.shape, zero_size):
        for some in group:
            storage = _sharded(value, use, some, conversions)
            if storage is not None:
                sharded.extend(ParameterChoice(use, storage, level) for level in levels)
        if zero and sharded:
            return sharded
    return found + sharded


def _sharing(axes: Sequence[int], sizes: Sequence[int], most: int | None) -> list[list[tuple[int, ...]]]:
    """The sets of axes that may share a parameter, in groups, the most wanted first: those of most axes; where so many
    devices at the ``most`` are to share, the set of most devices, and of such the one whose devices are nearest."""
    by_count = [list(itertools.combinations(axes, count)) for count in range(len(axes), 0, -1)]
    if most is None:
        return by_count
    devices = {some: math.prod(sizes[axis] for axis in some) for sets in by_count for some in sets}
    return [[some] for some in sorted(devices, key=lambda some: (devices[some], some), reverse=True) if devices[some] <= most]


def _sharded(value: Value, use: Layout, axes: Sequence[int], conversions: Conversions) -> Layout | None:
    """``use`` with a dim sharded over ``axes`` as well, the first one that is long enough; dims cut already come last.

    A dim that the use cuts can only be cut further by later axes: the gather must join the innermost pieces.
    """
    sizes = conversions.mesh.shape
    cut_by = {
        dim: [a for a, s in enumerate(use) if isinstance(s, Shard) and s.dim == dim] for dim in range(len(value.shape))
    }
    for dim, earlier in sorted(cut_by.items(), key=lambda item: bool(item[1])):
        added = Shard(dim, Cut.plain(value.shape[dim]))
        nests = not earlier or (max(earlier) < min(axes) and all(use[axis] == added for axis in earlier))
        if nests and value.shape[dim] >= math.prod(sizes[axis] for axis in (*earlier, *axes)):
            return tuple(added if axis in axes else state for axis, state in enumerate(_resting(use)))
    return None


def _levels(choices: Sequence[ParameterChoice]) -> np.ndarray:
    return np.array([choice.zero for choice in choices])


def _elements(
    value: Value, choices: Sequence[ParameterChoice], conversions: Conversions
) -> tuple[FloatArray, FloatArray]:
    """Elements by choice on a device: as the parameter is used, and as it rests."""
    used, stored = (
        np.array([conversions.local_elements(value.shape, layout) for layout in layouts], dtype=np.float64)
        for layouts in ([choice.use for choice in choices], [choice.storage for choice in choices])
    )
    return used, stored


def _bytes(
    value: Value,
    choices: Sequence[ParameterChoice],
    trainable: bool,
    conversions: Conversions,
    optimizer: str,
    master: str | None,
) -> tuple[FloatArray, FloatArray]:
    """Bytes by choice: parameter, working copy, gradient and states (4, choices), and what is held for a moment."""
    rests = master or value.dtype
    item, wide, zero = ITEM_BYTES[value.dtype], ITEM_BYTES[rests], _levels(choices)
    used, stored = _elements(value, choices, conversions)
    if not trainable:
        copy = used * item if master else np.zeros(len(choices))
        return np.array([stored * wide, copy, *np.zeros((2, len(choices)))]), np.zeros(len(choices))
    states = np.array([optimizer_state_bytes(int(count), rests, optimizer) for count in stored], dtype=np.float64)
    has_copy = zero != 3 if master else (zero == 1) | (zero == 2)
    gradient = np.where(zero <= 1, used, stored) * wide
    arrives = item if master else 0  # autograd's own gradient, until it has been brought to the master's type
    moment = used * np.select([zero == 3, zero == 2], [item + wide, arrives + wide], arrives)
    return np.array([stored * wide, used * item * has_copy, gradient, states]), moment


def _seconds(
    value: Value,
    choices: Sequence[ParameterChoice],
    trainable: bool,
    conversions: Conversions,
    parts: FloatArray,
    kept_for_backward: bool,
    master: str | None,
    optimizer: str,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Seconds by choice, for each micro-batch and once a step, and the optimizer's part of the latter."""
    if not trainable:
        return np.zeros(len(choices)), np.zeros(len(choices)), np.zeros(len(choices))
    zero = _levels(choices)
    optimizing = update_seconds(parts, value, conversions, master, optimizer)
    gathering, scattering, summing = _storage_seconds(value, choices, conversions, master or value.dtype)
    each = np.where(zero >= 2, scattering, 0.0) + np.where(zero == 3, gathering * (1 + kept_for_backward), 0.0)
    once = optimizing + summing + np.where(zero < 2, scattering, 0.0) + np.where(zero < 3, gathering, 0.0)
    return each, once, optimizing


def update_seconds(
    parts: FloatArray, value: Value, conversions: Conversions, master: str | None, optimizer: str
) -> FloatArray:
    """Seconds by choice of the optimizer's update on the device; ``parts`` as of :class:`ParameterTable`."""
    stored, _, _, states = parts
    moved = 2 * states + 3 * stored
    return conversions.cost_model.optimizer_seconds(
        optimizer, stored, moved, master or value.dtype, **conversions.where
    )


def narrowing_seconds(
    value: Value, choices: Sequence[ParameterChoice], conversions: Conversions, master: str
) -> FloatArray:
    """Seconds by choice of one cast of what rests to the type of the working copy, on the device."""
    _, stored = _elements(value, choices, conversions)
    moved = stored * (ITEM_BYTES[master] + ITEM_BYTES[value.dtype])
    return conversions.cost_model.compute_seconds(0.0, moved, master, "memory", **conversions.where)


def _cast_seconds(
    value: Value, choices: Sequence[ParameterChoice], conversions: Conversions, kept_for_backward: bool, master: str
) -> tuple[FloatArray, FloatArray]:
    """Seconds by choice of casts, for each micro-batch and once a step: of what rests to the type of the working copy, and
    of one micro-batch's gradient to the master's as it is added (reading both, writing the sum)."""
    zero = _levels(choices)
    used, _ = _elements(value, choices, conversions)
    added = used * (ITEM_BYTES[value.dtype] + 2 * ITEM_BYTES[master])
    narrowing = narrowing_seconds(value, choices, conversions, master)
    adding = conversions.cost_model.compute_seconds(0.0, added, master, "memory", **conversions.where)
    each = adding + np.where(zero == 3, narrowing * (1 + kept_for_backward), 0.0)
    return each, np.where(zero < 3, narrowing, 0.0)


def _storage_seconds(
    value: Value, choices: Sequence[ParameterChoice], conversions: Conversions, rests: str
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Seconds by choice of one gather of the parameter from storage to use, of one scattering of its gradient back, which is
    sent in the type ``rests``, and of summing what then rests (a shard, where storage is hybrid) over the other axes."""
    sizes, item, wide = conversions.mesh.shape, ITEM_BYTES[value.dtype], ITEM_BYTES[rests]
    sent: dict[tuple[int, str, bool], tuple[list[int], list[int]]] = {}
    for place, choice in enumerate(choices):
        current = choice.storage
        way = steps(choice.storage, choice.use)
        shared = is_in_bucket(choice.zero, way)
        for step in way:
            if step.name in ("copy_to", "all_gather") and sizes[step.axis] > 1:
                places, amounts = sent.setdefault((step.axis, step.name, shared or step.name == "copy_to"), ([], []))
                places.append(place)
                amounts.append(conversions.local_elements(value.shape, current))
            current = (*current[: step.axis], step.target, *current[step.axis + 1 :])
    gathering, scattering, summing = np.zeros((3, len(choices)))
    for (axis, name, in_bucket), (places, amounts) in sent.items():
        cost, elements = conversions.axes[axis], np.array(amounts, dtype=np.float64)
        if name == "copy_to":
            summing[places] += _sending(cost, "all_reduce", elements * wide, in_bucket)
        else:
            gathering[places] += _sending(cost, "all_gather", elements * item * sizes[axis], in_bucket)
            scattering[places] += _sending(cost, "reduce_scatter", elements * wide * sizes[axis], in_bucket)
    return gathering, scattering, summing


def _sending(cost: AxisCost, kind: CollectiveKind, num_bytes: FloatArray, in_bucket: bool) -> FloatArray:
    """Seconds of a collective of its own, or of its part of one of many parameters."""
    if in_bucket:
        return np.asarray(cost.seconds(kind, BUCKET_BYTES) * num_bytes / BUCKET_BYTES)
    return cost.seconds(kind, num_bytes)
