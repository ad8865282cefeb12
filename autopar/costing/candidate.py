"""What was found on one mesh for a model, or for a stage of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from autopar.costing.problem import Costed
from autopar.costing.timeline import peak_bytes
from autopar.plans import StagePlan
from autopar.solver import Assignment


@dataclass(frozen=True, eq=False)
class Candidate:
    """The best plan on one mesh.

    ``stage`` is None where nothing fits. ``lower_bound_seconds`` holds for every plan on this mesh. ``peak_bytes`` is the
    memory set aside for the plan on the fullest device, or the least that any would need: all that it keeps at some time,
    as if at one time, and ``moment_bytes``, which are held only for a moment. ``available_bytes`` is what the smallest
    device has for it.
    """

    costed: Costed
    assignment: Assignment
    stage: StagePlan | None
    lower_bound_seconds: float
    peak_bytes: float
    moment_bytes: float
    available_bytes: float

    @cached_property
    def predicted_bytes(self) -> float:
        """The most bytes that are allocated at one time in a step, from when every tensor is alive; infinite for no plan."""
        return math.inf if self.assignment.choices is None else peak_bytes(self.costed, self.assignment.choices)

    @property
    def missing_bytes(self) -> float:
        """By how much the plan exceeds the memory; 0 where it fits."""
        return max(0.0, self.peak_bytes - self.available_bytes)
