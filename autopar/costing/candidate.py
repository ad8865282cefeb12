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
    def host_bytes(self) -> float:
        """What the plan keeps in the host's memory for each device."""
        return self.assignment.memory_bytes[1] if len(self.assignment.memory_bytes) > 1 else 0.0

    @property
    def host_available_bytes(self) -> float:
        """What a device has of its host's memory; 0 where nothing is to rest there."""
        budgets = self.costed.problem.memory_budgets_bytes
        return float(budgets[1]) if len(budgets) > 1 else 0.0

    @property
    def missing_bytes(self) -> float:
        """By how much the plan exceeds the memory; 0 where it fits."""
        return max(0.0, self.peak_bytes - self.available_bytes)
