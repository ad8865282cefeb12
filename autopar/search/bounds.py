"""Lower bounds of a frame's step over all cuts, recomputations and shardings at once, from composed prices.

`search.stretches` bounds every run of units as a stage: w, f, o and e. A step of T seconds needs cuts with, for each stage s,

    h(s) + f_ka(s) + b(s) <= T    and    g(s) + w_ka(s) + b(s) <= T,    g(s + 1) = max(o(s), g(s)) + e(s).

h: one micro-batch has gone forward through the earlier stages before s can begin. g: it also goes back through them, down to
what stage 0 does once, after the last backward of s (`cost_models.lower_bound_seconds` has the proof). b: the first
micro-batch goes on from s to the end and back to s before s can do more than the a(s) forwards that its order puts ahead of
its first backward; so of the work only B - a + 1 forwards count beside it. GPipe puts all of them ahead: its a is taken for 1
and its b for 0. With a split backward nothing holds up the end of a step: g is h, and b has no gradients of parameters.
Only f counts what fitting in memory costs. Whether such cuts exist is a dynamic programme over the ends of stages that keeps
the least g, as a smaller one is never worse. The largest T without cuts is the lower bound; the least with is where the
search looks first. (Alpa, OSDI'22, section 5, enumerates the slowest stage's time in this way.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.search.space import ZERO_BUBBLE, Frame
from autopar.search.stretches import Charged, Point, Stretches
from autopar.solver.chain import Floats
from cost_models import Hops, StageTimes, in_flight, orders, placement, step_seconds_only

MOST_SLOWER = 1e4  # than the whole model's busy seconds divided by the stages: nothing fits
BISECTIONS = 18
MOST_MOVED = 16  # stages of which cuts are moved
MOST_MOVES = 8  # of a cut by a unit, in search of a faster step


@dataclass(frozen=True)
class Bound:
    """No plan of the frame takes less than ``seconds``; ``cuts`` are the ends of all stages but the last where the search
    should look first (None where nothing fits), and ``estimate_seconds`` is the simulated step with them."""

    seconds: float
    cuts: tuple[int, ...] | None
    estimate_seconds: float = math.inf


def bound_of(
    frame: Frame,
    stretches: Sequence[Stretches],
    within_memory: bool,
    stop_at: float = math.inf,
    hop_seconds: float = 0.0,
) -> Bound:
    """The bound of one frame; ``stretches`` are by pipeline rank. Above ``stop_at`` it need not be exact. ``hop_seconds``: of
    sending one micro-batch from stage to stage, for the estimate only."""
    split, several = frame.schedule in ZERO_BUBBLE, frame.num_stages > frame.grid.num_ranks
    beyond = np.minimum.reduce([one.beyond(split) for one in stretches])  # on whichever device is fastest
    before = np.minimum.reduce([one.before() for one in stretches])
    stages: dict[int, _Stage] = {}
    for here, numbers, points in _alike(frame, stretches):
        for number, point, busy, work in zip(
            numbers, points, here.busy(points, within_memory), here.work(points), strict=True
        ):
            stages[number] = _Stage(
                busy=busy,
                work=work,
                once=np.zeros_like(here.once()) if split else here.once(),
                each=here.forward() if split else here.each(),
                before=before,
                beyond=beyond if point.ahead > 1 or split else np.zeros_like(beyond),
                forwards=point.ahead,
            )
    in_order = [stages[number] for number in range(frame.num_stages)]
    if not several:
        return _improved(frame, in_order, _one_stage_a_rank(frame, in_order, stop_at), hop_seconds)
    return _bound_of_several(frame, stretches, in_order, within_memory, hop_seconds)


def _alike(frame: Frame, stretches: Sequence[Stretches]) -> list[tuple[Stretches, list[int], tuple[Point, ...]]]:
    """The stages on devices of each kind, with their points."""
    flying = in_flight(frame.schedule, frame.grid.num_ranks, frame.num_stages, frame.num_micro_batches)
    points = [Point(*pair) for pair in zip(flying, _ahead(frame), strict=True)]
    by_kind: dict[int, list[int]] = {}
    ranks = stage_ranks(frame)
    for stage, rank in enumerate(ranks):
        by_kind.setdefault(id(stretches[rank]), []).append(stage)
    return [
        (stretches[ranks[numbers[0]]], numbers, tuple(points[number] for number in numbers)) for numbers in by_kind.values()
    ]


def _ahead(frame: Frame) -> list[int]:
    """For each stage the a of the module's docstring."""
    if frame.num_stages > frame.grid.num_ranks or frame.schedule in ("single", "gpipe"):
        return [1] * frame.num_stages
    by_rank = orders(frame.schedule, frame.grid.num_ranks, frame.num_stages, frame.num_micro_batches)
    return [next((at for at, action in enumerate(actions) if action.kind != "F"), 0) for actions in by_rank]


