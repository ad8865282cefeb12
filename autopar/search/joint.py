"""The joint search: branch and bound over frames, cuts and styles.

    bound of a grid        one micro-batch as large as can be: no smaller one takes less for each sample
    bound of a frame       its own prices, without regard to memory beyond what cannot fit at all
    the same, within memory
    evaluation             the cuts that the bound proposes, solved in full and simulated
    enumeration            where no gap is allowed and a frame has few cuts: every one of them, in every style

Each step costs more and bounds better than the one before; the frame that promises most is taken first, until no bound is
below the best plan found, or the work that the options allow is done. What is left then is priced, the lowest bound first,
as far as that raises it (`_close`). The least bound left over is the lower bound of the
whole search: no plan of its frames is faster under the cost model. Schedules that are only tried on the best plan's grid
afterwards (`space.is_tried_after`) are not among them.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from autopar.batching import at_batch
from autopar.costing import Costed, Prepared, build, prepare
from autopar.costing.setting import Setting
from autopar.fitting import Solve
from autopar.graph import OpGraph
from autopar.mesh import Mesh
from autopar.options import PlanOptions
from autopar.recompute import MODES
from autopar.search.bounds import Bound, bound_of, least_bytes, multipliers, recomputing, refine
from autopar.search.chaining import chain_of
from autopar.search.clock import Clock
from autopar.search.evaluate import Evaluated, Evaluator, Style
from autopar.search.expected import Expected
from autopar.search.pricing import Priced
from autopar.search.space import Frame, Grid, Meshes, counts_of, frames, grids, kind_of, micro_batch_counts, tried_after
from autopar.search.stretches import Hint, Stretches
from autopar.staging import cut_points, stage_graphs
from cost_models import CostModel

DIVE = 40  # refinements after which the most promising frame is evaluated: a plan in hand closes many others
DEEPER = 0.7  # what is priced already promises that much more, so that the search gets to a plan before it widens
MEASURED_GAIN = 0.5  # of a sample's measured time, to which smaller micro-batches are taken to bring it at the very best
GROWTH = 1.12  # expected of the seconds of all micro-batches when there are twice as many
DIVIDED = 1.01  # of what recomputes: a plan has a whole number of blocks in each mode, its bound a mixture
ENUMERATED_CUTS = 400  # where a frame has no more cuts than this, each is evaluated on its own
SMALL_MODEL = 600  # operators of a model of which more than one style of boundaries is tried
MOST_WORSE = 2  # schedules tried after the search that are no better, until no more are tried

GRID, PRICED = range(2)  # how far the bound of a frame has come


@dataclass(order=True)
class _Waiting:
    """A frame whose bound, ``seconds``, is to be refined; the one that promises most first."""

    promise_seconds: float
    number: int
    seconds: float = field(compare=False)
    step: int = field(compare=False)
    frame: Frame = field(compare=False)


@dataclass(order=True)
class _Ready:
    """A frame to be evaluated, the one that promises most first; ``seconds`` is its bound."""

    estimate_seconds: float
    number: int
    seconds: float = field(compare=False)
    frame: Frame = field(compare=False)
    cuts: tuple[int, ...] = field(compare=False)
    refined: bool = field(compare=False, default=False)


@dataclass(frozen=True, eq=False)
class Found:
    """What the search found: the best plan (None where nothing fits), others that were evaluated, and the certificate.

    ``looked_at``: every frame with its lower bound and what the bound's cuts are expected to take, in seconds; infinite
    where nothing fits.
    """

    best: Evaluated | None
    evaluated: tuple[Evaluated, ...]
    lower_bound_seconds: float
    num_frames: int
    num_priced: int
    num_bounded: int
    looked_at: tuple[tuple[Frame, float, float], ...] = ()


class JointSearch:
    """Searches one model on one cluster."""

    def __init__(
        self,
        graph: OpGraph,
        cost_model: CostModel,
        options: PlanOptions,
        solve: Solve,
        meshes: Meshes,
        may_split: bool,
        say: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self.graph, self.cost_model, self.options, self.say, self.clock = graph, cost_model, options, say, clock
        self.solve, self.meshes, self.may_split = solve, meshes, may_split
        self.chain, self.short = chain_of(graph)
        self.expected = Expected(graph, self.short, cost_model, options.memory_margin)
        self.counts = micro_batch_counts(graph.batch_size, options, may_split)
        self.grids = grids(cost_model.cluster, options, self.chain.num_units, meshes)
        self.evaluator = Evaluator(cost_model, options, solve)
        self.evaluated: list[Evaluated] = []
        self._stretches: dict[object, Stretches] = {}
        self._hints: dict[object, Hint] = {}
        self._prepared: dict[int, Prepared] = {}
        self._each: dict[Grid, list[tuple[int, float]]] = {}
        self._middles: dict[int, OpGraph | None] = {}
        self._styles: dict[object, Style] = {}
        self._num_bounded = 0
        self._looked_at: dict[Frame, tuple[float, float]] = {}
        self._number = itertools.count()
        self.started = time.perf_counter()

    # -- the loop --------------------------------------------------------------------------------------------------

    def run(self) -> Found:
        """Search until the bound meets the best plan, or the work allowed is done."""
        waiting = [self._entry(bound, GRID, frame) for frame, bound in self._frames()]
        num_frames = len(waiting)
        self._looked_at = {entry.frame: (entry.seconds, entry.seconds) for entry in waiting}
        heapq.heapify(waiting)
        aside: list[_Waiting] = []  # frames whose bound says that another is better
        ready: list[_Ready] = []
        bounds: list[float] = []  # of frames that were evaluated, and are not closed
        most_priced = len(self._stretches) + self.options.max_pricings
        since = 0  # refinements since the last evaluation
        while not self._out_of_time():
            evaluates = since >= DIVE and ready and self._worthwhile(ready[0])
            if waiting and not evaluates:
                entry = heapq.heappop(waiting)
                spent = entry.step == GRID and len(self._stretches) >= most_priced
                if spent or entry.seconds >= self._least(ready) * (1 - self.options.gap):
                    aside.append(entry)
                else:
                    since += 1
                    self._refine(entry, waiting, ready)
            elif ready and self._worthwhile(ready[0]):
                since = 0
                promising = heapq.heappop(ready)
                if promising.refined:
                    bounds.append(self._evaluate(promising))
                else:
                    self._refine_more(promising, ready)
            else:
                enough = self._least(ready) * (1 - self.options.gap)
                spent = len(self._stretches) >= most_priced
                again = [entry for entry in aside if entry.seconds < enough and not (spent and entry.step == GRID)]
                if not again:
                    break
                aside = [entry for entry in aside if entry not in again]
                waiting.extend(again)
                heapq.heapify(waiting)
        waiting += aside
        if self.best is not None and self.best.frame.grid.num_ranks > 1 and self.options.parallelism.schedule is None:
            self._try_after(self.best.frame)
        self._close([entry.frame for entry in waiting if entry.step == GRID])
        for entry in waiting:
            entry.seconds = max(entry.seconds, self._grid_bound(entry.frame))
            self._looked_at[entry.frame] = (entry.seconds, max(entry.seconds, self._looked_at[entry.frame][1]))
        best = self.best
        bounds += [*(entry.seconds for entry in waiting), *(entry.seconds for entry in ready)]
        bound = min([*bounds, best.step_seconds if best else math.inf])
        looked_at = tuple((frame, *seconds) for frame, seconds in self._looked_at.items())
        return Found(best, tuple(self.evaluated), bound, num_frames, len(self._stretches), self._num_bounded, looked_at)

    def _least(self, ready: Sequence[_Ready]) -> float:
        """What the best plan found takes, or the best one expected."""
        return min(self.best_seconds, ready[0].estimate_seconds if ready else math.inf)

    def _try_after(self, frame: Frame) -> None:
        """The best plan's grid and micro-batches with the schedules of which no good bound is known, until some are no better:
        those with fewer stages first, of which more is known, and of these the ones that promise most."""
        promising = []
        with self.clock.phase("bound"):
            for number, other in enumerate(tried_after(frame, self.chain.num_units, self.options)):
                bound = bound_of(other, self._of_ranks(other), True, self.best_seconds, self._hop_seconds(other))
                promising.append((other.num_stages, bound.estimate_seconds, number, other, bound.cuts))
        worse = 0
        for _, estimate, _, other, cuts in sorted(promising):
            if worse == MOST_WORSE:
                break
            if cuts is None or estimate >= self.best_seconds:
                continue
            before = self.best_seconds
            self._add(other, cuts, [self._best_style(other)])
            worse += self.best_seconds == before

    def _out_of_time(self) -> bool:
        """Whether the user's own cut-off has passed and there is a plan to give."""
        limit = self.options.time_limit_seconds
        return limit is not None and self.best is not None and time.perf_counter() - self.started > limit

    @property
    def best(self) -> Evaluated | None:
        """The fastest plan so far that fits; of equal ones the first."""
        fitting = [evaluated for evaluated in self.evaluated if math.isfinite(evaluated.step_seconds)]
        return min(fitting, key=lambda evaluated: evaluated.step_seconds, default=None)

    @property
    def best_seconds(self) -> float:
        return self.best.step_seconds if self.best else math.inf

    def _worthwhile(self, entry: _Ready) -> bool:
        """Whether evaluating a frame may find a better plan, or close it. What could be better by less than the gap is only
        evaluated where it promises most of that."""
        if entry.seconds >= self.best_seconds:
            return False
        spent = len({evaluated.frame for evaluated in self.evaluated}) >= self.options.max_evaluations
        if entry.seconds >= self.best_seconds * (1 - self.options.gap):
            return entry.estimate_seconds < self.best_seconds * (1 - self.options.gap / 2) and not spent
        if not self.options.gap and self._num_cuts(entry.frame) <= ENUMERATED_CUTS:
            return True
        return entry.estimate_seconds < self.best_seconds and not spent

    def _entry(self, seconds: float, step: int, frame: Frame) -> _Waiting:
        depth = self._expected_growth(frame) if step == GRID else DEEPER
        return _Waiting(seconds * self.expected.factor(frame) * depth, next(self._number), seconds, step, frame)

    def _expected_growth(self, frame: Frame) -> float:
        """By how much smaller micro-batches than those priced so far may well take longer; for the order alone."""
        count = frame.num_micro_batches
        nearest = max(fewer for fewer, _ in self._each[frame.grid] if fewer <= count)
        return float(GROWTH ** math.log2(count / nearest))

    def _ready(self, seconds: float, frame: Frame, bound: Bound, refined: bool) -> _Ready:
        """A frame to be evaluated; where no gap is allowed in the order of bounds, so that none below the best is left."""
        assert bound.cuts is not None, "only what may fit is evaluated"
        excess = DIVIDED if self.expected.recomputes(frame) else 1.0
        expected = max(seconds, bound.estimate_seconds) * excess if self.options.gap else seconds
        return _Ready(expected, next(self._number), seconds, frame, bound.cuts, refined)

    def _refine(self, entry: _Waiting, waiting: list[_Waiting], ready: list[_Ready]) -> None:
        """The next better bound of a frame."""
        if entry.step == GRID:
            self._probe(entry.frame, self._least(ready) * (1 - self.options.gap))
            known = self._grid_bound(entry.frame)
            if known > entry.seconds:
                heapq.heappush(waiting, self._entry(known, GRID, entry.frame))
                return
        self._num_bounded += 1
        within = entry.step == PRICED
        with self.clock.phase("bound"):
            bound = bound_of(
                entry.frame, self._of_ranks(entry.frame), within, self.best_seconds, self._hop_seconds(entry.frame)
            )
        self._note_each(entry.frame.grid, entry.frame.num_micro_batches)
        seconds = max(entry.seconds, bound.seconds)
        self._looked_at[entry.frame] = (seconds, seconds if bound.cuts is None else max(seconds, bound.estimate_seconds))
        if bound.cuts is None:
            if math.isfinite(seconds):
                heapq.heappush(waiting, self._entry(seconds, entry.step, entry.frame))  # above the best plan
        elif within:
            heapq.heappush(ready, self._ready(seconds, entry.frame, bound, False))
        else:
            heapq.heappush(waiting, self._entry(seconds, PRICED, entry.frame))

    def _close(self, frames_left: Sequence[Frame]) -> None:
        """Raise the bounds of frames that there was no time to look at, the lowest first, by pricing alone."""
        enough = self.best_seconds * (1 - self.options.gap)
        lowest = [(self._grid_bound(frame), number, frame) for number, frame in enumerate(frames_left)]
        heapq.heapify(lowest)
        most = len(self._stretches) + self.options.max_pricings
        with self.clock.phase("bound"):
            while lowest and len(self._stretches) < most and not self._out_of_time():
                bound, number, frame = heapq.heappop(lowest)
                known = self._grid_bound(frame)
                if known == bound and (bound >= enough or not self._probe(frame, enough)):
                    return
                heapq.heappush(lowest, (self._grid_bound(frame), number, frame))

    def _probe(self, frame: Frame, enough: float) -> bool:
        """Price the middle one of the frame's number of micro-batches and the larger ones that are not known to be worse than
        what is at hand: where it turns out to be, so are all above it. Returns whether any was left to price."""
        if math.isinf(enough):
            return False
        priced = {count for count, _ in self._each[frame.grid]}
        counts = [count for count in self._counts_of(frame.grid) if count >= frame.num_micro_batches]
        like = [replace(frame, num_micro_batches=count) for count in counts if count not in priced]
        left = [other.num_micro_batches for other in like if self._grid_bound(other) < enough]
        if left:
            self._note_each(frame.grid, left[len(left) // 2])
        return bool(left)

    def least_bytes(self) -> float:
        """A lower bound of the bytes that any plan needs on its fullest device; infinite where nothing is allowed at all."""
        found = math.inf
        for grid in self.grids:
            for frame in frames(grid, self._counts_of(grid)[-1:], self.chain.num_units, self.options):
                if frame.num_stages == grid.num_ranks:
                    found = min(found, least_bytes(frame, self._of_ranks(frame)))
        return found

    # -- frames and their prices -----------------------------------------------------------------------------------

    def _frames(self) -> Iterator[tuple[Frame, float]]:
        """All frames with the bound of their grid; large micro-batches first."""
        for grid in self.grids:
            mine = list(frames(grid, self._counts_of(grid), self.chain.num_units, self.options))
            if mine:
                self._note_each(grid, min(frame.num_micro_batches for frame in mine))
            yield from ((frame, self._grid_bound(frame)) for frame in mine)

    def _counts_of(self, grid: Grid) -> list[int]:
        return counts_of(grid, self.counts, self.graph.batch_size)

    def _note_each(self, grid: Grid, num_micro_batches: int) -> None:
        """Remember the least seconds of one micro-batch through all stages, on whichever of the grid's devices is fastest."""
        each = min(
            float(self._stretches_of(grid, rank, num_micro_batches).each()[0, -1]) for rank in range(grid.num_ranks)
        )
        known = self._each.setdefault(grid, [])
        if all(count != num_micro_batches for count, _ in known):
            known.append((num_micro_batches, each))

    def _grid_bound(self, frame: Frame) -> float:
        """A bound of a frame from what is known of its grid's larger micro-batches: no smaller one takes less a sample, as
        twice the work never takes more than twice the time under the cost model. What was measured may, in smaller caches."""
        count = frame.num_micro_batches
        smaller = MEASURED_GAIN if self.cost_model.profile is not None else 1.0
        per_step = max(
            each * fewer * (1.0 if fewer == count else smaller)
            for fewer, each in self._each[frame.grid]
            if fewer <= count
        )
        return _grid_bound(frame, per_step / count)

    def _hop_seconds(self, frame: Frame) -> float:
        """About what it takes to send a micro-batch from the first stage to the second, cut over all devices."""
        if frame.num_stages == 1:
            return 0.0
        size = math.prod(frame.grid.mesh_shape)
        first, second = (frame.grid.order[rank] * size for rank in (0, 1))
        num_bytes = self._crossing_bytes / frame.num_micro_batches / size
        return self.cost_model.hop_seconds(first, second, size, num_bytes)

    @cached_property
    def _crossing_bytes(self) -> float:
        """Bytes of the whole batch that cross the cut in the middle of the model."""
        points = cut_points(self.graph)
        return float(sum(self.graph.values[value].num_bytes for value in points[len(points) // 2].values))

    def _of_ranks(self, frame: Frame) -> list[Stretches]:
        return [
            self._stretches_of(frame.grid, rank, frame.num_micro_batches) for rank in range(frame.grid.num_ranks)
        ]

    def _stretches_of(self, grid: Grid, rank: int, num_micro_batches: int) -> Stretches:
        mesh = grid.mesh
        first = grid.order[rank] * mesh.num_devices
        kind = kind_of(self.cost_model.cluster, first, mesh.num_devices)
        key = (mesh.shape, grid.roles, kind, num_micro_batches)
        if key not in self._stretches:
            self.say(f"pricing {' x '.join(map(str, mesh.shape))} in {num_micro_batches} micro-batches")
            available = self.cost_model.min_device_memory_bytes(self.options.memory_margin, first, mesh.num_devices)
            forced = self.options.parallelism.recompute
            modes = (forced,) if forced else MODES if self.short.graph.block_groups else MODES[:1]
            price = partial(self._price, grid, mesh, first, num_micro_batches)
            priced = Priced(self.chain, price, modes, available, from_first=grid.num_ranks == 1)
            hint = self._hints.setdefault((grid.num_ranks, num_micro_batches), Hint())
            self._stretches[key] = Stretches(priced, num_micro_batches, grid.num_ranks, hint)
        return self._stretches[key]

    def _price(
        self, grid: Grid, mesh: Mesh, first: int, num_micro_batches: int, mode: str, like: Costed | None
    ) -> Costed:
        """The short graph priced in one mode of recomputation."""
        with self.clock.phase("price"):
            prepared = self._prepared_short(math.ceil(self.graph.batch_size / num_micro_batches))
            blocks = [block.path for group in self.short.graph.block_groups for block in group.blocks]
            setting = Setting(
                min(2, num_micro_batches), 1, dict.fromkeys(blocks, mode), turn=False, first_rank=first
            )
            return build(prepared, mesh, grid.roles, self.cost_model, self.options, setting, like)

    def _prepared_short(self, size: int) -> Prepared:
        """The short graph at a micro-batch size."""
        if size not in self._prepared:
            self._prepared[size] = prepare(at_batch(self.short.graph, size))
        return self._prepared[size]

    # -- plans -----------------------------------------------------------------------------------------------------

    def graph_of(self, frame: Frame) -> OpGraph:
        """The whole model at a frame's micro-batch size."""
        size = math.ceil(self.graph.batch_size / frame.num_micro_batches)
        graph = at_batch(self.graph, size)
        self.evaluator.note(graph, self._prepared_short(size))
        return graph

    def _evaluate(self, entry: _Ready) -> float:
        """Evaluate a frame; returns a bound of all of its plans that remain."""
        frame = entry.frame
        self.say(f"evaluating {frame.schedule}, {frame.num_stages} stages, {frame.num_micro_batches} micro-batches")
        if self.options.gap or self._num_cuts(frame) > ENUMERATED_CUTS:
            self._add(frame, entry.cuts, self._promising_styles(frame), entry.seconds * (1 + self.options.gap / 2))
            return entry.seconds
        cuts = itertools.combinations(range(1, self.chain.num_units), frame.num_stages - 1)
        for ends in dict.fromkeys([entry.cuts, *cuts]):
            self._add(frame, ends, self.evaluator.styles(frame))
        return math.inf  # every plan of the frame is known

    def _refine_more(self, entry: _Ready, ready: list[_Ready]) -> None:
        """Better bounds of a frame that is about to be evaluated; it may turn out not to promise most."""
        frame = entry.frame
        with self.clock.phase("bound"):
            refine(frame, self._of_ranks(frame))
            bound = bound_of(frame, self._of_ranks(frame), True, math.inf, self._hop_seconds(frame))
        seconds = max(entry.seconds, bound.seconds)
        self._looked_at[frame] = (seconds, max(seconds, bound.estimate_seconds))
        if bound.cuts is not None:
            heapq.heappush(ready, self._ready(seconds, frame, bound, True))

    def _promising_styles(self, frame: Frame) -> list[Style]:
        """The style that suits a stage in the middle; of a small model also the batch split over every axis, as its first and
        last stages weigh more."""
        small = [self.evaluator.styles(frame)[0]] if len(self.graph.operators) <= SMALL_MODEL else []
        return list(dict.fromkeys([self._best_style(frame), *small]))

    def _best_style(self, frame: Frame) -> Style:
        """The style of boundaries that suits a stage in the middle of the short model."""
        starts = self.chain.short_starts
        size = math.ceil(self.graph.batch_size / frame.num_micro_batches)
        if size not in self._middles:
            third = len(starts) // 3
            cuts = (starts[third], starts[-1 - third]) if 0 < third < len(starts) - 1 - third else ()
            stages = stage_graphs(at_batch(self.short.graph, size), cuts)
            self._middles[size] = stages[1] if len(stages) > 2 else None
        key = (frame.grid, size)
        if key not in self._styles:
            self._styles[key] = self.evaluator.best_style(frame, self._middles[size])
        return self._styles[key]

    def _add(self, frame: Frame, ends: Sequence[int], styles: Sequence[Style], enough_seconds: float = 0.0) -> None:
        graph = self.graph_of(frame)
        cuts = tuple(self.chain.starts[end - 1] for end in ends)
        for style in styles:
            with self.clock.phase("evaluate"):
                wanted, near = self._wanted(frame, ends), multipliers(frame, self._of_ranks(frame))
                found = self.evaluator.evaluate(
                    frame, graph, cuts, style, self.best_seconds, enough_seconds, wanted, near
                )
                self.evaluated.append(found)

    def _wanted(self, frame: Frame, ends: Sequence[int]) -> list[tuple[int, ...]] | None:
        """How many blocks of each stage should recompute; None where all numbers are tried, or there is no choice."""
        may_choose = self.options.parallelism.recompute is None and bool(self.short.graph.block_groups)
        return recomputing(frame, self._of_ranks(frame), ends) if self.options.gap and may_choose else None

    def _num_cuts(self, frame: Frame) -> int:
        return math.comb(self.chain.num_units - 1, frame.num_stages - 1)


def _grid_bound(frame: Frame, each_seconds: float) -> float:
    """A bound from the seconds that one micro-batch takes in all stages together, w.

    Every rank's work is B times that of its stages f_s, so T >= B w / P. With a whole backward also T >= B f_s + the sum of
    f before s for every stage; the f that make all of these equal are least, whence T >= w / (1 - (1 - 1/B)^P).
    """
    ranks, count = frame.grid.num_ranks, frame.num_micro_batches
    if frame.schedule in ("gpipe", "1f1b"):
        return each_seconds / (1 - (1 - 1 / count) ** ranks)
    return each_seconds * count / ranks
