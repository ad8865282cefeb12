"""The collectives that the runtime issues, each noted in the ledger of the mesh.

All but two are functional (new tensors), so that they may stand inside ``torch.autograd.Function`` and under ``torch.compile``.
Each waits for its result unless asked not to; :func:`wait` ends what was not waited for. The pieces of all ranks are
stacked along a new first dim. An axis of size 1 sends nothing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.mesh import Axis

_functional = torch.ops._c10d_functional


def all_reduce(x: Tensor, axis: Axis, operator: str = "sum", waits: bool = True) -> Tensor:
    """Sum (or ``"max"``) of ``x`` over the ranks of ``axis``, same shape."""
    if axis.size == 1 or x.numel() == 0:
        return x
    return _issue("all_reduce", x, axis, operator, waits)


def all_reduce_in_place(x: Tensor, axis: Axis) -> Tensor:
    """Begin to replace contiguous ``x`` by its sum over the ranks of ``axis``; :func:`wait` for the result."""
    if axis.size == 1 or x.numel() == 0:
        return x
    axis.record("all_reduce", x.numel() * x.element_size())
    return _functional.all_reduce_(x, "sum", axis.group_name)  # type: ignore[no-any-return]


def all_gather(x: Tensor, axis: Axis, waits: bool = True) -> Tensor:
    """``x`` of every rank, stacked: ``[*shape] -> [axis.size, *shape]``."""
    if axis.size == 1 or x.numel() == 0:
        return x.new_empty(axis.size, *x.shape) if x.numel() == 0 else x.unsqueeze(0)
    return _issue("all_gather", x.unsqueeze(0), axis, "", waits)


def reduce_scatter(x: Tensor, axis: Axis, waits: bool = True) -> Tensor:
    """Sum over the ranks of this rank's slice: ``[axis.size, *shape] -> [1, *shape]``."""
    if axis.size == 1 or x.numel() == 0:
        return x[:1]
    return _issue("reduce_scatter", x, axis, "sum", waits)


def all_to_all(x: Tensor, axis: Axis, waits: bool = True) -> Tensor:
    """Slice ``k`` goes to rank ``k``; the result holds what each rank sent here: ``[axis.size, *shape]`` both."""
    if axis.size == 1 or x.numel() == 0:
        return x
    return _issue("all_to_all", x, axis, "", waits)


def broadcast_in_place(x: Tensor, axis: Axis, source: int) -> Tensor:
    """Contiguous ``x`` of the rank at place ``source`` of ``axis``, on all its ranks."""
    if axis.size > 1 and x.numel():
        axis.record("broadcast", x.numel() * x.element_size())
        dist.broadcast(message(x), group=axis.group, group_src=source)
    return x


def message(x: Tensor) -> Tensor:
    """Contiguous ``x`` as it is sent or received: a view of a type that every backend knows."""
    if x.dtype == torch.bool:
        return x.view(torch.uint8)
    return torch.view_as_real(x) if x.is_complex() else x


def wait(x: Tensor) -> Tensor:
    """The finished tensor of a collective that was issued with ``waits=False``; any other tensor as it is."""
    return _functional.wait_tensor(x)  # type: ignore[no-any-return]


def _issue(kind: str, x: Tensor, axis: Axis, operator: str, waits: bool) -> Tensor:
    """The one place that sends something: records it and calls the functional collective on a type that groups know."""
    if not torch.compiler.is_compiling():
        factor = axis.size if kind == "all_gather" else 1
        axis.record(kind, x.numel() * x.element_size() * factor)
    sent = _transportable(x, kind).contiguous()
    if kind == "all_reduce":
        result = _functional.all_reduce(sent, operator, axis.group_name)
    elif kind == "all_gather":
        result = _functional.all_gather_into_tensor(sent, axis.size, axis.group_name)
    elif kind == "reduce_scatter":
        result = _functional.reduce_scatter_tensor(sent, operator, axis.size, axis.group_name)
    else:
        sizes = [1] * axis.size
        result = _functional.all_to_all_single(sent, sizes, sizes, axis.group_name)
    if waits or sent.dtype != x.dtype:
        result = _functional.wait_tensor(result)
    return _restored(result, x.dtype)


def _transportable(x: Tensor, kind: str) -> Tensor:
    """``x`` in a type that every backend sends: bool travels as bytes, complex numbers as pairs."""
    if x.dtype == torch.bool:
        return x.to(torch.uint8)
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x


def _restored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`_transportable`."""
    if dtype == torch.bool:
        return x != 0
    return torch.view_as_complex(x) if dtype.is_complex else x
