"""Prices of layout changes on one mesh: matrices over the layouts that a value may have and those its readers want.

Enters: layouts, a tensor's shape and type, a CostModel. Leaves: seconds (forward and backward together) and the bytes of
the tensor that a conversion makes. The steps and their bytes are ``reshard``'s, so that the price is what runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.graph import ITEM_BYTES, Value
from autopar.layout import REPLICATED, Layout, Shard, local_shape
from autopar.mesh import Mesh
from autopar.reshard import COLLECTIVES, Step, steps
from cost_models import AxisCost, CostModel

FloatArray = NDArray[np.float64]

_COPIES = {"pad_shard", "keep_first", "keep_first_both", "take_shard", "scatter"}  # steps that copy without sending
_KEEPS = {"copy_to", "keep_first_gradient"}  # steps that hand the tensor itself on


@dataclass(frozen=True)
class ConversionPrices:
    """Seconds of conversions, and bytes of the tensors they make (0 where the value itself is handed on)."""

    seconds: FloatArray
    made_bytes: FloatArray


class Conversions:
    """Layout changes on one mesh, each pair of layouts of a kind of tensor priced once."""

    def __init__(self, mesh: Mesh, cost_model: CostModel) -> None:
        self.mesh = mesh
        self.cost_model = cost_model
        self.axes: list[AxisCost] = [
            cost_model.axis(size, mesh.stride(axis), num_devices=mesh.num_devices) for axis, size in enumerate(mesh.shape)
        ]
        self._elements: dict[tuple[tuple[int, ...], Layout], int] = {}
        self._pairs: dict[tuple[tuple[int, ...], str], dict[tuple[Layout, Layout], tuple[float, float, float]]] = {}

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
        known = self._pairs.setdefault((value.shape, value.dtype), {})
        missing = [(s, t) for s in sources for t in targets if (s, t) not in known]
        if missing:
            known.update(self._priced(value, missing))
        found = np.array([known[s, t] for s in sources for t in targets]).reshape(len(sources), len(targets), 3)
        seconds = found[..., 0] + found[..., 1] if has_gradient else found[..., 0]
        return ConversionPrices(np.ascontiguousarray(seconds), np.ascontiguousarray(found[..., 2]))

    def _priced(
        self, value: Value, pairs: Sequence[tuple[Layout, Layout]]
    ) -> dict[tuple[Layout, Layout], tuple[float, float, float]]:
        """Seconds forward and backward, and bytes made, of many conversions. Bytes to send are gathered first, then each
        axis prices its collectives all at once."""
        item = ITEM_BYTES[value.dtype]
        sent: dict[tuple[int, str, int], tuple[list[int], list[int]]] = {}
        made = [0] * len(pairs)
        moved = np.zeros(len(pairs))
        for index, (source, target) in enumerate(pairs):
            current = source
            for step in steps(source, target):
                after = (*current[: step.axis], step.target, *current[step.axis + 1 :])
                if self.mesh.shape[step.axis] > 1:
                    for direction, kind in enumerate(COLLECTIVES[step.name]):
                        if kind:
                            places, amounts = sent.setdefault((step.axis, kind, direction), ([], []))
                            places.append(index)
                            amounts.append(self._step_bytes(step, value.shape, current, after, item))
                if step.name in _COPIES:
                    moved[index] += item * self.local_elements(value.shape, after)
                if step.name not in _KEEPS:
                    made[index] = item * self.local_elements(value.shape, after)
                current = after
        seconds = np.zeros((2, len(pairs)))
        for (axis, kind, direction), (places, amounts) in sent.items():
            priced = self.axes[axis].seconds(kind, np.array(amounts, dtype=np.float64))  # type: ignore[arg-type]
            np.add.at(seconds[direction], places, priced)
        seconds += self._copy_seconds(value, moved)
        return {pair: (f, b, m) for pair, f, b, m in zip(pairs, *seconds.tolist(), made, strict=True)}

    def _copy_seconds(self, value: Value, moved: FloatArray) -> FloatArray:
        """Seconds of local copies of ``moved`` bytes."""
        model, mesh = self.cost_model, self.mesh
        return model.compute_seconds(0.0, 2 * moved, value.dtype, "memory", num_devices=mesh.num_devices)

    def _step_bytes(self, step: Step, shape: tuple[int, ...], before: Layout, after: Layout, item: int) -> int:
        """Bytes as of ``reshard.step_traffic``, with sizes looked up."""
        size = self.mesh.shape[step.axis]
        if step.name in ("copy_to", "reduce_from", "all_reduce"):
            return self.local_elements(shape, before) * item
        if step.name == "all_to_all":
            assert isinstance(step.source, Shard) and isinstance(step.target, Shard)
            joined = (*before[: step.axis], REPLICATED, *before[step.axis + 1 :])
            dim = step.source.dim
            kept = local_shape(shape, before, self.mesh.shape)[dim]
            whole = local_shape(shape, joined, self.mesh.shape)[dim]
            return self.local_elements(shape, after) // whole * kept * item * size
        small = after if isinstance(step.target, Shard) else before
        return self.local_elements(shape, small) * item * size
