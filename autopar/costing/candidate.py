"""What the search found: one candidate per mesh, and the whole result that the report explains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.costing.problem import Costed
from autopar.plans import StagePlan
from autopar.solver import Assignment


@dataclass(frozen=True, eq=False)
class Candidate:
    """The best plan on one mesh.

    ``stage`` is None where nothing fits. ``lower_bound_seconds`` holds for every plan on this mesh. ``peak_bytes`` is the
    memory that the plan needs on the fullest device, or the least that any would need; ``moment_bytes`` of it is held
    only for a moment; ``available_bytes`` is what the smallest device has for it.
    """

    costed: Costed
    assignment: Assignment
    stage: StagePlan | None
    lower_bound_seconds: float
    peak_bytes: float
    moment_bytes: float
    available_bytes: float

    @property
    def missing_bytes(self) -> float:
        """By how much the plan exceeds the memory; 0 where it fits."""
        return max(0.0, self.peak_bytes - self.available_bytes)


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The chosen plan among its rivals.

    ``candidates``: the best plan of each mesh. ``rivals``: plans as people write them by hand (``data``, ``zero-3``,
    ``tensor``), priced whether they fit or not. ``lower_bound_seconds`` holds for every plan of the searched space.
    """

    best: Candidate
    candidates: tuple[Candidate, ...]
    rivals: Mapping[str, Candidate]
    lower_bound_seconds: float
