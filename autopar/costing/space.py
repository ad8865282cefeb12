"""Split space: where it is offered, and what halos cost: seconds of messages between neighbours, bytes of pieces with halos.

Enters: an operator's signature, and its choices or strategies. Leaves: the choices worth trying; arrays with one entry per
strategy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.costing.conversions import Conversions, FloatArray
from autopar.strategies.choices import AxisChoice, Strategy, piece_fraction
from autopar.strategies.rule import Halo, Signature
from autopar.strategies.spatial import copied_elements, exchanged_halos, halo_section


def with_space(
    choices: Sequence[AxisChoice], space: Sequence[str], slides: bool, role: str, axis: int, num_devices: int
) -> tuple[AxisChoice, ...]:
    """An axis' choices, as many spatial dims among them as are worth trying.

    ``space``: letters, longest first; ``slides``: whether a window slides along them, which a tensor axis leaves whole. Where
    nothing is forced and all devices can share the batch evenly, space is left whole: the batch divides work, memory and
    gradients in the same way, and sends no halos. Else the first axis splits the longest spatial dim, the next one that or
    the second longest, and so on: the other way round is the same.
    """
    if not space or (role == "tensor" and not slides):
        return tuple(choices)
    shared = any(choice.splits_batch and choice.cut and choice.cut.num_units % num_devices == 0 for choice in choices)
    whole = role == "tensor" or (role != "spatial" and shared)
    left_out = set(space if whole else space[axis + 1 :])
    return tuple(choice for choice in choices if choice.letter not in left_out)


def halo_seconds(
    signature: Signature, conversions: Conversions, found: Sequence[Strategy], differentiated: bool
) -> FloatArray:
    """Seconds (forward and backward, strategies) of all halos.

    A device between two others sends to both, and both messages leave through its one port; of two devices each sends one
    way, at the same time as the other.
    """
    seconds: FloatArray = np.zeros((2, len(found)))
    for place, strategy in enumerate(found):
        lengths = _lengths(signature, strategy)
        for halo in exchanged_halos(signature, lengths):
            axis = next(axis for axis, choice in enumerate(strategy.axes) if choice.letter == halo.letter)
            sent = sent_bytes(signature, halo, lengths, conversions.mesh.shape[axis])
            took = float(conversions.axes[axis].seconds("send_recv", sent))
            seconds[0, place] += took
            seconds[1, place] += took if differentiated and halo.has_gradient else 0.0
    return seconds


def sent_bytes(signature: Signature, halo: Halo, lengths: dict[str, float], axis_size: int) -> float:
    """Bytes that leave the device that sends most, in forward, and in backward as well. ``lengths``: as of
    :func:`autopar.strategies.spatial.halo_section`."""
    rows = max(halo.before, halo.after) if axis_size == 2 else halo.before + halo.after
    return rows * halo_section(signature, halo, lengths) * halo.item_bytes


def halo_bytes(signature: Signature, found: Sequence[Strategy]) -> FloatArray:
    """Bytes of the copies that have halos around them, on the first device, by strategy."""
    item = signature.halos[0].item_bytes
    return np.array([item * copied_elements(signature, _lengths(signature, strategy)) for strategy in found])


def _lengths(signature: Signature, strategy: Strategy) -> dict[str, float]:
    """Lengths of the first device's pieces of the letters that are split."""
    return {letter: signature.sizes[letter] * piece_fraction(*split) for letter, split in strategy.split.items()}
