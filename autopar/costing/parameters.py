"""A parameter on one mesh: in which layouts its readers may start from it, how it may rest, and what each costs.

Storage is the use layout, sharded further on axes where the gradient is partial: replicated (data parallelism), or
ZeRO-1, 2, 3 (Rajbhandari et al., SC'20, section 5). With one micro-batch a step ZeRO-2 sends what ZeRO-1 sends and keeps
less, so ZeRO-1 is offered only where it is forced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.costing.conversions import Conversions, FloatArray
from autopar.costing.operators import LayoutColumn, Role
from autopar.graph import ITEM_BYTES, Value
from autopar.layout import PARTIAL, REPLICATED, SUMMED_GRADIENT, Cut, Layout, Shard
from autopar.reshard import steps
from cost_models import optimizer_state_bytes

# Replicated gradients are reduced together in flat buffers of this size, as torch's DistributedDataParallel does
# (its default bucket_cap_mb is 25), so a small parameter does not pay a collective's latency alone.
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class ParameterChoice:
    """One way to keep a parameter; see :class:`autopar.plans.ParameterPlan`."""

    use: Layout
    storage: Layout
    zero: int


@dataclass(frozen=True, eq=False)
class ParameterTable:
    """The ways to keep a parameter with their costs.

    ``seconds``: gathers, gradient reductions and the optimizer's own update; ``optimizer_seconds``: the latter;
    ``kept_bytes``: parameter, working copy, gradient and optimizer states; ``parts``: these four, (4, choices).
    """

    choices: tuple[ParameterChoice, ...]
    use: LayoutColumn
    seconds: FloatArray
    optimizer_seconds: FloatArray
    kept_bytes: FloatArray
    parts: FloatArray
    transient_bytes: FloatArray


def parameter_table(
    value: Value,
    wanted: Sequence[Layout],
    trainable: bool,
    conversions: Conversions,
    roles: Sequence[Role],
    zero: int | None,
    optimizer: str,
    kept_for_backward: bool = True,
) -> ParameterTable:
    """All ways to keep the parameter ``value`` whose readers want the layouts ``wanted``.

    ``kept_for_backward``: some reader needs the parameter in its backward pass, for which ZeRO-3 gathers it again.
    """
    uses = dict.fromkeys(tuple(REPLICATED if state == PARTIAL else state for state in layout) for layout in wanted)
    uses.setdefault((REPLICATED,) * conversions.mesh.num_axes)
    choices = []
    for use in uses:
        stored = list(_storages(value, use, conversions, roles, zero)) if trainable else []
        choices.extend(stored or [ParameterChoice(use, _resting(use), 0)])
    seconds, optimizing, parts, transient = zip(
        *(_price(value, choice, trainable, conversions, optimizer, kept_for_backward) for choice in choices), strict=True
    )
    kept = np.array(parts, dtype=np.float64).T
    return ParameterTable(
        tuple(choices),
        LayoutColumn.of([choice.use for choice in choices]),
        np.array(seconds),
        np.array(optimizing),
        np.ascontiguousarray(kept.sum(axis=0)),
        kept,
        np.array(transient, dtype=np.float64),
    )


def _resting(use: Layout) -> Layout:
    return tuple(REPLICATED if state == SUMMED_GRADIENT else state for state in use)


def _storages(
    value: Value, use: Layout, conversions: Conversions, roles: Sequence[Role], zero: int | None
) -> Sequence[ParameterChoice]:
    """Replicated and ZeRO storage for one use layout. A forced level holds on every axis that could take it."""
    axes = [a for a, state in enumerate(use) if state == SUMMED_GRADIENT and conversions.mesh.shape[a] > 1]
    axes = [a for a in axes if roles[a] != "tensor"]
    found = [ParameterChoice(use, _resting(use), 0)]
    levels = (2, 3) if zero is None else (zero,) if zero else ()
    sharded: list[ParameterChoice] = []
    for count in range(len(axes), 0, -1):
        for some in itertools.combinations(axes, count):
            storage = _sharded(value, use, some, conversions)
            if storage is not None:
                sharded.extend(ParameterChoice(use, storage, level) for level in levels)
        if zero and sharded:
            return sharded
    return found + sharded


def _sharded(value: Value, use: Layout, axes: Sequence[int], conversions: Conversions) -> Layout | None:
    """``use`` with a dim sharded over ``axes`` as well, the first one that is long enough; dims cut already come last.

    A dim that the use cuts can only be cut further by later axes: the gather must join the innermost pieces.
    """
    sizes = conversions.mesh.shape
    cut_by = {dim: [a for a, s in enumerate(use) if isinstance(s, Shard) and s.dim == dim] for dim in range(len(value.shape))}
    for dim, earlier in sorted(cut_by.items(), key=lambda item: bool(item[1])):
        added = Shard(dim, Cut.plain(value.shape[dim]))
        nests = not earlier or (max(earlier) < min(axes) and all(use[axis] == added for axis in earlier))
        if nests and value.shape[dim] >= math.prod(sizes[axis] for axis in (*earlier, *axes)):
            return tuple(added if axis in axes else state for axis, state in enumerate(_resting(use)))
    return None


def _price(
    value: Value,
    choice: ParameterChoice,
    trainable: bool,
    conversions: Conversions,
    optimizer: str,
    kept_for_backward: bool,
) -> tuple[float, float, tuple[float, float, float, float], float]:
    """Seconds, the optimizer's seconds, bytes (parameter, working copy, gradient, states), bytes held for a moment."""
    item = ITEM_BYTES[value.dtype]
    used = conversions.local_elements(value.shape, choice.use)
    stored = conversions.local_elements(value.shape, choice.storage)
    if not trainable:
        return 0.0, 0.0, (stored * item, 0.0, 0.0, 0.0), 0.0
    states = float(optimizer_state_bytes(stored, value.dtype, optimizer))
    moved = 2 * states + 3 * stored * item
    optimizing = float(conversions.cost_model.compute_seconds(0.0, moved, value.dtype, "memory"))
    gathers = 2 if choice.zero == 3 and kept_for_backward else 1
    seconds = optimizing + gradient_seconds(value, choice, conversions, gathers)
    copy = used * item if choice.zero in (1, 2) else 0.0
    gradient = (used if choice.zero in (0, 1) else stored) * item
    moment = used * item * (2.0 if choice.zero == 3 else 1.0 if choice.zero == 2 else 0.0)
    return seconds, optimizing, (stored * item, copy, gradient, states), moment


def gradient_seconds(value: Value, choice: ParameterChoice, conversions: Conversions, gathers: int) -> float:
    """Seconds of the collectives between storage and use in one step, which gathers the parameter ``gathers`` times."""
    mesh, item = conversions.mesh, ITEM_BYTES[value.dtype]
    seconds = 0.0
    current = choice.storage
    for step in steps(choice.storage, choice.use):
        axis = conversions.axes[step.axis]
        after = (*current[: step.axis], step.target, *current[step.axis + 1 :])
        if step.name == "copy_to" and mesh.shape[step.axis] > 1:
            num_bytes = conversions.local_elements(value.shape, current) * item
            buckets = max(num_bytes / BUCKET_BYTES, 0.0)
            full = float(axis.seconds("all_reduce", np.array([BUCKET_BYTES], dtype=np.float64))[0])
            seconds += full * buckets
        elif step.name == "all_gather" and mesh.shape[step.axis] > 1:
            num_bytes = conversions.local_elements(value.shape, current) * item * mesh.shape[step.axis]
            amount = np.array([num_bytes], dtype=np.float64)
            seconds += gathers * float(axis.seconds("all_gather", amount)[0])
            seconds += float(axis.seconds("reduce_scatter", amount)[0])
        current = after
    return seconds
