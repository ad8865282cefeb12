"""Memory budgets, by Lagrangian multipliers: elimination prices bytes in seconds until the total fits.

    L(lambda) = min_x [ c(x) + sum_r lambda_r (m_r(x) - budget_r) ] <= optimum, lambda >= 0     `_Search.probe`
    the lower bound is max over lambda of L, a concave function of few variables                `_Search.ascend`
    the optimum is at most the cheapest splice of the solutions around that maximum that fits   `_Search.improve`
    a choice with (least L(lambda) with it) >= cost of the incumbent cannot be better           `_Search.prune`
    what is left goes to the ILP (restricted to the choices left)                               `_Search.finish`

One row is bracketed: two solutions are two lines in lambda, the next lambda is where they cross, and when it gives
nothing new it is the maximum. Several rows are Kelley's cutting planes with a small linear program.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
from ortools.linear_solver import pywraplp

from autopar.solver.domains import num_choices
from autopar.solver.elimination import Program, compile_program
from autopar.solver.ilp import num_pairs, solve_ilp
from autopar.solver.network import IntArray
from autopar.solver.polish import polish
from autopar.solver.problem import RELATIVE_TOLERANCE, FloatArray, Problem, Status
from autopar.solver.repetition import Structure
from autopar.solver.splice import best_splice, order_of


@dataclass(frozen=True)
class Limits:
    """How much work a search may do; counts, so that the same limits give the same answer everywhere.

    rounds: of ascend, splice, prune; probes: evaluations of L per round (the rest on what pruning leaves); ilp_pairs: the largest integer program, in
    pairs of choices on edges (`small_ilp_pairs`: one that is solved whatever the gap); ilp_nodes: its branch and bound
    nodes; gap_target: relative gap that is good enough for what is not small.
    """

    gap_target: float = 1e-3
    rounds: int = 10
    probes: int = 6
    small_ilp_pairs: int = 1_000
    ilp_pairs: int = 3_000
    ilp_nodes: int = 500
    time_limit_seconds: float | None = None


@dataclass(frozen=True, eq=False)
class Point:
    """An assignment that some probe found, and its (1 + rows,) totals: a cut c + lambda (m - budget) above L."""

    choices: IntArray
    totals: FloatArray


@dataclass(frozen=True, eq=False)
class Found:
    """What a search knows at its end. `points`: the assignments met, cheapest last."""

    best: IntArray | None
    lower_bound_seconds: float
    points: tuple[Point, ...]
    smallest_budgets_bytes: tuple[float, ...] | None
    message: str


class _OutOfTime(Exception):
    """The user's own cut-off has passed."""


