"""Copies and optimizer steps measured by size.

Enters: sizes. Leaves: points of curves: seconds of copying by bytes read and written, and of an optimizer's update of one
parameter by the parameter's bytes. Parameters are DTensors, as those of a parallel program are, since their dispatch counts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from autopar.profiler.timing import MEMORY_SHARE, Stopwatch, free_bytes, summary
from cost_models import Point

ROUNDS = 7
ROUND_SECONDS = 0.01
MOST_CALLS = 64
PARAMETERS = 4  # updated in one step

OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def measure_copy(num_bytes: int, device: torch.device, num_sharing: int = 1) -> Point | None:
    """Seconds of a copy that reads and writes ``num_bytes`` together into fresh memory; None where it does not fit."""
    if 2 * num_bytes > MEMORY_SHARE * free_bytes(device) / num_sharing:
        return None
    source = torch.rand(max(1, num_bytes // 8), device=device)
    seconds = []
    calls = 1
    for number in range(ROUNDS + 1):
        watch = Stopwatch(device)
        watch.lap()
        for _ in range(calls):
            source.clone()
        watch.lap()
        took = watch.laps()[0] / calls
        if number:
            seconds.append(took)
        else:
            calls = max(1, min(MOST_CALLS, math.ceil(ROUND_SECONDS / max(took, 1e-7))))
    found = summary(seconds)
    return Point(num_bytes, found.seconds, found.spread, found.count)


def measure_optimizer(
    name: str, dtype: str, num_bytes: int, device: torch.device, mesh: Any, num_sharing: int = 1
) -> Point | None:
    """Seconds in which an optimizer updates one parameter of ``num_bytes``; None for an unknown one or where it does not
    fit. ``mesh``: a DeviceMesh that this process is on, None for plain tensors."""
    kind = OPTIMIZERS.get(name)
    if kind is None or 5 * PARAMETERS * num_bytes > MEMORY_SHARE * free_bytes(device) / num_sharing:
        return None
    count = max(1, num_bytes // getattr(torch, dtype).itemsize)
    parameters = []
    for _ in range(PARAMETERS):
        parameter = torch.nn.Parameter(_placed(torch.rand(count, dtype=getattr(torch, dtype), device=device), mesh))
        parameter.grad = _placed(torch.rand(count, dtype=getattr(torch, dtype), device=device), mesh)
        parameters.append(parameter)
    optimizer = kind(parameters, lr=1e-6)
    seconds = []
    for number in range(ROUNDS + 1):
        watch = Stopwatch(device)
        watch.lap()
        optimizer.step()
        watch.lap()
        if number:  # the first one makes the states
            seconds.append(watch.laps()[0] / PARAMETERS)
    found = summary(seconds)
    return Point(num_bytes, found.seconds, found.spread, found.count)


def _placed(tensor: torch.Tensor, mesh: Any) -> torch.Tensor:
    return tensor if mesh is None else DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
