"""Eliminating a unit of a chain = trying every assignment; left-out tables only lower the result."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from autopar.solver import chain
from autopar.solver.chain import Elimination, Factor, Unit

WEIGHTS = np.array([[1.0, 0.0], [1.0, 2.0], [1.0, 0.3]])


def by_trying(unit: Unit) -> np.ndarray:
    """(weights, entry, exit): the least over all assignments of the other variables."""
    entry, leaving = (1 if port is None else unit.sizes[port] for port in (unit.entry, unit.exit))
    found = np.full((len(WEIGHTS), entry, leaving), np.inf)
    for states in itertools.product(*map(range, unit.sizes)):
        cost = sum(WEIGHTS @ factor.rows[(slice(None), *(states[v] for v in factor.variables))] for factor in unit.factors)
        place = tuple(0 if port is None else states[port] for port in (unit.entry, unit.exit))
        found[:, place[0], place[1]] = np.minimum(found[:, place[0], place[1]], cost)
    return found


def random_unit(seed: int, entry: int | None, leaving: int | None) -> Unit:
    draw, values = random.Random(seed), np.random.default_rng(seed)
    sizes = tuple(draw.randint(1, 4) for _ in range(5))
    scopes = [tuple(draw.sample(range(5), draw.randint(1, 3))) for _ in range(5)]
    factors = tuple(Factor(scope, values.random((2, *(sizes[v] for v in scope)))) for scope in scopes)
    return Unit(sizes, factors, entry, leaving)


@pytest.mark.parametrize("ports", [(0, 4), (None, 2), (3, None), (None, None), (1, 1)])
@pytest.mark.parametrize("seed", range(8))
def test_elimination_is_exact(seed: int, ports: tuple[int | None, int | None]) -> None:
    unit = random_unit(seed, *ports)
    np.testing.assert_allclose(Elimination(unit).evaluate(WEIGHTS), by_trying(unit), rtol=1e-5)


def test_a_port_that_no_table_has_is_free() -> None:
    rows = np.arange(6.0).reshape(2, 3)
    for factors in ((Factor((1,), rows),), ()):
        unit = Unit((4, 3), factors, 0, 1)
        np.testing.assert_allclose(Elimination(unit).evaluate(WEIGHTS), by_trying(unit), rtol=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_tables_that_are_too_large_are_relaxed_to_a_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "MAX_ENTRIES", 6)
    unit = random_unit(seed, 0, 4)
    assert (Elimination(unit).evaluate(WEIGHTS) <= by_trying(unit) * (1 + 1e-5)).all()
