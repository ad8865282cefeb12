"""The multiplier of a memory row where minimising bytes alone has found nothing that fits."""

from __future__ import annotations

import math

import numpy as np

from autopar.solver import Problem
from autopar.solver.domains import consistent_domains
from autopar.solver.memory import Lagrangian, Limits
from autopar.solver.network import network_of
from autopar.solver.repetition import plain_structure


def lagrangian(budget: float) -> Lagrangian:
    """Eight nodes that cost 1 second and 100 bytes, or 2 seconds and 1 byte."""
    costs, memory = np.array([1.0, 2.0]), np.array([[100.0, 1.0]])
    problem = Problem((costs,) * 8, (memory,) * 8, (), np.array([budget]))
    structure = plain_structure(problem, network_of(problem))
    domains = consistent_domains(problem, structure)
    return Lagrangian(problem, structure, domains, Limits(), math.inf)


def test_the_multiplier_is_raised_until_something_fits() -> None:
    state = lagrangian(budget=300.0)
    state.dual(np.zeros(1))
    assert state.best is None, "the cheapest needs 800 bytes"
    state.bracket()
    assert state.best is not None and state.fits(state.network.totals(state.best))
    assert state.lower <= state.upper


def test_nothing_is_raised_where_something_fits_already() -> None:
    state = lagrangian(budget=800.0)
    state.dual(np.zeros(1))
    known = len(state.points)
    state.bracket()
    assert len(state.points) == known


def test_a_row_that_nothing_fits_ends_the_raising() -> None:
    state = lagrangian(budget=5.0)
    state.dual(np.zeros(1))
    state.bracket()
    assert state.best is None
