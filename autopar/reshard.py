"""Changing a tensor's layout: the named steps, each on one mesh axis, with what they send forward and backward.

This is the only place that says how a layout becomes another. Costing prices these steps, codegen writes them and
``autopar.runtime`` has one function of each name; a test holds the three sets equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from autopar.layout import (
    PARTIAL,
    REPLICATED,
    SUMMED_GRADIENT,
    Layout,
    Shard,
    State,
    independent,
    local_shape,
)

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]

# name -> (collective of the forward pass, collective of the backward pass)
COLLECTIVES: dict[str, tuple[CollectiveKind | None, CollectiveKind | None]] = {
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
    kind: CollectiveKind
    num_bytes: int


WHOLES = (REPLICATED, SUMMED_GRADIENT, PARTIAL)  # numbered so; shards have the numbers after these
# How two states go together: not two shards of one dim, two that cut one another's pieces, two that are independent.
APART, NESTED, INDEPENDENT = 0, 1, 2
_NAMES = {
    "SR": "gather", "SG": "all_gather", "SP": "pad_shard", "RS": "scatter", "GS": "take_shard", "PS": "reduce_scatter",
    "RG": "copy_to", "PR": "reduce_from", "PG": "all_reduce", "RP": "keep_first", "GP": "keep_first_both",
    "GR": "keep_first_gradient",
}  # fmt: skip


def relation(one: State, other: State) -> int:
    """How two states go together."""
    if not (isinstance(one, Shard) and isinstance(other, Shard) and one.dim == other.dim):
        return APART
    return INDEPENDENT if independent(one.cut, other.cut) else NESTED


def step_name(source: State, target: State) -> str | None:
    """Name of the step between two states of one axis; None where nothing is to be done; ``""`` where none is direct."""
    if source == target:
        return None
    letters = ("S" if isinstance(state, Shard) else state.name for state in (source, target))
    return _name("".join(letters), relation(source, target))


def _name(letters: str, related: int) -> str:
    if letters == "SS":
        return "all_to_all" if related == APART else ""
    return _NAMES[letters]


# What shrinks the tensor comes first, what makes it larger comes last.
_ORDER = (
    "take_shard", "scatter", "reduce_scatter", "all_to_all", "keep_first_gradient", "copy_to", "reduce_from", "all_reduce",
    "gather", "all_gather", "keep_first", "keep_first_both", "pad_shard",
)  # fmt: skip


@lru_cache(maxsize=1 << 16)
def steps(source: Layout, target: Layout) -> tuple[Step, ...]:
    """The steps from ``source`` to ``target``, in the order of the forward pass; the backward pass takes them in reverse.

    An axis whose piece of a dim is cut further by a later axis cannot change alone: the later one is gathered first and
    cut again afterwards.
    """
    states = (*source, *target)
    numbers: dict[State, int] = {state: number for number, state in enumerate(WHOLES)}
    pattern = tuple(numbers.setdefault(state, len(numbers)) for state in states)
    relations = tuple(relation(one, other) for one, other in itertools.combinations(states, 2))
    found: list[Step] = []
    current = list(source)
    for axis, name in path(pattern, relations):
        after = state_after(name, target[axis])
        found.append(Step(axis, name, current[axis], after))
        current[axis] = after
    return tuple(found)


def is_in_bucket(zero: int, way: Sequence[Step]) -> bool:
    """Whether the shards of a parameter at a ZeRO level travel in one collective with those of others
    (``autopar.runtime.zero``): outside of level 3, where the way from rest to use is one all-gather beside sums of its
    gradient.
    """
    return zero != 3 and [step.name for step in way if step.name != "copy_to"] == ["all_gather"]


def state_after(name: str, wanted: State) -> State:
    """The state that a step on the way to ``wanted`` leads to: what is gathered may be cut again later."""
    return REPLICATED if name == "gather" else wanted


_Relations = Mapping[tuple[int, int], int]
_Numbers = tuple[int, ...]  # a layout, its states numbered


def path(pattern: tuple[int, ...], relations: tuple[int, ...]) -> tuple[tuple[int, str], ...]:
    """Axis and name of each step between two layouts, from all that it depends on: few patterns, many layouts.

    ``pattern``: the states of the source and then of the target, as numbers: :data:`WHOLES`, then the shards in the order
    in which they appear. ``relations``: of every two of these states, in the order of ``itertools.combinations``.
    """
    pairs = tuple(itertools.combinations(pattern, 2))
    related = dict(zip(pairs, relations, strict=True))
    related.update(((other, one), related[one, other]) for one, other in pairs)
    num_axes = len(pattern) // 2
    current, target = pattern[:num_axes], pattern[num_axes:]
    found: list[tuple[int, str]] = []
    for _ in range(4 * num_axes + 1):
        if current == target:
            return tuple(found)
        axis, name = _next_step(current, target, related)
        found.append((axis, name))
        current = _with(current, axis, 0 if name == "gather" else target[axis])
    raise AssertionError(f"no way found for {pattern} with {relations}")


def _with(layout: _Numbers, axis: int, state: int) -> _Numbers:
    return (*layout[:axis], state, *layout[axis + 1 :])


def _letter(state: int) -> str:
    return WHOLES[state].name if state < len(WHOLES) else "S"


def _next_step(current: _Numbers, target: _Numbers, related: _Relations) -> tuple[int, str]:
    direct = []
    for axis, (state, wanted) in enumerate(zip(current, target, strict=True)):
        if state == wanted or not _is_innermost(current, axis, related):
            continue
        name = _name(_letter(state) + _letter(wanted), related.get((state, wanted), APART))
        after = _with(current, axis, wanted)
        if name and _is_innermost(after, axis, related) and _outer_cuts_done(current, target, axis, related):
            direct.append((axis, name))
    if direct:
        return min(direct, key=lambda step: (_ORDER.index(step[1]), -step[0]))
    # Clear the way: gather the innermost axis that stands on a dim which must change.
    for axis in reversed(range(len(current))):
        if current[axis] >= len(WHOLES) and _in_the_way(current, target, axis, related):
            return axis, "gather"
    raise AssertionError(f"no step leads from {current} to {target}")


def _is_innermost(layout: _Numbers, axis: int, related: _Relations) -> bool:
    """Whether no later axis cuts the piece that this axis holds, so that it can be joined or cut by itself."""
    return all(related.get((layout[axis], other)) != NESTED for other in layout[axis + 1 :])


def _outer_cuts_done(current: _Numbers, target: _Numbers, axis: int, related: _Relations) -> bool:
    """Whether every earlier axis that ``axis`` will cut further already stands as it shall."""
    return not any(
        related.get((target[axis], state)) == NESTED
        for earlier in range(axis)
        if current[earlier] != target[earlier]
        for state in (current[earlier], target[earlier])
    )


def _in_the_way(current: _Numbers, target: _Numbers, axis: int, related: _Relations) -> bool:
    """Whether a sharded axis must change itself, or an axis before it on the same dim must."""
    if not _is_innermost(current, axis, related):
        return False
    return current[axis] != target[axis] or any(
        related.get((current[axis], state)) == NESTED
        for earlier in range(axis)
        if current[earlier] != target[earlier]
        for state in (current[earlier], target[earlier])
    )


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
