"""Reduction of parameter gradients during and after backward.

ZeRO-2 gradients are reduce-scattered in every micro-batch, as soon as a bucket of them is there, and added up as shards.
All else happens once a step: ZeRO-1 gradients are reduce-scattered after the last backward; what is then still a sum of
terms at rest (G axes) is collected in flat buckets and all-reduced, for replicated parameters while the last backward goes
on; gradients of parameters that other pipeline ranks have, too, are summed with theirs at the end. All ranks run the same
program, so buckets fill in the same order everywhere. Of a parameter that is computed with in another type than it rests in,
each micro-batch's gradient is brought to the type at rest, where it is added to those before, as soon as it is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.runtime import collectives
from autopar.runtime.mesh import Axis
from autopar.runtime.parameters import ParameterSlot
from autopar.runtime.zero import BUCKET_BYTES, ScatterBucket


@dataclass
class SumBucket:
    """Gradients of one type that are summed over the same axes."""

    axes: tuple[Axis, ...]
    slots: list[ParameterSlot] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    num_bytes: int = 0
    flat: Tensor | None = None

    def launch(self) -> None:
        """Begin the all-reduce over the first axis."""
        if len(self.gradients) == 1 and self.gradients[0].is_contiguous():
            self.flat = self.gradients[0].view(-1)
        else:
            self.flat = torch.cat([gradient.reshape(-1) for gradient in self.gradients])
        self.gradients = [self.gradients[0]] if len(self.gradients) == 1 else []
        collectives.all_reduce_in_place(self.flat, self.axes[0])

    def finish(self) -> Iterator[tuple[ParameterSlot, Tensor]]:
        """Wait and sum over the other axes; each slot with its gradient."""
        assert self.flat is not None, "a bucket is launched before it is finished"
        collectives.wait(self.flat)
        for axis in self.axes[1:]:
            collectives.wait(collectives.all_reduce_in_place(self.flat, axis))
        at = 0
        for slot in self.slots:
            size = slot.local.numel()
            yield slot, self.flat[at : at + size].view(slot.local.shape)
            at += size


class GradientReducer:
    """Watches the leaves of ``slots``; :meth:`finish` after the last backward leaves every gradient on its ``storage``.

    ``is_last``: whether the backward that runs next is the step's last of all these slots. ``ties``: for parameters that
    other pipeline ranks have, too, the axis of those ranks, in an order that is the same on all of them.
    """

    def __init__(
        self, slots: Sequence[ParameterSlot], bucket_bytes: int = BUCKET_BYTES, ties: Mapping[str, Axis] | None = None
    ) -> None:
        self.is_last = True
        self._slots = [slot for slot in slots if slot.trainable]
        self._ties = dict(ties or {})
        self._tied: dict[str, Tensor] = {}
        self._bucket_bytes = bucket_bytes
        self._shards: dict[int, tuple[ParameterSlot, Tensor]] = {}
        self._scatters: dict[tuple[int, torch.dtype], ScatterBucket] = {}
        self._launched_scatters: list[ScatterBucket] = []
        self._sums: dict[tuple[tuple[int, ...], torch.dtype], SumBucket] = {}
        self._launched_sums: list[SumBucket] = []
        for slot in self._slots:
            self._watch(slot)

    def _watch(self, slot: ParameterSlot) -> None:
        if slot.zero == 2:
            slot.leaf.register_post_accumulate_grad_hook(lambda leaf: self._ready(slot))
            return
        if slot.leaf.dtype != slot.dtype:
            slot.leaf.register_post_accumulate_grad_hook(lambda leaf: slot.collect())
        if slot.zero != 1 and slot.reduce_axes:
            slot.leaf.register_post_accumulate_grad_hook(lambda leaf: self._ready(slot) if self.is_last else None)

    @torch.no_grad()
    def settle(self) -> None:
        """After a backward that is not the last: reduce what is reduced in every micro-batch."""
        for slot in self._slots:
            if slot.zero == 2 and slot.arrived is not None:
                self._ready(slot)
        self._end_scatters()

    @torch.no_grad()
    def finish(self) -> None:
        """After the last backward: reduce what is left over, and wait for everything."""
        for slot in self._slots:
            if slot.arrived is not None:
                self._ready(slot)
        self._end_scatters()
        for slot, shard in self._shards.values():
            self._sum(slot, shard)
        self._shards = {}
        for sums in list(self._sums):
            self._launch_sum(sums)
        for bucket in self._launched_sums:
            for slot, gradient in bucket.finish():
                self._deliver(slot, gradient)
        self._launched_sums = []
        self._end_ties()

    def _end_scatters(self) -> None:
        for key in list(self._scatters):
            self._launch_scatter(key)
        for scatter in self._launched_scatters:
            self._finish_scatter(scatter)
        self._launched_scatters = []

    def _finish_scatter(self, scatter: ScatterBucket) -> None:
        for slot, shard in scatter.finish():
            self._keep(slot, shard)

    def _keep(self, slot: ParameterSlot, shard: Tensor) -> None:
        """Add to the slot's shard of this step."""
        kept = self._shards.get(id(slot))
        self._shards[id(slot)] = (slot, shard if kept is None else kept[1].add_(shard))

    def _deliver(self, slot: ParameterSlot, gradient: Tensor) -> None:
        """A gradient of this step that is finished but for the other pipeline ranks."""
        if slot.name not in self._ties:
            slot.add_gradient(gradient)
            return
        there = self._tied.get(slot.name)
        self._tied[slot.name] = gradient if there is None else there + gradient

    def _end_ties(self) -> None:
        """Sum the gradients of tied parameters over the pipeline ranks that have them."""
        first = {slot.name: slot for slot in reversed(self._slots)}
        for name, axis in self._ties.items():
            if name in first:
                slot = first[name]
                gradient = self._tied.pop(name, None)
                gradient = torch.zeros_like(slot.local, device=slot.leaf.device) if gradient is None else gradient
                slot.add_gradient(collectives.all_reduce(gradient.contiguous(), axis))

    def abandon(self) -> None:
        """Forget the gradients of a step that failed."""
        self._scatters, self._launched_scatters = {}, []
        self._sums, self._launched_sums = {}, []
        self._shards, self._tied = {}, {}
        for slot in self._slots:
            slot.drop_arrived()

    @torch.no_grad()
    def _ready(self, slot: ParameterSlot) -> None:
        """The gradient of this step is there in the use layout: bring it to the layout at rest and sum it."""
        gradient = slot.take_arrived()
        if slot.zero not in (1, 2):
            self._sum(slot, gradient)
        elif not slot.has_one_gather():
            self._keep(slot, slot.fold(gradient))
        else:
            axis = slot.one_gather()[0]
            key = (axis.index, gradient.dtype)
            bucket = self._scatters.setdefault(key, ScatterBucket(axis))
            bucket.add(slot, gradient)
            if bucket.num_bytes >= self._bucket_bytes:
                self._launch_scatter(key)

    def _sum(self, slot: ParameterSlot, gradient: Tensor) -> None:
        """Sum a gradient in the layout at rest over the axes where it is a sum of terms."""
        axes = slot.reduce_axes
        if not axes:
            self._deliver(slot, gradient)
            return
        key = (tuple(axis.index for axis in axes), gradient.dtype)
        bucket = self._sums.setdefault(key, SumBucket(axes))
        bucket.slots.append(slot)
        bucket.gradients.append(gradient)
        bucket.num_bytes += gradient.numel() * gradient.element_size()
        if bucket.num_bytes >= self._bucket_bytes:
            self._launch_sum(key)

    def _launch_scatter(self, key: tuple[int, torch.dtype]) -> None:
        bucket = self._scatters.pop(key)
        bucket.launch()
        self._launched_scatters.append(bucket)
        if len(self._launched_scatters) > 1:  # what is sent stays in memory until it is waited for
            self._finish_scatter(self._launched_scatters.pop(0))

    def _launch_sum(self, key: tuple[tuple[int, ...], torch.dtype]) -> None:
        bucket = self._sums.pop(key)
        bucket.launch()
        self._launched_sums.append(bucket)
