"""What the predicted seconds rest on: how much of each was measured, and by how much it may be wrong.

Enters: the report's entries of operators and collectives, a cost model. Leaves: a JSON object. ``measured``: the profile has
the very operator, or collective on such groups; ``corrected``: the estimate, times the ratio of measured to estimated
seconds of its kind; ``estimated``: from data sheets and published curves alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cost_models import CostModel, Device

# Mean absolute errors of whole steps. Measured: 11% of GPT-2 in docs/profile_accuracy.md, rounded up; corrected: assumed
# between that and the estimate. Estimated: for GPUs docs/validation.md, runs that others published; for CPUs the former page.
EXPECTED_ERRORS: Mapping[str, float] = {"measured": 0.15, "corrected": 0.25}
ESTIMATED_ERRORS: Mapping[str, float] = {"cuda": 0.15, "rocm": 0.25, "cpu": 0.4}

ACTIVATIONS = ("forward", "backward", "recompute")
Parts = dict[str, float]  # seconds by provenance


def basis_json(
    model: CostModel,
    operators: Sequence[Mapping[str, Any]],
    collectives: Sequence[Mapping[str, Any]],
    breakdown: Mapping[str, float],
    optimizer: str,
    dtype: str,
    offloads: bool = False,
) -> dict[str, Any]:
    """Shares and expected errors of each kind of seconds, and of the step.

    ``breakdown``: the predicted step by kind; waiting for other stages is as certain as what all the rest is made of.
    ``offloads``: some parameters are updated on the host.
    """
    compute = _sums((entry["provenance"], _times(entry) * entry["compute_seconds"]) for entry in operators)
    sent = [(entry["phase"], (entry["provenance"], len(entry["stages"]) * entry["seconds"])) for entry in collectives]
    activations = _sums(part for phase, part in sent if phase in ACTIVATIONS)
    parameters = _sums(part for phase, part in sent if phase not in ACTIVATIONS)
    kinds: dict[str, Parts] = {
        "compute_seconds": compute,
        "recomputation_seconds": compute,
        "copies_seconds": {model.copy_provenance: 1.0},
        "resharding_seconds": activations,
        "parameter_communication_seconds": parameters,
        "optimizer_seconds": {model.optimizer_provenance(optimizer, dtype): 1.0},
        "offload_seconds": {"estimated": 1.0},
    }
    device = model.devices()[0]
    if offloads and device.kind != "cpu":  # what a profile has was measured on the device
        kinds["optimizer_seconds"] = {"estimated": 1.0}
    described = {kind: _described(parts, device) for kind, parts in kinds.items() if breakdown[kind]}
    step: Parts = {}
    for kind, one in described.items():
        for name, share in one["shares"].items():
            step[name] = step.get(name, 0.0) + max(0.0, breakdown[kind]) * share
    profile = model.profile
    return {
        "profile": None if profile is None else profile.fingerprint,
        "correction": 1.0 if profile is None else profile.correction,
        "step_seconds": _described(step, device),
        "kinds": described,
    }


def _times(entry: Mapping[str, Any]) -> int:
    return int(entry["occurrences"])


def _sums(parts: Iterable[tuple[str, float]]) -> Parts:
    found: Parts = {}
    for provenance, seconds in parts:
        found[provenance] = found.get(provenance, 0.0) + max(0.0, seconds)
    return found


def _described(parts: Parts, device: Device) -> dict[str, Any]:
    """Shares of seconds, what most of them are, and the error to expect: the shares' own, weighted."""
    total = math.fsum(parts.values())
    shares = {name: seconds / total for name, seconds in sorted(parts.items())} if total > 0 else {"estimated": 1.0}
    error = math.fsum(share * expected_error(name, device) for name, share in shares.items())
    return {"provenance": max(shares, key=lambda name: shares[name]), "shares": shares, "expected_error": error}


def expected_error(provenance: str, device: Device) -> float:
    """The mean absolute error of steps that are predicted so, as a fraction."""
    return EXPECTED_ERRORS.get(provenance, ESTIMATED_ERRORS[device.kind])
