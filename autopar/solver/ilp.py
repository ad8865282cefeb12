"""The problem as an integer linear program, for OR-tools: the second method, and what closes the last gap.

    x_ia in {0, 1}, sum_a x_ia = 1                                    one choice per node      `_Model.add_node`
    y_ab >= 0, sum_b y_ab = x_ia, sum_a y_ab = x_jb                   marginalisation of edges `_Model.add_edge`
    sum m x + sum m y <= budget                                       memory rows              `_Model.add_budgets`
    minimise sum c x + sum c y

The pair variables y are continuous: they are integral whenever x is, and solvers are several times faster with them
so (Alpa's formulation with binary y is the slow one). Absent choices and pairs have no variable, and what is decided
beforehand is folded away (`reduction`). Costs and bytes are scaled to about one; a solution that
exceeds a budget by the solver's tolerance is excluded by a cut, since budgets are meant exactly.
"""

from __future__ import annotations

import math

import numpy as np
from ortools.linear_solver import pywraplp

from autopar.solver.network import IntArray
from autopar.solver.problem import Assignment, Edge, FloatArray, Problem, Status, answer, no_answer
from autopar.solver.reduction import Reduced, reduced

# SCIP counts nodes, so a limit is the same everywhere; HiGHS through pywraplp has only a clock.
DEFAULT_NODE_LIMIT = 100_000
_MOST_CUTS = 50


class _Model:
    """A pywraplp model under construction."""

    def __init__(self, solver: pywraplp.Solver, problem: Problem) -> None:
        self.solver, self.problem = solver, problem
        costs = (*problem.node_costs_seconds, *(edge.costs_seconds for edge in problem.edges))
        finite = [np.abs(array[np.isfinite(array)]) for array in costs]
        largest = max((float(part.max()) for part in finite if part.size), default=0.0)
        self.cost_scale = largest if largest > 0.0 else 1.0
        budgets = problem.memory_budgets_bytes
        self.row_scales = [abs(float(b)) if math.isfinite(b) and b else 1.0 for b in budgets]
        self.objective = solver.Objective()
        self.objective.SetMinimization()
        self.limits = [solver.Constraint(-solver.infinity(), solver.infinity()) for _ in budgets]
        self.chosen: list[dict[int, pywraplp.Variable]] = []

    def price(self, variable: pywraplp.Variable, cost: float, memory: FloatArray | None) -> None:
        """Give a variable its seconds and its (rows,) bytes."""
        self.objective.SetCoefficient(variable, cost / self.cost_scale)
        for limit, scale, used in zip(self.limits, self.row_scales, () if memory is None else memory):
            if used:
                limit.SetCoefficient(variable, float(used) / scale)

    def add_node(self, node: int) -> None:
        costs, memory = self.problem.node_costs_seconds[node], self.problem.node_memory_bytes[node]
        one = self.solver.Constraint(1.0, 1.0)
        variables = {}
        for choice in np.flatnonzero(np.isfinite(costs)).tolist():
            variable = self.solver.IntVar(0.0, 1.0, f"x{node}_{choice}")
            one.SetCoefficient(variable, 1.0)
            self.price(variable, float(costs[choice]), None if memory is None else memory[:, choice])
            variables[choice] = variable
        self.chosen.append(variables)

    def add_edge(self, edge: Edge) -> None:
        sums: list[dict[int, pywraplp.Constraint]] = []
        for node in (edge.source, edge.target):
            constraints = {}
            for choice, variable in self.chosen[node].items():
                constraints[choice] = self.solver.Constraint(0.0, 0.0)
                constraints[choice].SetCoefficient(variable, -1.0)
            sums.append(constraints)
        costs, memory = edge.costs_seconds, edge.memory_bytes
        for a, row in sums[0].items():
            for b, column in sums[1].items():
                if math.isfinite(costs[a, b]):
                    variable = self.solver.NumVar(0.0, self.solver.infinity(), "")
                    row.SetCoefficient(variable, 1.0)
                    column.SetCoefficient(variable, 1.0)
                    self.price(variable, float(costs[a, b]), None if memory is None else memory[:, a, b])

    def add_budgets(self) -> None:
        for limit, scale, budget in zip(self.limits, self.row_scales, self.problem.memory_budgets_bytes):
            if math.isfinite(budget):
                limit.SetUb(float(budget) / scale)

    def exclude(self, picked: list[int]) -> None:
        """Cut off one assignment."""
        cut = self.solver.Constraint(-self.solver.infinity(), len(picked) - 1.0)
        for variables, choice in zip(self.chosen, picked):
            cut.SetCoefficient(variables[choice], 1.0)

    def picked(self) -> list[int]:
        return [
            max(variables, key=lambda choice: (variables[choice].solution_value(), -choice))
            for variables in self.chosen
        ]


