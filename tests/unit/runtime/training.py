"""A program and its model side by side: the same parameters, the same steps, compared all along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime import Engine, load_program
from autopar.runtime.parameters import ParameterSlot

Batch = Callable[[int], dict[str, Tensor]]


def make_engine(source: str, model: nn.Module) -> Engine:
    """The program with the model's parameters."""
    engine = Engine(load_program(source))
    state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    engine.load(lambda name: state[name].detach())
    return engine


def check_pieces(slot: ParameterSlot, found: Tensor | None, whole: Tensor | None, tolerance: float = 1e-12) -> None:
    """What rests here equals the same rectangles of the whole."""
    assert found is not None, slot.name
    assert whole is not None, slot.name
    for offsets, sizes, piece in slot.chunks(found):
        wanted = whole.detach()[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
        torch.testing.assert_close(piece, wanted, rtol=tolerance, atol=tolerance, msg=lambda m: f"{slot.name}: {m}")


def train(
    engine: Engine, model: nn.Module, batch: Batch, make_optimizer: Callable[[Any], torch.optim.Optimizer]
) -> None:
    """Three steps of both, compared all along."""
    whole = dict(model.named_parameters())
    mine = make_optimizer([p for p in engine.parameters() if p.requires_grad])
    theirs = make_optimizer([p for p in whole.values() if p.requires_grad])
    for number in range(3):
        inputs = batch(number)
        theirs.zero_grad()
        wanted, _ = model(**inputs)
        wanted.backward()
        loss = engine.step(**inputs)
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-11, atol=1e-11)
        for name, slot in engine.slots.items():
            if slot.trainable:
                check_pieces(slot, slot.storage.grad, whole[name].grad)
        norm = engine.clip_grad_norm_(0.5)
        wanted_norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch.testing.assert_close(norm, wanted_norm, rtol=1e-12, atol=1e-12)
        mine.step()
        theirs.step()
        engine.zero_grad()
        for name, slot in engine.slots.items():
            # AdamW divides by sqrt(v) + 1e-8: a key bias, whose gradient is rounding noise, differs a little.
            check_pieces(slot, slot.storage, whole[name], tolerance=1e-10)
    inputs = batch(9)
    found = engine.forward(**inputs)
    for key, wanted in zip(found, model(**inputs), strict=True):
        torch.testing.assert_close(found[key], wanted.detach(), rtol=1e-10, atol=1e-10)
    for name, value in model.named_buffers():
        assert torch.equal(dict(engine.named_buffers())[name], value)
