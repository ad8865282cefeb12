"""Prices of layout changes on one mesh: matrices over the layouts that a value may have and those its readers want.

Enters: layouts, a tensor's shape and type, a CostModel. Leaves: seconds and the bytes of the tensor that a
conversion makes. The steps and their bytes are ``reshard``'s, so that the price is what runs; ``moves`` lists them, so
that each distinct step is priced once, and all at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.costing.moves import STEP_NAMES, IntArray, Moves, Ways, moves
from autopar.graph import ITEM_BYTES, Value
from autopar.layout import Layout, Layouts, local_shape
from autopar.mesh import Mesh
from cost_models import AxisCost, CostModel

FloatArray = NDArray[np.float64]

# Of each step, by its number: whether it copies without sending, hands the tensor itself on, sends whole tensors, turns cuts.
_COPIES, _KEEPS, _SENDS_WHOLE, _TURNS = (
    np.isin(STEP_NAMES, names)
    for names in (
        ["pad_shard", "keep_first", "keep_first_both", "take_shard", "scatter"],
        ["copy_to", "keep_first_gradient"],
        ["copy_to", "reduce_from", "all_reduce"],
        ["all_to_all"],
    )
)


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
        self._elements_of: dict[tuple[tuple[int, ...], Layouts], FloatArray] = {}
        self._priced: dict[tuple[object, ...], FloatArray] = {}

    def local_elements(self, shape: tuple[int, ...], layout: Layout) -> int:
        """Elements of a tensor on the first device of the mesh."""
        key = (shape, layout)
        found = self._elements.get(key)
        if found is None:
            found = self._elements[key] = math.prod(local_shape(shape, layout, self.mesh.shape))
        return found

    def elements_of(self, shape: tuple[int, ...], layouts: Layouts) -> FloatArray:
        """The same of a tensor in each of ``layouts``."""
        key = (shape, layouts)
        found = self._elements_of.get(key)
        if found is None:
            found = np.array([self.local_elements(shape, layout) for layout in layouts], dtype=np.float64)
            found.setflags(write=False)
            self._elements_of[key] = found
        return found

    def prices(
        self, value: Value, sources: Sequence[Layout], targets: Sequence[Layout], has_gradient: bool
    ) -> ConversionPrices:
        """Matrices (sources, targets), layouts distinct, of what it costs to change ``value`` from one to the other."""
        key = (value.shape, value.dtype, _as_key(sources), _as_key(targets))
        found = self._priced.get(key)
        if found is None:
            priced = self._prices(value, moves(sources, targets))
            found = self._priced[key] = priced.reshape(3, len(sources), len(targets))
            found.setflags(write=False)
        forward, backward, made = found
        return ConversionPrices(forward, forward + backward if has_gradient else forward, made)

    def _prices(self, value: Value, found: Moves) -> FloatArray:
        """Seconds forward and backward, and bytes made, (3, pairs). What is copied on the way is copied as one."""
        item, ways = ITEM_BYTES[value.dtype], found.ways
        before, after = found.local_sizes(value.shape, self.mesh.shape)
        seconds = self._sending_seconds(ways, _sent_elements(found, before, after, self.mesh.shape) * item)
        made = np.append(after.prod(axis=1) * item, 0)
        copied = np.where(_COPIES[np.append(ways.name, 0)], made, 0)
        makes = np.append(~_KEEPS[ways.name], False)
        prices: FloatArray = np.zeros((3, ways.taken.shape[1]))
        moved = np.zeros(ways.taken.shape[1])
        for taken in ways.taken:  # where a way has ended, the last entry, which is nothing
            prices[:2] += seconds[:, taken]
            moved += copied[taken]
            prices[2] = np.where(makes[taken], made[taken], prices[2])
        prices[:2] += self._copy_seconds(value, moved)
        return prices

    def _sending_seconds(self, ways: Ways, num_bytes: IntArray) -> FloatArray:
        """Seconds (forward and backward, moves) of collectives of ``num_bytes`` each; of nothing in the last entry."""
        seconds: FloatArray = np.zeros((2, len(num_bytes) + 1))
        for running in ways.running:
            if self.mesh.shape[running.axis] > 1:
                each = self.axes[running.axis].seconds(running.kind, num_bytes[running.places])
                seconds[:, running.places] += running.passes * each
        return seconds

    def _copy_seconds(self, value: Value, moved: FloatArray) -> FloatArray:
        """Seconds of local copies of ``moved`` bytes."""
        return self.cost_model.compute_seconds(0.0, 2 * moved, value.dtype, "memory", **self.where)


def _as_key(layouts: Sequence[Layout]) -> Layouts:
    return layouts if isinstance(layouts, Layouts) else Layouts(layouts)


def _sent_elements(found: Moves, before: IntArray, after: IntArray, mesh_shape: Sequence[int]) -> IntArray:
    """Elements that each move sends, as of ``reshard.step_traffic``. ``before`` and ``after``: sizes (moves, dims)."""
    ways = found.ways
    rows = np.arange(len(ways.axis))
    whole, left = before.prod(axis=1), after.prod(axis=1)
    pieces = np.where(found.dims[ways.after[rows, ways.axis]] >= 0, left, whole)
    turned = np.flatnonzero(_TURNS[ways.name])
    joined = found.dims[ways.before[turned, ways.axis[turned]]]
    pieces[turned] = pieces[turned] // after[turned, joined] * before[turned, joined]
    sizes = np.array(mesh_shape)[ways.axis]
    return np.asarray(np.where(_SENDS_WHOLE[ways.name], whole, pieces * sizes))
