"""Cuts and pieces: every element is held once, sizes agree with index sets, and cuts survive lifting and lowering."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.layout import (
    PARTIAL,
    REPLICATED,
    Cut,
    Shard,
    indices,
    layout_text,
    local_shape,
    local_size,
    parse_layout,
)

cuts = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=3).map(
    lambda runs: Cut(tuple((count, units * unit, unit) for count, units, unit in runs))
)


@given(cuts, st.integers(1, 4), st.integers(1, 3))
def test_pieces_of_nested_cuts_partition_the_dim(cut: Cut, outer: int, inner: int) -> None:
    pieces = [
        indices(cut.size, [(cut, outer, i), (cut, inner, j)]) for i, j in itertools.product(range(outer), range(inner))
    ]
    assert sorted(np.concatenate(pieces).tolist()) == list(range(cut.size))
    sizes = [
        local_size(cut.size, ((cut, outer, i), (cut, inner, j)))
        for i, j in itertools.product(range(outer), range(inner))
    ]
    assert sizes == [len(piece) for piece in pieces]
    assert max(sizes) == sizes[0], "the first device's piece is the largest"


@given(cuts, st.integers(1, 4), st.integers(1, 4))
def test_lowered_inverts_lifted(cut: Cut, outer: int, inner: int) -> None:
    lifted = cut.lifted(outer, inner)
    assert lifted.size == cut.size * outer * inner
    lowered = lifted.lowered(outer, inner)
    assert lowered is not None and lowered.lifted(outer, inner) == lifted


@given(cuts, st.sampled_from([2, 3, 4, 6]))
def test_normalized_has_the_same_pieces(cut: Cut, parts: int) -> None:
    for divisor in (d for d in range(1, parts + 1) if parts % d == 0):
        for place in range(divisor):
            before = indices(cut.size, [(cut, divisor, place)])
            assert np.array_equal(before, indices(cut.size, [(cut.normalized(parts), divisor, place)]))


def test_pieces_differ_by_one_unit_at_the_most() -> None:
    for size, parts in itertools.product(range(1, 12), range(1, 5)):
        ours = [indices(size, [(Cut.plain(size), parts, place)]).tolist() for place in range(parts)]
        assert ours == [piece.tolist() for piece in np.array_split(np.arange(size), parts)]


def test_fused_segments_are_cut_each_on_its_own() -> None:
    cut = Cut(((3, 4, 2),))
    assert indices(12, [(cut, 2, 1)]).tolist() == [2, 3, 6, 7, 10, 11]


def test_independent_cuts_commute() -> None:
    rows, columns = Cut(((1, 12, 4),)), Cut(((3, 4, 1),))  # a dim of (3 4): cut the 3, cut the 4
    one = indices(12, [(rows, 3, 1), (columns, 2, 1)])
    other = indices(12, [(columns, 2, 1), (rows, 3, 1)])
    assert one.tolist() == other.tolist() == [6, 7]


def test_text_and_back() -> None:
    layout = (Shard(1, Cut(((3, 768, 64),))), REPLICATED, Shard(0, Cut.plain(8)), PARTIAL)
    assert parse_layout(layout_text(layout)) == layout


@pytest.mark.parametrize("text", ["S0", "X", "S0[3x5/2]", "S0[]"])
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_layout(text)


def test_local_shape_takes_the_largest_piece() -> None:
    plain = Cut.plain(7)
    assert local_shape((7, 3), (Shard(0, plain), Shard(0, plain)), (2, 3)) == (2, 3)
    assert local_shape((7, 3), (Shard(0, plain), REPLICATED), (2, 3), (1, 0)) == (3, 3)
