"""Measured values: the machine, an operator, a curve over sizes, an overlap, a training run. A profile is made of them.

Enters: figures that ``autopar.profiler`` measured. Leaves: frozen dataclasses that merge and interpolate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from cost_models.errors import ProfileError

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Machine:
    """What measurements depend on beside what is measured. Two profiles of equal machines merge.

    Args:
        device: model of the devices: of the GPU, or of the processor.
        kind: ``cuda``, ``rocm`` or ``cpu``.
        devices_per_node: devices (on CPUs: processes) of each node that measured together. On CPUs they share the
            node's memory, so that other numbers are another machine; GPUs do not.
        threads: threads of one process.
        cores: processor cores of a node.
        torch_version: of PyTorch.
    """

    device: str
    kind: str
    devices_per_node: tuple[int, ...]
    threads: int
    cores: int
    torch_version: str

    def differences(self, other: Machine) -> list[str]:
        """What keeps measurements on ``other`` from being valid here, as ``what: here, there``."""
        found = []
        for one in fields(self):
            here, there = getattr(self, one.name), getattr(other, one.name)
            if here != there and not (one.name == "devices_per_node" and self.kind != "cpu"):
                found.append(f"{one.name}: {numbers_text(there)} there, {numbers_text(here)} here")
        return found


def numbers_text(value: object) -> str:
    """A tuple as ``2+2``, anything else as it is."""
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class OperatorEntry:
    """One operator at its local shapes.

    Args:
        forward_seconds, backward_seconds: medians; the backward pass is 0 where no gradient flows.
        spread: half of the range of the middle half of the rounds, over their median.
        count: rounds.
        kind: ``matmul``, ``attention``, ``elementwise``, ``view``: by which estimate it is priced where it is not measured.
        dtype: of the arithmetic.
        flops, backward_flops, num_bytes: what the estimate is made from: FLOPs of each pass, bytes that forward reads and
            writes.
    """

    forward_seconds: float
    backward_seconds: float
    spread: float
    count: int
    kind: str
    dtype: str
    flops: float
    backward_flops: float
    num_bytes: float

    def merged(self, other: OperatorEntry) -> OperatorEntry:
        """Both measurements of one operator together."""
        total = self.count + other.count
        mine, theirs = self.count / total, other.count / total
        return replace(
            self,
            forward_seconds=mine * self.forward_seconds + theirs * other.forward_seconds,
            backward_seconds=mine * self.backward_seconds + theirs * other.backward_seconds,
            spread=max(self.spread, other.spread),
            count=total,
        )


@dataclass(frozen=True)
class Point:
    """Seconds of one size: the median of ``count`` rounds with their ``spread`` (as of :class:`OperatorEntry`)."""

    num_bytes: float
    seconds: float
    spread: float
    count: int

    def merged(self, other: Point) -> Point:
        """Both measurements of one size together."""
        total = self.count + other.count
        seconds = (self.count * self.seconds + other.count * other.seconds) / total
        return Point(self.num_bytes, seconds, max(self.spread, other.spread), total)


@dataclass(frozen=True)
class Curve:
    """Seconds by bytes, from points in order of their bytes."""

    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        sizes = [point.num_bytes for point in self.points]
        if not sizes or sizes != sorted(set(sizes)):
            raise ProfileError(f"a curve has points of rising bytes, at least one; these are of {sizes}")

    @cached_property
    def _grid(self) -> tuple[FloatArray, FloatArray]:
        sizes = np.array([point.num_bytes for point in self.points])
        seconds = np.array([point.seconds for point in self.points])
        # What disturbs a measurement makes it longer: fewer bytes cost no more than more bytes were seen to.
        return sizes, np.minimum.accumulate(seconds[::-1])[::-1]

    @cached_property
    def seconds_per_byte(self) -> float:
        """Of what goes beyond the largest size: the slope between the last two, or the largest one's own rate."""
        sizes, seconds = self._grid
        if len(sizes) == 1:
            return float(seconds[-1] / max(sizes[-1], 1.0))
        slope = float((seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
        return slope if slope > 0 else float(seconds[-1] / sizes[-1])

    def seconds(self, num_bytes: npt.ArrayLike) -> FloatArray:
        """Piecewise linear between the points, the least one's seconds below it, the last slope above; monotone."""
        sizes, seconds = self._grid
        amount = np.asarray(num_bytes, dtype=np.float64)
        beyond = np.maximum(amount - sizes[-1], 0.0) * self.seconds_per_byte
        return np.asarray(np.interp(amount, sizes, seconds) + beyond)

    @property
    def spread(self) -> float:
        """The median spread of the points."""
        return float(np.median([point.spread for point in self.points]))

    def merged(self, other: Curve) -> Curve:
        """The points of both."""
        found = {point.num_bytes: point for point in self.points}
        for point in other.points:
            known = found.get(point.num_bytes)
            found[point.num_bytes] = point if known is None else known.merged(point)
        return Curve(tuple(found[size] for size in sorted(found)))


@dataclass(frozen=True)
class Overlap:
    """A collective beside compute: by how many times each takes longer than alone (1: they do not disturb each other)."""

    compute_slowdown: float
    collective_slowdown: float


@dataclass(frozen=True)
class Context:
    """A model's operators run one after the other, beside what each took alone.

    Args:
        num_operators: how many there are.
        forward_seconds, backward_seconds: of all of them in a row.
        forward_alone_seconds, backward_alone_seconds: sums of what each took alone.
    """

    num_operators: int
    forward_seconds: float
    backward_seconds: float
    forward_alone_seconds: float
    backward_alone_seconds: float


@dataclass(frozen=True)
class InContext:
    """What an operator takes inside a model: ``ratio`` times what it takes alone, and ``overhead_seconds``."""

    ratio: float = 1.0
    overhead_seconds: float = 0.0


def in_context(counts: Sequence[int], alone: Sequence[float], together: Sequence[float]) -> InContext:
    """The ratio r and overhead a for which ``r x alone + a x count`` is closest to ``together``, by relative squares; neither
    is negative. Of a single model size the ratio alone."""
    if not counts:
        return InContext()
    rows = np.array([[s / t, n / t] for n, s, t in zip(counts, alone, together, strict=True)])
    ones = np.ones(len(rows))
    ratio_only = float(rows[:, 0].sum() / (rows[:, 0] ** 2).sum())
    if len(rows) == 1:
        return InContext(ratio_only)
    ratio, overhead = (float(item) for item in np.linalg.lstsq(rows, ones, rcond=None)[0])
    if overhead < 0 or ratio < 0:
        return InContext(ratio_only)
    return InContext(ratio, overhead)


@dataclass(frozen=True)
class Run:
    """A training run: its predicted step before any correction by other runs, and the median step that was measured."""

    plan: str
    predicted_seconds: float
    measured_seconds: float
    num_steps: int


Mergeable = TypeVar("Mergeable", OperatorEntry, Curve)


def merged_entries(mine: Mapping[str, Mergeable], theirs: Mapping[str, Mergeable]) -> dict[str, Mergeable]:
    """The entries of both; what both have is merged."""
    found = dict(mine)
    for key, entry in theirs.items():
        known = mine.get(key)
        found[key] = entry if known is None else known.merged(entry)
    return found