class _Search:
    """The state of one search, advanced by its methods in the order of the module's docstring."""

    def __init__(self, problem: Problem, structure: Structure, domains: dict[int, IntArray], limits: Limits) -> None:
        self.problem, self.structure, self.limits = problem, structure, limits
        self.network = structure.network
        self.budgets = problem.memory_budgets_bytes
        self.domains = domains
        self.program: Program = compile_program(structure, domains)
        self.points: list[Point] = []
        self.upper, self.best = math.inf, None
        self.lower, self.at = -math.inf, np.zeros(problem.num_rows)
        self.order: tuple[IntArray, IntArray] | None = None
        self.spliced: set[tuple[int, int]] = set()
        self.started = time.monotonic()

    best: IntArray | None

    def probe(self, weights: FloatArray) -> tuple[float, Point | None]:
        """Minimise w_0 c + sum lambda_r m_r: its least value and an assignment that attains it."""
        limit = self.limits.time_limit_seconds
        if limit is not None and time.monotonic() - self.started > limit:
            raise _OutOfTime
        values = self.program.evaluate(weights)
        value = self.program.value(values)
        if not math.isfinite(value):
            return value, None
        choices = self.program.decode(values).choices
        return value, Point(choices, self.network.totals(choices))

    def fits(self, totals: FloatArray) -> bool:
        return bool((totals[1:] <= self.budgets + 1e-12 * np.abs(self.budgets)).all())

    def offer(self, point: Point) -> None:
        """Keep a point, as incumbent if it is one."""
        if self.fits(point.totals) and point.totals[0] < self.upper:
            self.upper, self.best = float(point.totals[0]), point.choices
        if not any(np.array_equal(point.choices, other.choices) for other in self.points):
            self.points.append(point)

    def dual(self, multipliers: FloatArray) -> float:
        """L(lambda); its point is offered."""
        value, point = self.probe(np.concatenate([[1.0], multipliers]))
        if point is None:
            self.lower = self.upper
            return math.inf
        self.offer(point)
        rows = multipliers > 0.0
        bound = value - float(multipliers[rows] @ self.budgets[rows])
        if bound > self.lower:
            self.lower, self.at = min(bound, self.upper), multipliers
        return bound

    @property
    def closed(self) -> bool:
        return math.isfinite(self.upper) and self.upper - self.lower <= RELATIVE_TOLERANCE * abs(self.upper)

    @property
    def good_enough(self) -> bool:
        """Whether the gap is within its target, of a problem that is too large for closing it by the ILP."""
        narrow = self.upper - self.lower <= self.limits.gap_target * abs(self.upper)
        return math.isfinite(self.upper) and narrow and len(self.network.edges) > self.limits.small_ilp_pairs

    def smallest_budgets(self) -> tuple[float, ...]:
        """Per row the least total over all assignments that are offered; the points are offered."""
        smallest = []
        for row in range(self.problem.num_rows):
            weights = np.zeros(1 + self.problem.num_rows)
            weights[1 + row] = 1.0
            value, point = self.probe(weights)
            if point is not None:
                self.offer(point)
                value = float(point.totals[1 + row])
            smallest.append(value)
        return tuple(smallest)

    def ascend(self, most_probes: int) -> bool:
        """Raise the lower bound by cutting planes; whether the next lambda gave nothing new: it is the maximum."""
        self.points = [point for point in self.points if self.in_domains(point)]
        for _ in range(most_probes):
            proposal = self.one_row() if self.problem.num_rows == 1 else self.several_rows()
            if proposal is None:
                return True
            multipliers, ceiling = proposal
            known = len(self.points)
            bound = self.dual(multipliers)
            if self.closed or bound >= ceiling - 1e-12 * abs(ceiling) or len(self.points) == known:
                return True
        return False

    def in_domains(self, point: Point) -> bool:
        """Whether all choices of a point are still left."""
        roles = np.array(self.structure.roles)
        starts = np.concatenate([[0], np.cumsum(self.network.sizes)])
        left = np.zeros(int(starts[-1]), dtype=np.bool_)
        for role, domain in self.domains.items():
            left[starts[role] + domain] = True
        return bool(left[starts[roles] + point.choices].all())

    def one_row(self) -> tuple[FloatArray, float] | None:
        """Where the lines of the best two points cross: of those that exceed the budget and of those that fit."""
        over = [p for p in self.points if p.totals[1] > self.budgets[0]]
        under = [p for p in self.points if p.totals[1] <= self.budgets[0]]
        if not over or not under:
            return None
        lines = [(float(p.totals[0]), float(p.totals[1] - self.budgets[0])) for p in (*over, *under)]
        low, high = 0.0, math.inf
        # Maximise the lower envelope: walk from the crossing of any pair to where it is the least of all lines.
        best = min((line for line in lines if line[1] <= 0.0), key=lambda line: line)
        steep = min((line for line in lines if line[1] > 0.0), key=lambda line: line)
        for _ in range(4 * len(lines)):
            low = (best[0] - steep[0]) / (steep[1] - best[1])
            high = best[0] + low * best[1]
            least = min(lines, key=lambda line: (line[0] + low * line[1], line))
            if least[0] + low * least[1] >= high - 1e-13 * abs(high):
                break
            if least[1] > 0.0:
                steep = least
            else:
                best = least
        return np.array([max(low, 0.0)]), high

    def several_rows(self) -> tuple[FloatArray, float] | None:
        """max t subject to t <= c_j + lambda (m_j - budget) for all points j, lambda >= 0 and bounded."""
        if not self.points:
            return None
        finite = np.isfinite(self.budgets)
        scales = np.where(finite & (self.budgets != 0.0), np.abs(self.budgets), 1.0)
        unit = max(abs(float(p.totals[0])) for p in self.points) or 1.0
        solver = pywraplp.Solver.CreateSolver("GLOP")
        level = solver.NumVar(-solver.infinity(), solver.infinity(), "t")
        rows = [solver.NumVar(0.0, 1e4 if ok else 0.0, "") for ok in finite]
        for point in self.points:
            cut = solver.Constraint(-solver.infinity(), float(point.totals[0]) / unit)
            cut.SetCoefficient(level, 1.0)
            for row, variable in enumerate(rows):
                if finite[row]:
                    cut.SetCoefficient(variable, -float(point.totals[1 + row] - self.budgets[row]) / scales[row])
        solver.Maximize(level)
        if solver.Solve() != pywraplp.Solver.OPTIMAL:
            return None
        found = np.array([max(0.0, variable.solution_value()) for variable in rows])
        return found * unit / scales, level.solution_value() * unit

    def improve(self) -> None:
        """Splice pairs of points around the best multipliers: one that fits with ones that are cheaper."""
        if self.order is None:
            self.order = order_of(self.network)
        excess = [
            float(p.totals[0] + self.at @ np.where(self.at > 0.0, p.totals[1:] - self.budgets, 0.0))
            for p in self.points
        ]
        near = sorted(range(len(self.points)), key=excess.__getitem__)[:6]
        for low in near:
            for high in near:
                first, second = self.points[low].choices, self.points[high].choices
                if low >= high or self.fits(self.points[low].totals) == self.fits(self.points[high].totals) == 1:
                    continue
                spliced = best_splice(self.network, self.order, (first, second), self.budgets)
                if spliced is not None:
                    totals = self.network.totals(spliced[0])
                    if totals[0] < self.upper and self.fits(totals):
                        self.upper, self.best = float(totals[0]), spliced[0]
        if self.best is not None:
            self.best = polish(self.network, self.best, self.budgets, 64)
            self.upper = min(self.upper, float(self.network.totals(self.best)[0]))

    def prune(self) -> bool:
        """Drop choices that no better assignment has; whether enough went to make another round worthwhile."""
        if not math.isfinite(self.upper):
            return False
        values = self.program.evaluate(np.concatenate([[1.0], self.at]))
        rows = self.at > 0.0
        offset = float(self.at[rows] @ self.budgets[rows])
        marginals, _ = self.program.marginals(values)
        before = num_choices(self.structure, self.domains)
        threshold = self.upper - 1e-10 * abs(self.upper)
        kept = {
            role: domain[marginals[role] - offset < threshold] if role in marginals else domain
            for role, domain in self.domains.items()
        }
        if any(not domain.size for domain in kept.values()):
            self.lower = self.upper
            return False
        after = num_choices(self.structure, kept)
        if after < before:
            self.domains = kept
            self.program = compile_program(self.structure, kept)
        return after < 0.9 * before

    def finish(self) -> str:
        """The integer program on the choices that are left, if it is small or the gap too wide."""
        domains = tuple(self.domains[role] for role in self.structure.roles)
        size = num_pairs(self.problem, domains)
        wide = self.upper - self.lower > self.limits.gap_target * abs(self.upper) or not math.isfinite(self.upper)
        if size > (self.limits.ilp_pairs if wide else self.limits.small_ilp_pairs):
            return "stopped at the limits of the search"
        left = None
        if self.limits.time_limit_seconds is not None:
            left = max(0.01, self.limits.time_limit_seconds - (time.monotonic() - self.started))
        found = solve_ilp(self.problem, domains, self.limits.ilp_nodes, left)
        if found.choices is not None:
            choices = np.array(found.choices, dtype=np.int64)
            totals = self.network.totals(choices)
            if totals[0] < self.upper:
                self.upper, self.best = float(totals[0]), choices
        if found.status in (Status.OPTIMAL, Status.INFEASIBLE):
            self.lower = self.upper
        else:
            self.lower = max(self.lower, min(self.upper, found.lower_bound_seconds))
        return found.message


