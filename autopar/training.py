"""A plain training loop, on a parallel model and on the plain one: what ``autopar run`` and the demo measure.

Enters: a model and batches. Leaves: the loss and the wall-clock seconds of every step. AdamW, gradients clipped to a norm.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from autopar.parallel import Parallel

MAX_NORM = 1.0
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Trained:
    """Loss and seconds of each step; of a parallel model also the seconds in it that clipping and the optimizer take, and the
    most bytes that were allocated on a GPU at one time (None on CPUs)."""

    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    clip_seconds: tuple[float, ...] = ()
    optimizer_seconds: tuple[float, ...] = ()
    peak_bytes: int | None = None

    @property
    def typical_seconds(self) -> float:
        """The median step, the first ones (warming up) left out."""
        return typical(self.step_seconds)


def typical(seconds: Sequence[float]) -> float:
    """The median, the first two (warming up) left out."""
    return statistics.median(seconds[WARM_UP_STEPS:] or seconds)


def train_parallel(
    parallel: Parallel,
    batches: Iterable[Any],
    learning_rate: float = 1e-3,
    each: Callable[[int, float, float], None] | None = None,
) -> Trained:
    """Train with ``parallel.step``; ``each(step, loss, seconds)`` is called after every step."""
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=learning_rate)
    clipping: list[float] = []
    optimizing: list[float] = []
    on_gpu = parallel.device.type == "cuda"

    def step(batch: Any) -> torch.Tensor:
        args, kwargs = _arguments(batch)
        loss: torch.Tensor = parallel.step(*args, **kwargs)
        marks = [_now(on_gpu)]
        parallel.clip_grad_norm_(MAX_NORM)
        marks.append(_now(on_gpu))
        optimizer.step()
        optimizer.zero_grad()
        marks.append(_now(on_gpu))
        clipping.append(marks[1] - marks[0])
        optimizing.append(marks[2] - marks[1])
        return loss

    found = _measured(step, batches, each)
    peak = torch.cuda.max_memory_allocated(parallel.device) if on_gpu else None
    return replace(found, clip_seconds=tuple(clipping), optimizer_seconds=tuple(optimizing), peak_bytes=peak)


def _now(on_gpu: bool) -> float:
    """The time when all that was asked for is done."""
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def train_plain(
    model: nn.Module,
    batches: Iterable[Any],
    learning_rate: float = 1e-3,
    loss_fn: Callable[..., Any] | None = None,
) -> Trained:
    """The same training by plain PyTorch in this process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)

    def step(batch: Any) -> torch.Tensor:
        args, kwargs = _arguments(batch)
        outputs = model(*args, **kwargs)
        loss: torch.Tensor = loss_fn(outputs, batch) if loss_fn else getattr(outputs, "loss", outputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return _measured(step, batches, None)


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, dict):
        return (), batch
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if (
        isinstance(batch, (tuple, list))
        and len(batch) == 2
        and isinstance(batch[0], tuple)
        and isinstance(batch[1], dict)
    ):
        return batch[0], batch[1]
    return tuple(batch), {}


def _measured(
    step: Callable[[Any], torch.Tensor], batches: Iterable[Any], each: Callable[[int, float, float], None] | None
) -> Trained:
    losses, seconds = [], []
    for index, batch in enumerate(batches):
        start = time.perf_counter()
        loss = step(batch).item()
        seconds.append(time.perf_counter() - start)
        losses.append(loss)
        if each:
            each(index, loss, seconds[-1])
    return Trained(tuple(losses), tuple(seconds))
