"""One operator measured at its local shapes: forward and backward, as a training step runs them.

Enters: an :class:`OperatorNeed`. Leaves: an ``OperatorEntry``, None where the operator does not run here or would take too
much memory. A round runs the operator several times in a row and keeps the results, as a forward pass keeps activations;
the backward pass then goes through all of them, the last one first. What the operators of a step share (starting autograd's
engine) is not counted for each. How much more operators take inside a model is measured on the whole model (``whole``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar.costing.measured import SIZED
from autopar.graph import BatchLiteral, DeviceArgument, Ref, TorchName
from autopar.profiler.needs import OperatorNeed
from autopar.profiler.timing import (
    FEW_ROUNDS,
    LONG_SECONDS,
    MEDIUM_SECONDS,
    MEMORY_SHARE,
    ROUND_SECONDS,
    ROUNDS,
    Stopwatch,
    free_bytes,
    summary,
)
from cost_models import OperatorEntry

MOST_CALLS = 32
MOST_BYTES = 2**27  # that the calls of a round keep

Call = Callable[[Sequence[Tensor]], list[Tensor]]


def measure_operator(need: OperatorNeed, device: torch.device, num_sharing: int = 1) -> OperatorEntry | None:
    """Seconds of one operator. ``num_sharing``: processes that share the device's memory."""
    allowed = MEMORY_SHARE * free_bytes(device) / num_sharing
    if 4 * need.num_bytes > allowed:  # inputs and results, and their gradients
        return None
    try:
        call, inputs = _call(need, device), _inputs(need, device)
        first = _round(call, inputs, need, 1, device)
        return _measured(need, call, inputs, first, device, allowed)
    except (
        RuntimeError,
        TypeError,
        IndexError,
        ValueError,
        AttributeError,
    ):  # what the plan runs in its place is another function
        return None


def _measured(
    need: OperatorNeed,
    call: Call,
    inputs: Sequence[Tensor],
    first: tuple[float, float],
    device: torch.device,
    allowed: float,
) -> OperatorEntry:
    once = max(sum(first), 1e-7)
    if once > LONG_SECONDS:
        return _entry(need, [first])
    fitting = max(1, int(min(allowed, MOST_BYTES) / max(4 * need.num_bytes, 1)))
    calls = max(1, min(MOST_CALLS, fitting, math.ceil(ROUND_SECONDS / once)))
    rounds = FEW_ROUNDS if once > MEDIUM_SECONDS else ROUNDS
    return _entry(need, [_round(call, inputs, need, calls, device) for _ in range(rounds)])


def _entry(need: OperatorNeed, found: Sequence[tuple[float, float]]) -> OperatorEntry:
    ahead, back = summary([forward for forward, _ in found]), summary([backward for _, backward in found])
    both = summary([forward + backward for forward, backward in found])
    return OperatorEntry(
        ahead.seconds, back.seconds, both.spread, len(found), need.kind, need.dtype, need.flops, need.backward_flops,
        need.num_bytes,
    )  # fmt: skip


def _round(
    call: Call, inputs: Sequence[Tensor], need: OperatorNeed, calls: int, device: torch.device
) -> tuple[float, float]:
    """Seconds of a call and of its backward pass, in a row of so many."""
    flows = [gradient for _, _, gradient in need.inputs]
    own = [
        [tensor.detach().requires_grad_() if flowing else tensor for tensor, flowing in zip(inputs, flows, strict=True)]
        for _ in range(calls)
    ]
    watch = Stopwatch(device)
    with torch.set_grad_enabled(any(flows)):
        watch.lap()
        results = [call(tensors) for tensors in own]
        watch.lap()
    ahead = watch.laps()[0] / calls
    outputs = [[result for result in some if result.requires_grad] for some in results]
    del results
    if not outputs[0]:
        return ahead, 0.0
    leaves = [[tensor for tensor, flowing in zip(each, flows, strict=True) if flowing] for each in own]
    del own
    return ahead, _backward(outputs, leaves, device) / calls


def _backward(outputs: list[list[Tensor]], leaves: list[list[Tensor]], device: torch.device) -> float:
    """Seconds of the backward passes of all calls, the last one first.

    On CPUs each call's gradients are dropped before those of the next are made, as a backward pass drops those of
    activations, so that memory is used again; what starting autograd's engine anew costs is taken off.
    """
    along = [torch.ones_like(output) for output in outputs[0]]
    watch = Stopwatch(device)
    if device.type != "cpu":
        flat, wanted = [out for some in outputs for out in some], [leaf for some in leaves for leaf in some]
        watch.lap()
        torch.autograd.grad(flat, wanted, along * len(outputs), allow_unused=True)
        watch.lap()
        return watch.laps()[0]
    count = len(outputs)
    watch.lap()
    while outputs:
        torch.autograd.grad(outputs.pop(), leaves.pop(), along, allow_unused=True)
    watch.lap()
    return max(watch.laps()[0] - count * _engine_seconds(), 0.1 * count * _engine_seconds())


