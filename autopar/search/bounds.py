"""Lower bounds of a frame's step over all cuts, recomputations and shardings at once, from composed prices.

For every run of units [i, j) and number of micro-batches in flight k, of any stage that holds these units,

    w_k(i, j) <= seconds of all its micro-batches in a step,                     `Stretches.work`
    o(i, j)   <= seconds of what it does once a step,                            `Stretches.once`
    f_k(i, j) <= both together,                                                  `Stretches.busy`
    e(i, j)   <= seconds of one micro-batch,                                     `Stretches.each`

where w and f are infinite when the stage cannot fit. A step of T seconds needs cuts with, for each stage s,

    f_k(s) <= T    and, with a whole backward,    w_k(s) + g(s) <= T,    g(s + 1) = max(o(s), g(s)) + e(s),

since one micro-batch has gone forward through the earlier stages before s can begin, and goes back through them, down to
what stage 0 does once, after its last backward (`cost_models.lower_bound_seconds` has the proof). With a split backward and
one stage a rank, from the first forward of s one micro-batch goes on to the end and back to s, gradients of parameters
left out, before s can do more than the forwards that its order puts ahead: `Stretches.around`. Whether such cuts exist
is a dynamic programme over the ends of stages that keeps the least g, as a smaller one is never worse. The largest T
without cuts is the lower bound; the least with is where the search looks first. (Alpa, OSDI'22, section 5, enumerates the
slowest stage's time in this way.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.search.pricing import Priced
from autopar.search.space import Frame
from autopar.search.units import ROWS
from cost_models import Hops, StageTimes, in_flight, orders, placement, step_seconds_only

FloatArray = NDArray[np.floating[Any]]  # bounds are kept in float32, a rounding width below what they bound

MOST_SLOWER = 1e4  # than the whole model's busy seconds divided by the stages: nothing fits
BISECTIONS = 18
ROUNDS = 2
# Rows of the basic bounds: seconds of one micro-batch, of a whole step, and of what is done once; and where the backward
# pass is split, of the forward pass, of the backward pass, and of both without making the parameters' gradients.
EACH, BUSY, ONCE = range(3)
FORWARD, BACKWARD, WITHOUT_WEIGHT = range(3)
LITTLE = 1e-9  # weight of seconds where bytes are what counts


@dataclass(frozen=True, eq=False)
class _Charged:
    """Seconds with bytes charged at a price, and what the whole budget of a device costs at that price."""

    seconds: FloatArray
    budget_seconds: float


@dataclass(eq=False)
class Stretches:
    """Bounds of all runs of units on one kind of devices at one micro-batch size, made as they are asked for."""

    priced: Priced
    num_micro_batches: int
    _work: dict[tuple[int, bool], FloatArray] = field(default_factory=dict)
    _limited: dict[int, FloatArray] = field(default_factory=dict)
    _best_multipliers: dict[tuple[int, float], float] = field(default_factory=dict)
    _refined: set[int] = field(default_factory=set)
    _charged: dict[int, list[_Charged]] = field(default_factory=dict)
    _bytes: dict[int, FloatArray] = field(default_factory=dict)
    _basic: FloatArray | None = None

    def each(self) -> FloatArray:
        """(starts, ends): least seconds of one micro-batch."""
        return np.asarray(self._basics()[EACH])

    def once(self) -> FloatArray:
        """(starts, ends): least seconds of what is done once a step."""
        return np.asarray(self._basics()[ONCE])

    def work(self, flying: int, within_memory: bool) -> FloatArray:
        """(starts, ends): least seconds of all micro-batches with ``flying`` of them in flight. ``within_memory``: also
        counting what fitting costs; else only what cannot fit at all is left out."""
        key = (self._place(flying), within_memory)
        if key not in self._work:
            basics = self._basics()
            fits = self.least_bytes(flying) <= self._budget
            work = np.where(fits, self.num_micro_batches * basics[EACH], np.inf)
            self._work[key] = np.maximum(work, self._within_memory(self._place(flying), 0.0)) if within_memory else work
        return self._work[key]

    def busy(self, flying: int, within_memory: bool) -> FloatArray:
        """(starts, ends): least busy seconds in a step."""
        busy = np.maximum(self._basics()[BUSY], self.work(flying, False) + self.once())
        if not within_memory:
            return np.asarray(busy)
        place = self._place(flying)
        if place not in self._limited:
            self._limited[place] = self._within_memory(place, 1.0)
        return np.asarray(np.maximum(busy, self._limited[place]))

    def around(self, ahead: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Where the backward pass is split: (starts, ends) least seconds of one forward pass; of a stage's work without the
        ``ahead`` forward passes before its first backward; and (starts,) of one micro-batch from there to the model's end
        and back, gradients of parameters left out."""
        basics, count = self._split, self.num_micro_batches
        return basics[FORWARD], (count - ahead) * basics[FORWARD] + count * basics[BACKWARD], basics[WITHOUT_WEIGHT, :, -1]

    def least_bytes(self, flying: int) -> FloatArray:
        """(starts, ends): least bytes that a stage keeps."""
        place = self._place(flying)
        if place not in self._bytes:
            weights = np.array([[LITTLE, 0.0, 1.0, float(self._flying[place]), 0.0, 0.0]])
            self._bytes[place] = self.priced.leanest(weights)[0]
        return self._bytes[place]

    def charged(self, flying: int) -> list[_Charged]:
        """Busy seconds plus what memory would cost, for a few multipliers."""
        place = self._place(flying)
        if place not in self._charged:
            grid = self._typical_multiplier(0) * np.array([0.3, 1.0, 3.0])
            count = float(self._flying[place])
            sums = self.priced.costs(np.array([[self.num_micro_batches, 1.0, m, m * count, 0.0, 0.0] for m in grid]))
            budget = self.priced.available_bytes
            self._charged[place] = [_Charged(array, float(m) * budget) for array, m in zip(sums, grid, strict=True)]
        return self._charged[place]

    def _basics(self) -> FloatArray:
        """The rows EACH, BUSY and ONCE, without regard to memory."""
        if self._basic is None:
            fast = np.zeros((3, len(ROWS)))
            fast[EACH, :1] = 1.0
            fast[BUSY, :2] = self.num_micro_batches, 1.0
            fast[ONCE, :2] = LITTLE, 1.0
            self._basic = self.priced.fastest(fast)
        return self._basic

    @cached_property
    def _split(self) -> FloatArray:
        """The rows FORWARD, BACKWARD and WITHOUT_WEIGHT, without regard to memory."""
        fast = np.zeros((3, len(ROWS)))
        fast[FORWARD, [0, 4]] = LITTLE, 1.0
        fast[BACKWARD, [0, 4]] = 1.0 + LITTLE, -1.0
        fast[WITHOUT_WEIGHT, [0, 5]] = 1.0 + LITTLE, -1.0
        return self.priced.fastest(fast) * (1 - 10 * LITTLE)

    @cached_property
    def _budget(self) -> FloatArray:
        """(starts, ends): bytes that may be kept."""
        return self.priced.budgets()

    @cached_property
    def _flying(self) -> tuple[int, ...]:
        """Numbers in flight that are told apart; others are taken for the next smaller of these."""
        return tuple(2**power for power in range(self.num_micro_batches.bit_length()))

    def _place(self, flying: int) -> int:
        return max(index for index, count in enumerate(self._flying) if count <= flying)

    def _within_memory(self, place: int, once: float) -> FloatArray:
        """The dual bound over a few multipliers: max of [least (seconds + multiplier x bytes) - multiplier x budget]. The
        seconds are those of all micro-batches, and ``once`` times those that are spent once."""
        count, budget = self._flying[place], self._budget
        best: FloatArray | None = None
        most = 1
        grid = self._typical_multiplier(place) * np.array([0.15, 0.3, 0.6])
        for _ in range(ROUNDS):
            weights = np.array([[self.num_micro_batches, once, m, m * count, 0.0, 0.0] for m in grid])
            bounds = self.priced.costs(weights) - grid[:, None, None] * budget
            top = bounds.max(axis=0)
            best = top if best is None else np.maximum(best, top)
            most = self._votes(bounds)
            if most == 1:
                break  # neither end of the grid is better
            grid = grid[most] * (np.array([0.1, 0.3, 0.6]) if most == 0 else np.array([1.7, 4.0, 12.0]))
        assert best is not None
        self._best_multipliers[place, once] = float(grid[most])
        return best

    def refine(self, flying: int) -> None:
        """Raise the bounds within memory of this number in flight with multipliers around the best one."""
        place = self._place(flying)
        if place in self._refined or place not in self._limited:
            return
        self._refined.add(place)
        count, budget = self._flying[place], self._budget
        grid = self._best_multipliers[place, 1.0] * np.array([0.7, 0.85, 1.2, 1.45])
        weights = np.array([[self.num_micro_batches, 1.0, m, m * count, 0.0, 0.0] for m in grid])
        bounds = (self.priced.costs(weights) - grid[:, None, None] * budget).max(axis=0)
        self._limited[place] = np.maximum(self._limited[place], bounds)

    @staticmethod
    def _votes(bounds: FloatArray) -> int:
        """The multiplier that is best for most runs."""
        finite = np.isfinite(bounds[0]) & (bounds.max(axis=0) > bounds[0])
        if not finite.any():
            return int(np.nanargmax([np.sum(b[np.isfinite(b)]) for b in bounds]))
        return int(np.bincount(bounds[:, finite].argmax(axis=0), minlength=len(bounds)).argmax())

    def _typical_multiplier(self, place: int) -> float:
        """Seconds for each byte: the whole model's, as a start."""
        basics = self._basics()
        seconds, least = float(basics[BUSY, 0, -1]), float(self.least_bytes(self._flying[place])[0, -1])
        return 0.2 * seconds / max(least, 1.0)


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
    flying = in_flight(frame.schedule, frame.grid.num_ranks, frame.num_stages, frame.num_micro_batches)
    ranks = stage_ranks(frame)
    stages = [
        _Stage(
            here.busy(count, within_memory),
            here.work(count, within_memory and frame.num_stages > 1),
            here.once(),
            here.each(),
        )
        for here, count in zip((stretches[rank] for rank in ranks), flying, strict=True)
    ]
    if frame.schedule == "interleaved_zero_bubble" and frame.num_stages == frame.grid.num_ranks:
        ahead = forwards_ahead(frame)
        around = [stretches[rank].around(count - 1) for rank, count in zip(ranks, ahead, strict=True)]
        beyond = np.minimum.reduce([part[2] for part in around])  # on whichever device is fastest
        stages = [
            replace(stage, split=(part[0], part[1], beyond)) for stage, part in zip(stages, around, strict=True)
        ]
    if frame.num_stages > frame.grid.num_ranks:
        by_stage = [stretches[rank].charged(count) for rank, count in zip(ranks, flying, strict=True) if within_memory]
        bound = _several_stages_a_rank(frame, stages, list(zip(*by_stage, strict=True)))
    else:
        bound = _one_stage_a_rank(frame, stages, stop_at)
    return replace(bound, estimate_seconds=_estimate(frame, stages, bound.cuts, hop_seconds))


