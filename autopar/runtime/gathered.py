"""ZeRO-3: a parameter that rests as a shard is whole only around its use, in the forward pass and again in the backward pass.

:func:`gathered` makes the whole tensor. While :meth:`Gathers.saving` is active, autograd keeps a handle in place of each
saved tensor that lies in the memory of a gathered parameter; when backward asks for it, the parameter is gathered again
and kept until the gradient of that use has been reduced. Under ``torch.compile`` each gather breaks the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Whole = Callable[[Tensor], Tensor]  # shard -> whole, or gradient of the whole -> gradient of the shard


class Use:
    """One use of a parameter: how to make it whole again, and the copy that backward is using now."""

    def __init__(self, shard: Tensor, join: Whole, dtype: torch.dtype) -> None:
        self.shard = shard
        self.join = join
        self.dtype = dtype
        self.num_saved = 0
        self.copy: Tensor | None = None

    def whole(self) -> Tensor:
        """The gathered parameter; released after as many calls as tensors were saved, or with :meth:`release`."""
        copy = self.copy
        if copy is None:
            with torch.no_grad():
                copy = self.copy = self.join(self.shard)
        self.num_saved -= 1
        if self.num_saved <= 0:
            self.copy = None
        return copy

    def release(self) -> None:
        self.copy = None


class Handle(NamedTuple):
    """What autograd keeps in place of a saved view of a gathered parameter."""

    use: Use
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Gathers:
    """The gathered parameters that are alive, found by their memory.

    A weak reference keeps the address of a storage from being given to another one, so that an entry whose reference has
    not expired can only be the parameter itself.
    """

    def __init__(self) -> None:
        self._alive: dict[int, tuple[StorageWeakRef, Use]] = {}

    def add(self, whole: Tensor, use: Use) -> None:
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        reference = StorageWeakRef(whole.untyped_storage())
        self._alive[reference.cdata] = (reference, use)

    def __len__(self) -> int:
        """How many gathered parameters are in memory now."""
        return sum(not reference.expired() for reference, _ in self._alive.values())

    def saving(self) -> AbstractContextManager[Any]:
        """While active, autograd saves handles in place of gathered parameters."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, saved: Tensor) -> Tensor | Handle:
        """A handle, or the tensor without its graph: a graph that holds itself is never freed where no backward frees it,
        such as the part of one that is kept for W."""
        if not self._alive or type(saved) not in (Tensor, torch.nn.Parameter):
            return saved.detach()
        entry = self._alive.get(saved.untyped_storage()._cdata)
        if entry is None or entry[0].expired() or saved.dtype != entry[1].dtype:
            return saved.detach()
        entry[1].num_saved += 1
        return Handle(entry[1], tuple(saved.shape), saved.stride(), int(saved.storage_offset()))


def _unpack(kept: Tensor | Handle) -> Tensor:
    if isinstance(kept, Handle):
        return kept.use.whole().as_strided(kept.size, kept.stride, kept.offset)
    return kept


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, use: Use, fold: Whole) -> Tensor:
        ctx.use, ctx.fold = use, fold
        return use.join(shard)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # Every operator that used the whole parameter has had its backward by now.
        ctx.use.release()
        return ctx.fold(gradient), None, None


def gathered(
    shard: Tensor, join: Whole, fold: Whole, gathers: Gathers, dtype: torch.dtype | None = None
) -> Tensor:
    """``join(shard)``, whose gradient is ``fold`` of the whole one's; the whole tensor is not kept for backward.

    ``dtype``: the type of the whole tensor, by default the shard's.
    """
    # Autograd's handles are no business of a compiled graph.
    whole: Tensor = torch.compiler.disable(_gather)(shard, join, fold, gathers, dtype or shard.dtype)
    return whole


def _gather(shard: Tensor, join: Whole, fold: Whole, gathers: Gathers, dtype: torch.dtype) -> Tensor:
    use = Use(shard.detach(), join, dtype)
    whole: Tensor = _Gathered.apply(shard, use, fold)  # type: ignore[no-untyped-call]
    if torch.is_grad_enabled():
        gathers.add(whole, use)
    return whole
