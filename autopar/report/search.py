"""What else was looked at: the certificate of the search, and what the plan's rivals would cost.

Enters: the SearchResult. Leaves: JSON objects. Infinite seconds and bytes (nothing found) are null.
"""

from __future__ import annotations

import math
from typing import Any

from autopar.costing.candidate import Candidate, SearchResult
from autopar.plans import StagePlan
from autopar.solver.problem import RELATIVE_TOLERANCE

NUM_RUNNERS_UP = 5


def solver_json(result: SearchResult, stage: StagePlan) -> dict[str, Any]:
    """Status, bound and gap of the whole search, and of each mesh."""
    cost, bound = result.best.assignment.cost_seconds, result.lower_bound_seconds
    gap = max(0.0, cost - bound) / max(cost, 1e-300)
    return {
        "status": "OPTIMAL" if gap <= RELATIVE_TOLERANCE else "FEASIBLE",
        "cost_seconds": cost,
        "lower_bound_seconds": min(bound, cost),
        "gap": gap,
        "num_meshes": len(result.candidates),
        "meshes": [
            {**candidate_json(candidate, cost), "lower_bound_seconds": finite(candidate.lower_bound_seconds)}
            for candidate in result.candidates
        ],
        "variants": {group: max(numbers, default=0) + 1 for group, numbers in stage.variants.items()},
    }


def alternatives_json(result: SearchResult) -> dict[str, Any]:
    """Plans as people write them by hand, whether they fit or not, and the best plans of other meshes."""
    cost = result.best.assignment.cost_seconds
    others = [candidate for candidate in result.candidates if candidate.costed is not result.best.costed]
    others.sort(key=lambda other: (other.stage is None, other.assignment.cost_seconds, other.missing_bytes))
    return {
        "by_hand": {name: candidate_json(rival, cost) for name, rival in result.rivals.items()},
        "other_meshes": [candidate_json(other, cost) for other in others[:NUM_RUNNERS_UP]],
    }


def candidate_json(candidate: Candidate, best_seconds: float) -> dict[str, Any]:
    """One plan of the search: its seconds, as a multiple of the best, and by how many bytes it does not fit."""
    assignment = candidate.assignment
    return {
        "mesh_shape": list(candidate.costed.mesh.shape),
        "roles": list(candidate.costed.roles),
        "status": assignment.status.name,
        "fits": candidate.stage is not None and candidate.missing_bytes == 0,
        "seconds": finite(assignment.cost_seconds),
        "ratio": finite(assignment.cost_seconds / best_seconds) if best_seconds > 0 else None,
        "peak_bytes": finite(candidate.peak_bytes),
        "missing_bytes": finite(candidate.missing_bytes),
    }


def finite(number: float) -> float | None:
    """The number, or None (JSON has no infinity)."""
    return float(number) if math.isfinite(number) else None
