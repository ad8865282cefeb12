"""Runs a program's text on simulated ranks beside the plain model, and compares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.runtime import Engine, load_program
from autopar.simulation import run_ranks
from autopar.tracing import Traced

TOLERANCE = 1e-10  # float64, relative to the largest gradient of the model


@dataclass(frozen=True)
class Ran:
    """What one rank has after a step: the loss, the pieces of its gradients as (offsets, piece), buffers, bytes sent."""

    loss: Tensor
    gradients: dict[str, list[tuple[tuple[int, ...], Tensor]] | None]
    buffers: dict[str, Tensor]
    sent: dict[tuple[str, str], int]


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter and buffer, under all of its names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach().clone() for name, tensor in (parameters | buffers).items()}


def run_program(source: str, traced: Traced, values: dict[str, Tensor], batch: object, num_ranks: int) -> list[Ran]:
    """One training step of the program on every rank."""
    given = traced.inputs(batch)

    def rank_main(rank: int) -> Ran:
        engine = Engine(load_program(source))
        engine.load(values.__getitem__)
        inputs = zip(engine.program.INPUTS, traced.graph.inputs, strict=True)
        engine.set_ledger(True)
        loss = engine.step(**{named.name: given[entry.value] for named, entry in inputs})
        assert engine.ledger is not None
        sent = engine.ledger.totals()
        engine.set_ledger(False)
        gradients: dict[str, list[tuple[tuple[int, ...], Tensor]] | None] = {}
        for name, parameter in engine.named_parameters():
            chunks = None if parameter.grad is None else engine.slot(name).chunks(parameter.grad)
            gradients[name] = None if chunks is None else [(chunk.offsets, chunk.tensor.clone()) for chunk in chunks]
        return Ran(loss, gradients, {name: tensor.clone() for name, tensor in engine.named_buffers()}, sent)

    return run_ranks(num_ranks, rank_main) if num_ranks > 1 else [rank_main(0)]


def assert_equal(ran: list[Ran], model: nn.Module, loss: Tensor) -> None:
    """Every rank's loss, gradients and buffers are those of the plain model after ``loss.backward()``."""
    tolerance = TOLERANCE if loss.dtype == torch.float64 else 1e-5  # some models compute their loss in float32
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for rank, found in enumerate(ran):
        assert abs(found.loss - loss) <= tolerance * abs(loss), f"loss on rank {rank}"
        for name, parameter in model.named_parameters():
            pieces = found.gradients[name]
            if parameter.grad is None:
                assert pieces is None, f"{name} has a gradient"
                continue
            assert pieces is not None, f"{name} has no gradient"
            for offsets, piece in pieces:
                places = tuple(slice(at, at + size) for at, size in zip(offsets, piece.shape, strict=True))
                difference = float((piece - parameter.grad[places]).abs().max())
                assert difference <= tolerance * largest, f"gradient of {name} on rank {rank} differs by {difference}"
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(found.buffers[name], buffer, rtol=1e-10, atol=1e-12)
