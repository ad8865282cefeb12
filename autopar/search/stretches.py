"""Lower bounds of every run of units as a stage, on one kind of devices at one micro-batch size.

For a stage of the units [i, j) with k micro-batches in flight, whose order has a forwards ahead of its first backward:

    w_a(i, j)  <= seconds of all its micro-batches but a - 1 forwards,           `Stretches.work`
    f_ka(i, j) <= the same and what it does once a step,                         `Stretches.busy`
    o(i, j)    <= seconds of what it does once a step,                           `Stretches.once`
    e(i, j)    <= seconds of one micro-batch,                                    `Stretches.each`

f is infinite when the stage cannot fit; within memory it is the dual bound: for any price m of a byte, no plan that fits takes
less than [least (seconds + m bytes) - m budget]. Every such least cost is a minimum of linear functions of (k, a), hence
concave, and what lies between two pairs is at least what a straight line between them says: of the stages of a pipeline,
which lie on a line, only those at the ends and in the middle are composed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.search.pricing import Priced
from autopar.search.units import FLYING, KEPT, weights_of
from autopar.solver.chain import Floats

DECODED = np.array([0.01, 0.08, 0.2, 0.4, 0.8, 1.6, 5.0])  # times the typical multiplier: where modes are read off
NEARBY = 0.01  # of a multiplier: the distance over which slopes are taken
FEW = 3  # points on a line that are all composed; of more the ends and the middle
FIRST_SHARE = 0.3  # of the typical multiplier: what is tried first
ROUNDS = 3  # of multipliers tried
COARSE, FINE = 2.1, 1.15  # the best multiplier's neighbours among those tried are within this factor of it
LIKE_STAGES = 1.5  # runs whose units are more or fewer than a stage's by this factor do not choose the multipliers
# Rows of the basic bounds: seconds of one micro-batch, of a whole step, of what is done once; and where there may be several
# stages, of a forward pass, and of both passes without making the parameters' gradients.
EACH, BUSY, ONCE, FORWARD, WITHOUT_WEIGHT = range(5)
LITTLE = 1e-9  # weight of seconds where bytes are what counts


class Point(NamedTuple):
    """A stage's micro-batches in flight, and the forwards that its order puts ahead of its first backward."""

    flying: int
    ahead: int


Points = tuple[Point, ...]


@dataclass(frozen=True, eq=False)
class Charged:
    """Seconds with bytes charged at a price, and what the whole budget of a device costs at that price."""

    seconds: Floats
    budget_seconds: float


@dataclass
class Hint:
    """Where bounds within memory begin: the ``multiplier`` of bytes that was best for like stretches, in seconds for each."""

    multiplier: float | None = None


class _Tried:
    """Multipliers and what runs that are like stages are bounded by with each: concave in the multiplier, so that the best
    one lies between the neighbours of the best that was tried."""

    def __init__(self, first: Floats) -> None:
        self._first = first
        self._votes: dict[float, Floats] = {}

    def add(self, multipliers: Floats, votes: Sequence[Floats]) -> None:
        self._votes.update(zip(map(float, multipliers), votes, strict=True))

    @property
    def best(self) -> float:
        """The multiplier that is best for most runs."""
        return list(self._votes)[_most_voted(np.stack(list(self._votes.values())))]

    def next(self, precision: float) -> Floats:
        """What to try now: beyond the end that is best, or on both sides of the best until its neighbours are near."""
        if not self._votes:
            return self._first
        best, tried = self.best, sorted(self._votes)
        at = tried.index(best)
        if at in (0, len(tried) - 1):
            return best * (np.array([0.1, 0.3, 0.6]) if at == 0 else np.array([1.7, 4.0, 12.0]))
        sides = [other for other in (tried[at - 1], tried[at + 1]) if max(other / best, best / other) > precision]
        return np.sqrt(best * np.array(sides))