def forwards_ahead(frame: Frame) -> list[int]:
    """How many forward passes each rank does before its first backward."""
    by_rank = orders(frame.schedule, frame.grid.num_ranks, frame.num_stages, frame.num_micro_batches)
    return [next((at for at, action in enumerate(actions) if action.kind != "F"), 0) for actions in by_rank]


def _one_stage_a_rank(frame: Frame, stages: Sequence[_Stage], stop_at: float) -> Bound:
    """By bisection on the step's seconds."""
    ramps = frame.schedule in ("single", "gpipe", "1f1b")
    low = 0.0
    high = start = _start([stage.busy for stage in stages])
    if math.isinf(start):
        return Bound(math.inf, None)
    cuts = _cuts(stages, high, ramps)
    while cuts is None and high <= MOST_SLOWER * start:
        low, high = high, high * 1.3
        if low > stop_at:
            return Bound(low, None)
        cuts = _cuts(stages, high, ramps)
    if cuts is None:
        return Bound(math.inf, None)
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        if high - low <= 1e-5 * high:
            break
        found = _cuts(stages, middle, ramps)
        low, high, cuts = (low, middle, found) if found is not None else (middle, high, cuts)
    return Bound(low * (1 - 1e-9), cuts)


def _estimate(
    frame: Frame, stages: Sequence[_Stage], cuts: tuple[int, ...] | None, hop_seconds: float
) -> float:
    """The step simulated with what the bounds say of each stage, a third of it forward."""
    if cuts is None:
        return math.inf
    num_units = stages[0].busy.shape[0]
    times = []
    for stage, start, end in zip(stages, (0, *cuts), (*cuts, num_units), strict=True):
        once = float(stage.once[start, end])
        each = max(0.0, float(stage.busy[start, end]) - once) / frame.num_micro_batches
        times.append(StageTimes(each / 3, each / 3, each / 3, once))
    hops = Hops((hop_seconds,) * len(cuts), (hop_seconds,) * len(cuts))
    return step_seconds_only(frame.schedule, times, hops, frame.grid.num_ranks, frame.num_micro_batches)


