"""One stage in full: its recomputation, shardings and storage within the memory of its devices.

Enters: a stage's graph, where and how often it runs. Leaves: a :class:`Solved` stage, or what it lacks. The inner objective
is the stage's busy time in a step; among the numbers of blocks that recompute, fewer is tried first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from autopar.costing import Costed, Prepared, build
from autopar.costing.candidate import Candidate
from autopar.costing.operators import Role
from autopar.costing.setting import Setting
from autopar.fitting import Solve, candidate_of, fit, fit_quickly
from autopar.graph import OpGraph
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.options import PlanOptions
from autopar.plans import StagePlan
from autopar.recompute import MODES
from autopar.solver import Assignment, choices_left
from autopar.solver.problem import answer
from cost_models import CostModel, StageTimes

KEPT_INSTEAD = (0.8, 0.5, 0.0)  # of the blocks that were to keep all, where that does not fit: what is held was not foreseen
EXHAUSTIVE_BLOCKS = 6  # with so few blocks, and no gap allowed, every division of them among the modes is tried


@dataclass(frozen=True)
class Site:
    """Where a stage runs, and how: what its :class:`Setting` is made from, and what its devices have for it."""

    mesh: Mesh
    roles: tuple[Role, ...]
    first_rank: int
    num_micro_batches: int
    in_flight: int
    available_bytes: float


@dataclass(frozen=True)
class Aim:
    """How far a stage is to be solved: what takes ``to_beat_seconds`` or more is of no use, what takes ``enough_seconds`` or
    less is not improved. ``wanted``: numbers of blocks in each mode of recomputation that should suit it; ``near``: the seconds
    that a byte is expected to be worth there."""

    to_beat_seconds: float = math.inf
    enough_seconds: float = 0.0
    wanted: tuple[int, ...] | None = None
    near: float | None = None


@dataclass(frozen=True, eq=False)
class Solved:
    """A stage with its plan (``candidate.stage``; None where nothing fits) and its times."""

    candidate: Candidate
    times: StageTimes

    @property
    def fits(self) -> bool:
        return self.candidate.stage is not None

    @property
    def repeats(self) -> bool:
        """Whether its backward pass gathers or computes something again."""
        recomputes = _only(self.candidate.costed.setting.recompute) != "none"
        return recomputes or any(parameter.zero == 3 for parameter in self.plan.parameters.values())

    @property
    def plan(self) -> StagePlan:
        """The plan of a stage that fits."""
        assert self.candidate.stage is not None, "only a stage that fits has a plan"
        return self.candidate.stage


class StageSolver:
    """Solves one stage under different settings, reusing its prices."""

    def __init__(
        self,
        prepared: Prepared,
        site: Site,
        cost_model: CostModel,
        options: PlanOptions,
        solve: Solve,
        boundary: Mapping[str, Layout],
        storage: Mapping[str, frozenset[Layout]],
        unlimited: dict[tuple[int, ...], Assignment] | None = None,
    ) -> None:
        """``unlimited``: what stages that are alike found without regard to memory, whatever they have in flight."""
        self.prepared, self.site, self.cost_model, self.options, self.solve = prepared, site, cost_model, options, solve
        self.boundary, self.storage = boundary, storage
        self._unlimited = {} if unlimited is None else unlimited
        self.blocks = [block.path for group in prepared.graph.block_groups for block in group.blocks]
        self._priced: dict[tuple[int, ...], Costed] = {}

    def within(self, available_bytes: float) -> StageSolver:
        """The same stage where so much is available; prices, and what is found without regard to memory, are shared."""
        other = copy(self)
        other.site = replace(self.site, available_bytes=available_bytes)
        return other

    def costed(self, counts: tuple[int, ...]) -> Costed:
        """The stage priced when the last ``counts[i]`` blocks, in order of modes, take mode i."""
        if counts not in self._priced:
            like = next(iter(self._priced.values()), None)
            setting = Setting(
                self.site.num_micro_batches, self.site.in_flight, self._modes(counts), self.boundary,
                first_rank=self.site.first_rank,
            )  # fmt: skip
            made = build(
                self.prepared, self.site.mesh, self.site.roles, self.cost_model, self.options, setting, like
            )
            self._priced[counts] = _with_storage(made, self.storage)
        return self._priced[counts]

    def _modes(self, counts: Sequence[int]) -> dict[str, str]:
        """Blocks that recompute most come first: they are in flight longest."""
        modes = [mode for mode, count in zip(reversed(MODES), reversed(counts), strict=True) for _ in range(count)]
        return dict(zip(self.blocks, modes, strict=True))

    def allowed(self) -> list[tuple[int, ...]]:
        """Numbers of blocks in each mode, those that recompute least first."""
        total = len(self.blocks)
        forced = self.options.parallelism.recompute
        if forced is not None:
            return [tuple(total if mode == forced else 0 for mode in MODES)]
        pairs = [(some, full) for full in range(total + 1) for some in range(total + 1 - full)]
        return sorted(((total - s - f, s, f) for s, f in pairs), key=lambda counts: (counts[2], counts[1]))

    def best(self, aim: Aim) -> Solved:
        """The fastest way to run the stage that fits. Where it does not with the numbers of blocks that are wanted, others are
        tried."""
        found = self._as_wanted(aim.wanted, aim) if aim.wanted is not None else None
        if found is None or (found.stage is None and not _is_too_slow(found, aim.to_beat_seconds)):
            found = self._searched(aim.to_beat_seconds, aim.enough_seconds)
        return Solved(found, times_of(found) if found.assignment.choices is not None else StageTimes(0.0, 0.0, 0.0))

    def _as_wanted(self, wanted: tuple[int, ...], aim: Aim) -> Candidate:
        """With these numbers of blocks in each mode, or where that does not fit with more of it; without recomputation, where
        little of it is wanted, if that is better."""
        plain, some, full = self._of_all_blocks(wanted)
        to_beat_seconds = aim.to_beat_seconds
        if not some + full:
            return self._fitted((plain, 0, 0), to_beat_seconds)
        found = fit_quickly(self.costed((plain, some, full)), self.site.available_bytes, self.solve, aim.near)
        for part in KEPT_INSTEAD if plain else (0.0,):
            if found.stage is not None or _is_too_slow(found, to_beat_seconds):
                break
            keeping = int(plain * part)
            more = (keeping, some, full + plain - keeping) if full else (keeping, some + plain - keeping, 0)
            found = self._fitted(more, to_beat_seconds, bound_by_memory=True)
        if some + full <= len(self.blocks) // 4:
            beat = min(to_beat_seconds, _seconds(found)) if found.stage is not None else to_beat_seconds
            found = min([found, self._fitted(self._counts(1, 0), beat)], key=_rank)
        return found

    def _of_all_blocks(self, wanted: tuple[int, ...]) -> tuple[int, int, int]:
        """The same where bounds cut some blocks, which here recompute as most others that do."""
        plain, some, full = wanted
        cut = len(self.blocks) - sum(wanted)
        return (plain, some, full + cut) if full else (plain, some + cut, 0) if some else (plain + cut, 0, 0)

    def _searched(self, to_beat_seconds: float, enough_seconds: float) -> Candidate:
        """Without recomputation, or where memory is wanting with as much of it as is found to pay."""
        found = self._fitted(self._counts(1, 0), to_beat_seconds) if self._may_keep_all() else None
        enough = found is not None and found.stage is not None and _seconds(found) <= enough_seconds
        if found is not None and (enough or _is_unlimited(found)):
            return found  # no memory is wanting: recomputing only costs
        few = self.options.parallelism.recompute is not None or (
            not self.options.gap and len(self.blocks) <= EXHAUSTIVE_BLOCKS
        )
        beat = min(to_beat_seconds, _seconds(found) if found is not None and found.stage is not None else math.inf)
        others = self._each(beat) if few else self._as_few_as_fit(beat)
        return min([*([found] if found else []), *others], key=_rank)

    def _may_keep_all(self) -> bool:
        return self.options.parallelism.recompute in (None, "none")

    def _each(self, to_beat_seconds: float) -> list[Candidate]:
        """The best plan of every division of the blocks among the modes."""
        found: list[Candidate] = []
        for counts in self.allowed():
            best = min(found, key=_rank, default=None)
            known = _seconds(best) if best is not None and best.stage is not None else math.inf
            found.append(self._fitted(counts, min(to_beat_seconds, known)))
        return found

    def _as_few_as_fit(self, to_beat_seconds: float) -> list[Candidate]:
        """For each mode of recomputation the least number of blocks with which the fastest sharding fits; and where even
        all blocks are not enough, the sharding that fits."""
        found = []
        for place in (1, 2):
            everything = self._free(self._counts(place, len(self.blocks)))
            if everything.missing_bytes:
                found += self._as_many_as_pays(place, to_beat_seconds)
                continue
            low, high, best = 0, len(self.blocks), everything
            while high - low > max(1, len(self.blocks) // 12):
                middle = (low + high) // 2
                candidate = self._free(self._counts(place, middle))
                low, high, best = (middle, high, best) if candidate.missing_bytes else (low, middle, candidate)
            found.append(best)
        return found

    def _as_many_as_pays(self, place: int, to_beat_seconds: float) -> list[Candidate]:
        """Where the sharding must give way too: all blocks in a mode, or three quarters, or half, as long as that is better."""
        found: list[Candidate] = []
        for quarters in (4, 3, 2, 1):
            candidate = self._fitted(self._counts(place, len(self.blocks) * quarters // 4), to_beat_seconds)
            found.append(candidate)
            if candidate.stage is None or _seconds(candidate) >= to_beat_seconds:
                break
            to_beat_seconds = _seconds(candidate)
        return found

    def _counts(self, place: int, number: int) -> tuple[int, ...]:
        """So many blocks in one mode, the others keeping all."""
        counts = [len(self.blocks) - number, 0, 0]
        counts[place] += number
        return tuple(counts)

    def _free(self, counts: tuple[int, ...]) -> Candidate:
        """The fastest plan with these numbers of blocks in each mode, whether it fits or not."""
        costed = self.costed(counts)
        known = self._unlimited.get(counts)
        if known is None:
            known = self._unlimited[counts] = self.solve(costed.problem)
        elif known.choices is not None:
            known = answer(costed.problem, known.choices, known.lower_bound_seconds)  # other bytes may be kept
        return candidate_of(costed, known, self.site.available_bytes)

    def unlimited(self) -> Solved:
        """The stage without recomputation, whether it fits or not."""
        found = self._free((len(self.blocks), 0, 0))
        return Solved(found, times_of(found) if found.assignment.choices is not None else StageTimes(0.0, 0.0, 0.0))

    def _fitted(
        self,
        counts: tuple[int, ...],
        to_beat_seconds: float,
        bound_by_memory: bool = False,
    ) -> Candidate:
        """The fastest plan that fits with these numbers of blocks in each mode. First without regard to memory, unless it is
        known that it is ``bound_by_memory``."""
        free = None if bound_by_memory else self._free(counts)
        if free is not None and not free.missing_bytes:
            return free
        if free is not None and _seconds(free) >= to_beat_seconds:
            return replace(free, stage=None)
        available = self.site.available_bytes
        fitted = fit(self.costed(counts), available, self.solve, to_beat_seconds, explain=False)
        if fitted.stage is not None or math.isfinite(fitted.peak_bytes):
            return fitted
        return replace(free or self._free(counts), stage=None, lower_bound_seconds=fitted.lower_bound_seconds)


def _only(modes: Mapping[str, str]) -> str:
    """The one mode of all blocks; empty where they differ."""
    found = set(modes.values()) or {"none"}
    return found.pop() if len(found) == 1 else ""


def _rank(candidate: Candidate) -> tuple[bool, float]:
    """Of those that fit the fastest, else the one that lacks least."""
    return candidate.stage is None, _seconds(candidate) if candidate.stage is not None else candidate.missing_bytes


def _is_too_slow(candidate: Candidate, to_beat_seconds: float) -> bool:
    """Whether something may fit, but nothing that is fast enough."""
    return to_beat_seconds <= candidate.lower_bound_seconds < math.inf


def _seconds(candidate: Candidate) -> float:
    return candidate.assignment.cost_seconds


def _is_unlimited(candidate: Candidate) -> bool:
    """Whether the plan fits though it was found without regard to memory."""
    unbounded = math.isinf(float(candidate.costed.problem.memory_budgets_bytes[0]))
    return candidate.stage is not None and unbounded


def _with_storage(costed: Costed, storage: Mapping[str, frozenset[Layout]]) -> Costed:
    """The parameters that other stages hold too rest as they may there; other choices are absent."""
    costs = list(costed.problem.node_costs_seconds)
    for value, wanted in storage.items():
        if value in costed.nodes:
            node = costed.nodes[value]
            choices = costed.parameter_table(value).choices
            # Updated alike everywhere: on the host only where all parameters are.
            alike = np.array([one.storage in wanted and one.offload == choices[0].offload for one in choices])
            costs[node] = np.where(alike, costs[node], np.inf)
    if not storage:
        return costed
    return replace(costed, problem=replace(costed.problem, node_costs_seconds=tuple(costs)))


def times_of(candidate: Candidate) -> StageTimes:
    """Seconds of one micro-batch, forward and backward, and what is done once a step."""
    costed, choices = candidate.costed, candidate.assignment.choices
    assert choices is not None
    graph, setting = costed.prepared.graph, costed.setting
    forward = weight = once = 0.0
    for operator in graph.operators:
        table = costed.operator_table(operator.id)
        choice = choices[costed.nodes[operator.id]]
        forward += float(table.forward_seconds[choice])
        weight += float(table.weight_seconds[choice])
    for edge, seconds in zip(costed.problem.edges, costed.edges_forward, strict=True):
        forward += 0.0 if seconds is None else float(seconds[choices[edge.source], choices[edge.target]])
    for parameter in graph.parameters:
        table_ = costed.parameter_table(parameter.value)
        once += float(table_.once_seconds[choices[costed.nodes[parameter.value]]])
    each = max(0.0, candidate.assignment.cost_seconds - once) / setting.num_micro_batches
    forward = min(forward, each)
    weight = min(weight, each - forward)
    return StageTimes(forward, max(0.0, each - forward - weight), weight, once)


def storages_of(costed: Costed, values: Sequence[str]) -> dict[str, frozenset[Layout]]:
    """The layouts in which a stage may keep each of some parameters: those that go with what their readers may do."""
    left = choices_left(costed.problem, [costed.nodes[value] for value in values])
    tables = {value: costed.parameter_table(value).choices for value in values}
    return {value: frozenset(table[at].storage for at in left[costed.nodes[value]]) for value, table in tables.items()}


def tied_parameters(graphs: Sequence[OpGraph]) -> frozenset[str]:
    """Parameters that several stages hold."""
    seen: set[str] = set()
    twice: set[str] = set()
    for graph in graphs:
        for parameter in graph.parameters:
            (twice if parameter.value in seen else seen).add(parameter.value)
    return frozenset(twice)
