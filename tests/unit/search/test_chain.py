"""A chain of units is the solver's optimum or below it, and a short graph has all prices."""

from __future__ import annotations

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
from cost_models import Cluster, CostModel, Link, Node
from tests.unit.search.instances import device, traced


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
    weights[0, :3] = 1.0
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
