"""Prices of layout changes on one mesh: matrices over the layouts that a value may have and those its readers want.

Enters: layouts, a tensor's shape and type, a CostModel. Leaves: seconds and the bytes of the tensor that a
conversion makes. The steps and their bytes are ``reshard``'s, so that the price is what runs; ``moves`` lists them, so
that each distinct step is priced once, and all at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.costing.moves import STEP_NAMES, IntArray, Moves, moves
from autopar.graph import ITEM_BYTES, Value
from autopar.layout import Layout, Shard, local_shape
from autopar.mesh import Mesh
from autopar.reshard import COLLECTIVES, CollectiveKind
from cost_models import AxisCost, CostModel

FloatArray = NDArray[np.float64]

# Of each step, by its number: whether it copies without sending, hands the tensor itself on, sends whole tensors, ...
_COPIES, _KEEPS, _SENDS_WHOLE, _TURNS = (
    np.isin(STEP_NAMES, names)
    for names in (
        ["pad_shard", "keep_first", "keep_first_both", "take_shard", "scatter"],
        ["copy_to", "keep_first_gradient"],
        ["copy_to", "reduce_from", "all_reduce"],
        ["all_to_all"],
    )
)
# ... and whether it runs a kind of collective, (forward and backward, steps).
_RUNS: Mapping[CollectiveKind, NDArray[np.bool_]] = {
    kind: np.array([[kinds[way] == kind for kinds in COLLECTIVES.values()] for way in (0, 1)])
    for kind in dict.fromkeys(kind for kinds in COLLECTIVES.values() for kind in kinds if kind)
}


@dataclass(frozen=True)
class ConversionPrices:
    """Seconds of conversions (the forward pass's, and of both passes), and bytes of the tensors they make (0 where the
    value itself is handed on)."""

    forward_seconds: FloatArray
    seconds: FloatArray
    made_bytes: FloatArray


class Conversions:
    """Layout changes on one mesh, priced once for like tensors with the same layouts."""

    def __init__(self, mesh: Mesh, cost_model: CostModel, first_rank: int = 0) -> None:
        self.mesh = mesh
        self.where = {"offset_devices": first_rank, "num_devices": mesh.num_devices}
        self.cost_model = cost_model
        self.axes: list[AxisCost] = [
            cost_model.axis(size, mesh.stride(axis), **self.where) for axis, size in enumerate(mesh.shape)
        ]
        self._elements: dict[tuple[tuple[int, ...], Layout], int] = {}
        self._priced: dict[tuple[object, ...], FloatArray] = {}

    def local_elements(self, shape: tuple[int, ...], layout: Layout) -> int:
        """Elements of a tensor on the first device of the mesh."""
        key = (shape, layout)
        found = self._elements.get(key)
        if found is None:
            found = self._elements[key] = math.prod(local_shape(shape, layout, self.mesh.shape))
        return found

    def prices(
        self, value: Value, sources: Sequence[Layout], targets: Sequence[Layout], has_gradient: bool
    ) -> ConversionPrices:
        """Matrices (sources, targets), layouts distinct, of what it costs to change ``value`` from one to the other."""
        key = (value.shape, value.dtype, tuple(sources), tuple(targets))
        found = self._priced.get(key)
        if found is None:
            priced = self._prices(value, moves(sources, targets))
            found = self._priced[key] = priced.reshape(3, len(sources), len(targets))
            found.setflags(write=False)
        forward, backward, made = found
        return ConversionPrices(forward, forward + backward if has_gradient else forward, made)

    def _prices(self, value: Value, ways: Moves) -> FloatArray:
        """Seconds forward and backward, and bytes made, (3, pairs). What is copied on the way is copied as one."""
        item = ITEM_BYTES[value.dtype]
        before, after = ways.local_sizes(value.shape, self.mesh.shape)
        seconds = self._sending_seconds(ways, _sent_elements(ways, before, after, self.mesh.shape) * item)
        made = np.append(after.prod(axis=1) * item, 0)
        copied = np.where(_COPIES[np.append(ways.name, 0)], made, 0)
        makes = np.append(~_KEEPS[ways.name], False)
        found: FloatArray = np.zeros((3, ways.taken.shape[1]))
        moved = np.zeros(ways.taken.shape[1])
        for taken in ways.taken:  # where a way has ended, the last entry, which is nothing
            found[:2] += seconds[:, taken]
            moved += copied[taken]
            found[2] = np.where(makes[taken], made[taken], found[2])
        found[:2] += self._copy_seconds(value, moved)
        return found

    def _sending_seconds(self, ways: Moves, num_bytes: IntArray) -> FloatArray:
        """Seconds (forward and backward, moves) of collectives of ``num_bytes`` each; of nothing in the last entry."""
        seconds: FloatArray = np.zeros((2, len(num_bytes) + 1))
        for axis, size in enumerate(self.mesh.shape):
            on_axis = np.flatnonzero(ways.axis == axis) if size > 1 else np.zeros(0, dtype=np.int64)
            for kind, runs in _RUNS.items():
                running = runs[:, ways.name[on_axis]]
                chosen = running.any(axis=0)
                if chosen.any():
                    places = on_axis[chosen]
                    seconds[:, places] += running[:, chosen] * self.axes[axis].seconds(kind, num_bytes[places])
        return seconds

    def _copy_seconds(self, value: Value, moved: FloatArray) -> FloatArray:
        """Seconds of local copies of ``moved`` bytes."""
        return self.cost_model.compute_seconds(0.0, 2 * moved, value.dtype, "memory", **self.where)


def _sent_elements(ways: Moves, before: IntArray, after: IntArray, mesh_shape: Sequence[int]) -> IntArray:
    """Elements that each move sends, as of ``reshard.step_traffic``. ``before`` and ``after``: sizes (moves, dims)."""
    rows = np.arange(len(ways.axis))
    shards = np.array([isinstance(state, Shard) for state in ways.states])
    pieces = np.where(shards[ways.after[rows, ways.axis]], after.prod(axis=1), before.prod(axis=1))
    turned = np.flatnonzero(_TURNS[ways.name])
    dims = np.array([state.dim if isinstance(state, Shard) else 0 for state in ways.states])
    joined = dims[ways.before[turned, ways.axis[turned]]]
    pieces[turned] = pieces[turned] // after[turned, joined] * before[turned, joined]
    sizes = np.array(mesh_shape)[ways.axis]
    return np.asarray(np.where(_SENDS_WHOLE[ways.name], before.prod(axis=1), pieces * sizes))
