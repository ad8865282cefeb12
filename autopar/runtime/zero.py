"""ZeRO-1 and 2 traffic of many parameters at once: shards that travel along the same axis share one collective.

Every shard is padded to the largest, as it would be alone, so the bytes are the same and only their number is smaller.
Parameters whose way from rest to use has other steps than one all-gather go alone (``ParameterSlot.join`` and ``fold``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.runtime import collectives
from autopar.runtime.mesh import Axis
from autopar.runtime.parameters import ParameterSlot
from autopar.runtime.split import join_pieces, pad, stack_pieces

BUCKET_BYTES = 25 * 2**20  # as torch's DistributedDataParallel


@dataclass
class ScatterBucket:
    """Gradients of one type that are reduce-scattered along one axis."""

    axis: Axis
    slots: list[ParameterSlot] = field(default_factory=list)
    stacked: list[Tensor] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    num_bytes: int = 0
    _result: Tensor | None = None

    def add(self, slot: ParameterSlot, gradient: Tensor) -> None:
        """Take the whole gradient of ``slot``."""
        _, dim, pieces = slot.one_gather()
        stacked = stack_pieces(gradient, dim, pieces).reshape(pieces.parts, -1)
        self.slots.append(slot)
        self.stacked.append(stacked)
        self.widths.append(stacked.shape[1])
        self.num_bytes += stacked.numel() * stacked.element_size()

    def launch(self) -> None:
        """Begin the reduce-scatter."""
        flat = self.stacked[0] if len(self.stacked) == 1 else torch.cat(self.stacked, 1)
        self.stacked = []
        self._result = collectives.reduce_scatter(flat, self.axis, waits=False)

    def finish(self) -> Iterator[tuple[ParameterSlot, Tensor]]:
        """Wait; each slot with the gradient of its shard."""
        assert self._result is not None, "a bucket is launched before it is finished"
        result = collectives.wait(self._result)[0]
        for slot, mine in zip(self.slots, result.split(self.widths), strict=True):
            axis, dim, pieces = slot.one_gather()
            shape = [*slot.local.shape]
            shape[dim] = pieces.largest
            yield slot, mine.view(shape).narrow(dim, 0, pieces.sizes[axis.place]).contiguous()


@torch.no_grad()
def refresh(slots: Iterable[ParameterSlot], bucket_bytes: int = BUCKET_BYTES) -> None:
    """Gather the working copies whose shards may have changed; see :meth:`ParameterSlot.refresh`."""
    buckets: dict[tuple[int, torch.dtype], list[ParameterSlot]] = {}
    sizes: dict[tuple[int, torch.dtype], int] = {}
    for slot in slots:
        if not slot.is_stale():
            continue
        if not slot.is_gathered_ahead():
            slot.refresh()
            continue
        key = (slot.one_gather()[0].index, slot.compute)
        buckets.setdefault(key, []).append(slot)
        sizes[key] = sizes.get(key, 0) + slot.leaf.numel() * slot.leaf.element_size()
        if sizes[key] >= bucket_bytes:
            _gather(buckets.pop(key))
            sizes[key] = 0
    for bucket in buckets.values():
        _gather(bucket)


def _gather(slots: list[ParameterSlot]) -> None:
    """One all-gather of the shards of all ``slots``, which lie along the same axis."""
    padded = []
    for slot in slots:
        _, dim, pieces = slot.one_gather()
        padded.append(pad(slot.brought(), dim, pieces.largest))
    flat = torch.cat([shard.reshape(-1) for shard in padded]) if len(padded) > 1 else padded[0].reshape(-1)
    gathered = collectives.all_gather(flat, slots[0].one_gather()[0])
    for slot, shard, stacked in zip(slots, padded, gathered.split([x.numel() for x in padded], 1), strict=True):
        _, dim, pieces = slot.one_gather()
        whole = join_pieces(stacked.reshape(pieces.parts, *shard.shape), dim, pieces)
        slot.take_working_copy(whole)
