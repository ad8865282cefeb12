"""What a verification finds: relative errors by kind, and whether what was sent is what the plan says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.verifier.trial import PieceOf, TrialResult

PARAMETER_TOLERANCE = 1e-8  # an optimizer's step divides by the root of a square: half the digits
SHARE_OF_GRADIENT = 1e-2  # AdamW's epsilon in a verification, of the model's largest gradient
SHARE_OF_STATISTICS = 1e-3  # of the largest running statistic: one that is exactly zero is what rounding leaves of it


class VerificationError(AutoparError):
    """A program does not compute what its model computes, or does not send what its plan says."""


@dataclass(frozen=True)
class Measure:
    """The largest relative error among the tensors of one kind, and whose it is."""

    kind: str
    error: float
    tolerance: float
    worst: str
    num_tensors: int

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance

    def __str__(self) -> str:
        verdict = "" if self.passed else ", too large"
        return (
            f"{self.kind}: {self.error:.1e} of {self.tolerance:.0e} ({self.num_tensors}, worst {self.worst}{verdict})"
        )


@dataclass(frozen=True)
class Verification:
    """The outcome of :func:`verify`.

    ``measures``: of loss, outputs, gradients, parameters and buffers. ``collectives``: bytes that the first rank sent
    in a step by (kind, axis). ``differences``: where these are not the plan's own count; None when they were not
    counted.
    """

    model: str
    mesh: str
    measures: tuple[Measure, ...]
    collectives: Mapping[tuple[str, str], int]
    differences: tuple[str, ...] | None = None

    @property
    def passed(self) -> bool:
        return all(measure.passed for measure in self.measures) and not self.differences

    def __str__(self) -> str:
        head = f"{self.model} on {self.mesh}: {'equal' if self.passed else 'NOT equal'} to the plain model"
        counted = [f"collectives: {line}" for line in self.differences or ()]
        return "\n  ".join([head, *map(str, self.measures), *counted])

    def require(self) -> Verification:
        """This outcome, or VerificationError with its facts when something is not equal."""
        if not self.passed:
            raise VerificationError(f"{self}\nthis is a fault of autopar: please report it with the model and the plan")
        return self


@dataclass(frozen=True)
class Expected:
    """What the plain model computes: loss, outputs by path, and by name gradients (absent ones as zeros), parameters
    and buffers after a step of AdamW with this epsilon. ``statistics``: the buffers that a forward pass changes."""

    loss: Tensor
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    epsilon: float = 1e-8
    statistics: frozenset[str] = frozenset()

    def buffer_scale(self, name: str) -> float:
        """What a buffer's error is relative to: its largest value, and of a running statistic no less than a small part of
        the model's largest one (the mean after a normalisation and a product without bias is exactly zero)."""
        largest = max((_size(self.buffers[other]) for other in self.statistics if name in self.statistics), default=0.0)
        return max(_size(self.buffers[name]), SHARE_OF_STATISTICS * largest)


def adamw_epsilon(gradients: Iterable[Tensor]) -> float:
    """So large that a gradient of zero, of which rounding leaves something, moves its parameter by next to nothing."""
    return max(1e-8, SHARE_OF_GRADIENT * max(map(_size, gradients), default=0.0))


def measures(
    expected: Expected, results: Sequence[TrialResult], tolerance: float, learning_rate: float
) -> Iterator[Measure]:
    """The largest error of each kind over all ranks."""
    losses = {
        f"on rank {rank}": _error(result.loss, expected.loss, _size(expected.loss))
        for rank, result in enumerate(results)
    }
    yield _worst("loss", losses, tolerance)
    outputs: dict[str, float] = {}
    for result in results:
        for name, value in result.outputs.items():
            whole = expected.outputs.get(name, expected.loss)
            outputs[name] = max(outputs.get(name, 0.0), _error(value, whole, _size(whole)))
    yield _worst("outputs", outputs, tolerance)
    largest = max((_size(gradient) for gradient in expected.gradients.values()), default=0.0)
    gradients = {
        name: _piecewise([result.gradients.get(name, []) for result in results], whole, max(_size(whole), largest))
        for name, whole in expected.gradients.items()
    }
    yield _worst("gradients", gradients, tolerance)
    parameters = {
        name: _piecewise(
            [result.parameters.get(name, []) for result in results], whole, whole.abs().clamp(min=learning_rate)
        )
        for name, whole in expected.parameters.items()
    }
    yield _worst("parameters", parameters, PARAMETER_TOLERANCE)
    buffers = {
        name: max(
            (
                _error(result.buffers[name], whole, expected.buffer_scale(name))
                for result in results
                if name in result.buffers
            ),
            default=float("inf"),
        )
        for name, whole in expected.buffers.items()
    }
    if buffers:
        yield _worst("buffers", buffers, tolerance)


def _worst(kind: str, errors: Mapping[str, float], tolerance: float) -> Measure:
    worst = max(errors, key=lambda name: errors[name], default="none")
    return Measure(kind, errors.get(worst, 0.0), tolerance, worst, 1 if kind == "loss" else len(errors))


def _size(tensor: Tensor) -> float:
    """The largest finite magnitude in a tensor."""
    if not tensor.numel() or not _is_real_or_complex(tensor):
        return 1.0
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else 1.0


def _is_real_or_complex(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _error(found: Tensor, whole: Tensor, scale: float | Tensor) -> float:
    """The largest |difference| over its scale; infinite where shapes, infinities or integers differ."""
    if found.shape != whole.shape:
        return float("inf")
    if not whole.numel():
        return 0.0
    if not _is_real_or_complex(whole):
        return 0.0 if bool((found == whole).all()) else float("inf")
    same = (found == whole) | (found.isnan() & whole.isnan())
    difference = torch.where(same, 0.0, (found.to(whole.dtype) - whole).abs())
    error = torch.where(difference == 0, 0.0, difference / scale)
    return float(error.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def _piecewise(ranks: Sequence[list[PieceOf]], whole: Tensor, scale: float | Tensor) -> float:
    """The largest error of any rank's pieces; infinite when they do not make up the whole tensor.

    Ranks of other pipeline stages have none.
    """
    covered = torch.zeros(whole.shape, dtype=torch.bool)
    error = 0.0
    for pieces in ranks:
        for offsets, piece in pieces:
            where = tuple(slice(start, start + size) for start, size in zip(offsets, piece.shape, strict=True))
            covered[where] = True
            error = max(error, _error(piece, whole[where], scale[where] if isinstance(scale, Tensor) else scale))
    return error if bool(covered.all()) else float("inf")


def differences(sent: Mapping[tuple[str, str], int], planned: Mapping[tuple[str, str], int]) -> tuple[str, ...]:
    """Kinds and axes whose bytes differ, in words."""
    found = []
    for kind, axis in sorted({*sent, *planned}):
        there, here = planned.get((kind, axis), 0), sent.get((kind, axis), 0)
        if there != here:
            found.append(f"{kind} on {axis}: the plan says {there} bytes, {here} were sent")
    return tuple(found)