@lru_cache(maxsize=1)
def _engine_seconds() -> float:
    """What a backward pass of its own costs beyond what its operator costs inside a longer one: of the cheapest operator."""
    leaf, count, cpu = torch.zeros(1, requires_grad=True), 200, torch.device("cpu")
    chain = leaf
    for _ in range(count):
        chain = chain.view(1)
    singles = [leaf.view(1) for _ in range(count)]
    along = torch.ones(1)
    watch = Stopwatch(cpu)
    watch.lap()
    torch.autograd.grad(chain, leaf, along)
    watch.lap()
    for single in singles:
        torch.autograd.grad(single, leaf, along)
    watch.lap()
    together, apart = watch.laps()
    return max(0.0, (apart - together) / count)


def _inputs(need: OperatorNeed, device: torch.device) -> list[Tensor]:
    """Tensors of the call's shapes: numbers of an ordinary size, indices that are in range."""
    generator = torch.Generator(device).manual_seed(0)
    rows = _rows(need)
    found = []
    for shape, name, _ in need.inputs:
        dtype = getattr(torch, name)
        if dtype.is_floating_point or dtype.is_complex:
            wide = dtype if dtype.itemsize > 1 else torch.float32
            found.append(torch.rand(shape, generator=generator, dtype=wide, device=device).to(dtype))
        elif dtype == torch.bool:
            found.append(torch.rand(shape, generator=generator, device=device) < 0.5)
        else:
            found.append(torch.randint(0, rows, shape, generator=generator, device=device).to(dtype))
    return found


def _rows(need: OperatorNeed) -> int:
    """Below what indices must be: the rows of an embedding, the classes of a loss; 2 is in range of any other."""
    first = need.inputs[0][0] if need.inputs else ()
    if "embedding" in need.operator.target and first:
        return max(1, first[0])
    if "cross_entropy" in need.operator.target or "nll_loss" in need.operator.target:
        return max(1, first[1] if len(first) > 1 else first[0])
    smallest = min((size for shape, _, _ in need.inputs for size in shape), default=1)
    return max(1, min(2, smallest))


def _call(need: OperatorNeed, device: torch.device) -> Call:
    """The operator with the call's own sizes as a function of its tensors."""
    operator = need.operator
    function: Any = torch.ops
    for part in operator.target.split("."):
        function = getattr(function, part)
    args, names = list(operator.args), dict(operator.kwargs)
    _set_local_sizes(need, args, names)

    def call(tensors: Sequence[Tensor]) -> list[Tensor]:
        rest = iter(tensors)
        given = [_filled(item, rest, device) for item in args]
        result = function(*given, **{name: _filled(item, rest, device) for name, item in names.items()})
        return [
            item for item in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(item, Tensor)
        ]

    return call


def _set_local_sizes(need: OperatorNeed, args: list[Any], names: dict[str, Any]) -> None:
    """Replace sizes of the whole tensor by those on one device."""
    target = need.operator.target
    if target in SIZED:
        place = 1 if "new_" in target or target.split(".")[1] in ("view", "reshape", "_unsafe_view", "expand") else 0
        key = {"expand": "size", "reshape": "shape"}.get(target.split(".")[1], "size")
        if len(args) > place:
            args[place] = need.outputs[0]
        else:
            names[key] = need.outputs[0]
    elif target.startswith("aten.split"):
        dim = args[2] if len(args) > 2 else names.get("dim", 0)
        sizes = tuple(shape[dim] for shape in need.outputs)
        args[1] = sizes if isinstance(args[1], tuple) else sizes[0]
    elif target.startswith(("aten.upsample_", "aten.adaptive_")) and isinstance(args[1], tuple):
        args[1] = need.outputs[0][-len(args[1]) :]


def _filled(item: Any, tensors: Iterator[Tensor], device: torch.device) -> Any:
    """An argument with tensors in the place of references."""
    if isinstance(item, Ref):
        return next(tensors)
    if isinstance(item, tuple):
        return [_filled(each, tensors, device) for each in item]
    if isinstance(item, TorchName):
        return getattr(torch, item.name.removeprefix("torch."))
    if isinstance(item, BatchLiteral):
        return item.value
    return device if isinstance(item, DeviceArgument) else item
