"""Running a program: filling its parameters, training steps, whole outputs, the gradient norm.

The engine is what a training loop holds on each rank::

    engine = Engine(load_program(source))
    engine.load(lambda name: checkpoint[name])
    optimizer = torch.optim.AdamW(engine.parameters())
    loss = engine.step(input_ids=batch, labels=batch)
    engine.clip_grad_norm_(1.0)
    optimizer.step()
    engine.zero_grad()
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime import norms, zero
from autopar.runtime.batches import Batches, replicated, scaled
from autopar.runtime.errors import ProgramError
from autopar.runtime.gathered import Gathers
from autopar.runtime.gradients import GradientReducer
from autopar.runtime.layouts import changes, parse_words
from autopar.runtime.mesh import Ledger, Mesh
from autopar.runtime.parameters import BufferSlot, ParameterSlot
from autopar.runtime.program import Output


class Engine:
    """One rank's part of a program. All ranks make it together, and call its methods in the same order."""

    def __init__(self, program: types.ModuleType, device: torch.device | str | None = None) -> None:
        self.program = program
        self.mesh: Mesh = program.mesh
        self.mesh.bind(device)
        if len(program.STAGES) != 1:
            raise ProgramError(f"this engine runs programs of one stage, this one has {len(program.STAGES)}")
        self.stage: nn.Module = program.STAGES[0]()
        self._run: Callable[..., dict[str, Tensor]] = self.stage
        self._outputs: tuple[Output, ...] = tuple(program.OUTPUTS)
        self._batches = Batches(program.INPUTS, self.mesh, program.BATCH, program.BATCH_MULTIPLE)
        self._gathers = Gathers()
        self.slots: dict[str, ParameterSlot] = {}
        self.buffer_slots: dict[str, BufferSlot] = {}
        self._names: dict[str, str] = {}
        for slot in self.stage.modules():
            if isinstance(slot, (ParameterSlot, BufferSlot)):
                self._adopt(slot)
        self._reducer = GradientReducer(list(self.slots.values()))

    def _adopt(self, slot: ParameterSlot | BufferSlot) -> None:
        for name in (slot.name, *slot.aliases):
            if name in self._names:
                raise ProgramError(f"two slots of the program are called {name!r}")
            self._names[name] = slot.name
        slot.allocate(self.mesh.device)
        if isinstance(slot, ParameterSlot):
            slot.gathers = self._gathers
            self.slots[slot.name] = slot
        else:
            self.buffer_slots[slot.name] = slot

    # Parameters and buffers

    def slot(self, name: str) -> ParameterSlot | BufferSlot:
        """The slot of a parameter or buffer, by any of its names."""
        own = self._names.get(name)
        if own is None:
            raise ProgramError(f"the program has no parameter or buffer {name!r}")
        return self.slots[own] if own in self.slots else self.buffer_slots[own]

    def fill(self, name: str, read: Callable[[], Tensor]) -> None:
        """Copy this rank's piece of the whole tensor that ``read()`` returns; the whole one may be on the CPU."""
        self.slot(name).fill(read)

    def load(self, source: Callable[[str], Tensor]) -> None:
        """Fill every parameter and buffer with this rank's piece of ``source(name)``, one whole tensor at a time."""
        for slot in (*self.slots.values(), *self.buffer_slots.values()):
            slot.fill(lambda name=slot.name: source(name))  # type: ignore[misc]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(the model's name, what rests here) of every parameter, one entry per tied set."""
        for name, slot in self.slots.items():
            yield name, slot.storage

    def parameters(self) -> Iterator[nn.Parameter]:
        """What the optimizer updates."""
        for slot in self.slots.values():
            yield slot.storage

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """(the model's name, tensor) of every buffer, whole on every rank."""
        for name, slot in self.buffer_slots.items():
            yield name, slot.local

    # Running

    @property
    def data_size(self) -> int:
        """Into how many shares the batch is cut: ``num_replicas`` of a ``DistributedSampler``."""
        return self._batches.data_size

    @property
    def data_rank(self) -> int:
        """Which share of the batch this rank takes: ``rank`` of a ``DistributedSampler``."""
        return self._batches.data_rank

    def step(self, *args: Any, local: bool = False, **kwargs: Any) -> Tensor:
        """Forward and backward: adds to the parameters' gradients and returns the detached loss, the same on every rank.

        The inputs are the global batch, the same on every rank; with ``local`` this rank's share of it.
        """
        shares, _ = self._batches.shares(args, kwargs, local)
        self._refresh()
        try:
            with torch.enable_grad(), self._gathers.saving():
                outputs = self._run(**shares)
            loss = outputs.get("loss")
            if loss is None or loss.dim() != 0:
                raise ProgramError(f"the program returns no scalar 'loss' to train on, only {', '.join(outputs)}")
            if not loss.requires_grad:
                raise ProgramError(
                    "the loss depends on no trainable parameter, so there is no step to make; forward() gives its value"
                )
            loss.backward()
            self._reducer.finish()
        except BaseException:
            self._reducer.abandon()
            for slot in self.buffer_slots.values():
                slot.abandon()
            raise
        self._commit()
        return loss.detach()

    @torch.no_grad()
    def forward(self, *args: Any, local: bool = False, **kwargs: Any) -> dict[str, Tensor]:
        """Every output, whole on every rank; without gradients."""
        shares, batch = self._batches.shares(args, kwargs, local)
        self._refresh()
        found = self._run(**shares)
        self._commit()
        return {
            output.name: self._whole(output, found[output.name], batch)
            for output in self._outputs
            if output.name in found
        }

    def _whole(self, output: Output, share: Tensor, batch: int) -> Tensor:
        """An output gathered from its shares."""
        shape = scaled(output.shape, output.batch_dim, batch, self.program.BATCH)
        words = parse_words(output.layout, self.mesh, len(shape))
        for change in changes(words, replicated(words), shape, self.mesh):
            if change.name != "keep_first_gradient":
                share = change.forward(share)
        return share

    def _refresh(self) -> None:
        zero.refresh(self.slots.values())

    def _commit(self) -> None:
        for slot in self.buffer_slots.values():
            slot.commit()

    def compile(self, **options: Any) -> None:
        """Run the stage through ``torch.compile`` from now on."""
        self._run = torch.compile(self.stage, **options)

    def train(self, mode: bool = True) -> Engine:
        """Set the mode of the stage's modules."""
        self.stage.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    # Gradients

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for slot in self.slots.values():
            slot.storage.grad = None

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their common norm is at most ``max_norm``; returns the norm before, on every rank.

        As ``torch.nn.utils.clip_grad_norm_`` on the whole gradients: every element counts once.
        """
        return norms.clip_grad_norm_(list(self.slots.values()), self.mesh, max_norm, norm_type, error_if_nonfinite)

    # What is sent

    def set_ledger(self, enabled: bool) -> None:
        """Start a new ledger of collectives, or stop keeping one."""
        self.mesh.keep_ledger(enabled)

    @property
    def ledger(self) -> Ledger | None:
        """Collectives issued since :meth:`set_ledger`."""
        return self.mesh.ledger
