"""The norm of all gradients of a program, whatever their layouts: every element counts once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autopar.runtime import collectives
from autopar.runtime.errors import ProgramError
from autopar.runtime.mesh import Mesh
from autopar.runtime.parameters import ParameterSlot, local_of


@torch.no_grad()
def clip_grad_norm_(
    slots: Sequence[ParameterSlot],
    mesh: Mesh,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    everywhere: Mapping[str, ParameterSlot] | None = None,
    owners: Mapping[str, int] | None = None,
) -> Tensor:
    """See ``Engine.clip_grad_norm_``: one all-reduce of a single number for each axis that shards some parameter, and one
    over the pipeline ranks. ``slots`` are this rank's; ``everywhere`` those of all stages, and ``owners`` the pipeline rank
    that counts each parameter.
    """
    norm = total_norm(slots, mesh, norm_type, everywhere, owners)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise ProgramError(f"the norm of the gradients is {norm.item()}: they are left as they are")
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    gradients = [local_of(slot.storage.grad) for slot in slots if slot.storage.grad is not None]
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.device, gradient.dtype))
    return norm


@torch.no_grad()
def total_norm(
    slots: Sequence[ParameterSlot],
    mesh: Mesh,
    norm_type: float,
    everywhere: Mapping[str, ParameterSlot] | None = None,
    owners: Mapping[str, int] | None = None,
) -> Tensor:
    """The norm of the whole gradients, the same on every rank, in the widest of their types and at least float32."""
    if norm_type <= 0:
        raise ProgramError(f"norm_type is positive or inf, not {norm_type}")
    owners = owners or {}
    given = [slot for slot in slots if slot.storage.grad is not None]
    # Which axes take part must not depend on the rank: all trainable parameters decide, with or without a gradient here.
    needed = {axis.index for slot in slots if slot.trainable for axis in slot.sharded_axes}
    counted = [
        slot
        for slot in given
        if _counts_here(slot, needed) and owners.get(slot.name, mesh.stages.place) == mesh.stages.place
    ]
    dtype = torch.float32
    for slot in slots if everywhere is None else everywhere.values():
        dtype = torch.promote_types(dtype, slot.dtype) if slot.trainable else dtype
    norms = [
        torch.linalg.vector_norm(local_of(slot.storage.grad), norm_type, dtype=dtype).to(mesh.device)
        for slot in counted
        if slot.local.numel() and slot.storage.grad is not None
    ]
    stacked = torch.stack(norms) if norms else torch.zeros(1, dtype=dtype, device=mesh.device)
    is_maximum = math.isinf(norm_type)
    total = stacked.amax() if is_maximum else stacked.pow(norm_type).sum()
    for axis in (*(axis for axis in mesh.axes if axis.index in needed), mesh.stages):
        total = collectives.all_reduce(total, axis, "max" if is_maximum else "sum")
    return total if is_maximum else total.pow(1.0 / norm_type)


def _counts_here(slot: ParameterSlot, needed: set[int]) -> bool:
    """Whether this rank counts its piece: of several ranks with the same piece, the first does."""
    sharded = {axis.index for axis in slot.sharded_axes}
    return all(axis.place == 0 for axis in slot.mesh.axes if axis.index in needed and axis.index not in sharded)
