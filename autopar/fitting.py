"""The best plan on one mesh within the devices' memory: what a step keeps and what it holds for a moment together.

The solver's row of memory adds up what is kept throughout a step. What is held for a moment, the largest operator's
gradients beside the largest gathered parameters, is a sum of two maxima, so it is searched by branch and bound around the
solver. Plans are parted by the two: those of a part with ``low`` and ``high`` have the available bytes less ``low`` for
what they keep, and choices that hold ``high`` or more are absent. Each part's lower bound holds for all plans in it,
hence the least of the parts' bounds holds for all plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from autopar.costing import Costed, stage_plan
from autopar.costing.candidate import Candidate
from autopar.costing.conversions import FloatArray
from autopar.solver import Assignment, Problem, Status

MAX_PARTS = 24  # how many parts are solved before the search for a better bound ends
GAP_TARGET = 1e-3  # a plan so close to its bound is not improved any more
LARGE, LARGE_PARTS, LARGE_GAP = 600, 3, 5e-3  # the same for problems of more nodes than this


class Solve(Protocol):
    """Solves a problem; ``near``: see :func:`autopar.solver.solve`."""

    def __call__(self, problem: Problem, near: float | None = None) -> Assignment: ...


Pair = tuple[float, float]  # bytes held for a moment by the largest operator, and by gathered parameters


@dataclass(frozen=True)
class _Part:
    """Plans that hold at least ``low`` and less than ``high`` for a moment; ``bound`` in seconds."""

    low: Pair
    high: Pair
    bound: float

    def split(self, held: Pair, bound: float) -> list[_Part]:
        """In two, at what a plan holds, by the one of the pair that is more above its ``low``: the plan is in the first."""
        which = 0 if held[0] - self.low[0] >= held[1] - self.low[1] else 1
        return [
            _Part(_with(self.low, which, held[which]), self.high, bound),
            _Part(self.low, _with(self.high, which, held[which]), bound),
        ]


def _with(pair: Pair, which: int, value: float) -> Pair:
    return (value, pair[1]) if which == 0 else (pair[0], value)


def unlimited(costed: Costed, available_bytes: float, solve: Callable[[Problem], Assignment]) -> Candidate:
    """The best plan on the mesh whether it fits or not."""
    assignment = solve(costed.problem)
    return _candidate(costed, assignment, assignment.lower_bound_seconds, available_bytes)


def fit(
    costed: Costed,
    available_bytes: float,
    solve: Solve,
    to_beat_seconds: float = math.inf,
    explain: bool = True,
) -> Candidate:
    """The best plan on the mesh that fits; where none does, a candidate without a stage that says what is needed, if it
    is to ``explain``.

    Parts whose plans all take ``to_beat_seconds`` or more are not searched.
    """
    parts = [_Part(_least(costed), (math.inf, math.inf), -math.inf)]
    closed: list[float] = []
    best: Candidate | None = None
    large = costed.problem.num_nodes > LARGE
    gap = LARGE_GAP if large else GAP_TARGET
    for _ in range(LARGE_PARTS if large else MAX_PARTS):
        part = min(parts, key=lambda part: part.bound, default=None)
        if part is None or part.bound >= min(to_beat_seconds, (1 - gap) * _cost(best) if best else math.inf):
            break
        parts.remove(part)
        assignment = solve(_restricted(costed, part, available_bytes))
        bound = max(part.bound, assignment.lower_bound_seconds)
        if assignment.choices is None:
            closed.append(bound)  # infinite where nothing fits, not where nothing was found
            continue
        found = _candidate(costed, assignment, bound, available_bytes)
        if found.peak_bytes <= available_bytes:
            closed.append(bound)
            best = found if best is None or _cost(found) < _cost(best) else best
        else:
            parts += part.split(_moment(costed, assignment.choices), bound)
    bounds = [*closed, *(part.bound for part in parts)]
    if best is None and (to_beat_seconds < math.inf or not explain):
        return replace(_none(costed, available_bytes), lower_bound_seconds=min(bounds, default=math.inf))
    if best is None:
        best = _leanest(costed, available_bytes, solve)
        if best.stage is None or best.peak_bytes > available_bytes:
            return replace(best, stage=None, lower_bound_seconds=min(bounds, default=math.inf))
    return replace(best, lower_bound_seconds=min([*bounds, _cost(best)]))


def fit_quickly(costed: Costed, available_bytes: float, solve: Solve, near: float | None = None) -> Candidate:
    """A good plan that fits, in a solve or two; without a stage where none is found, which says nothing of other plans.

    Where memory is short, plans that gather repeated blocks' parameters, and none that are larger, are about as good as any.
    Of a small problem all plans are tried before. ``near``: the seconds that a byte is expected to be worth.
    """
    operators, parameters = _least(costed)
    usual = max(parameters, gathered_bytes(costed))
    parts = [_Part((operators, usual), (math.inf, np.nextafter(usual, math.inf)), -math.inf)]
    if costed.problem.num_nodes <= LARGE:
        parts.insert(0, _Part((operators, parameters), (math.inf, math.inf), -math.inf))
    for part in parts:
        found = _candidate(costed, solve(_restricted(costed, part, available_bytes), near=near), -math.inf, available_bytes)
        if found.peak_bytes <= available_bytes:
            return found
    return replace(_none(costed, available_bytes), lower_bound_seconds=-math.inf)


def _cost(candidate: Candidate) -> float:
    return candidate.assignment.cost_seconds


def _none(costed: Costed, available_bytes: float) -> Candidate:
    """No plan of this mesh fits and is fast enough."""
    nothing = Assignment(None, math.inf, math.inf, Status.INFEASIBLE)
    return Candidate(costed, nothing, None, math.inf, math.inf, 0.0, available_bytes)


def candidate_of(costed: Costed, assignment: Assignment, available_bytes: float) -> Candidate:
    """A solver's answer as a candidate."""
    return _candidate(costed, assignment, assignment.lower_bound_seconds, available_bytes)


