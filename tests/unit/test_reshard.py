"""Layout changes: every step joins or cuts pieces that belong together, and the steps arrive."""

import itertools
import math

import numpy as np
import pytest

from autopar.layout import PARTIAL, REPLICATED, SUMMED_GRADIENT, Cut, Layout, Shard, indices, splits_of
from autopar.reshard import COLLECTIVES, step_name, step_traffic, steps, traffic

SHAPE = (7, 12)
STATES = [
    REPLICATED,
    SUMMED_GRADIENT,
    PARTIAL,
    Shard(0, Cut.plain(7)),
    Shard(1, Cut.plain(12)),
    Shard(1, Cut(((1, 12, 4),))),
    Shard(1, Cut(((3, 4, 1),))),
]


def held(layout: Layout, mesh: tuple[int, ...], place: tuple[int, ...], dim: int) -> set[int]:
    return set(indices(SHAPE[dim], splits_of(layout, dim, mesh, place)).tolist())


def legal(layout: Layout) -> bool:
    """Two cuts of one dim are either one cut twice or independent (rules offer no others)."""
    shards = [state for state in layout if isinstance(state, Shard)]
    mixed = {(a.cut.is_plain, b.cut.is_plain) for a in shards for b in shards if a.dim == b.dim and a.cut != b.cut}
    return all(pair == (False, False) for pair in mixed)


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (2, 3)])
def test_steps_lead_from_anything_to_anything(mesh: tuple[int, ...]) -> None:
    layouts = [layout for layout in itertools.product(STATES, repeat=len(mesh)) if legal(layout)]
    for source, target in itertools.product(layouts, layouts):
        current = source
        for step in steps(source, target):
            after = (*current[: step.axis], step.target, *current[step.axis + 1 :])
            check_step(step.name, step.axis, current, after, mesh)
            current = after
        assert current == target


def check_step(name: str, axis: int, before: Layout, after: Layout, mesh: tuple[int, ...]) -> None:
    """A gather joins exactly the pieces of its group; a slice keeps a part of what is held."""
    assert name == step_name(before[axis], after[axis])
    small, large = (before, after) if isinstance(before[axis], Shard) else (after, before)
    if not isinstance(small[axis], Shard) or isinstance(large[axis], Shard):
        return
    dim = small[axis].dim
    for place in itertools.product(*map(range, mesh)):
        group = [(*place[:axis], index, *place[axis + 1 :]) for index in range(mesh[axis])]
        pieces = [held(small, mesh, member, dim) for member in group]
        assert set.union(*pieces) == held(large, mesh, place, dim), (name, before, after, place)
        assert sum(map(len, pieces)) == len(held(large, mesh, place, dim))


def test_every_named_step_occurs() -> None:
    one = {step_name(a, b) for a, b in itertools.permutations(STATES[:5], 2)}
    assert one == set(COLLECTIVES)


def test_bytes_include_padding() -> None:
    rows = (Shard(0, Cut.plain(7)),)
    forward, backward = traffic(rows, (SUMMED_GRADIENT,), SHAPE, (3,), 4)
    assert [(t.kind, t.num_bytes) for t in (*forward, *backward)] == [
        ("all_gather", 3 * 3 * 12 * 4),
        ("reduce_scatter", 3 * 3 * 12 * 4),
    ]
    (step,) = steps(rows, (Shard(1, Cut.plain(12)),))
    ahead, back = step_traffic(step, rows, SHAPE, (3,), 4)
    assert ahead == back and ahead is not None and ahead.num_bytes == 3 * 3 * 4 * 4


def test_a_sum_over_two_axes_is_two_all_reduces() -> None:
    forward, backward = traffic((PARTIAL, PARTIAL), (REPLICATED, REPLICATED), SHAPE, (2, 3), 8)
    assert {(t.axis, t.kind, t.num_bytes) for t in forward} == {(a, "all_reduce", math.prod(SHAPE) * 8) for a in (0, 1)}
    assert backward == ()


def test_nothing_is_sent_on_an_axis_of_one() -> None:
    assert traffic((PARTIAL,), (REPLICATED,), SHAPE, (1,), 8) == ((), ())


def test_indices_are_arrays() -> None:
    assert isinstance(indices(3, ()), np.ndarray)
