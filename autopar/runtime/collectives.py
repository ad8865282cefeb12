"""The collectives that the runtime issues, each noted in the ledger of the mesh.

All but two are functional (new tensors), so that they may stand inside ``torch.autograd.Function`` and under ``torch.compile``.
Each waits for its result unless asked not to; :func:`wait` ends what was not waited for. The pieces of all ranks are
stacked along a new first dim. An axis of size 1 sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def exchange_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], axis: Axis, num_own: int) -> Tensor:
    """``sent[k]`` rows of ``x``, one rank's after the other's, go to rank ``k``; the result holds ``received[k]`` rows of
    each rank. Noted as an all-to-all of ``num_own`` rows: those that this rank has to give away, or gets back.
    """
    if not torch.compiler.is_compiling():
        axis.record("all_to_all", num_own * math.prod(x.shape[1:]) * x.element_size())
    issued = _functional.all_to_all_single(x.contiguous(), list(received), list(sent), axis.group_name)
    return _functional.wait_tensor(issued)  # type: ignore[no-any-return]


def exchange_with_neighbours(
    to_previous: Tensor, to_next: Tensor, from_previous: Sequence[int], from_next: Sequence[int], axis: Axis
) -> tuple[Tensor | None, Tensor | None]:
    """What the previous and the next rank of ``axis`` have sent here, of these shapes; None where there is no such rank.

    One all-to-all in which only neighbours have something for each other: NCCL sends that from rank to rank, in one group.
    Noted in the ledger as the messages that it is.
    """
    messages = {axis.place - 1: to_previous, axis.place + 1: to_next}
    shapes = {axis.place - 1: tuple(from_previous), axis.place + 1: tuple(from_next)}
    neighbours = [peer for peer in messages if 0 <= peer < axis.size]
    if not neighbours:
        return None, None
    sizes = [messages[peer].numel() if peer in neighbours else 0 for peer in range(axis.size)]
    awaited = [math.prod(shapes[peer]) if peer in neighbours else 0 for peer in range(axis.size)]
    if not torch.compiler.is_compiling():
        for size in filter(None, sizes):
            axis.record("send_recv", size * to_next.element_size())
    flat = torch.cat([messages[peer].reshape(-1) for peer in neighbours])
    sent = _transportable(flat, "all_to_all").contiguous()
    arrived = _functional.wait_tensor(_functional.all_to_all_single(sent, awaited, sizes, axis.group_name))
    pieces = _restored(arrived, to_next.dtype).split(awaited)
    previous, following = (pieces[peer].view(shapes[peer]) if peer in neighbours else None for peer in messages)
    return previous, following


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