def _candidate(costed: Costed, assignment: Assignment, bound: float, available_bytes: float) -> Candidate:
    if assignment.choices is None:
        return Candidate(costed, assignment, None, bound, math.inf, 0.0, available_bytes)
    moment = moment_bytes(costed, assignment.choices)
    peak = assignment.memory_bytes[0] + moment
    return Candidate(costed, assignment, stage_plan(costed, assignment.choices), bound, peak, moment, available_bytes)


def _leanest(costed: Costed, available_bytes: float, solve: Solve) -> Candidate:
    """The plan that keeps least."""
    nothing = solve(replace(costed.problem, memory_budgets_bytes=_budgets(costed, 0.0)))
    smallest = nothing.smallest_budgets_bytes
    if smallest is None:  # no choices are allowed at all, whatever the memory
        return _candidate(costed, nothing, nothing.lower_bound_seconds, available_bytes)
    budget = _budgets(costed, smallest[0] * (1 + 1e-9))
    assignment = solve(replace(costed.problem, memory_budgets_bytes=budget))
    return _candidate(costed, assignment, assignment.lower_bound_seconds, available_bytes)


def _budgets(costed: Costed, device_bytes: float) -> FloatArray:
    """So many bytes on a device, and of the host what there is."""
    return np.array([device_bytes, *costed.problem.memory_budgets_bytes[1:]])


def _restricted(costed: Costed, part: _Part, available_bytes: float) -> Problem:
    """The problem of one part: less memory by what is held at least, and no choice that holds too much."""
    budget = _budgets(costed, max(available_bytes - sum(part.low), 0.0))
    if part.high == (math.inf, math.inf):
        return replace(costed.problem, memory_budgets_bytes=budget)
    costs = list(costed.problem.node_costs_seconds)
    made: dict[int, FloatArray] = {}  # like nodes go on sharing their arrays
    for which, held in enumerate(_held(costed)):
        for name, num_bytes in held if part.high[which] < math.inf else ():
            node = costed.nodes[name]
            key = id(costs[node])
            if key not in made:
                made[key] = np.where(num_bytes < part.high[which], costs[node], np.inf)
            costs[node] = made[key]
    return replace(costed.problem, node_costs_seconds=tuple(costs), memory_budgets_bytes=budget)


GATHERED = 2.0  # parameters under ZeRO-3 that are whole at the same time: one in use, one ahead


def _held(costed: Costed) -> tuple[list[tuple[str, FloatArray]], list[tuple[str, FloatArray]]]:
    """What each operator's choices, and each parameter's, hold for a moment."""
    graph = costed.prepared.graph
    operators = [(operator.id, costed.operator_table(operator.id).transient_bytes) for operator in graph.operators]
    parameters = [(p.value, GATHERED * costed.parameter_table(p.value).transient_bytes) for p in graph.parameters]
    return operators, parameters


def gathered_bytes(costed: Costed) -> float:
    """The most that ZeRO-3 holds of the repeated blocks' parameters for a moment; 0 where there are none."""
    names = {costed.prepared.name(name) for group in costed.prepared.graph.block_groups for name in group.blocks[0].parameters}
    held = [
        float(num_bytes[np.isfinite(costed.problem.node_costs_seconds[costed.nodes[name]])].max(initial=0.0))
        for name, num_bytes in _held(costed)[1]
        if name in names
    ]
    return max(held, default=0.0)


def _least(costed: Costed) -> Pair:
    """What every plan holds for a moment."""
    allowed = costed.problem.node_costs_seconds
    operators, parameters = (
        max(
            (float(num_bytes[np.isfinite(allowed[costed.nodes[name]])].min(initial=math.inf)) for name, num_bytes in held),
            default=0.0,
        )
        for held in _held(costed)
    )
    return operators, parameters


def _moment(costed: Costed, choices: Sequence[int]) -> Pair:
    """What a plan holds for a moment."""
    operators, parameters = (
        max((float(num_bytes[choices[costed.nodes[name]]]) for name, num_bytes in held), default=0.0)
        for held in _held(costed)
    )
    return operators, parameters


def moment_bytes(costed: Costed, choices: Sequence[int]) -> float:
    """Bytes that a step holds for a moment beyond what it keeps: the largest operator's tensors and gradients, and the
    parameters that ZeRO gathers around their use."""
    return sum(_moment(costed, choices))
