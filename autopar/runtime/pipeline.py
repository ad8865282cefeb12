"""Several stages: torch's pipeline schedules over the stages of this rank, and what all pipeline ranks share of a step."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.runtime import collectives
from autopar.runtime.batches import MicroBatch, scaled
from autopar.runtime.errors import ProgramError
from autopar.runtime.gradients import GradientReducer
from autopar.runtime.holdings import Holdings, place_of
from autopar.runtime.layouts import local_shape, parse_words
from autopar.runtime.loop import NO_STEP
from autopar.runtime.mesh import Mesh
from autopar.runtime.program import Output, Stage
from autopar.runtime.stages import RunnableStage, make_schedule, run_forward, run_schedule

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
           torch.uint8, torch.bool, torch.complex64, torch.complex128)  # fmt: skip


class Pipeline:
    """Runs the stages of this rank under the program's schedule."""

    def __init__(
        self,
        program: types.ModuleType,
        mesh: Mesh,
        holdings: Holdings,
        reducer: GradientReducer,
        schedule: str,
        num: int,
    ) -> None:
        self._mesh = mesh
        self._name = schedule
        self._num_micro_batches = num
        self._reducer = reducer
        self._outputs: tuple[Output, ...] = tuple(program.OUTPUTS)
        self._planned: int = program.BATCH
        descriptions: list[Stage] = list(program.STAGES)
        self._owners = _owners(descriptions, schedule, mesh.stages.size)
        self._last = place_of(schedule, len(descriptions) - 1, mesh.stages.size)
        self._dtypes: dict[str, torch.dtype] | None = None
        if not holdings.stages:
            raise ProgramError(f"pipeline rank {mesh.stages.place} of {mesh.stages.size} has no stage")
        self._stages = [
            RunnableStage(
                own,
                descriptions[own.index - 1].sends if own.index else (),
                len(descriptions),
                mesh,
                program.BATCH,
                self._before_backward,
                self._after_backward,
            )
            for own in holdings.stages
        ]
        self._schedule = make_schedule(schedule, self._stages, num)
        self._open()

    def _open(self) -> None:
        """Have all pipeline ranks talk once: with NCCL, messages in a new group otherwise want all of them at the same time."""
        ledger, self._mesh.ledger = self._mesh.ledger, None
        collectives.all_reduce(torch.zeros(1, device=self._mesh.device), self._mesh.stages)
        self._mesh.ledger = ledger

    def _before_backward(self, is_last: bool) -> None:
        # Stages of one rank take turns to the end: only a single one can reduce while its last backward goes on.
        self._reducer.is_last = is_last and len(self._stages) == 1

    def _after_backward(self, is_last: bool) -> None:
        if not self._reducer.is_last:
            self._reducer.settle()

    def train(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Forward and backward of all micro-batches; the loss, detached, on every pipeline rank."""
        if self._owners.get("loss") != self._last:  # found by every rank before anything is sent
            raise ProgramError(f"the last stage returns no 'loss' to train on, only {', '.join(self._owners)}")
        for stage in self._stages:
            stage.begin(micro_batches)
        losses = run_schedule(self._schedule, self._stages, len(micro_batches))
        is_trainable = all(stage.has_trainable_loss for stage in self._stages)
        for stage in self._stages:
            stage.begin([])
        return self._shared(sum(losses[1:], losses[0]) if losses else None, is_trainable)

    def _shared(self, loss: Tensor | None, is_trainable: bool) -> Tensor:
        """The loss of the last stage on every pipeline rank: its value and type as two numbers, and by the sign of the
        second whether anything trainable leads to it."""
        said = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)
        if loss is not None:
            code = _DTYPES.index(loss.dtype) + 1
            said[0], said[1] = loss.double(), code if is_trainable else -code
        collectives.broadcast_in_place(said, self._mesh.stages, self._last)
        code = int(said[1])
        if code < 0:
            raise ProgramError(NO_STEP)
        return said[0].to(_DTYPES[code - 1]) if loss is None else loss

    def abandon(self) -> None:
        """Forget a step that failed."""
        for stage in self._stages:
            stage.begin([])
        self._schedule = make_schedule(self._name, self._stages, self._num_micro_batches)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> list[dict[str, Tensor]]:
        """The shares of the outputs of each micro-batch at this rank's position, whichever stage has computed them."""
        for stage in self._stages:
            stage.begin(micro_batches)
        run_forward(self._stages, len(micro_batches))
        found: list[dict[str, Tensor]] = [{} for _ in micro_batches]
        for stage in self._stages:
            for at, outputs in enumerate(stage.outputs):
                found[at].update({name: value for name, value in outputs.items() if name in self._owners})
            stage.begin([])
        dtypes = self._known_dtypes(found[0])
        for at, micro_batch in enumerate(micro_batches):
            for output in self._outputs:
                if output.name in self._owners:
                    shape = self._local_shape(output, micro_batch.size)
                    found[at][output.name] = self._from_owner(output.name, found[at], shape, dtypes[output.name])
        return found

    def _known_dtypes(self, found: dict[str, Tensor]) -> dict[str, torch.dtype]:
        """The types of all outputs, which only the ranks that compute them know at first."""
        if self._dtypes is None:
            names = sorted(self._owners)
            here = [_DTYPES.index(found[name].dtype) if name in found else 0 for name in names]
            codes = torch.tensor(here, device=self._mesh.device)
            codes = collectives.all_reduce(codes, self._mesh.stages, "max")
            self._dtypes = {name: _DTYPES[code] for name, code in zip(names, codes.tolist(), strict=True)}
        return self._dtypes

    def _local_shape(self, output: Output, batch: int) -> tuple[int, ...]:
        shape = scaled(output.shape, output.batch_dim, batch, self._planned)
        return local_shape(shape, parse_words(output.layout, self._mesh, len(shape)), self._mesh)

    def _from_owner(self, name: str, found: dict[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        owner = self._owners[name]
        if self._mesh.stages.place == owner:
            share = found[name].contiguous()
        else:
            share = torch.empty(shape, dtype=dtype, device=self._mesh.device)
        return collectives.broadcast_in_place(share, self._mesh.stages, owner)

    def compile(self, **options: Any) -> None:
        """Run every stage through ``torch.compile`` from now on; its backward is then never split."""
        for stage in self._stages:
            stage.run = torch.compile(stage.own.module, **options)
            stage.is_compiled = True


def _owners(stages: Sequence[Stage], schedule: str, num_places: int) -> dict[str, int]:
    """The pipeline rank that computes each output."""
    found: dict[str, int] = {}
    for index, stage in enumerate(stages):
        found.update(dict.fromkeys(stage.outputs, place_of(schedule, index, num_places)))
    return found
