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
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime import host, norms, zero
from autopar.runtime.batches import Batches, MicroBatching, replicated, scaled
from autopar.runtime.counts import Counts
from autopar.runtime.draws import Draws
from autopar.runtime.errors import ProgramError
from autopar.runtime.gathered import Gathers
from autopar.runtime.gradients import GradientReducer
from autopar.runtime.holdings import Holdings
from autopar.runtime.layouts import changes, parse_words
from autopar.runtime.loop import Loop
from autopar.runtime.mesh import Ledger, Mesh
from autopar.runtime.parameters import BufferSlot, ParameterSlot
from autopar.runtime.pipeline import Pipeline
from autopar.runtime.program import Output
from autopar.runtime.random import keys
from autopar.runtime.recompute import running
from autopar.runtime.split import Split


class Engine:
    """One rank's part of a program. All ranks make it together, and call its methods in the same order."""

    def __init__(self, program: types.ModuleType, device: torch.device | str | None = None, seed: int = 0) -> None:
        self.program = program
        self.seed = seed  # of random numbers
        self.num_steps = 0  # made so far
        self.mesh: Mesh = program.mesh
        self.mesh.bind(device)
        schedule = str(getattr(program, "SCHEDULE", "single"))
        loop = MicroBatching(
            getattr(program, "GLOBAL_BATCH", program.BATCH),
            getattr(program, "MICRO_BATCHES", 1),
            getattr(program, "MICRO_BATCH_UNIT", 1),
        )
        self.holdings = Holdings(program, self.mesh, schedule)
        self.slots: dict[str, ParameterSlot] = self.holdings.slots
        self.buffer_slots: dict[str, BufferSlot] = self.holdings.buffer_slots
        self._gathers = Gathers()
        for slot in self.holdings.all_slots():
            slot.gathers = self._gathers
        self._counts = Counts(getattr(program, "COUNTS", ()), self.mesh)
        self._outputs: tuple[Output, ...] = tuple(program.OUTPUTS)
        self._batches = Batches(
            program.INPUTS, self.mesh, program.BATCH, program.BATCH_MULTIPLE, loop, self._used_inputs(program)
        )
        self._reducer = GradientReducer(list(self.holdings.all_slots()), ties=self.holdings.ties())
        self._runner: Loop | Pipeline
        if len(program.STAGES) == 1:
            if self.mesh.stages.size > 1 or schedule != "single":
                raise ProgramError(f"a program of one stage runs on one pipeline rank under 'single', not {schedule!r}")
            self._runner = Loop(self.stage, self.mesh, self._reducer)
        elif self.mesh.stages.size == 1:
            raise ProgramError(
                f"{len(program.STAGES)} stages on one pipeline rank: plan the model as one stage, which computes the same"
            )
        else:
            self._runner = Pipeline(program, self.mesh, self.holdings, self._reducer, schedule, loop.num_micro_batches)

    @property
    def stage(self) -> nn.Module:
        """The module of this rank's stage; of the first where it has several."""
        return self.holdings.stages[0].module

    def _used_inputs(self, program: types.ModuleType) -> set[str]:
        """The inputs of which this rank needs its share."""
        if len(program.STAGES) == 1:
            return {given.name for given in program.INPUTS}
        names = {name for own in self.holdings.stages for name in own.description.takes}
        return names.union(*(count.takes for count in getattr(program, "COUNTS", ())))

    # Parameters and buffers

    def slot(self, name: str) -> ParameterSlot | BufferSlot:
        """The slot of a parameter or buffer of this rank, by any of its names."""
        own = self.holdings.name_of(name)
        if own in self.slots:
            return self.slots[own]
        if own in self.buffer_slots:
            return self.buffer_slots[own]
        raise ProgramError(
            f"{name!r} is on pipeline rank {', '.join(map(str, self.holdings.places[own]))}, this is "
            f"{self.mesh.stages.place}"
        )

    def holds(self, name: str) -> bool:
        """Whether this rank has a piece of the parameter or buffer."""
        own = self.holdings.name_of(name)
        return own in self.slots or own in self.buffer_slots

    def fill(self, name: str, read: Callable[[], Tensor]) -> None:
        """Copy this rank's piece of the whole tensor that ``read()`` returns; the whole one may be on the CPU."""
        self.slot(name).fill(read)

    def load(self, source: Callable[[str], Tensor]) -> None:
        """Fill every parameter and buffer of this rank with its piece of ``source(name)``, one whole tensor at a time."""
        for slot in (*self.slots.values(), *self.buffer_slots.values()):
            slot.fill(lambda name=slot.name: source(name))  # type: ignore[misc]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(the model's name, what rests here) of every parameter of this rank's stages, one entry per tied set."""
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
        micro_batches = self._batches.micro_batches(args, kwargs, local)
        self._refresh()
        self._draw()
        try:
            with torch.enable_grad(), running(self.mesh), self._gathers.saving(), self._alike():
                self._counts.find([micro_batch.shares for micro_batch in micro_batches])
                loss = self._runner.train(micro_batches)
            self._reducer.finish()
            self._wait_for_host()
        except BaseException:
            self._runner.abandon()
            self._reducer.abandon()
            for slot in self.holdings.all_buffer_slots():
                slot.abandon()
            raise
        self._commit()
        self.num_steps += 1
        return loss

    @torch.no_grad()
    def forward(self, *args: Any, local: bool = False, **kwargs: Any) -> dict[str, Tensor]:
        """Every output, whole on every rank; without gradients."""
        micro_batches = self._batches.micro_batches(args, kwargs, local, evaluates=True)
        sizes = [micro_batch.size for micro_batch in micro_batches]
        self._refresh()
        self._draw()
        self._counts.find([micro_batch.shares for micro_batch in micro_batches])
        with self._alike():
            found = self._runner.evaluate(micro_batches)
        self._commit()
        return {
            output.name: self._combined(output, [shares[output.name] for shares in found], sizes, local)
            for output in self._outputs
            if output.name in found[0]
        }

    def _combined(self, output: Output, shares: list[Tensor], sizes: list[int], local: bool) -> Tensor:
        """An output of the batch from those of its micro-batches."""
        wholes = [self._whole(output, share, size) for share, size in zip(shares, sizes, strict=True)]
        if len(wholes) == 1:
            return wholes[0]
        how = output.combine or ("sum" if output.name == "loss" else "same")
        if output.combine is None and output.batch_dim is not None:
            how = "concatenate"
        if how == "concatenate":
            assert output.batch_dim is not None, "what is concatenated has a batch dim"
            joined = torch.cat(wholes, output.batch_dim)
            order = self._batches.order(sizes) if local else None
            return joined if order is None else _reordered(joined, output.batch_dim, order)
        return torch.stack(wholes).sum(0) if how == "sum" else wholes[0]

    def _whole(self, output: Output, share: Tensor, batch: int) -> Tensor:
        """An output gathered from its shares."""
        shape = scaled(output.shape, output.batch_dim, batch, self.program.BATCH)
        words = parse_words(output.layout, self.mesh, len(shape))
        for change in changes(words, replicated(words), shape, self.mesh):
            if change.name != "keep_first_gradient":
                share = change.forward(share)
        return share

    def _draw(self) -> None:
        """Random numbers are those of the step to come."""
        self.mesh.draws = Draws(self.seed, self.num_steps, planned=self.program.BATCH)

    @contextmanager
    def _alike(self) -> Iterator[None]:
        """What torch's own generators draw is the same on all ranks, and their state that of before afterwards: an operator
        that is computed whole on every rank has one result."""
        if not getattr(self.program, "DRAWS_ALIKE", False):
            yield
            return
        devices = [self.mesh.device] if self.mesh.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(keys(self.seed, self.num_steps, "generators")[0])
            yield

    def _refresh(self) -> None:
        zero.refresh(self.holdings.all_slots())
        self._wait_for_host()

    def _wait_for_host(self) -> None:
        """What travels to and from the host has arrived when the user's code goes on."""
        if any(slot.offload for slot in self.holdings.all_slots()):
            host.wait(self.mesh.device)

    def _commit(self) -> None:
        for slot in self.holdings.all_buffer_slots():
            slot.commit()

    def compile(self, **options: Any) -> None:
        """Run the stages through ``torch.compile`` from now on."""
        for value in vars(self.program).values():
            if isinstance(value, Split):
                value.prepare()
        self._runner.compile(**options)

    def train(self, mode: bool = True) -> Engine:
        """Set the mode of the stages' modules."""
        for own in self.holdings.stages:
            own.module.train(mode)
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
        described = self.holdings.described
        return norms.clip_grad_norm_(
            list(self.slots.values()),
            self.mesh,
            max_norm,
            norm_type,
            error_if_nonfinite,
            {name: slot for name, slot in described.items() if isinstance(slot, ParameterSlot)},
            {name: self.holdings.owner(name) for name in self.slots},
        )

    # What is sent

    def set_ledger(self, enabled: bool) -> None:
        """Start a new ledger of collectives, or stop keeping one."""
        self.mesh.keep_ledger(enabled)

    @property
    def ledger(self) -> Ledger | None:
        """Collectives issued since :meth:`set_ledger`."""
        return self.mesh.ledger


def _reordered(joined: Tensor, dim: int, order: Tensor) -> Tensor:
    """A batch of samples in another order; a sample may have several elements along ``dim``."""
    per_sample = joined.shape[dim] // len(order)
    places = (order.unsqueeze(1) * per_sample + torch.arange(per_sample, device=order.device)).flatten()
    return joined.index_select(dim, places)