def refine(frame: Frame, stretches: Sequence[Stretches]) -> None:
    """Spend more work on the bounds of a frame's stages."""
    flying = in_flight(frame.schedule, frame.grid.num_ranks, frame.num_stages, frame.num_micro_batches)
    counts = set(flying) if frame.num_stages == 1 else {max(flying), min(flying)}
    for here in {id(one): one for one in stretches}.values():
        for count in counts:
            here.refine(count)


def least_bytes(frame: Frame, stretches: Sequence[Stretches]) -> float:
    """A lower bound of the bytes that the fullest device of a frame needs, whatever it has."""
    flying = in_flight(frame.schedule, frame.grid.num_ranks, frame.num_stages, frame.num_micro_batches)
    bytes_ = [stretches[rank].least_bytes(count) for rank, count in zip(stage_ranks(frame), flying, strict=True)]
    return _divided(bytes_, np.maximum)[0]


def stage_ranks(frame: Frame) -> list[int]:
    """The pipeline rank of each stage."""
    by_rank = placement(frame.schedule, frame.grid.num_ranks, frame.num_stages)
    rank_of = {stage: rank for rank, stages in enumerate(by_rank) for stage in stages}
    return [rank_of[stage] for stage in range(frame.num_stages)]


def _start(busy: Sequence[FloatArray]) -> float:
    """Where to begin: the whole model's busy seconds divided among the stages."""
    whole = min(float(array[0, -1]) for array in busy)
    if math.isfinite(whole):
        return whole / len(busy)
    finite = [float(array[np.isfinite(array)].min(initial=np.inf)) for array in busy]
    return min(finite)