def _one_stage_a_rank(frame: Frame, stages: Sequence[_Stage], stop_at: float) -> Bound:
    """By bisection on the step's seconds."""
    low = 0.0
    high = start = _start([stage.busy for stage in stages])
    if math.isinf(start):
        return Bound(math.inf, None)
    cuts = _cuts(stages, high)
    while cuts is None and high <= MOST_SLOWER * start:
        low, high = high, high * 1.3
        if low > stop_at:
            return Bound(low, None)
        cuts = _cuts(stages, high)
    if cuts is None:
        return Bound(math.inf, None)
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        if high - low <= 1e-5 * high:
            break
        found = _cuts(stages, middle)
        low, high, cuts = (low, middle, found) if found is not None else (middle, high, cuts)
    return Bound(low * (1 - 1e-9), cuts)


def _improved(frame: Frame, stages: Sequence[_Stage], bound: Bound, hop_seconds: float) -> Bound:
    """The bound with its cuts moved unit by unit as long as the step that is expected of them falls."""
    if bound.cuts is None:
        return bound
    best, cuts = _estimate(frame, stages, bound.cuts, hop_seconds), bound.cuts
    tried = {cuts}
    for _ in range(MOST_MOVES if len(cuts) < MOST_MOVED else 0):
        moved = [
            (*cuts[:at], cuts[at] + step, *cuts[at + 1 :]) for at in range(len(cuts)) for step in (-1, 1)
        ]
        new = [other for other in moved if other not in tried and _in_order(other, stages[0].busy.shape[0])]
        tried.update(new)
        found = min(((_estimate(frame, stages, other, hop_seconds), other) for other in new), default=(math.inf, cuts))
        if found[0] >= best:
            break
        best, cuts = found
    return replace(bound, cuts=cuts, estimate_seconds=best)


def _in_order(cuts: tuple[int, ...], num_units: int) -> bool:
    """Whether every stage has a unit."""
    return all(one < other for one, other in itertools.pairwise((0, *cuts, num_units)))


def _estimate(frame: Frame, stages: Sequence[_Stage], cuts: tuple[int, ...], hop_seconds: float) -> float:
    """The step simulated with what the bounds say of each stage, a third of it forward."""
    num_units = stages[0].busy.shape[0]
    times = []
    for stage, start, end in zip(stages, (0, *cuts), (*cuts, num_units), strict=True):
        once = float(stage.once[start, end])
        each = max(0.0, float(stage.busy[start, end]) - once) / (frame.num_micro_batches - (stage.forwards - 1) / 3)
        if math.isinf(each):
            return math.inf
        times.append(StageTimes(each / 3, each / 3, each / 3, once))
    hops = Hops((hop_seconds,) * len(cuts), (hop_seconds,) * len(cuts))
    return step_seconds_only(frame.schedule, times, hops, frame.grid.num_ranks, frame.num_micro_batches)


def refine(frame: Frame, stretches: Sequence[Stretches]) -> None:
    """Spend more work on the bounds of a frame's stages."""
    for here, _, points in _alike(frame, stretches):
        here.refine(points)


def recomputing(frame: Frame, stretches: Sequence[Stretches], cuts: Sequence[int]) -> list[tuple[int, ...]]:
    """For each stage, how many of its blocks the bounds would have in each mode that is allowed, the plain one first."""
    runs = list(itertools.pairwise((0, *cuts, stretches[0].priced.chain.num_units)))
    num_local = frame.num_stages // frame.grid.num_ranks
    found: dict[int, tuple[int, ...]] = {}
    for here, numbers, points in _alike(frame, stretches):
        by_size: dict[int, list[int]] = {}
        for number, point in zip(numbers, points, strict=True):
            by_size.setdefault(point.flying.bit_length(), []).append(number)
        for size, like in by_size.items():
            most = max(point.flying for point in points if point.flying.bit_length() == size)
            modes = here.recomputing(Point(most, 1), [runs[number] for number in like], num_local)
            found.update(zip(like, modes, strict=True))
    return [found[number] for number in range(frame.num_stages)]


def multipliers(frame: Frame, stretches: Sequence[Stretches]) -> list[float | None]:
    """For each stage, the seconds that the bounds take a byte to be worth; None where they did not look at memory."""
    found: dict[int, float | None] = {}
    for here, numbers, points in _alike(frame, stretches):
        found.update(dict.fromkeys(numbers, here.multiplier(points)))
    return [found[number] for number in range(frame.num_stages)]


def least_bytes(frame: Frame, stretches: Sequence[Stretches]) -> float:
    """A lower bound of the bytes that the fullest device of a frame needs, whatever it has."""
    found: dict[int, Floats] = {}
    for here, numbers, points in _alike(frame, stretches):
        found.update(zip(numbers, here.least_bytes(points), strict=True))
    return _divided([found[number] for number in range(frame.num_stages)], np.maximum)[0]


def stage_ranks(frame: Frame) -> list[int]:
    """The pipeline rank of each stage."""
    by_rank = placement(frame.schedule, frame.grid.num_ranks, frame.num_stages)
    rank_of = {stage: rank for rank, stages in enumerate(by_rank) for stage in stages}
    return [rank_of[stage] for stage in range(frame.num_stages)]


