"""Memory budgets, by Lagrangian multipliers: elimination prices bytes in seconds until the total fits.

    L(lambda) = min_x [ c(x) + sum_r lambda_r (m_r(x) - budget_r) ] <= optimum, lambda >= 0     `Lagrangian.probe`
    the lower bound is max over lambda of L, a concave function of few variables                `Lagrangian.ascend`
    the optimum is at most the cheapest splice of the solutions around that maximum that fits   `Lagrangian.improve`
    a choice with (least L(lambda) with it) >= cost of the incumbent cannot be better           `Lagrangian.prune`
    what is left goes to branch and bound, with L as its bound                                  `branch`

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
from autopar.solver.elimination import Program
from autopar.solver.network import IntArray
from autopar.solver.polish import polish
from autopar.solver.problem import RELATIVE_TOLERANCE, FloatArray, Problem
from autopar.solver.repetition import Structure
from autopar.solver.splice import best_splice, order_of
from autopar.solver.splitting import Oracle


@dataclass(frozen=True)
class Limits:
    """How much work a search may do; counts, so that the same limits give the same answer everywhere.

    gap_target: the relative gap that is good enough for a large problem; rounds: of ascend, splice, prune; probes:
    evaluations of L per round; branch_ops: elimination ops (of about 20 microseconds) spent on branch and bound to
    prove the optimum, or `wide_branch_ops` while the gap is above its target; ilp_pairs: the largest integer program
    tried after that, in pairs of choices on edges; ilp_nodes: nodes of its own branch and bound.
    """

    gap_target: float = 1e-3
    rounds: int = 10
    probes: int = 6
    branch_ops: int = 10_000
    wide_branch_ops: int = 40_000
    ilp_pairs: int = 3_000
    ilp_nodes: int = 100


FIRST_MULTIPLIER = 1 / 16  # times what would make the bytes above the budget cost as much as everything else
RAISE, MOST_RAISES = 4.0, 12
NEAR, MOST_NEAR = 1.3, 4  # by how much a multiplier that is expected is moved at first, and how often


@dataclass(frozen=True, eq=False)
class Point:
    """An assignment that some probe found, and its (1 + rows,) totals: a cut c + lambda (m - budget) above L."""

    choices: IntArray
    totals: FloatArray


class OutOfTime(Exception):
    """The user's own cut-off has passed."""