def num_pairs(problem: Problem, domains: tuple[IntArray, ...]) -> int:
    """The size of the program: pairs of choices on the edges whose two nodes still have a choice."""
    sizes = [domain.size for domain in domains]
    pairs = ((sizes[edge.source], sizes[edge.target]) for edge in problem.edges)
    return sum(source * target for source, target in pairs if source > 1 and target > 1)


def solve_ilp(
    problem: Problem,
    domains: tuple[IntArray, ...] | None = None,
    node_limit: int = DEFAULT_NODE_LIMIT,
    time_limit_seconds: float | None = None,
) -> Assignment:
    """Solve within `domains` (indices of the choices allowed, per node; all if left out), variants not limited.

    The lower bound is that of the restricted problem. Without choices: INFEASIBLE, or TIMED_OUT at a limit.
    """
    if domains is None:
        domains = tuple(np.arange(costs.size) for costs in problem.node_costs_seconds)
    small = reduced(problem, domains)
    if not np.isfinite(small.constant).all():
        return no_answer(Status.INFEASIBLE, math.inf, "a choice or pair that is forced is absent")
    solver = pywraplp.Solver.CreateSolver("SCIP")
    if solver is None:
        return no_answer(Status.ERROR, -math.inf, "this OR-tools has no SCIP; use method='elimination'")
    model = _Model(solver, small.problem)
    for node in range(small.problem.num_nodes):
        model.add_node(node)
        if not model.chosen[-1]:
            return no_answer(Status.INFEASIBLE, math.inf, f"{small.problem.name(node)} has no choice left")
    for edge in small.problem.edges:
        model.add_edge(edge)
    model.add_budgets()
    solver.SetSolverSpecificParametersAsString(f"limits/totalnodes = {node_limit}\nnumerics/feastol = 1e-09\n")
    parameters = pywraplp.MPSolverParameters()
    parameters.SetDoubleParam(parameters.RELATIVE_MIP_GAP, 0.0)
    if time_limit_seconds is not None:
        solver.SetTimeLimit(max(1, round(time_limit_seconds * 1000)))
    return _run(problem, small, model, parameters)


def _run(problem: Problem, small: Reduced, model: _Model, parameters: pywraplp.MPSolverParameters) -> Assignment:
    solver = model.solver
    for _ in range(_MOST_CUTS):
        status = solver.Solve(parameters)
        if status == pywraplp.Solver.INFEASIBLE:
            return no_answer(Status.INFEASIBLE, math.inf, "the integer program is infeasible")
        if status == pywraplp.Solver.NOT_SOLVED:
            return no_answer(Status.TIMED_OUT, -math.inf, "the integer program reached its limit without a solution")
        if status not in (pywraplp.Solver.OPTIMAL, pywraplp.Solver.FEASIBLE):
            return no_answer(Status.ERROR, -math.inf, f"SCIP ended with status {status}")
        picked = model.picked()
        choices = small.expand(picked)
        cost = problem.cost_of(choices)
        if math.isfinite(cost) and problem.fits(problem.memory_of(choices)):
            proved = status == pywraplp.Solver.OPTIMAL
            best = float(model.objective.BestBound()) * model.cost_scale + float(small.constant[0])
            return answer(
                problem, choices, cost if proved else best, "" if proved else "the integer program stopped at its limit"
            )
        if not picked:
            return no_answer(Status.INFEASIBLE, math.inf, "the only choices left exceed a memory budget")
        model.exclude(picked)
    return no_answer(Status.ERROR, -math.inf, "SCIP keeps returning choices that exceed a budget by its tolerance")
