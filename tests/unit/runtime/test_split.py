"""Splits and layouts of the runtime against the planner's definitions, which runtime may not import."""

from __future__ import annotations

import random

import torch

from autopar import layout as planned
from autopar import reshard
from autopar.layout import REPLICATED, SUMMED_GRADIENT, Cut, Shard
from autopar.runtime import Mesh
from autopar.runtime.layouts import changes, parse_words
from autopar.runtime.split import held, join_pieces, make_pieces, put_piece, stack_pieces, take, take_piece


def random_cut(size: int, generator: random.Random) -> Cut:
    """A cut of ``size``: one run, or two whose segments start at multiples of their units."""
    units = [unit for unit in range(1, size + 1) if size % unit == 0]
    if generator.random() < 0.3 and size > 3:
        first = generator.randrange(1, size)
        return Cut(((1, first, 1), (1, size - first, 1)))
    count = generator.choice(units)
    length = size // count
    return Cut(((count, length, generator.choice([unit for unit in units if length % unit == 0])),))


def test_held_indices_are_those_of_the_planner() -> None:
    generator = random.Random(0)
    for _ in range(400):
        size = generator.randrange(1, 25)
        splits = []
        for _ in range(generator.randrange(0, 4)):
            parts = generator.randrange(1, 5)
            splits.append((random_cut(size, generator), parts, generator.randrange(parts)))
        found = held(size, tuple((cut.runs, parts, place) for cut, parts, place in splits))
        assert take(torch.arange(size), 0, found).tolist() == planned.indices(size, splits).tolist()


def test_units_are_counted_from_the_start_of_their_segment() -> None:
    cut = ((1, 5, 5), (1, 4, 2))
    assert held(9, ((cut, 2, 0),)) == ((0, 7),)
    assert held(9, ((cut, 2, 1),)) == ((7, 9),)


def test_pieces_are_taken_and_put_together() -> None:
    generator = random.Random(1)
    kinds = set()
    for _ in range(300):
        size, parts = generator.randrange(1, 40), generator.randrange(1, 5)
        cut = random_cut(size, generator).runs
        pieces = make_pieces(((0, size),), tuple(held(size, ((cut, parts, place),)) for place in range(parts)))
        kinds.add(min(pieces.segments, 2))
        x = torch.randn(2, size, 3)
        stacked = stack_pieces(x, 1, pieces)
        assert torch.equal(join_pieces(stacked, 1, pieces), x)
        total = torch.zeros_like(x)
        for place in range(parts):
            piece = take_piece(x, 1, pieces, place)
            wanted = take(x, 1, held(size, ((cut, parts, place),)))
            assert torch.equal(piece, wanted)
            assert torch.equal(stacked[place].narrow(1, 0, pieces.sizes[place]), wanted)
            total += put_piece(piece, 1, pieces, place)
        assert torch.equal(total, x)
    assert kinds == {0, 1, 2}, "uneven, plain and segmented pieces all occur"


def test_many_intervals_are_joined_by_index() -> None:
    cut = ((200, 3, 1),)
    pieces = make_pieces(((0, 600),), tuple(held(600, ((cut, 2, place),)) for place in range(2)))
    x = torch.randn(600, 2)
    assert torch.equal(join_pieces(stack_pieces(x, 0, pieces), 0, pieces), x)


def test_changes_are_the_steps_of_the_planner() -> None:
    mesh = Mesh(a=1, b=1, c=1)
    shape = (12, 8)
    states = [
        REPLICATED,
        SUMMED_GRADIENT,
        Shard(0, Cut.plain(12)),
        Shard(1, Cut.plain(8)),
        Shard(0, Cut.parse("3x4/1")),
    ]
    states += [Shard(1, Cut.parse("1x8/4")), planned.PARTIAL]
    generator = random.Random(2)
    for _ in range(500):
        source, target = (tuple(generator.choice(states) for _ in range(3)) for _ in range(2))
        try:
            wanted = [(step.name, step.axis) for step in reshard.steps(source, target)]
        except AssertionError:
            continue
        first, last = (parse_words(planned.layout_text(layout), mesh, 2) for layout in (source, target))
        found = changes(first, last, shape, mesh)
        assert [(change.name, change.move.axis.index) for change in found] == wanted
