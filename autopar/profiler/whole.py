"""A model's operators run one after the other on one device, against the sum of what each takes alone.

Enters: the graph of a share of the batch. Leaves: seconds of its forward and backward pass. Operators in a model find their
inputs and weights in colder caches, their memory fresher or not, than when each is measured alone: what comes out is by how
much, which is then true of all plans of the model.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.graph import ITEM_BYTES, BatchLiteral, DeviceArgument, OpGraph, Ref, TorchName, Value
from autopar.profiler.timing import MEMORY_SHARE, Stopwatch, free_bytes

WHOLE_ROUNDS = 5
SCALE = 0.02  # of random parameters, so that deep models stay finite


def measure_whole(
    graph: OpGraph, device: torch.device, num_sharing: int = 1, rounds: int = WHOLE_ROUNDS
) -> tuple[float, float] | None:
    """Median seconds of the forward and backward pass of a graph with a loss, of so many rounds after one that warms up; None
    where it does not run here, or would take too much memory."""
    if graph.loss is None or 3 * _bytes(graph) > 2 * MEMORY_SHARE * free_bytes(device) / num_sharing:
        return None
    try:
        given = _given(graph, device)
        calls = _calls(graph, given, device)
        found = [_step(calls, given, graph.loss, device) for _ in range(rounds + 1)][1:]
    except (RuntimeError, TypeError, IndexError, ValueError, AttributeError):
        return None
    return statistics.median(ahead for ahead, _ in found), statistics.median(back for _, back in found)


def _bytes(graph: OpGraph) -> float:
    """At most what a step keeps: all values that are not views."""
    return float(sum(value.num_bytes for value in graph.values.values() if value.storage in ("", value.id)))


def _step(calls: Sequence[Call], given: Mapping[str, Tensor], loss: str, device: torch.device) -> tuple[float, float]:
    for tensor in given.values():
        tensor.grad = None
    watch = Stopwatch(device)
    watch.lap()
    result = _forward(calls, given, loss)
    watch.lap()
    result.backward()
    watch.lap()
    del result
    ahead, back = watch.laps()
    return ahead, back


def _forward(calls: Sequence[Call], given: Mapping[str, Tensor], loss: str) -> Tensor:
    """The loss; values are dropped after their last reader, as a program does."""
    values = dict(given)
    for call in calls:
        args = list(call.args)
        for place, value in call.tensors:
            args[place] = values[value]
        for place, names in call.lists:
            args[place] = [None if name is None else values[name] for name in names]
        result = call.function(*args, **call.names)
        if len(call.outputs) == 1:
            values[call.outputs[0]] = result
        else:
            values.update(zip(call.outputs, result, strict=False))
        for value in call.dropped:
            del values[value]
    return values[loss]


@dataclass(frozen=True)
class Call:
    """An operator made ready: what is left to do is to put the tensors in their places among the arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    names: Mapping[str, Any]
    tensors: tuple[tuple[int, str], ...]
    lists: tuple[tuple[int, tuple[str | None, ...]], ...]
    outputs: tuple[str, ...]
    dropped: tuple[str, ...]


def _calls(graph: OpGraph, given: Mapping[str, Tensor], device: torch.device) -> list[Call]:
    last = {value: operator.id for operator in graph.operators for value in operator.inputs}
    found = []
    for operator in graph.operators:
        function: Any = torch.ops
        for part in operator.target.split("."):
            function = getattr(function, part)
        args = operator.args
        dropped = [
            value
            for value in dict.fromkeys(operator.inputs)
            if last[value] == operator.id and value not in given and value != graph.loss
        ]
        found.append(
            Call(
                function,
                tuple(_literal(item, device) for item in args),
                {name: _literal(item, device) for name, item in operator.kwargs},
                tuple((place, item.value) for place, item in enumerate(args) if isinstance(item, Ref)),
                tuple((place, _names(item)) for place, item in enumerate(args) if _has_tensors(item)),
                operator.outputs,
                tuple(dropped),
            )
        )
    return found


def _has_tensors(item: Any) -> bool:
    return isinstance(item, tuple) and any(isinstance(each, Ref) for each in item)


def _names(item: tuple[Any, ...]) -> tuple[str | None, ...]:
    return tuple(each.value if isinstance(each, Ref) else None for each in item)


def _literal(item: Any, device: torch.device) -> Any:
    """An argument that is no tensor."""
    if isinstance(item, Ref) or _has_tensors(item):
        return None
    if isinstance(item, tuple):
        return [_literal(each, device) for each in item]
    if isinstance(item, TorchName):
        return getattr(torch, item.name.removeprefix("torch."))
    if isinstance(item, BatchLiteral):
        return item.value
    return device if isinstance(item, DeviceArgument) else item


def _given(graph: OpGraph, device: torch.device) -> dict[str, Tensor]:
    """Random parameters and inputs, and the constants."""
    generator = torch.Generator(device).manual_seed(0)
    rows = _rows(graph)
    values = [entry.value for entry in graph.inputs] + [entry.value for entry in graph.buffers]
    values += [entry.value for entry in graph.parameters]
    found = {value: _drawn(graph.values[value], generator, rows) for value in values}
    for parameter in graph.parameters:
        found[parameter.value].mul_(SCALE).requires_grad_(parameter.trainable)
    for constant in graph.constants:
        value = graph.values[constant.value]
        numbers = torch.tensor(constant.numbers, dtype=getattr(torch, value.dtype), device=device)
        found[constant.value] = numbers.reshape(value.shape)
    return found


def _rows(graph: OpGraph) -> int:
    """Below what indices must be, for every embedding and loss."""
    found = [2**31]
    for operator in graph.operators:
        if "embedding" in operator.target and operator.inputs:
            found.append(graph.values[operator.inputs[0]].shape[0])
        elif "cross_entropy" in operator.target or "nll_loss" in operator.target:
            found.append(graph.values[operator.inputs[0]].shape[1])
    return min(found) if len(found) > 1 else 2


def _drawn(value: Value, generator: torch.Generator, rows: int) -> Tensor:
    dtype, device = getattr(torch, value.dtype), generator.device
    if dtype.is_floating_point or dtype.is_complex:
        return torch.rand(value.shape, generator=generator, dtype=torch.float32, device=device).to(dtype)
    if dtype == torch.bool:
        return torch.ones(value.shape, dtype=dtype, device=device)
    high = min(rows, 2 ** (8 * ITEM_BYTES[value.dtype] - 1) - 1)
    return torch.randint(0, high, value.shape, generator=generator, device=device).to(dtype)
