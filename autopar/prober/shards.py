"""An example run on simulated shards along one mesh axis: do the pieces come together to what one device computes?

What each tensor is on the axis, as in :mod:`autopar.layout`, with a dim's number for a shard of it cut anywhere:

    0, 1 ...   sharded along that dim                     gradient sharded alike
    WHOLE      the same on every rank                     gradient the same
    SUMMED     the same on every rank                     gradient: each rank has a term
    PARTIAL    each rank has a term                       gradient the same
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from autopar.prober.example import Example

WHOLE: Literal["whole"] = "whole"
SUMMED: Literal["summed"] = "summed"
PARTIAL: Literal["partial"] = "partial"
State = int | Literal["whole", "summed", "partial"]


def pieces(tensor: torch.Tensor, state: State, parts: int, is_term: bool, seed: int) -> list[torch.Tensor]:
    """What each rank has of a tensor: its piece, the whole, or where ``is_term`` one of random terms of a sum."""
    if isinstance(state, int):
        return [piece.contiguous() for piece in torch.tensor_split(tensor, parts, dim=state)]
    if not is_term:
        return [tensor.clone() for _ in range(parts)]
    generator = torch.Generator().manual_seed(seed)
    terms = [
        torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype) - 0.5
        for _ in range(parts - 1)
    ]
    return [*terms, tensor - sum(terms)]


def local_outputs(
    example: Example, inputs: Sequence[State], parts: int
) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    """(by output and rank, by input and rank): what the ranks compute, from what."""
    given = [
        [
            piece.detach().requires_grad_(tensor.requires_grad)
            for piece in pieces(tensor.detach(), state, parts, state == PARTIAL, 7 * index + 1)
        ]
        for index, (tensor, state) in enumerate(zip(example.tensors, inputs, strict=True))
    ]
    by_rank = [example.call([column[rank] for column in given]) for rank in range(parts)]
    return [list(column) for column in zip(*by_rank, strict=True)], [list(column) for column in given]


def observed(example: Example, inputs: Sequence[State], parts: int) -> tuple[State, ...] | None:
    """What the outputs are when the inputs are so; None where the operator fails or the pieces make nothing of the whole."""
    try:
        found, _ = local_outputs(example, inputs, parts)
    except Exception:
        return None
    states = [_state_of(whole, column, example.tolerance) for whole, column in zip(example.outputs, found, strict=True)]
    return None if None in states else tuple(state for state in states if state is not None)


def _state_of(whole: torch.Tensor, column: Sequence[torch.Tensor], tolerance: float) -> State | None:
    for dim in range(whole.dim()):
        lengths = [piece.shape[dim] if piece.dim() == whole.dim() else -1 for piece in column]
        expected = [piece.shape[dim] for piece in torch.tensor_split(whole, len(column), dim=dim)]
        others = {(*piece.shape[:dim], *piece.shape[dim + 1 :]) for piece in column}
        if lengths == expected and len(others) == 1 and close(torch.cat(list(column), dim), whole, tolerance):
            return dim
    if any(piece.shape != whole.shape for piece in column):
        return None
    if all(close(piece, whole, tolerance) for piece in column):
        return WHOLE
    floating = whole.is_floating_point() or whole.is_complex()
    return PARTIAL if floating and close(torch.stack(list(column)).sum(0), whole, tolerance) else None


def wrong(example: Example, inputs: Sequence[State], outputs: Sequence[State], parts: int) -> str | None:
    """What does not come together when inputs and outputs are so, forward or backward; None where everything does."""
    try:
        found, given = local_outputs(example, inputs, parts)
    except Exception as error:
        return f"it fails on a shard: {error}"
    for index, (whole, state, column) in enumerate(zip(example.outputs, outputs, found, strict=True)):
        if not joins(whole.detach(), state, [piece.detach() for piece in column], PARTIAL, example.tolerance):
            return f"output {index} of the shards is not that of one device"
    along = [
        torch.linspace(0.5, 1.5, t.numel(), dtype=torch.float64).to(t.dtype).view(t.shape) for t in example.outputs
    ]
    terms = [
        pieces(gradient, state, parts, state == SUMMED, 11 * index + 3)
        for index, (gradient, state) in enumerate(zip(along, outputs, strict=True))
    ]
    expected = _gradients(example.outputs, along, example.tensors)
    by_rank = [
        _gradients([c[rank] for c in found], [t[rank] for t in terms], [c[rank] for c in given])
        for rank in range(parts)
    ]
    for index, (gradient, state) in enumerate(zip(expected, inputs, strict=True)):
        if gradient is not None:
            column = [piece for local in by_rank if (piece := local[index]) is not None]
            if len(column) < parts:
                return f"input {index} gets no gradient on a shard"
            if not joins(gradient, state, column, SUMMED, example.tolerance):
                return f"the gradient of input {index} of the shards is not that of one device"
    return None


def _gradients(
    outputs: Sequence[torch.Tensor], along: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """By input; None where none is wanted, zeros where the operator does not use it."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    pairs = [(output, gradient) for output, gradient in zip(outputs, along, strict=True) if output.requires_grad]
    if not wanted or not pairs:
        return [None] * len(inputs)
    made, given = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(made, wanted, given, retain_graph=True, allow_unused=True))
    results = [next(found) if tensor.requires_grad else None for tensor in inputs]
    return [
        torch.zeros_like(tensor) if tensor.requires_grad and result is None else result
        for tensor, result in zip(inputs, results, strict=True)
    ]


def joins(whole: torch.Tensor, state: State, column: Sequence[torch.Tensor], summed: State, tolerance: float) -> bool:
    """Whether pieces in ``state`` make the whole; ``summed`` is the state in which they are terms."""
    if isinstance(state, int):
        expected = torch.tensor_split(whole, len(column), dim=state)
        scale = _scale(whole)
        return all(
            piece.shape == part.shape and close(piece, part, tolerance, scale)
            for piece, part in zip(column, expected, strict=True)
        )
    if any(piece.shape != whole.shape for piece in column):
        return False
    if state == summed:
        return close(torch.stack(list(column)).sum(0), whole, tolerance)
    return all(close(piece, whole, tolerance) for piece in column)


def _scale(tensor: torch.Tensor) -> float:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 1.0
    finite = tensor.detach().abs()[tensor.isfinite()]
    return max(1.0, float(finite.max())) if finite.numel() else 1.0


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float, scale: float | None = None) -> bool:
    """Equal; floating numbers within the tolerance of the largest one."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not (expected.is_floating_point() or expected.is_complex()):
        return bool((found == expected).all())
    allowed = tolerance * (scale or _scale(expected))
    return torch.allclose(found, expected, rtol=0, atol=allowed, equal_nan=True)
