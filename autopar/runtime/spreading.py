"""A whole tensor that one rank has, brought to the ranks that have a piece of it.

Where every rank has it whole it is broadcast; else each rank that has a piece is sent that piece and nothing more, so that
a sharded parameter is never whole on any rank but the first.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.collectives import message
from autopar.runtime.holdings import Holdings, Slot
from autopar.runtime.layouts import take_share
from autopar.runtime.mesh import Mesh


class Spreader:
    """Fills the slots of a program on all ranks. All ranks make it, and call it, together."""

    def __init__(self, holdings: Holdings, mesh: Mesh) -> None:
        self._holdings = holdings
        self._mesh = mesh
        self._seen = [mesh.seen_from(position) for position in range(mesh.size)]

    @torch.no_grad()
    def spread(self, name: str, whole: Tensor | None, source: int) -> None:
        """Fill the slot called ``name`` from ``whole``, which rank ``source`` gives."""
        own = self._holdings.name_of(name)
        slot, places, mesh = self._holdings.described[own], self._holdings.places[own], self._mesh
        if mesh.num_ranks == 1:
            slot.fill(lambda: _given(whole, own))
        elif len(places) == mesh.stages.size and not any(word.kind == "S" for word in slot.rest):
            self._broadcast(slot, whole, source)
        else:
            for place in places:
                for position in range(mesh.size):
                    self._send(slot, whole, source, mesh.ranks[place * mesh.size + position], position)

    def _broadcast(self, slot: Slot, whole: Tensor | None, source: int) -> None:
        if self._mesh.rank == source:
            found = _given(whole, slot.name).detach().to(self._mesh.device, slot.dtype).contiguous()
        else:
            found = torch.empty(slot.shape, dtype=slot.dtype, device=self._mesh.device)
        if found.numel():
            dist.broadcast(message(found), src=source)
        slot.fill(lambda: found)

    def _send(self, slot: Slot, whole: Tensor | None, source: int, target: int, position: int) -> None:
        """The piece of one rank, at its position in the mesh of its pipeline rank."""
        if self._mesh.rank == source:
            share = take_share(_given(whole, slot.name).detach(), slot.rest, self._seen[position])
            if target == source:
                slot.local.copy_(share)
            elif share.numel():
                dist.send(message(share.to(self._mesh.device, slot.dtype).contiguous()), target)
        elif self._mesh.rank == target and slot.local.numel():
            received = torch.empty(slot.local.shape, dtype=slot.dtype, device=self._mesh.device)
            dist.recv(message(received), source)
            slot.local.copy_(received)


def _given(whole: Tensor | None, name: str) -> Tensor:
    assert whole is not None, f"the rank that spreads {name} has it"
    return whole
