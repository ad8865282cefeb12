"""Prices of many layout changes at once are those of each change by itself, step after step."""

import itertools
import random

import pytest

from autopar.costing.conversions import Conversions
from autopar.costing.moves import moves
from autopar.graph import Value
from autopar.layout import PARTIAL, REPLICATED, SUMMED_GRADIENT, Cut, Layout, Shard, local_shape
from autopar.mesh import Mesh
from autopar.reshard import step_traffic, steps
from cost_models import Cluster, CostModel

SHAPE = (8, 24, 5)
STATES = [
    REPLICATED,
    SUMMED_GRADIENT,
    PARTIAL,
    Shard(0, Cut.plain(8)),
    Shard(1, Cut.plain(24)),
    Shard(1, Cut(((1, 24, 8),))),
    Shard(1, Cut(((3, 8, 1),))),
    Shard(2, Cut.plain(5)),
]
COPIES = {"pad_shard", "keep_first", "keep_first_both", "take_shard", "scatter"}
KEEPS = {"copy_to", "keep_first_gradient"}


def nests(layout: Layout) -> bool:
    """Two cuts of one dim are either one cut twice or independent (rules offer no others)."""
    cuts = [state.cut for state in layout if isinstance(state, Shard) and state.dim == 1]
    return len({cut.is_plain for cut in cuts}) < 2


def price(conversions: Conversions, source: Layout, target: Layout) -> tuple[float, float, float]:
    """Seconds forward and backward and bytes made, by the definition."""
    mesh, seconds, copied, made = conversions.mesh, [0.0, 0.0], 0.0, 0.0
    current = source
    for step in steps(source, target):
        after = (*current[: step.axis], step.target, *current[step.axis + 1 :])
        num_bytes = 4.0
        for size in local_shape(SHAPE, after, mesh.shape):
            num_bytes *= size
        for way, traffic in enumerate(step_traffic(step, current, SHAPE, mesh.shape, 4)):
            if traffic and mesh.shape[step.axis] > 1:
                seconds[way] += float(conversions.axes[step.axis].seconds(traffic.kind, traffic.num_bytes))
        copied += num_bytes if step.name in COPIES else 0.0
        made = made if step.name in KEEPS else num_bytes
        current = after
    copy = float(conversions.cost_model.compute_seconds(0.0, 2 * copied, "float32", "memory", num_devices=mesh.num_devices))
    return seconds[0] + copy, seconds[1] + copy, made


@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 4), (2, 2, 2), (2, 1, 2, 2), (2, 1, 1, 2, 1)])
def test_prices_are_those_of_the_steps(shape: tuple[int, ...]) -> None:
    layouts = [layout for layout in itertools.product(STATES, repeat=len(shape)) if nests(layout)]
    picked = random.Random(len(shape))
    sources, targets = (picked.sample(layouts, min(len(layouts), 12)) for _ in range(2))
    cluster = Cluster.homogeneous(num_nodes=2, devices_per_node=4)
    conversions = Conversions(Mesh(shape, tuple(f"axis{index}" for index in range(len(shape)))), CostModel(cluster))
    value = Value("x", SHAPE, "float32", True)
    found, ahead = (conversions.prices(value, sources, targets, has_gradient) for has_gradient in (True, False))
    for (row, source), (column, target) in itertools.product(enumerate(sources), enumerate(targets)):
        forward, backward, made = price(conversions, source, target)
        assert found.forward_seconds[row, column] == pytest.approx(forward, rel=1e-12)
        assert ahead.seconds[row, column] == pytest.approx(forward, rel=1e-12)
        assert found.seconds[row, column] == pytest.approx(forward + backward, rel=1e-12)
        assert found.made_bytes[row, column] == made


def test_each_move_is_listed_once() -> None:
    layouts = list(itertools.product(STATES[:5], repeat=2))
    found = moves(layouts, layouts).ways
    listed = {
        (tuple(before), tuple(after)) for before, after in zip(found.before.tolist(), found.after.tolist(), strict=True)
    }
    assert len(listed) == len(found.axis) < found.taken.shape[1]
