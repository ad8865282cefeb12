"""What else was looked at: the certificate of the search, and what the plan's rivals and neighbours would cost.

Enters: what the search found. Leaves: JSON objects. Infinite seconds and bytes (nothing found) are null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.report.views import View
from autopar.search.evaluate import Evaluated, rank_bytes
from autopar.search.joint import Found
from autopar.search.space import Frame
from autopar.solver.problem import RELATIVE_TOLERANCE

NUM_EVALUATED = 12


def chosen(found: Found) -> Evaluated:
    """The best plan of a search that found some."""
    assert found.best is not None, "only a plan that was found is explained"
    return found.best


def solver_json(found: Found, views: Sequence[View]) -> dict[str, Any]:
    """Status, bound and gap of the whole search, how far it went, and the best plan of each arrangement evaluated."""
    cost, bound = chosen(found).step_seconds, found.lower_bound_seconds
    gap = max(0.0, cost - bound) / max(cost, 1e-300)
    bounds = {frame: seconds for frame, seconds, _ in found.looked_at}
    variants: dict[str, int] = {}
    for view in views:
        for group, numbers in view.plan.variants.items():
            variants[group] = max(variants.get(group, 1), max(numbers, default=0) + 1)
    evaluated = sorted(best_of_frames(found).values(), key=lambda other: (other.step_seconds, missing_bytes(other)))
    return {
        "status": "OPTIMAL" if gap <= RELATIVE_TOLERANCE else "FEASIBLE",
        "cost_seconds": cost,
        "lower_bound_seconds": min(bound, cost),
        "gap": gap,
        "num_frames": found.num_frames,
        "num_priced": found.num_priced,
        "num_bounded": found.num_bounded,
        "num_evaluated": len(found.evaluated),
        "evaluated": [
            {**evaluated_json(other, cost), "lower_bound_seconds": finite(bounds.get(other.frame, 0.0))}
            for other in evaluated[:NUM_EVALUATED]
        ],
        "variants": variants,
    }


def best_of_frames(found: Found) -> dict[Frame, Evaluated]:
    """The fastest plan of each frame that was evaluated; where none fits, the one that lacks least."""
    best: dict[Frame, Evaluated] = {}
    for other in found.evaluated:
        known = best.get(other.frame)
        key = (other.step_seconds, missing_bytes(other))
        if known is None or key < (known.step_seconds, missing_bytes(known)):
            best[other.frame] = other
    return best


def by_hand_json(rivals: Mapping[str, Evaluated], best_seconds: float) -> dict[str, Any]:
    """Plans as people write them by hand, whether they fit or not."""
    return {
        name: {**evaluated_json(rival, best_seconds), "status": rival.stages[0].candidate.assignment.status.name}
        for name, rival in rivals.items()
    }


def frame_json(frame: Frame) -> dict[str, Any]:
    """How the devices are arranged."""
    return {
        "num_pipeline_ranks": frame.grid.num_ranks,
        "mesh_shape": list(frame.grid.mesh_shape),
        "roles": list(frame.grid.roles),
        "schedule": frame.schedule,
        "num_stages": frame.num_stages,
        "num_micro_batches": frame.num_micro_batches,
    }


def evaluated_json(other: Evaluated, best_seconds: float) -> dict[str, Any]:
    """One plan of the search: its seconds, as a multiple of the best, and by how many bytes it does not fit."""
    missing, seconds = missing_bytes(other), other.step_seconds
    return {
        **frame_json(other.frame),
        "recompute": modes_of(other),
        "fits": other.fits and missing == 0 and len(other.stages) == other.frame.num_stages,
        "seconds": finite(seconds),
        "ratio": finite(seconds / best_seconds) if best_seconds > 0 else None,
        "peak_bytes": finite(max(rank_peaks(other))),
        "missing_bytes": finite(missing),
    }


def rank_peaks(other: Evaluated) -> list[float]:
    """Peak bytes of each pipeline rank, as far as its stages were solved."""
    if len(other.stages) == len(other.graphs):
        return rank_bytes(other)
    return [stage.candidate.peak_bytes for stage in other.stages] or [math.inf]


def missing_bytes(other: Evaluated) -> float:
    """By how much the stage that lacks most exceeds its memory."""
    return max((stage.candidate.missing_bytes for stage in other.stages), default=0.0)


def modes_of(other: Evaluated) -> list[str]:
    """What blocks compute again in backward; empty where nothing is."""
    modes = {mode for stage in other.stages for mode in stage.candidate.costed.setting.recompute.values()}
    return sorted(modes - {"none"})


def finite(number: float) -> float | None:
    """The number, or None (JSON has no infinity)."""
    return float(number) if math.isfinite(number) else None
