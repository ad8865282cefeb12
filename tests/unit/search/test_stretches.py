"""Bounds of runs of units: on a line of points below those of each point alone, and what they say of recomputation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from autopar.batching import at_batch
from autopar.costing import Costed, build, prepare
from autopar.costing.setting import Setting
from autopar.mesh import Mesh
from autopar.options import PlanOptions
from autopar.recompute import MODES
from autopar.search.chaining import chain_of
from autopar.search.places import Chain, Place
from autopar.search.pricing import Priced, _Run, rounding_of
from autopar.search.stretches import Point, Stretches
from autopar.search.units import weights_of
from cost_models import Cluster, CostModel, Link, Node
from tests.unit.search.instances import device, traced

COUNT = 8
LINE = tuple(Point(flying, flying) for flying in (5, 4, 3, 2, 1))  # of 1F1B on five ranks


def stretches_of(structure: str, available_bytes: float = 1e12) -> Stretches:
    graph = traced(structure)
    link = Link("inside", 1e9, 1e-6)
    model = CostModel(Cluster((Node(device(1e9, 1e12), 2, link),), link))
    chain, short = chain_of(graph)
    prepared = prepare(at_batch(short.graph, graph.batch_size))
    blocks = [block.path for group in short.graph.block_groups for block in group.blocks]

    def price(mode: str, like: Costed | None) -> Costed:
        setting = Setting(2, 1, dict.fromkeys(blocks, mode), turn=False)
        return build(prepared, Mesh((2,), ("axis0",)), ("free",), model, PlanOptions(), setting, like)

    return Stretches(Priced(chain, price, MODES, available_bytes), COUNT)


@pytest.fixture(scope="module")
def tight() -> Stretches:
    """With half of what the whole model needs at least when five micro-batches are in flight."""
    free = stretches_of("six alike")
    return stretches_of("six alike", 0.5 * float(free.least_bytes((LINE[0],))[0][0, -1]))


@pytest.mark.parametrize("within_memory", [False, True])
def test_a_line_of_points_is_bounded_as_low_as_each_alone_or_lower(tight: Stretches, within_memory: bool) -> None:
    together = tight.busy(LINE, within_memory)
    least = tight.least_bytes(LINE)
    for point, busy, num_bytes in zip(LINE, together, least, strict=True):
        alone = tight.least_bytes((point,))[0]
        assert (num_bytes <= alone * (1 + 1e-5)).all()
        if not within_memory:
            fits = np.isfinite(tight.busy((point,), False)[0])
            assert (busy[fits] <= tight.busy((point,), False)[0][fits] * (1 + 1e-5)).all()
    for place in (0, 2, 4):  # composed themselves
        assert np.allclose(least[place], tight.least_bytes((LINE[place],))[0], rtol=1e-5)


def test_refining_only_raises_bounds() -> None:
    stretches = stretches_of("six alike", 2e5)
    before = [array.copy() for array in (*stretches.busy(LINE, True), *stretches.work(LINE))]
    stretches.refine(LINE)
    after = [*stretches.busy(LINE, True), *stretches.work(LINE)]
    assert all((new >= old * (1 - 1e-6)).all() for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("structure", ["six alike", "two blocks", "uneven"])
def test_modes_are_read_off_the_way_that_costs_least(structure: str) -> None:
    priced = stretches_of(structure).priced
    multipliers = np.array([0.0, 1e-9, 1e-7, 1e-5, 1e-3])
    weights = np.stack([weights_of(COUNT, COUNT, 1.0, price, 4 * price) for price in multipliers])
    costs = priced.costs(weights)
    runs = list(itertools.combinations(range(priced.chain.num_units + 1), 2))
    for (start, end), ways in zip(runs, priced.modes(weights, runs), strict=True):
        places = priced.chain.places[start:end]
        whole = _whole_blocks(places)
        for index, (cost, modes) in enumerate(ways):
            assert cost == pytest.approx(float(costs[index, start, end]), rel=1e-5)
            assert len(modes) == whole
        assert set(ways[0][1]) <= {"none"}, "where bytes cost nothing, nothing is computed again"


def _whole_blocks(places: Sequence[Place]) -> int:
    opened = {place.block for place in places if place.opens}
    return len({place.block for place in places if place.closes and place.block in opened} - {None})


def test_less_memory_makes_more_blocks_recompute() -> None:
    free, point = stretches_of("two blocks"), Point(64, 1)
    runs = [(0, free.priced.chain.num_units)]
    needed = float(free.least_bytes((point,))[0][0, -1])
    shares = (100.0, 3.0, 1.5)
    counts = [stretches_of("two blocks", share * needed).recomputing(point, runs, 1)[0] for share in shares]
    assert counts == [(2, 0, 0), (1, 0, 1), (0, 0, 2)]


@pytest.mark.parametrize("settles", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_like_blocks_that_are_not_walked_through_add_what_walking_does(seed: int, settles: bool) -> None:
    """From the first unit alone, a hundred blocks of two units and fifty of one: as if every one had been walked through, and
    never above. A chain ``settles`` where staying in one state is cheap; else the best way may go round for ever."""
    random = np.random.default_rng(seed)
    kinds = [0, *[1, 2] * 100, *[4] * 50, 3]
    blocks = [None, *(f"block {at // 2}" for at in range(200)), *(f"other {at}" for at in range(50)), None]
    places = [
        Place(kind, block, kind in (1, 4), kind in (2, 4)) for kind, block in zip(kinds, blocks, strict=True)
    ]
    chain = Chain(tuple(places), (), ())
    assert chain.repeats[4] == (2, 98)
    matrices = {
        mode: [np.where(random.random((3, 5, 5)) < 0.2, np.inf, 1 + random.random((3, 5, 5))) for _ in range(5)]
        for mode in MODES
    }
    for matrix in itertools.chain(*matrices.values()) if settles else ():
        matrix[:, 0, 0] = 0.1
    narrow = {mode: [matrix.astype(np.float32) for matrix in matrices[mode]] for mode in MODES}
    walks = [0]

    class Counted(_Run):
        def _through(self, reached: Any, unit: int) -> Any:
            walks[0] += 1
            return super()._through(reached, unit)

    found = Counted(chain, narrow, MODES[0]).costs(3, 1)[:, 0, 1:]
    least = {mode: np.zeros((3, 5)) for mode in MODES}
    for unit, place in enumerate(places):
        if place.opens:
            least = dict.fromkeys(MODES, np.minimum.reduce(list(least.values())))
        taken = MODES if place.block else MODES[:1]
        least = {m: (least[m][:, :, None] + narrow[m][place.kind].astype(np.float64)).min(axis=1) for m in taken}
        if place.closes or not place.block:
            least = dict.fromkeys(MODES, np.minimum.reduce(list(least.values())))
            assert found[:, unit] == pytest.approx(least[MODES[0]].min(axis=1), rel=1e-5)
            assert (found[:, unit] <= least[MODES[0]].min(axis=1) * (1 + rounding_of(chain))).all()
    assert walks[0] < 100 or not settles
