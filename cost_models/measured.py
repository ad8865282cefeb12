"""Prices from a profile: what was measured as it was, anything else by the estimate, corrected by what was measured.

Enters: a :class:`Profile` and the estimates of a cost model. Leaves: seconds. An estimate is corrected by the ratio of
measured to estimated seconds of the nearest sizes of the same operator, or where there is none of the same kind: linear
in the logarithm of the estimate between them, constant beyond. To operators comes what they take more inside a model (the
profile's ``contexts``), and all is multiplied by the profile's ``correction``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from cost_models.collectives import COLLECTIVE_KINDS, AxisCost, CollectiveKind
from cost_models.measurements import Curve, FloatArray, OperatorEntry
from cost_models.profile import Profile

Provenance = Literal["measured", "corrected", "estimated"]
Estimate = Callable[[OperatorEntry], tuple[float, float]]  # seconds of the forward and of the backward pass

LEAST_SECONDS = 1e-9  # of what is put into a logarithm: less than any operator takes


class MeasuredOperators:
    """Seconds of operators, by key where they were measured.

    Args:
        profile: the measurements.
        estimate: what the cost model says of an entry.
    """

    def __init__(self, profile: Profile, estimate: Estimate) -> None:
        self.profile = profile
        self._ratios = _Ratios(profile.operators, estimate)

    def entry(self, key: str) -> OperatorEntry | None:
        """The measurement of an operator at its local shapes; None where there is none."""
        return self.profile.operators.get(key)

    def seconds(
        self, keys: Sequence[str], kind: str, ahead: npt.ArrayLike, back: npt.ArrayLike
    ) -> tuple[FloatArray, FloatArray]:
        """Seconds of the forward and backward pass of each key, whose estimates are ``ahead`` and ``back``.

        Args:
            keys: of calls of one operator.
            kind: of the operator, as :class:`OperatorEntry` has it.
            ahead: estimated seconds of the forward pass, (keys,).
            back: of the backward pass, (keys,); 0 where there is none.
        """
        found = []
        entries = [self.entry(key) for key in keys]
        contexts = self.profile.forward_context, self.profile.backward_context
        for name, estimates, context in zip(("forward", "backward"), (ahead, back), contexts, strict=True):
            estimated = np.array(estimates, dtype=np.float64)
            corrected = self._ratios.corrected(target_of(keys[0]), kind, name, estimated)
            for place, entry in enumerate(entries):
                if entry is not None:
                    corrected[place] = entry.forward_seconds if name == "forward" else entry.backward_seconds
            inside = context.ratio * corrected + context.overhead_seconds * (corrected > 0)
            found.append(np.asarray(inside * self.profile.correction))
        return found[0], found[1]


def target_of(key: str) -> str:
    """The operator of a key: what stands before its inputs."""
    return key.partition("(")[0]


class _Ratios:
    """Measured over estimated seconds by the estimate, for each operator and each kind of operators.

    What is estimated at nothing (a view) has no ratio: it takes the median of the like ones that were measured.
    """

    def __init__(self, operators: Mapping[str, OperatorEntry], estimate: Estimate) -> None:
        self._points: dict[tuple[str, str], list[tuple[float, float]]] = {}
        self._nothing: dict[tuple[str, str], list[float]] = {}
        for key, entry in operators.items():
            measured = (entry.forward_seconds, entry.backward_seconds)
            for name, seconds, estimated in zip(("forward", "backward"), measured, estimate(entry), strict=True):
                for group in (target_of(key), f"kind {entry.kind}"):
                    if estimated > 0 and seconds > 0:
                        ratio = float(np.log(seconds / estimated))
                        self._points.setdefault((group, name), []).append((float(np.log(estimated)), ratio))
                    elif seconds > 0:
                        self._nothing.setdefault((group, name), []).append(seconds)
        self._grids: dict[tuple[str, str], tuple[FloatArray, FloatArray]] = {}

    def corrected(self, target: str, kind: str, name: str, estimated: FloatArray) -> FloatArray:
        """The estimates, each times the ratio of those nearest to it."""
        for group in ((target, name), (f"kind {kind}", name)):
            if group in self._points:
                sizes, ratios = self._grid(group)
                logs = np.log(np.maximum(estimated, LEAST_SECONDS))
                return np.asarray(estimated * np.exp(np.interp(logs, sizes, ratios)))
            if group in self._nothing:
                typical = float(np.median(self._nothing[group]))
                return np.asarray(np.where(estimated > 0, estimated, typical))
        return np.array(estimated)

    def _grid(self, group: tuple[str, str]) -> tuple[FloatArray, FloatArray]:
        """The points of a group in order; of those at one size the median."""
        if group not in self._grids:
            by_size: dict[float, list[float]] = {}
            for size, ratio in self._points[group]:
                by_size.setdefault(round(size, 3), []).append(ratio)
            sizes = sorted(by_size)
            ratios = [float(np.median(by_size[size])) for size in sizes]
            self._grids[group] = np.array(sizes), np.array(ratios)
        return self._grids[group]


BANDWIDTH_BYTES = 1 << 20  # of collectives whose seconds show the bandwidth of their links; smaller ones are mostly latency


@dataclass(frozen=True)
class MeasuredAxisCost(AxisCost):
    """An axis with measured curves for some kinds of collectives; others are estimated and corrected.

    Args:
        curves: by kind.
        ratios: by what the estimate of a kind that has no curve is multiplied.
        correction: of all seconds.
    """

    curves: Mapping[str, Curve] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=dict)
    correction: float = 1.0

    def seconds(self, kind: CollectiveKind, num_bytes: npt.ArrayLike) -> FloatArray:
        """As of :meth:`AxisCost.seconds`."""
        estimated = super().seconds(kind, num_bytes)
        if self.size == 1:
            return estimated
        if kind not in self.curves:
            return np.asarray(estimated * (self.ratios.get(kind, 1.0) * self.correction))
        amount, curve = np.asarray(num_bytes, dtype=np.float64), self.curves[kind]
        measured, largest = curve.seconds(amount), curve.points[-1].num_bytes
        if largest < BANDWIDTH_BYTES:  # these seconds are latency: what larger ones add is not known from them
            known, expected = float(curve.seconds(largest)), float(super().seconds(kind, largest))
            # No faster than the links, but twice the bytes never take more than twice the time: bounds rely on that.
            part = min(1.0, known / expected) if expected > 0 else 1.0
            measured = np.where(amount > largest, known + part * np.maximum(estimated - expected, 0.0), measured)
        return np.asarray(np.where(amount > 0, measured * self.correction, 0.0))


def measured_axis(estimated: AxisCost, profile: Profile, key: str) -> AxisCost:
    """An axis whose groups have this key in the profile: measured kinds as measured, others by the median ratio of those.

    Where no collective of these groups was measured, the estimate stays.
    """
    curves = {
        kind: profile.collectives[f"{kind} {key}"]
        for kind in COLLECTIVE_KINDS
        if f"{kind} {key}" in profile.collectives
    }
    ratios = [
        point.seconds / float(estimated.seconds(kind, point.num_bytes))  # type: ignore[arg-type]
        for kind, curve in curves.items()
        for point in curve.points
        if point.num_bytes > 0
    ]
    typical = float(np.median(ratios)) if ratios else 1.0
    return MeasuredAxisCost(
        estimated.size,
        estimated.lines,
        curves,
        {kind: typical for kind in COLLECTIVE_KINDS if kind not in curves},
        profile.correction,
    )


def provenance_of(cost: AxisCost, kind: str) -> Provenance:
    """How an axis prices a kind of collectives."""
    if not isinstance(cost, MeasuredAxisCost) or not cost.curves:
        return "estimated"
    return "measured" if kind in cost.curves else "corrected"
