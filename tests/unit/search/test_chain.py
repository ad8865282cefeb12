"""Units by elimination equal brute force, their chain is the solver's optimum or below it, and a short graph has all prices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.batching import at_batch
from autopar.costing import Costed, build, prepare
from autopar.costing.setting import Setting
from autopar.graph import OpGraph, check
from autopar.mesh import Mesh
from autopar.options import PlanOptions
from autopar.search.chaining import chain_of
from autopar.search.pricing import Priced
from autopar.search.shorten import shortened
from autopar.search.units import ROWS
from autopar.solver import solve
from autopar.solver.chain import ROUNDING, Elimination, Factor, Unit
from cost_models import Cluster, CostModel, Link, Node
from tests.unit.search.instances import device, traced

NUM_ROWS = 3


def random_unit(seed: int) -> Unit:
    """Up to 5 variables of up to 4 states, with ports at both ends, one or none; some entries are absent."""
    draw = np.random.default_rng(seed)
    sizes = tuple(int(size) for size in draw.integers(1, 5, draw.integers(1, 6)))
    factors = [Factor((at,), draw.random((NUM_ROWS, size))) for at, size in enumerate(sizes)]
    for _ in range(int(draw.integers(0, 6))):
        count = min(len(sizes), int(draw.integers(2, 4)))
        variables = tuple(int(at) for at in draw.choice(len(sizes), count, replace=False))
        rows = draw.random((NUM_ROWS, *(sizes[at] for at in variables)))
        rows[0][draw.random(rows.shape[1:]) < 0.1] = np.inf
        factors.append(Factor(variables, rows))
    ports = [None if draw.random() < 0.25 else int(draw.integers(len(sizes))) for _ in range(2)]
    return Unit(sizes, tuple(factors), *ports)


def by_brute_force(unit: Unit, weights: np.ndarray) -> np.ndarray:
    """The least cost between the ports over every assignment."""
    entries, exits = (1 if port is None else unit.sizes[port] for port in (unit.entry, unit.exit))
    found = np.full((len(weights), entries, exits), np.inf)
    for states in itertools.product(*map(range, unit.sizes)):
        cost = sum(weights @ f.rows[(slice(None), *(states[at] for at in f.variables))] for f in unit.factors)
        at = tuple(0 if port is None else states[port] for port in (unit.entry, unit.exit))
        found[:, at[0], at[1]] = np.minimum(found[:, at[0], at[1]], cost)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_elimination_equals_brute_force(seed: int) -> None:
    unit = random_unit(seed)
    weights = np.array([[1.0, 0.0, 0.0], [0.5, 2.0, 0.1], [3.0, 0.01, 7.0]])[: 1 + seed % 3]
    weights = np.where(weights == 0.0, 1e-9, weights)  # nothing times an absent entry would be no number
    expected = by_brute_force(unit, weights)
    np.testing.assert_allclose(Elimination(unit).evaluate(weights), expected, rtol=10 * ROUNDING)


def priced_whole(graph: OpGraph, num_devices: int = 2) -> tuple[Costed, float]:
    """A whole graph's prices on one node, and what its chain of units says of a step."""
    link = Link("inside", 1e9, 1e-6)
    model = CostModel(Cluster((Node(device(1e9, 1e12), num_devices, link),), link))
    chain, short = chain_of(graph)
    prepared = prepare(at_batch(short.graph, graph.batch_size))
    mesh = Mesh((num_devices,), ("axis0",))

    def price(mode: str, like: Costed | None) -> Costed:
        return build(prepared, mesh, ("free",), model, PlanOptions(), Setting(1, 1, turn=False), like)

    weights = np.zeros((1, len(ROWS)))
    weights[0, :2] = 1.0
    composed = float(Priced(chain, price, ("none",), 1e12).costs(weights)[0, 0, -1])
    return build(prepare(graph), mesh, ("free",), model, PlanOptions(), Setting(1, 1)), composed


PLAIN = ("three alike", "four alike", "six alike", "uneven", "wide end")  # nothing is relaxed in a plain chain


@pytest.mark.parametrize("structure", [*PLAIN, "skip", "two blocks", "tied"])
def test_chain_of_units_is_the_optimum_or_below_it(structure: str) -> None:
    costed, composed = priced_whole(traced(structure))
    optimum = solve(costed.problem).cost_seconds
    assert composed <= optimum * (1 + 1e-9)
    if structure in PLAIN:
        assert composed == pytest.approx(optimum, rel=1e-4)


@pytest.mark.parametrize("structure", ["six alike", "two blocks"])
def test_shortened_graph_has_every_price(structure: str) -> None:
    graph = traced(structure)
    short = shortened(graph)
    check(short.graph)
    assert all(len(group.blocks) <= 3 for group in short.graph.block_groups)
    whole, less = (priced_whole(each)[0] for each in (graph, short.graph))
    for operator, stand_in in short.stands_for.items():
        ours = whole.problem.node_costs_seconds[whole.nodes[operator]]
        theirs = less.problem.node_costs_seconds[less.nodes[stand_in]]
        np.testing.assert_array_equal(ours, theirs, err_msg=operator)
