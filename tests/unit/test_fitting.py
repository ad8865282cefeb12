"""The search within memory: what it says where its solver finds nothing."""

from __future__ import annotations

import math

from autopar.costing import Costed, build, prepare
from autopar.fitting import fit, unlimited
from autopar.mesh import Mesh
from autopar.options import PlanOptions
from autopar.solver import Assignment, Problem, Status, solve
from cost_models import Cluster, CostModel, Link, Node
from tests.unit.search.instances import device, traced


def priced() -> Costed:
    link = Link("inside", 1e9, 1e-6)
    model = CostModel(Cluster((Node(device(1e9, 1e12), 2, link),), link))
    return build(prepare(traced("six alike")), Mesh((2,), ("axis0",)), ("free",), model, PlanOptions())


def test_a_solver_that_finds_nothing_in_time_proves_nothing() -> None:
    costed = priced()
    free = unlimited(costed, math.inf, solve)

    def gives_up(problem: Problem) -> Assignment:
        return Assignment(None, math.inf, free.lower_bound_seconds, Status.TIMED_OUT)

    found = fit(costed, 0.6 * free.peak_bytes, gives_up, explain=False)
    assert found.stage is None and found.lower_bound_seconds == free.lower_bound_seconds


def test_what_does_not_fit_has_an_infinite_bound() -> None:
    assert math.isinf(fit(priced(), 1.0, solve, explain=False).lower_bound_seconds)
