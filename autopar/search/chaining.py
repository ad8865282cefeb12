"""The whole model as a chain of units, each of a kind that the short graph has.

Enters: a graph. Leaves: its :class:`~autopar.search.places.Chain` and the short graph. Units end at cut points.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.graph import OpGraph
from autopar.search.places import Chain, Place
from autopar.search.shorten import Short, shortened
from autopar.search.units import line_of
from autopar.staging import cut_points

MAX_UNITS = 128  # with more cut points than this, blocks are not cut: half a block is little then


def chain_of(graph: OpGraph) -> tuple[Chain, Short]:
    """Cut a model at every cut point, and find each unit's like in the short graph."""
    short = shortened(graph)
    line = line_of(graph)
    blocks = {name: block.path for group in graph.block_groups for block in group.blocks for name in block.operators}
    starts = _starts(graph, blocks)
    firsts = [line[0], *starts] if line else []
    wanted = {short.stands_for[first] for first in firsts}
    short_line = line_of(short.graph)
    short_firsts = [name for name in short_line if name in wanted]
    kind = {name: index for index, name in enumerate(short_firsts)}
    ends = [*starts, None]
    place = {name: index for index, name in enumerate(line)}
    found = []
    for first, end in zip(firsts, ends, strict=True):
        members = line[place[first] : place[end] if end else len(line)]
        inside = {blocks.get(name) for name in members}
        block = blocks.get(first) if len(inside) == 1 else None
        found.append(Place(kind[short.stands_for[first]], block, True, True))
    return Chain(_with_ends(found), starts, tuple(short_firsts[1:])), short


def _starts(graph: OpGraph, blocks: Mapping[str, str]) -> tuple[str, ...]:
    """First operators of all units but the first: every cut point, in a deep model those between blocks only."""
    points = [point.operator for point in cut_points(graph)]
    if len(points) < MAX_UNITS:
        return tuple(points)
    line = line_of(graph)
    before = dict(zip(line[1:], line, strict=False))
    return tuple(name for name in points if blocks.get(name) is None or blocks.get(name) != blocks.get(before[name]))


def _with_ends(places: list[Place]) -> tuple[Place, ...]:
    """Which units open and close their block."""
    found = []
    for at, place in enumerate(places):
        before = places[at - 1].block if at else None
        after = places[at + 1].block if at + 1 < len(places) else None
        opens, closes = (place.block is None or other != place.block for other in (before, after))
        found.append(Place(place.kind, place.block, opens, closes))
    return tuple(found)