def search(problem: Problem, structure: Structure, domains: dict[int, IntArray], limits: Limits) -> Found:
    """Solve within the domains; `best` is None where nothing was found, and infeasible if the bound is infinite."""
    state = _Search(problem, structure, domains, limits)
    smallest: tuple[float, ...] | None = None
    message = ""
    try:
        if state.dual(np.zeros(problem.num_rows)) == math.inf:
            return Found(None, math.inf, (), None, "no combination of choices is offered")
        if not state.closed:
            smallest = state.smallest_budgets()
            over = [row for row, least in enumerate(smallest) if least > problem.memory_budgets_bytes[row] * (1 + 1e-12)]
            if over:
                facts = ", ".join(f"row {row} needs {smallest[row]:g}, has {state.budgets[row]:g}" for row in over)
                return Found(None, math.inf, (), smallest, f"memory budgets are too small in bytes: {facts}")
            for _ in range(limits.rounds):
                settled = state.ascend(limits.probes)
                if not state.closed:
                    state.improve()
                if state.closed or state.good_enough or (not state.prune() and settled):
                    break
        if not state.closed:
            message = state.finish()
    except _OutOfTime:
        message = "stopped at the time limit"
    lower = math.inf if state.best is None and state.lower == state.upper else state.lower
    return Found(state.best, lower, tuple(state.points), smallest, message)