class Lagrangian:
    """The state of one search, advanced by its methods in the order of the module's docstring."""

    best: IntArray | None

    def __init__(
        self,
        problem: Problem,
        structure: Structure,
        domains: dict[int, IntArray],
        limits: Limits,
        stop_at: float,
        program: Program | None = None,
    ) -> None:
        self.problem, self.structure, self.limits = problem, structure, limits
        self.network = structure.network
        self.budgets = problem.memory_budgets_bytes
        self.domains = domains
        self.oracle = Oracle(structure, domains, program)
        self.points: list[Point] = []
        self.upper, self.best = math.inf, None
        self.lower, self.at = -math.inf, np.zeros(problem.num_rows)
        self.order: tuple[IntArray, IntArray] | None = None
        self.stop_at = stop_at
        self.past_ops = 0

    def probe(self, weights: FloatArray) -> tuple[float, Point | None]:
        """Minimise w_0 c + sum lambda_r m_r: a lower bound, and an assignment that attains or nearly attains it."""
        if time.monotonic() > self.stop_at:
            raise OutOfTime
        bound, choices = self.oracle.minimise(weights)
        return bound, None if choices is None else Point(choices, self.network.totals(choices))

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
        if value == math.inf:
            self.lower = self.upper
            return math.inf
        if point is not None:
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
    def num_ops(self) -> int:
        """Work done so far, in elimination ops."""
        return self.past_ops + self.oracle.num_ops

    @property
    def narrow(self) -> bool:
        """Whether the gap is within its target."""
        return math.isfinite(self.upper) and self.upper - self.lower <= self.limits.gap_target * abs(self.upper)

    def smallest_budgets(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Per row a lower bound of all totals, and the least total met (the same where elimination is exact)."""
        bounds, totals = [], []
        for row in range(self.problem.num_rows):
            weights = np.zeros(1 + self.problem.num_rows)
            weights[1 + row] = 1.0
            bound, point = self.probe(weights)
            if point is not None:
                self.offer(point)
                if not self.oracle.program.copies:
                    bound = float(point.totals[1 + row])
            bounds.append(bound)
            totals.append(bound if point is None else float(point.totals[1 + row]))
        return tuple(bounds), tuple(totals)

    def ascend(self, most_probes: int) -> bool:
        """Raise the lower bound by cutting planes; whether the next lambda gave nothing new: it is the maximum."""
        self.points = [point for point in self.points if self.in_domains(point)]
        if not self.points and self.dual(self.at) == math.inf:
            return True
        if not self.problem.num_rows:
            self.dual(self.at)
            return True
        if self.problem.num_rows == 1:
            self.bracket()
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

    def bracket(self, most_raises: int = MOST_RAISES) -> None:
        """Raise the one multiplier until something fits. Where variables are split, minimising bytes alone need not find a
        point: all choices that need no memory are equally good then, and the copies do not agree on one."""
        over = [point for point in self.points if not self.fits(point.totals)]
        if len(over) < len(self.points) or not over:
            return
        cost, num_bytes = min((float(point.totals[0]), float(point.totals[1])) for point in over)
        multiplier = FIRST_MULTIPLIER * cost / (num_bytes - float(self.budgets[0]))
        for _ in range(most_raises):
            self.dual(np.array([multiplier]))
            if any(self.fits(point.totals) for point in self.points):
                return
            multiplier *= RAISE

    def bracket_near(self, multiplier: float) -> bool:
        """Probe from a multiplier that is expected to be about the best one; whether something that fits and something that
        does not were met."""
        for _ in range(MOST_NEAR):
            if self.dual(np.array([multiplier])) == math.inf:
                return False
            fit = [self.fits(point.totals) for point in self.points]
            if any(fit) and not all(fit):
                return True
            self.settle()
            multiplier = multiplier / NEAR if any(fit) else multiplier * NEAR
        return False

    def tighten(self) -> None:
        """Raise the bound at the best multipliers where variables are split. At others it is a guide alone, as it stands."""
        self.oracle.tighten(self._weights())
        self.dual(self.at)

    def settle(self) -> None:
        """Where copies of a variable do not agree, move them together once, so that most probes to come are spared a vote."""
        if not self.oracle.agreed:
            self.oracle.tighten(self._weights(), steps=1)

    def _weights(self) -> FloatArray:
        """Of costs and bytes at the best multipliers."""
        return np.concatenate([[1.0], self.at])

    def in_domains(self, point: Point) -> bool:
        """Whether all choices of a point are still left."""
        roles = np.array(self.structure.roles, dtype=np.int64)
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

    def excess(self, point: Point) -> float:
        """c + lambda (m - budget) of a point at the best multipliers: how near it is to attaining L."""
        rows = self.at > 0.0
        return float(point.totals[0] + self.at[rows] @ (point.totals[1:] - self.budgets)[rows])

    def improve(self, most_points: int = 6) -> None:
        """Splice pairs of points around the best multipliers: one that fits with ones that are cheaper."""
        if self.order is None:
            self.order = order_of(self.network)
        near = sorted(range(len(self.points)), key=lambda index: self.excess(self.points[index]))[:most_points]
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
        rows = self.at > 0.0
        offset = float(self.at[rows] @ self.budgets[rows])
        marginals = self.oracle.marginals(self._weights())
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
            self.past_ops += self.oracle.num_ops
            self.oracle = Oracle(self.structure, kept)
        return after < 0.9 * before