@dataclass(eq=False)
class Stretches:
    """The bounds, made as they are asked for; arrays are (starts, ends), a list has one for each point. They are kept in
    float32, a rounding width below what they bound."""

    priced: Priced
    num_micro_batches: int
    num_ranks: int = 1  # into which the whole model is divided
    hint: Hint = field(default_factory=Hint)
    _work: dict[tuple[int, ...], list[Floats]] = field(default_factory=dict)
    _free: dict[Points, list[Floats]] = field(default_factory=dict)
    _limited: dict[tuple[Points, int], list[Floats]] = field(default_factory=dict)
    _limited_work: dict[Points, list[Floats]] = field(default_factory=dict)  # of what was refined
    _tried: dict[Points, _Tried] = field(default_factory=dict)
    _refined: set[Points] = field(default_factory=set)
    _bytes: dict[tuple[int, ...], list[Floats]] = field(default_factory=dict)
    _basic: Floats | None = None

    # -- without regard to memory ----------------------------------------------------------------------------------

    def each(self) -> Floats:
        """Least seconds of one micro-batch."""
        return np.asarray(self._basics()[EACH])

    def once(self) -> Floats:
        """Least seconds of what is done once a step."""
        return np.asarray(self._basics()[ONCE])

    def forward(self) -> Floats:
        """Least seconds of one forward pass."""
        return np.asarray(self._basics()[FORWARD])

    def before(self) -> Floats:
        """(starts,): least seconds of one micro-batch to come there from the model's beginning. Of what is in one stage
        nothing comes before, or is beyond."""
        if self.priced.from_first:
            return np.zeros(self._budget.shape[0])
        return np.append(0.0, self._basics()[FORWARD, 0, 1:-1])

    def beyond(self, split: bool) -> Floats:
        """(starts,): least seconds of one micro-batch from there to the model's end and back; with a ``split`` backward
        gradients of parameters are left out. 0 at the end."""
        if self.priced.from_first:
            return np.zeros(self._budget.shape[1])
        return np.append(self._basics()[WITHOUT_WEIGHT if split else EACH, :, -1], 0.0)

    def work(self, points: Points) -> list[Floats]:
        """Least seconds of all micro-batches, less ``ahead - 1`` forward passes; where that was refined, also counting what
        fitting in memory costs."""
        if points in self._limited_work:
            return self._limited_work[points]
        aheads = tuple(point.ahead for point in points)
        if aheads not in self._work:
            if set(aheads) == {1}:  # whole micro-batches
                self._work[aheads] = [self.num_micro_batches * self.each()] * len(points)
            else:
                self._work[aheads] = self._on_line(points, lambda some: self.priced.fastest(self._seconds(some, 0.0)))
        return self._work[aheads]

    def busy(self, points: Points, within_memory: bool, stages_a_device: int = 1) -> list[Floats]:
        """Least busy seconds in a step, less ``ahead - 1`` forward passes. ``within_memory``: also counting what fitting
        costs, in an equal share of the memory with other stages on the device; else only what cannot fit at all is left
        out."""
        if not within_memory:
            return self._free_busy(points)
        key = points, stages_a_device
        if key not in self._limited:
            limited = self._within_memory(points, 1.0, stages_a_device)
            self._limited[key] = [np.maximum(*pair) for pair in zip(self._free_busy(points), limited, strict=True)]
        return self._limited[key]

    def _free_busy(self, points: Points) -> list[Floats]:
        if points not in self._free:
            if all(point.ahead == 1 for point in points):
                free = [np.asarray(self._basics()[BUSY])] * len(points)
            else:
                free = self._on_line(points, lambda some: self.priced.fastest(self._seconds(some, 1.0)))
            self._free[points] = [
                np.where(num_bytes <= self._budget, np.maximum(busy, work + self.once()), np.inf)
                for busy, work, num_bytes in zip(free, self.work(points), self.least_bytes(points), strict=True)
            ]
        return self._free[points]

    def _seconds(self, points: Points, once: float) -> Floats:
        """(points, rows): weights of the seconds of all micro-batches less ``ahead - 1`` forward passes, and of ``once`` times
        what is done once."""
        count = self.num_micro_batches
        return np.array([weights_of(count - point.ahead + 1, count, once) for point in points])

    def _basics(self) -> Floats:
        """The rows of the basic bounds."""
        if self._basic is None:
            count = self.num_micro_batches
            rows = [
                weights_of(1.0, 1.0),
                weights_of(count, count, once=1.0),
                weights_of(LITTLE, LITTLE, once=1.0),
            ]
            if not self.priced.from_first:
                rows += [weights_of(1.0, LITTLE), weights_of(1.0 + LITTLE, 1.0 + LITTLE, weight=-1.0)]
            self._basic = self.priced.fastest(np.array(rows)) * (1 - 10 * LITTLE)
        return self._basic

    # -- within memory ---------------------------------------------------------------------------------------------

    def least_bytes(self, points: Points) -> list[Floats]:
        """Least bytes that a stage keeps."""
        counts = tuple(point.flying for point in points)
        if counts not in self._bytes:
            self._bytes[counts] = self._on_line(
                tuple(Point(count, 1) for count in counts),
                lambda some: self.priced.leanest(
                    np.array([weights_of(LITTLE, LITTLE, kept=1.0, flying=point.flying) for point in some])
                ),
            )
        return self._bytes[counts]

    def charged(self, points: Points) -> list[list[Charged]]:
        """For each point, busy seconds plus what memory would cost, for a few multipliers."""
        multipliers = self._typical_multiplier(points) * np.array([0.3, 1.0, 3.0])
        sums = self._with_bytes(points, multipliers, 1.0)
        budget = self.priced.available_bytes
        return [
            [Charged(sums[at][place], float(m) * budget) for at, m in enumerate(multipliers)] for place in range(len(points))
        ]

    def refine(self, points: Points) -> None:
        """Raise the bounds within memory: more multipliers, and of the work alone."""
        if points in self._refined or (points, 1) not in self._limited:
            return
        self._refined.add(points)
        better = self._raised(self._tried[points], points, 1.0, 1, FINE)
        self._limited[points, 1] = [np.maximum(*pair) for pair in zip(self._limited[points, 1], better, strict=True)]
        if self.num_ranks > 1:  # else what is done once a step always counts
            pairs = zip(self.work(points), self._within_memory(points, 0.0, 1), strict=True)
            self._limited_work[points] = [np.maximum(work, better) for work, better in pairs]

    def multiplier(self, points: Points) -> float | None:
        """The seconds for each byte that bound stages within memory best, where that was looked at."""
        tried = self._tried.get(points)
        return tried.best if tried is not None else None

    def _within_memory(self, points: Points, once: float, stages_a_device: int) -> list[Floats]:
        """The dual bound over a few multipliers, with ``once`` times what is done once."""
        first = self.hint.multiplier or FIRST_SHARE * self._typical_multiplier(points)
        tried = _Tried(first * np.array([0.5, 1.0, 2.0]))
        found = self._raised(tried, points, once, stages_a_device, COARSE)
        if once and stages_a_device == 1:
            self._tried[points] = tried
            self.hint.multiplier = tried.best
        return found

    def _raised(
        self, tried: _Tried, points: Points, once: float, stages_a_device: int, precision: float
    ) -> list[Floats]:
        """The dual bound over what is tried next, until the best multiplier is known to a factor of ``precision``."""
        found = [np.zeros_like(self._budget)] * len(points)
        for _ in range(ROUNDS):
            multipliers = tried.next(precision)
            if not len(multipliers):
                break
            duals = self._duals(points, multipliers, once, stages_a_device)
            found = [np.maximum.reduce([best, *(here[at] for here in duals)]) for at, best in enumerate(found)]
            like = self._like_stages(stages_a_device)
            tried.add(multipliers, [np.stack([here[0][like], here[-1][like]]) for here in duals])
        return found

    def _duals(
        self, points: Points, multipliers: Floats, once: float, stages_a_device: int
    ) -> list[list[Floats]]:
        """The dual bound of each multiplier and point."""
        budget = self._share(stages_a_device)
        sums = self._with_bytes(points, multipliers, once)
        return [[one - m * budget for one in here] for here, m in zip(sums, multipliers, strict=True)]

    def _like_stages(self, stages_a_device: int) -> np.ndarray:
        """(starts, ends): which runs are about as long as a stage is; all that there is where it is one."""
        count, ends = self._budget.shape
        lengths = np.arange(ends) - np.arange(count)[:, None]
        stages = self.num_ranks * stages_a_device
        if stages == 1:
            return np.asarray(lengths == count)
        share = count / stages
        return np.asarray((lengths >= share / LIKE_STAGES) & (lengths <= max(share * LIKE_STAGES, 1.0)))

    def _with_bytes(self, points: Points, multipliers: Floats, once: float) -> list[list[Floats]]:
        """For each multiplier and point, the least of busy seconds plus multiplier times bytes."""
        size = len(multipliers)

        def composed(some: Points) -> Floats:
            weights = np.repeat(self._seconds(some, once), size, axis=0)
            for row, point in enumerate(some):
                weights[row * size : (row + 1) * size, KEPT] = multipliers
                weights[row * size : (row + 1) * size, FLYING] = multipliers * point.flying
            found = self.priced.costs(weights)
            return found.reshape(len(some), size, *found.shape[1:])

        by_point = self._on_line(points, composed)
        return [[sums[at] for sums in by_point] for at in range(size)]

    def _on_line(self, points: Points, compose: Callable[[Points], Floats]) -> list[Floats]:
        """``compose``, which is concave along a line of points, at each point or as near below as its neighbours say."""
        distinct = tuple(sorted(set(points)))
        first, last = distinct[0], distinct[-1]
        if len(distinct) <= FEW or not all(_is_between(point, first, last) for point in distinct):
            anchors = distinct
        else:
            anchors = (first, distinct[len(distinct) // 2], last)
        found = compose(anchors)
        return [_interpolated(found, anchors, point) for point in points]

    @cached_property
    def _budget(self) -> Floats:
        """Bytes that may be kept."""
        return self.priced.budgets()

    def _share(self, stages_a_device: int) -> Floats:
        """Bytes that a stage may keep which shares its device equally with others."""
        return self._budget - self.priced.available_bytes * (1 - 1 / stages_a_device)

    def _typical_multiplier(self, points: Points) -> float:
        """Seconds for each byte: the whole model's, as a start."""
        least = min(float(num_bytes[0, -1]) for num_bytes in self.least_bytes(points))
        return 0.2 * float(self._basics()[BUSY, 0, -1]) / max(least, 1.0)

    # -- what the bounds would do ----------------------------------------------------------------------------------

    def recomputing(self, point: Point, runs: Sequence[tuple[int, int]], stages_a_device: int) -> list[tuple[int, ...]]:
        """For stages of these runs, in how many blocks each allowed mode is taken where the dual bound is best."""
        multipliers = self._typical_multiplier((point,)) * DECODED
        pairs = np.concatenate([multipliers, multipliers * (1 + NEARBY)])
        weights = np.repeat(self._seconds((Point(point.flying, 1),), 1.0), len(pairs), axis=0)
        weights[:, KEPT], weights[:, FLYING] = pairs, pairs * point.flying
        budget = self._share(stages_a_device) - self.priced.gathered_bytes
        return [
            self._mixed(ways, multipliers, float(budget[start, end]))
            for ways, (start, end) in zip(self.priced.modes(weights, runs), runs, strict=True)
        ]

    def _mixed(self, ways: Sequence[tuple[float, list[str]]], multipliers: Floats, budget: float) -> tuple[int, ...]:
        """The numbers of blocks in each mode between the two multipliers of which one's plan fits and the other's does not,
        as far as the budget is from what each keeps: the slope of its cost."""
        size = len(multipliers)
        costs = np.array([cost for cost, _ in ways])
        kept = (costs[size:] - costs[:size]) / (NEARBY * multipliers)
        counts = [[modes.count(mode) for mode in self.priced.allowed] for _, modes in ways[:size]]
        fits = np.flatnonzero(kept <= budget)
        after = int(fits[0]) if fits.size else size - 1
        if not after:
            return tuple(counts[0])
        part = min(1.0, float((kept[after - 1] - budget) / max(kept[after - 1] - kept[after], 1.0)))
        mixed = [one + part * (other - one) for one, other in zip(counts[after - 1], counts[after], strict=True)]
        total, recomputed = sum(counts[0]), [math.ceil(count - 1e-6) for count in mixed[1:]]
        last = min(recomputed[-1], total) if recomputed else 0
        fitted = [*(min(count, total - last) for count in recomputed[:-1]), last]
        return (total - sum(fitted), *fitted) if recomputed else (total,)


def _most_voted(bounds: Floats) -> int:
    """The multiplier that is best for most runs; bounds: (multipliers, ...)."""
    finite = np.isfinite(bounds[0]) & (bounds.max(axis=0) > bounds[0])
    if not finite.any():
        return int(np.nanargmax([np.sum(b[np.isfinite(b)]) for b in bounds]))
    return int(np.bincount(bounds[:, finite].argmax(axis=0), minlength=len(bounds)).argmax())


def _is_between(point: Point, first: Point, last: Point) -> bool:
    """Whether three points lie on a line."""
    across = (point.flying - first.flying) * (last.ahead - first.ahead)
    return across == (point.ahead - first.ahead) * (last.flying - first.flying)


def _interpolated(found: Floats, anchors: Points, point: Point) -> Floats:
    """What the anchors' arrays say of a point at or between two of them."""
    at = next(index for index, anchor in enumerate(anchors) if point <= anchor)
    if anchors[at] == point:
        return np.asarray(found[at])
    low, high = anchors[at - 1], anchors[at]
    span = max(high.flying - low.flying, 0) or high.ahead - low.ahead
    part = ((point.flying - low.flying) if high.flying > low.flying else point.ahead - low.ahead) / span
    mixed = found[at - 1] * np.float32(1 - part) + found[at] * np.float32(part)
    return np.asarray(mixed, dtype=np.float32)
