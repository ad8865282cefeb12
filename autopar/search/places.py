"""A model as a row of units: what each is of, and where it lies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A unit of the whole model: its kind, and the block that it is a part of (None: of no repeated block)."""

    kind: int
    block: str | None
    opens: bool  # first unit of its block
    closes: bool  # last unit of its block


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
