"""Parameters whose optimizer states, and what the optimizer updates, rest in the host's memory: their bytes, and their price.

Enters: the ways to keep a parameter on a device. Leaves: the same with the host. As in ZeRO-Offload (Ren et al., USENIX
ATC'21), at any ZeRO level, once a step and one after the other:

    the gradient of the piece at rest goes to the host    in the type at rest
    the host's CPUs update the piece                      all devices of a node at the same time, at the speed of its memory
    the updated piece comes back                          in the type of the working copy

The device keeps the working copy (under ZeRO-3 the shard, in the type at rest) and the gradient while it is summed. A CPU
process is its own host: then nothing is saved, and what is on the host counts as the process's own.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.costing.conversions import Conversions, FloatArray
from autopar.costing.operators import LayoutColumn
from autopar.costing.parameters import ParameterTable, narrowing_seconds, update_seconds
from autopar.graph import ITEM_BYTES, Value
from cost_models import HostShare


def with_host(
    table: ParameterTable,
    value: Value,
    conversions: Conversions,
    optimizer: str,
    master: str | None,
    beside: bool,
) -> ParameterTable:
    """The ways of ``table``, all on the device, on the host; ``beside`` those of the table, where either may be chosen."""
    host = _on_host(table, value, conversions, optimizer, master)
    return _joined(table, host) if beside else host


def _on_host(
    table: ParameterTable, value: Value, conversions: Conversions, optimizer: str, master: str | None
) -> ParameterTable:
    share = conversions.cost_model.host_share(**conversions.where)
    resting, _, gradient, states = table.parts
    last = np.array([choice.zero == 3 for choice in table.choices])
    item, wide = ITEM_BYTES[value.dtype], ITEM_BYTES[master or value.dtype]
    narrowed = np.where(last, resting, resting * (item / wide))  # what comes back
    shuttle = np.where(last | (narrowed == resting), 0.0, narrowed)  # cast on the host into a buffer of its own
    used = np.array([conversions.local_elements(value.shape, choice.use) for choice in table.choices], dtype=np.float64)
    copy = np.where(last, resting, used * item)
    there = 2 * resting + states + shuttle
    nothing = np.zeros_like(resting)
    landed = resting if share.is_own_memory else nothing
    parts = np.array([nothing, copy, gradient, nothing])
    if share.is_own_memory:
        parts += np.array([resting, shuttle, resting, states])
    copying = _copy_seconds(share, resting) + _copy_seconds(share, narrowed)
    updating = nothing
    if not share.is_own_memory:
        here = update_seconds(table.parts, value, conversions, master, optimizer)
        moved = 2 * states + 3 * resting  # as on a device
        if master:
            here = here + np.where(last, 0.0, narrowing_seconds(value, table.choices, conversions, master))
            moved = moved + np.where(shuttle > 0, resting + shuttle, 0.0)
        updating = moved / share.memory_bytes_per_second - here
    return replace(
        table,
        choices=tuple(replace(choice, offload=True) for choice in table.choices),
        seconds=table.seconds + updating + copying,
        once_seconds=table.once_seconds + updating + copying,
        optimizer_seconds=table.optimizer_seconds + updating,
        offload_seconds=copying,
        kept_bytes=parts.sum(axis=0),
        parts=parts,
        host_bytes=there,
        landed_bytes=landed,
    )


def _copy_seconds(share: HostShare, num_bytes: FloatArray) -> FloatArray:
    """Between a device and its host."""
    return np.asarray(np.where(num_bytes > 0, share.link_seconds, 0.0) + num_bytes / share.link_bytes_per_second)


def _joined(one: ParameterTable, other: ParameterTable) -> ParameterTable:
    """The choices of both."""
    names = ("seconds", "once_seconds", "optimizer_seconds", "offload_seconds", "kept_bytes", "parts", "transient_bytes",
             "host_bytes", "landed_bytes")  # fmt: skip
    choices = (*one.choices, *other.choices)
    arrays = {name: np.concatenate([getattr(one, name), getattr(other, name)], axis=-1) for name in names}
    return ParameterTable(choices, LayoutColumn.of([choice.use for choice in choices]), **arrays)
