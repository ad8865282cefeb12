"""On tiny models and clusters the joint search finds what trying everything finds, and no bound is above it.

The space: every grid (pipeline ranks, mesh, order of unlike nodes), number of micro-batches and schedule, all cuts at cut
points, all styles of boundaries; how blocks recompute and how a stage is sharded is the stage solver's own optimum, which
the last tests hold against an ILP. Fifteen instances are tried here; all hundred with

    pytest -m slow tests/unit/search/test_optimality.py
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterator

import pytest

from autopar.costing import prepare
from autopar.fitting import GAP_TARGET
from autopar.mesh import Mesh
from autopar.planner import Search
from autopar.search.bounds import bound_of, least_bytes
from autopar.search.evaluate import Evaluated, rank_bytes
from autopar.search.joint import Found
from autopar.search.space import Frame, frames
from autopar.search.stages import Aim, Site, StageSolver
from autopar.solver import solve
from cost_models import Cluster, CostModel, Link, Node
from tests.unit.search.instances import EXACT, Instance, device, instance, traced, whole_bytes
from tests.unit.search.stage_oracle import least_stage_seconds

QUICK = (0, 1, 2, 4, 6, 7, 8, 13, 15, 16, 17, 18, 22, 24, 28)
ROUNDING = 1e-9


def every_frame(search: Search) -> Iterator[Frame]:
    """The whole space but cuts and styles."""
    for grid in search.grids:
        yield from frames(grid, search._counts_of(grid), search.chain.num_units, search.options)


def every_plan(search: Search, frame: Frame) -> Iterator[Evaluated]:
    """All cuts and styles of a frame, each evaluated in full."""
    for cuts in itertools.combinations(search.chain.starts, frame.num_stages - 1):
        for style in search.evaluator.styles(frame):
            yield search.evaluator.evaluate(frame, search.graph_of(frame), cuts, style)


def exhaustive(tried: Instance) -> dict[Frame, list[Evaluated]]:
    """Every plan of the space, by frame."""
    search = tried.search()
    return {frame: list(every_plan(search, frame)) for frame in every_frame(search)}


def certified_seconds(found: Found, space: Container[Frame]) -> float:
    """The best plan of the space that the certificate covers: without what is tried with the best plan alone."""
    return min((plan.step_seconds for plan in found.evaluated if plan.frame in space), default=math.inf)


def assert_search_is_exact(tried: Instance) -> None:
    plans = exhaustive(tried)
    search = tried.search()
    found = search.run()
    least = min((plan.step_seconds for each in plans.values() for plan in each), default=math.inf)
    best = found.best.step_seconds if found.best else math.inf
    if tried.options.parallelism.schedule is None:
        assert certified_seconds(found, plans) == pytest.approx(least, rel=ROUNDING)
        assert best <= least * (1 + ROUNDING)
    else:
        assert best == pytest.approx(least, rel=ROUNDING)
    assert found.lower_bound_seconds <= best * (1 + ROUNDING)
    for frame, each in plans.items():
        assert_bounds_hold(search, frame, each)


def assert_bounds_hold(search: Search, frame: Frame, plans: list[Evaluated]) -> None:
    """No bound of a frame is above its fastest plan, and none of its bytes above its leanest."""
    fastest = min(plan.step_seconds for plan in plans)
    ranks = search._of_ranks(frame)
    known = {
        "grid": search._grid_bound(frame),
        "free": bound_of(frame, ranks, within_memory=False).seconds,
        "within memory": bound_of(frame, ranks, within_memory=True).seconds,
    }
    for name, seconds in known.items():
        assert seconds <= fastest * (1 + ROUNDING), (name, frame, seconds, fastest)
    leanest = min((max(rank_bytes(plan)) for plan in plans if plan.fits), default=math.inf)
    assert least_bytes(frame, ranks) <= leanest * (1 + ROUNDING), frame


@pytest.mark.parametrize("seed", QUICK)
def test_joint_search_equals_exhaustive_search(seed: int) -> None:
    assert_search_is_exact(instance(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_joint_search_equals_exhaustive_search_on_100_instances(seed: int) -> None:
    assert_search_is_exact(instance(seed))


def stage_solver(structure: str, part: float) -> StageSolver:
    """A whole small model on two devices, each with this part of what the model would fill on one."""
    graph = traced(structure)
    link = Link("inside", 1e9, 1e-6)
    cluster = Cluster((Node(device(1e9, part * whole_bytes(graph)), 2, link),), link)
    model = CostModel(cluster)
    site = Site(Mesh((2,), ("axis0",)), ("free",), 0, 2, 1, model.min_device_memory_bytes(EXACT.memory_margin))
    return StageSolver(prepare(graph), site, model, EXACT, solve, {}, {})


@pytest.mark.parametrize("part", [0.3, 0.45, 0.6, 2.0])
@pytest.mark.parametrize("structure", ["skip", pytest.param("three alike", marks=pytest.mark.slow)])
def test_a_stage_is_solved_as_well_as_by_an_ilp(structure: str, part: float) -> None:
    solver = stage_solver(structure, part)
    best, least = solver.best(Aim()), least_stage_seconds(solver)
    assert best.fits == math.isfinite(least), (best.candidate.missing_bytes, least)
    if best.fits:
        assert least * (1 - ROUNDING) <= best.candidate.assignment.cost_seconds <= least * (1 + GAP_TARGET)
