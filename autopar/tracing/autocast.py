"""torch.autocast made explicit: the types to which operators cast their tensors, found by running them on stand-ins.

Enters: operators of torch's training IR that run inside ``torch.autocast``. Leaves: their arguments, cast by operators of the
graph, so that the plain operator then gives what autocast gives. Which operators cast is torch's own business, and differs
between kinds of devices: what counts is what torch does.

Where an operator casts a tensor that it makes inside (on CPUs cross-entropy does, between its log-softmax and the mean), its
arguments are cast to the type of the result: at least as precise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.graph import Ref, TorchName, refs
from autopar.tracing.capture import Capture
from autopar.tracing.lowered import Lowered


@dataclass(frozen=True)
class Autocast:
    """An enabled ``torch.autocast(device_type, dtype)``."""

    device_type: str
    dtype: torch.dtype


class Lowering(Protocol):
    """What casts are written with: the values so far with their stand-ins, and how to add an operator."""

    capture: Capture
    lowered: Lowered
    fakes: dict[str, Any]

    def to_torch(self, tree: Any, gradient: bool = False) -> Any: ...
    def emit(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]: ...
    def fail(self, what: str) -> NoReturn: ...


class Casting:
    """Casts the arguments of operators as their autocast region does. A parameter is cast once, as by autocast's cache."""

    def __init__(self, lowering: Lowering) -> None:
        self._lowering = lowering
        self._known: dict[Any, tuple[torch.dtype | None, ...] | None] = {}
        self._parameters: dict[tuple[str, torch.dtype], str] = {}

    def applied(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Autocast
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of an operator with those replaced that it casts."""
        lowering = self._lowering
        read = [ref.value for ref in refs((args, tuple(kwargs.values())))]
        key = (target, region, tuple(lowering.fakes[value].dtype for value in read), repr(kwargs.get("dtype")))
        if key not in self._known:
            with lowering.capture.fake_mode, torch.no_grad():
                self._known[key] = casts_of(target, lowering.to_torch(args), lowering.to_torch(kwargs), region)
        casts = self._known[key]
        if casts is None:
            lowering.fail(f"uses {target} under autocast, whose casts autopar cannot write out; cast its tensors explicitly")
        changed = _with((args, kwargs), [Ref(self._cast(value, dtype)) for value, dtype in zip(read, casts, strict=True)])
        return changed[0], changed[1]

    def _cast(self, value: str, dtype: torch.dtype | None) -> str:
        if dtype is None:
            return value
        if (value, dtype) not in self._parameters:
            made = self._lowering.emit("aten.to.dtype", (Ref(value), TorchName(str(dtype))), {})[0]
            if self._lowering.lowered.values[value].kind != "parameter":
                return made
            self._parameters[value, dtype] = made
        return self._parameters[value, dtype]


class _Casts(TorchDispatchMode):
    """Notes to which types the memory of some tensors is copied."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = {tensor.untyped_storage()._cdata: place for place, tensor in enumerate(tensors)}
        self.found: dict[int, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = (kwargs or {}).get("dtype")
        if str(func) == "aten._to_copy.default" and dtype is not None:
            place = self._places.get(args[0].untyped_storage()._cdata)
            if place is not None:
                self.found[place] = dtype
        return func(*args, **(kwargs or {}))


def casts_of(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Autocast
) -> tuple[torch.dtype | None, ...] | None:
    """For each tensor among the arguments, in order, the type to cast it to; None where it stays as it is.

    None in place of them all where no casts of the arguments give what autocast gives. The arguments are stand-ins without
    gradient, and their mode is active.
    """
    tensors = [tensor.clone() for tensor in _tensors((args, tuple(kwargs.values())))]  # none shares memory with another
    args, kwargs = _with((args, kwargs), tensors)
    recorder = _Casts(tensors)
    with torch.autocast(region.device_type, region.dtype, cache_enabled=False), recorder:
        wanted = _types(target(*args, **kwargs))
    tries = [recorder.found]
    if wanted[0] is not None:
        floats = [place for place, tensor in enumerate(tensors) if tensor.is_floating_point()]
        tries.append({place: wanted[0] for place in floats if tensors[place].dtype != wanted[0]})
    for casts in tries:
        cast = [tensor.to(casts.get(place, tensor.dtype)) for place, tensor in enumerate(tensors)]
        cast_args, cast_kwargs = _with((args, kwargs), cast)
        try:
            found = target(*cast_args, **cast_kwargs)
        except RuntimeError:  # types that do not meet
            continue
        if _types(found) == wanted:
            return tuple(casts.get(place) for place in range(len(tensors)))
    return None


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple):
        for item in tree:
            yield from _tensors(item)


def _with(tree: Any, leaves: Sequence[Any]) -> Any:
    """The tree with its tensors, or references to them, replaced in order."""
    supply = iter(leaves)

    def replaced(part: Any) -> Any:
        if isinstance(part, (torch.Tensor, Ref)):
            return next(supply)
        if isinstance(part, dict):
            return {key: replaced(item) for key, item in part.items()}
        return tuple(replaced(item) for item in part) if isinstance(part, tuple) else part

    return replaced(tree)


def _types(result: Any) -> list[torch.dtype | None]:
    results = result if isinstance(result, (tuple, list)) else [result]
    return [item.dtype if isinstance(item, torch.Tensor) else None for item in results]
