"""One stage, micro-batch after micro-batch: gradients add up, and the loss is the sum of the micro-batches' losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.batches import MicroBatch
from autopar.runtime.errors import ProgramError
from autopar.runtime.gradients import GradientReducer
from autopar.runtime.mesh import Mesh

NO_STEP = "the loss depends on no trainable parameter, so there is no step to make; forward() gives its value"


class Loop:
    """Runs the one stage of a program."""

    def __init__(self, module: nn.Module, mesh: Mesh, reducer: GradientReducer) -> None:
        self._module = module
        self._mesh = mesh
        self._reducer = reducer
        self._run: Callable[..., dict[str, Tensor]] = module

    def train(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Forward and backward of all micro-batches; the loss, detached."""
        total: Tensor | None = None
        for at, micro_batch in enumerate(micro_batches):
            loss = checked_loss(self._outputs(micro_batch, micro_batches))
            self._reducer.is_last = at == len(micro_batches) - 1
            loss.backward()
            if not self._reducer.is_last:
                self._reducer.settle()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None, "a step has a micro-batch"
        return total

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> list[dict[str, Tensor]]:
        """This rank's shares of the outputs of each micro-batch."""
        return [self._outputs(micro_batch, micro_batches) for micro_batch in micro_batches]

    def _outputs(self, micro_batch: MicroBatch, micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
        self._mesh.begin(micro_batch.first, micro_batch.size, sum(one.size for one in micro_batches))
        return self._run(**micro_batch.shares)

    def abandon(self) -> None:
        """Nothing is left of a step that failed."""

    def compile(self, **options: Any) -> None:
        self._run = torch.compile(self._module, **options)


def checked_loss(outputs: Mapping[str, Tensor]) -> Tensor:
    """The loss among the outputs of a stage; an error where there is none to train on."""
    loss = outputs.get("loss")
    if loss is None or loss.dim() != 0:
        raise ProgramError(f"the program returns no scalar 'loss' to train on, only {', '.join(outputs)}")
    if not loss.requires_grad:
        raise ProgramError(NO_STEP)
    return loss
