"""Eliminating a unit of a chain = trying every assignment; left-out tables only lower the result."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from autopar.solver import chain
from autopar.solver.chain import ROUNDING, Elimination, Factor, Unit

WEIGHTS = np.array([[1.0, 0.0], [1.0, 2.0], [1.0, 0.3]])


def by_trying(unit: Unit, weights: np.ndarray = WEIGHTS) -> np.ndarray:
    """(weights, entry, exit): the least over all assignments of the other variables."""
    entry, leaving = (1 if port is None else unit.sizes[port] for port in (unit.entry, unit.exit))
    found = np.full((len(weights), entry, leaving), np.inf)
    for states in itertools.product(*map(range, unit.sizes)):
        cost = sum(weights @ factor.rows[(slice(None), *(states[v] for v in factor.variables))] for factor in unit.factors)
        place = tuple(0 if port is None else states[port] for port in (unit.entry, unit.exit))
        found[:, place[0], place[1]] = np.minimum(found[:, place[0], place[1]], cost)
    return found


def random_unit(seed: int, entry: int | None, leaving: int | None) -> Unit:
    draw, values = random.Random(seed), np.random.default_rng(seed)
    sizes = tuple(draw.randint(1, 4) for _ in range(5))
    scopes = [tuple(draw.sample(range(5), draw.randint(1, 3))) for _ in range(5)]
    factors = tuple(Factor(scope, values.random((2, *(sizes[v] for v in scope)))) for scope in scopes)
    return Unit(sizes, factors, entry, leaving)


def unit_with_absent_entries(seed: int) -> Unit:
    """Up to 5 variables of up to 4 states, with ports at both ends, one or none; some entries are absent."""
    draw = np.random.default_rng(seed)
    sizes = tuple(int(size) for size in draw.integers(1, 5, draw.integers(1, 6)))
    factors = [Factor((at,), draw.random((3, size))) for at, size in enumerate(sizes)]
    for _ in range(int(draw.integers(0, 6))):
        count = min(len(sizes), int(draw.integers(2, 4)))
        variables = tuple(int(at) for at in draw.choice(len(sizes), count, replace=False))
        rows = draw.random((3, *(sizes[at] for at in variables)))
        rows[0][draw.random(rows.shape[1:]) < 0.1] = np.inf
        factors.append(Factor(variables, rows))
    ports = [None if draw.random() < 0.25 else int(draw.integers(len(sizes))) for _ in range(2)]
    return Unit(sizes, tuple(factors), *ports)


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


@pytest.mark.parametrize("seed", range(60))
def test_elimination_is_exact_where_entries_are_absent(seed: int) -> None:
    unit = unit_with_absent_entries(seed)
    weights = np.array([[1.0, 0.0, 0.0], [0.5, 2.0, 0.1], [3.0, 0.01, 7.0]])[: 1 + seed % 3]
    weights = np.where(weights == 0.0, 1e-9, weights)  # nothing times an absent entry would be no number
    expected = by_trying(unit, weights)
    np.testing.assert_allclose(Elimination(unit).evaluate(weights), expected, rtol=10 * ROUNDING)
