"""Training under a precision policy: by a program on simulated ranks, and on one device by hand."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.options import Precision
from autopar.parallel import bind_inputs
from autopar.runtime import Engine, load_program
from autopar.simulation import run_ranks
from autopar.tracing import Traced
from autopar.tracing.capture import LossFunction, find_loss

RATE = 1e-2
EPSILON = 1e-3  # of AdamW: what rounding leaves of a gradient of about zero must not become a whole step

Batch = Mapping[str, Tensor]
PieceOf = tuple[tuple[int, ...], Tensor]


@dataclass(frozen=True)
class Trained:
    """The losses of all steps, the gradients of the first, the masters after the last: whole, or a rank's pieces."""

    losses: tuple[Tensor, ...]
    gradients: dict[str, Any]
    masters: dict[str, Any]
    sent: dict[tuple[str, str], int]


def train_alone(
    model: nn.Module, batches: Sequence[Batch], policy: Precision, loss_fn: LossFunction | None = None, num_steps: int = 2
) -> Trained:
    """Each step: masters -> working copies; of every micro-batch a backward pass, whose gradients are added to the
    masters' in their type; AdamW on the masters."""
    working = _converted(copy.deepcopy(model), policy)
    named = dict(working.named_parameters())
    types = {name: _dtype(policy.master(_name(parameter.dtype))) for name, parameter in model.named_parameters()}
    masters = {name: nn.Parameter(p.detach().to(types[name], copy=True)) for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=RATE, eps=EPSILON)
    losses, first = [], dict[str, Tensor]()
    for step in range(num_steps):
        total = torch.zeros(())
        for batch in batches:
            with torch.no_grad():
                for name, parameter in named.items():
                    parameter.copy_(masters[name])
            loss = _loss(working, batch, policy, loss_fn) / len(batches)
            loss.backward()
            total = total + loss.detach()
            for name, parameter in named.items():
                _add(masters[name], parameter)
        losses.append(total)
        if step == 0:
            first = {name: master.grad.clone() for name, master in masters.items() if master.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return Trained(tuple(losses), first, {name: master.detach() for name, master in masters.items()}, {})


def train_program(
    source: str, traced: Traced, model: nn.Module, batch: Batch, num_ranks: int, num_steps: int = 2
) -> list[Trained]:
    """The same by a program, on every rank: the global batch in each step."""
    values = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    values = {name: value.detach().clone() for name, value in values.items()}
    by_path = bind_inputs(traced.example, (), batch)

    def rank_main(rank: int) -> Trained:
        engine = Engine(load_program(source))
        engine.load(values.__getitem__)
        inputs = {
            given.name: by_path[entry.path]
            for given, entry in zip(engine.program.INPUTS, traced.graph.inputs, strict=True)
        }
        optimizer = torch.optim.AdamW(engine.parameters(), lr=RATE, eps=EPSILON)
        losses, first, sent = [], dict[str, list[PieceOf]](), dict[tuple[str, str], int]()
        for step in range(num_steps):
            engine.set_ledger(step == 0)
            losses.append(engine.step(**inputs))
            if step == 0:
                assert engine.ledger is not None
                sent = engine.ledger.totals()
                first = {name: _pieces(engine, name, slot.storage.grad) for name, slot in engine.slots.items()}
            optimizer.step()
            engine.zero_grad()
        masters = {name: _pieces(engine, name, slot.storage) for name, slot in engine.slots.items()}
        return Trained(tuple(losses), first, masters, sent)

    return run_ranks(num_ranks, rank_main) if num_ranks > 1 else [rank_main(0)]


def largest_difference(found: Mapping[str, Sequence[PieceOf]], expected: Mapping[str, Tensor], scale: float) -> float:
    """Of all pieces from the whole tensors of the same names, as a part of ``scale``."""
    worst = 0.0
    for name, pieces in found.items():
        for offsets, piece in pieces:
            assert piece.dtype == expected[name].dtype, name
            places = tuple(slice(at, at + size) for at, size in zip(offsets, piece.shape, strict=True))
            worst = max(worst, float((piece - expected[name][places]).abs().max()) / scale)
    return worst


def micro_batches_of(batch: Batch, count: int) -> list[Batch]:
    """Equal ones, in order."""
    chunks = {name: tensor.chunk(count) for name, tensor in batch.items()}
    return [{name: chunks[name][at] for name in batch} for at in range(count)]


def _pieces(engine: Engine, name: str, tensor: Tensor | None) -> list[PieceOf]:
    assert tensor is not None, f"{name} has no gradient"
    return [(chunk.offsets, chunk.tensor.clone()) for chunk in engine.slot(name).chunks(tensor)]


def _converted(model: nn.Module, policy: Precision) -> nn.Module:
    """Parameters and persistent buffers in the type to compute in."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.data = parameter.data.to(_dtype(policy.computed(_name(parameter.dtype))))
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                module._buffers[key] = buffer.to(_dtype(policy.computed(_name(buffer.dtype))))
    return model


def _loss(model: nn.Module, batch: Batch, policy: Precision, loss_fn: LossFunction | None) -> Tensor:
    inputs = {name: tensor.to(_dtype(policy.computed(_name(tensor.dtype)))) for name, tensor in batch.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=policy.autocast is not None):
        if loss_fn is not None:
            output = model(inputs["x"])
            return loss_fn(output.float() if policy.autocast is None else output, batch)
        output = model(**inputs)
        loss = find_loss(output, list(output.values()) if isinstance(output, dict) else [output])
        assert loss is not None, "the model has a loss"
        return loss.float() if loss.dtype == torch.bfloat16 else loss


def _add(master: nn.Parameter, working: nn.Parameter) -> None:
    if working.grad is not None:
        gradient = working.grad.to(master.dtype)
        master.grad = gradient if master.grad is None else master.grad + gradient
        working.grad = None


def _dtype(name: str | None) -> torch.dtype:
    found = getattr(torch, name or "float32")
    assert isinstance(found, torch.dtype)
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