@dataclass(frozen=True, eq=False)
class _Stage:
    """The bounds of one stage, each (starts, ends)."""

    busy: FloatArray
    work: FloatArray
    once: FloatArray
    each: FloatArray
    split: tuple[FloatArray, FloatArray, FloatArray] | None = None  # of Stretches.around


def _cuts(stages: Sequence[_Stage], seconds: float, ramps: bool) -> tuple[int, ...] | None:
    """Ends of stages with which a step of ``seconds`` is not ruled out. ``ramps``: the schedule's backward is whole."""
    num_units = stages[0].busy.shape[0]
    least = np.full(num_units, np.inf)  # the least g with which a stage can begin at each unit
    least[0] = 0.0
    ends = least
    came: list[np.ndarray] = []
    for number, stage in enumerate(stages):
        before = least[:, None]
        after = np.maximum(stage.once, before) + stage.each
        allowed = (stage.busy <= seconds) & np.isfinite(before)
        if ramps and number:
            allowed &= stage.work + before <= seconds
        if stage.split is not None:
            forward, work, beyond = stage.split
            after = before + forward
            allowed &= before + work + np.append(beyond, 0.0)[None, :] <= seconds
        reached = np.where(allowed, after, np.inf)
        came.append(reached.argmin(axis=0))
        ends = reached.min(axis=0)
        least = ends[:num_units]
    if not math.isfinite(float(ends[num_units])):
        return None
    return _traced(came, num_units)


def _several_stages_a_rank(frame: Frame, stages: Sequence[_Stage], charged: Sequence[Sequence[_Charged]]) -> Bound:
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
    if math.isinf(seconds):
        return Bound(math.inf, None)
    return Bound(seconds / ranks * (1 - 1e-9), _divided([stage.busy for stage in stages], np.maximum)[1])


def _divided(costs: Sequence[FloatArray], join: np.ufunc) -> tuple[float, tuple[int, ...] | None]:
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
