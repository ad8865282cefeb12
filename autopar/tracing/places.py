"""Tensors that the traced program may write into, and the views between them, turned into pure values.

Enters: views and writes as the program makes them. Leaves: for every read, the id of the value that the tensor holds at
that point. A write into a view becomes a scatter into what it views (``x[:, 1:] = y`` is ``slice_scatter``), and a view
that is read after its base was written is taken again: what torch's own functionalisation does, for this IR.

A :class:`Place` is a tensor object of the program; ``value`` is the id of what it held when last looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import TraceError
from autopar.graph import Ref

Emit = Callable[[str, tuple[Any, ...], dict[str, Any]], list[str]]


@dataclass(frozen=True)
class View:
    """How a place is seen from its base: the operator and its arguments after the tensor; None: the same tensor."""

    target: str
    rest: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int = 0


class Place:
    """A tensor of the traced program: a root with memory of its own, or a view of another place.

    ``memory`` identifies the storage that the program gave it: places of one root have one memory.
    """

    def __init__(self, value: str, memory: int, base: Place | None = None, view: View | None = None) -> None:
        self.value = value
        self.memory = memory
        self.base = base
        self.view = view
        self.root: Place = base.root if base is not None else self
        self.clock = 0
        self.seen = self.root.clock


def memory_of(tensor: Any) -> int:
    """Which memory a tensor has; 0 for what is no tensor."""
    return int(tensor.untyped_storage()._cdata) if isinstance(tensor, torch.Tensor) else 0


def read(place: Place, emit: Emit) -> str:
    """The id of the value that the place holds now."""
    if place.base is not None and place.seen != place.root.clock:
        base = read(place.base, emit)
        if place.view is None:
            place.value = base
        else:
            view = place.view
            place.value = emit(view.target, (Ref(base), *view.rest), view.kwargs)[view.output]
        place.seen = place.root.clock
    return place.value


def write(place: Place, value: str, emit: Emit, shape_of: Callable[[str], tuple[int, ...]]) -> None:
    """Let the place, and all that share its memory, hold the new value from now on."""
    updates: list[tuple[Place, str]] = [(place, value)]
    here = place
    while here.base is not None:
        if here.view is not None:
            value = _put_back(here.view, read(here.base, emit), value, emit, shape_of)
        here = here.base
        updates.append((here, value))
    here.clock += 1
    for changed, new in updates:
        changed.value, changed.seen = new, here.clock


def _put_back(view: View, base: str, piece: str, emit: Emit, shape_of: Callable[[str], tuple[int, ...]]) -> str:
    """``base`` with the part that ``view`` shows replaced by ``piece``."""
    name = view.target.split(".")[1]
    shape = shape_of(base)
    args, b, p = view.rest, Ref(base), Ref(piece)
    if name in _RESHAPES:
        return emit("aten.reshape.default", (p, shape), {})[0]
    if name in ("transpose", "swapaxes", "swapdims"):
        return emit("aten.transpose.int", (p, *args), {})[0]
    if name == "t":
        return emit("aten.t.default", (p,), {})[0]
    if name == "permute":
        order = [dim % len(shape) for dim in args[0]]
        return emit("aten.permute.default", (p, tuple(order.index(dim) for dim in range(len(order)))), {})[0]
    if name == "slice":
        return emit("aten.slice_scatter.default", (b, p, *args), view.kwargs)[0]
    if name == "select":
        return emit("aten.select_scatter.default", (b, p, *args), {})[0]
    if name == "narrow":
        dim, start, length = args
        return emit("aten.slice_scatter.default", (b, p, dim, start, start + length), {})[0]
    if name == "diagonal":
        return emit("aten.diagonal_scatter.default", (b, p, *args), view.kwargs)[0]
    if name == "unbind":
        return emit("aten.select_scatter.default", (b, p, args[0] if args else 0, view.output), {})[0]
    if name in ("split", "split_with_sizes", "chunk", "unsafe_chunk", "unsafe_split"):
        dim = args[1] if len(args) > 1 else view.kwargs.get("dim", 0)
        start = _start_of_piece(view, shape[dim])
        return emit("aten.slice_scatter.default", (b, p, dim, start, start + shape_of(piece)[dim]), {})[0]
    raise TraceError(f"writes in place through the view {view.target}, which autopar cannot express; write to a copy")


_RESHAPES = frozenset(
    "view reshape view_as reshape_as _unsafe_view flatten unflatten squeeze unsqueeze ravel contiguous to".split()
)


def _start_of_piece(view: View, whole: int) -> int:
    sizes: Any = view.rest[0]
    if isinstance(sizes, tuple):
        return int(sum(sizes[: view.output]))
    if "chunk" in view.target:
        return view.output * -(-whole // int(sizes))
    return view.output * int(sizes)
