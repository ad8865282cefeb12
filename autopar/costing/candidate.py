"""What was found on one mesh for a model, or for a stage of it."""

from __future__ import annotations

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
