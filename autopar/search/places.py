"""A model as a row of units: what each is of, and where it lies."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Place:
    """A unit of the whole model: its kind, and the block that it is a part of (None: of no repeated block)."""

    kind: int
    block: str | None
    opens: bool  # first unit of its block
    closes: bool  # last unit of its block

    @property
    def key(self) -> tuple[int, bool, bool, bool]:
        """What a walk along the chain needs to know of it."""
        return self.kind, self.block is None, self.opens, self.closes


@dataclass(frozen=True)
class Chain:
    """The whole model as units. ``starts`` are the first operators of all units but the first in the whole graph;
    ``short_starts`` those of the short graph's units, which are numbered by ``Place.kind``."""

    places: tuple[Place, ...]
    starts: tuple[str, ...]
    short_starts: tuple[str, ...]

    @property
    def num_units(self) -> int:
        return len(self.places)

    @cached_property
    def repeats(self) -> Mapping[int, tuple[int, int]]:
        """For the last unit of a block: how many units the block has, and how many blocks of the same units follow it."""
        keys = [place.key for place in self.places]
        ends = [unit for unit, place in enumerate(self.places) if place.closes]
        found: dict[int, tuple[int, int]] = {}
        for before, end in reversed(list(itertools.pairwise(ends))):
            size = end - before
            follows = keys[before + 1 : end + 1] == keys[end + 1 : end + 1 + size]
            found[end] = size, 1 + found.get(end + size, (size, 0))[1] if follows else 0
        return found
