"""Solvers of pairwise discrete problems with memory rows: `Problem` in, `Assignment` out, `check` on the way.

    solve(problem, method)      elimination (exact, Lagrangian for memory), ilp, exhaustive, or auto

Nothing in here knows what an operator is. Two methods and an oracle answer the same question; tests hold them equal.
"""

from __future__ import annotations

from autopar.errors import InputError
from autopar.solver.domains import choices_left
from autopar.solver.exhaustive import solve_exhaustive
from autopar.solver.memory import Limits
from autopar.solver.problem import Assignment, Edge, Problem, Repeat, Status, check
from autopar.solver.search import solve_elimination, solve_integer

__all__ = [
    "Assignment",
    "Edge",
    "Limits",
    "Problem",
    "Repeat",
    "Status",
    "check",
    "choices_left",
    "solve",
]

METHODS = ("auto", "elimination", "ilp", "exhaustive")


def solve(
    problem: Problem,
    method: str = "auto",
    time_limit_seconds: float | None = None,
    limits: Limits | None = None,
    near: float | None = None,
) -> Assignment:
    """The best choices found for a problem, with a proof of how good they are.

    method: 'elimination' (exact without a memory budget that binds; otherwise multipliers, splicing, pruning, and an
    integer program for a small rest), 'ilp' (SCIP alone), 'exhaustive' (tiny problems), 'auto' (elimination).
    `limits` bound the work of elimination, `time_limit_seconds` is a clock on top, whose result may vary. `near`: the seconds
    that a byte of the one row of memory is expected to be worth where it is short, from which elimination then starts.
    Raises InputError for a malformed problem; that nothing fits is no error, read `Assignment.status`.
    """
    if method in ("auto", "elimination"):
        return solve_elimination(problem, limits or Limits(), time_limit_seconds, near)
    if method == "exhaustive":
        return solve_exhaustive(problem)
    if method == "ilp":
        return solve_integer(problem, time_limit_seconds)
    raise InputError(f"method {method!r} is not one of {', '.join(METHODS)}")