def _start(busy: Sequence[Floats]) -> float:
    """Where to begin: the whole model's busy seconds divided among the stages."""
    whole = min(float(array[0, -1]) for array in busy)
    if math.isfinite(whole):
        return whole / len(busy)
    finite = [float(array[np.isfinite(array)].min(initial=np.inf)) for array in busy]
    return min(finite)


@dataclass(frozen=True, eq=False)
class _Stage:
    """The bounds of one stage, each (starts, ends); ``before`` is by where it starts, ``beyond`` by where it ends."""

    busy: Floats
    work: Floats
    once: Floats
    each: Floats
    before: Floats
    beyond: Floats
    forwards: int  # of these all but one are not counted in busy and work


def _cuts(stages: Sequence[_Stage], seconds: float) -> tuple[int, ...] | None:
    """Ends of stages with which a step of ``seconds`` is not ruled out."""
    num_units = stages[0].busy.shape[0]
    least = np.full(num_units, np.inf)  # the least g with which a stage can begin at each unit
    least[0] = 0.0
    ends = least
    came: list[np.ndarray] = []
    for stage in stages:
        ramp = least[:, None]
        allowed = stage.before[:, None] + stage.busy + stage.beyond <= seconds
        allowed &= ramp + stage.work + stage.beyond <= seconds
        reached = np.where(allowed, np.maximum(stage.once, ramp) + stage.each, np.inf)
        came.append(reached.argmin(axis=0))
        ends = reached.min(axis=0)
        least = ends[:num_units]
    if not math.isfinite(float(ends[num_units])):
        return None
    return _traced(came, num_units)


def _bound_of_several(
    frame: Frame, stretches: Sequence[Stretches], stages: Sequence[_Stage], within_memory: bool, hop_seconds: float
) -> Bound:
    """Of several stages a rank. The cuts, and what is expected of them, are for stages that share a device's memory equally."""
    num_local = frame.num_stages // frame.grid.num_ranks
    charged: dict[int, list[Charged]] = {}
    shared = dict(enumerate(stages))
    for here, numbers, points in _alike(frame, stretches) if within_memory else ():
        charged.update(zip(numbers, here.charged(points), strict=True))
        for number, busy in zip(numbers, here.busy(points, True, num_local), strict=True):
            shared[number] = replace(stages[number], busy=busy)
    prices = list(zip(*(charged[number] for number in range(len(stages))), strict=True)) if charged else []
    seconds = _several_stages_a_rank(frame, stages, prices)
    expected = [shared[number] for number in range(len(stages))]
    cuts = _divided([stage.busy for stage in expected], np.maximum)[1] if math.isfinite(seconds) else None
    return _improved(frame, expected, Bound(seconds, cuts), hop_seconds)


def _several_stages_a_rank(frame: Frame, stages: Sequence[_Stage], charged: Sequence[Sequence[Charged]]) -> float:
    """The sum over ranks: each is busy for all of its stages, so P T is at least the sum of f over all stages, and with a
    whole backward also of the ramps of the ranks: stage s, of the first P, delays each of the P - 1 - s ranks behind it by e.
    ``charged``, by multiplier and stage: f plus multiplier x bytes, for ranks whose stages together exceed their memory.
    """
    ranks = frame.grid.num_ranks
    ramps = frame.schedule == "interleaved_1f1b"
    delays = [(ranks - 1 - at) * stage.each if ramps and at < ranks - 1 else 0.0 for at, stage in enumerate(stages)]
    allowed = [np.where(np.isfinite(stage.busy), 0.0, np.inf) for stage in stages]
    seconds, _ = _divided([stage.busy + delay for stage, delay in zip(stages, delays, strict=True)], np.add)
    for sums in charged:
        costs = [c.seconds + out + delay for c, out, delay in zip(sums, allowed, delays, strict=True)]
        taken_off = sum(c.budget_seconds for c in sums) * ranks / len(sums)
        seconds = max(seconds, _divided(costs, np.add)[0] - taken_off)
    return seconds / ranks * (1 - 1e-9)


def _divided(costs: Sequence[Floats], join: np.ufunc) -> tuple[float, tuple[int, ...] | None]:
    """The cuts of which the stages' costs, joined by ``np.add`` or ``np.maximum``, are least, and what they are then."""
    num_units = costs[0].shape[0]
    least = np.full(num_units, np.inf)
    least[0] = 0.0
    came = []
    ends = least
    for here in costs:
        reached = join(here, least[:, None])
        came.append(reached.argmin(axis=0))
        ends = reached.min(axis=0)
        least = ends[:num_units]
    total = float(ends[num_units])
    return (total, _traced(came, num_units)) if math.isfinite(total) else (math.inf, None)


def _traced(came: Sequence[np.ndarray], num_units: int) -> tuple[int, ...]:
    """The ends of all stages but the last; ``came`` has, by stage and end, where the stage begins."""
    found = [num_units]
    for starts in reversed(came):
        found.append(int(starts[found[-1]]))
    return tuple(reversed(found[1:-1]))
