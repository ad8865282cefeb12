"""Changing a tensor's layout: the named steps, each on one mesh axis, with what they send forward and backward.

This is the only place that says how a layout becomes another. Costing prices these steps, codegen writes them and
``autopar.runtime`` has one function of each name; a test holds the three sets equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar.layout import (
    REPLICATED,
    Layout,
    Shard,
    State,
    independent,
    local_shape,
)

# name -> (collective of the forward pass, collective of the backward pass)
COLLECTIVES: dict[str, tuple[str | None, str | None]] = {
    "copy_to": (None, "all_reduce"),  # R -> G, Megatron's f
    "reduce_from": ("all_reduce", None),  # P -> R, Megatron's g
    "all_reduce": ("all_reduce", "all_reduce"),  # P -> G
    "gather": ("all_gather", None),  # S -> R
    "all_gather": ("all_gather", "reduce_scatter"),  # S -> G
    "reduce_scatter": ("reduce_scatter", "all_gather"),  # P -> S
    "all_to_all": ("all_to_all", "all_to_all"),  # S -> S of another dim
    "scatter": (None, "all_gather"),  # R -> S
    "take_shard": (None, None),  # G -> S, backward pads with zeros
    "keep_first": (None, None),  # R -> P, kept on the first device, zero elsewhere
    "keep_first_both": (None, None),  # G -> P, the gradient is kept on the first device too
    "keep_first_gradient": (None, None),  # G -> R, the value is untouched
    "pad_shard": (None, None),  # S -> P, zeros around the shard
}


@dataclass(frozen=True)
class Step:
    """One change on one axis: ``name`` as of :data:`COLLECTIVES`, from ``source`` to ``target``."""

    axis: int
    name: str
    source: State
    target: State


@dataclass(frozen=True)
class Traffic:
    """A collective on one axis: ``num_bytes`` as of ``cost_models.collectives`` (all-gather: of the gathered result)."""

    axis: int
    kind: str
    num_bytes: int


def step_name(source: State, target: State) -> str | None:
    """Name of the step between two states of one axis; None where nothing is to be done; ``""`` where none is direct."""
    if source == target:
        return None
    if isinstance(source, Shard):
        if isinstance(target, Shard):
            return "all_to_all" if source.dim != target.dim else ""
        return {"R": "gather", "G": "all_gather", "P": "pad_shard"}[target.name]
    if isinstance(target, Shard):
        return {"R": "scatter", "G": "take_shard", "P": "reduce_scatter"}[source.name]
    return {
        ("R", "G"): "copy_to",
        ("P", "R"): "reduce_from",
        ("P", "G"): "all_reduce",
        ("R", "P"): "keep_first",
        ("G", "P"): "keep_first_both",
        ("G", "R"): "keep_first_gradient",
    }[source.name, target.name]


# What shrinks the tensor comes first, what makes it larger comes last.
_ORDER = (
    "take_shard", "scatter", "reduce_scatter", "all_to_all", "keep_first_gradient", "copy_to", "reduce_from", "all_reduce",
    "gather", "all_gather", "keep_first", "keep_first_both", "pad_shard",
)  # fmt: skip


@lru_cache(maxsize=1 << 20)
def steps(source: Layout, target: Layout) -> tuple[Step, ...]:
    """The steps from ``source`` to ``target``, in the order of the forward pass; the backward pass takes them in reverse.

    An axis whose piece of a dim is cut further by a later axis cannot change alone: the later one is gathered first and
    cut again afterwards.
    """
    found: list[Step] = []
    current = list(source)
    for _ in range(4 * len(source) + 1):
        if tuple(current) == target:
            return tuple(found)
        step = _next_step(tuple(current), target)
        found.append(step)
        current[step.axis] = step.target
    raise AssertionError(f"no way found from {source} to {target}")


def _next_step(current: Layout, target: Layout) -> Step:
    direct = []
    for axis, (state, wanted) in enumerate(zip(current, target, strict=True)):
        name = step_name(state, wanted)
        after = (*current[:axis], wanted, *current[axis + 1 :])
        if name and _is_innermost(current, axis) and _is_innermost(after, axis) and _outer_cuts_done(current, target, axis):
            direct.append(Step(axis, name, state, wanted))
    if direct:
        return min(direct, key=lambda step: (_ORDER.index(step.name), -step.axis))
    # Clear the way: gather the innermost axis that stands on a dim which must change.
    for axis in reversed(range(len(current))):
        state = current[axis]
        if isinstance(state, Shard) and _in_the_way(current, target, axis):
            return Step(axis, "gather", state, REPLICATED)
    raise AssertionError(f"no step leads from {current} to {target}")


def _is_innermost(layout: Layout, axis: int) -> bool:
    """Whether no later axis cuts the piece that this axis holds, so that it can be joined or cut by itself."""
    state = layout[axis]
    if not isinstance(state, Shard):
        return True
    later = (other for other in layout[axis + 1 :] if isinstance(other, Shard) and other.dim == state.dim)
    return all(independent(state.cut, other.cut) for other in later)


def _outer_cuts_done(current: Layout, target: Layout, axis: int) -> bool:
    """Whether every earlier axis that ``axis`` will cut further already stands as it shall."""
    wanted = target[axis]
    if not isinstance(wanted, Shard):
        return True
    for earlier in range(axis):
        if current[earlier] != target[earlier]:
            for state in (current[earlier], target[earlier]):
                if isinstance(state, Shard) and state.dim == wanted.dim and not independent(wanted.cut, state.cut):
                    return False
    return True


def _in_the_way(current: Layout, target: Layout, axis: int) -> bool:
    """Whether a sharded axis must change itself, or an axis before it on the same dim must."""
    if current[axis] != target[axis] and _is_innermost(current, axis):
        return True
    state = current[axis]
    assert isinstance(state, Shard)
    for earlier in range(axis):
        for layout in (current, target):
            other = layout[earlier]
            if current[earlier] == target[earlier] or not isinstance(other, Shard) or other.dim != state.dim:
                continue
            if not independent(state.cut, other.cut):
                return _is_innermost(current, axis)
    return False


def step_traffic(
    step: Step, before: Layout, shape: Sequence[int], mesh_shape: Sequence[int], item_bytes: int
) -> tuple[Traffic | None, Traffic | None]:
    """What a step sends forward and backward, padding included, as seen by the first device of the mesh."""
    forward, backward = COLLECTIVES[step.name]
    if forward is None and backward is None:
        return None, None
    small = before
    if isinstance(step.target, Shard):
        small = (*before[: step.axis], step.target, *before[step.axis + 1 :])
    pieces = math.prod(local_shape(shape, small, mesh_shape))
    if step.name == "all_to_all":
        assert isinstance(step.source, Shard) and isinstance(step.target, Shard)
        kept = local_shape(shape, before, mesh_shape)[step.source.dim]
        sizes = list(local_shape(shape, small, mesh_shape))
        sizes[step.source.dim] = kept
        pieces = math.prod(sizes)
    factor = 1 if step.name in ("copy_to", "reduce_from", "all_reduce") else mesh_shape[step.axis]
    num_bytes = pieces * item_bytes * factor
    return (
        Traffic(step.axis, forward, num_bytes) if forward else None,
        Traffic(step.axis, backward, num_bytes) if backward else None,
    )


def traffic(
    source: Layout,
    target: Layout,
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    item_bytes: int,
    has_gradient: bool = True,
) -> tuple[tuple[Traffic, ...], tuple[Traffic, ...]]:
    """All collectives of a change of layout, (forward, backward). A size-1 axis sends nothing."""
    forward, backward = [], []
    current = source
    for step in steps(source, target):
        ahead, back = step_traffic(step, current, shape, mesh_shape, item_bytes)
        if mesh_shape[step.axis] > 1:
            if ahead:
                forward.append(ahead)
            if back and has_gradient:
                backward.append(back)
        current = (*current[: step.axis], step.target, *current[step.axis + 1 :])
    return tuple(forward), tuple(reversed(backward))
