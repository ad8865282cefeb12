"""CostModel: one cluster's prices, ready to be asked many times.

Enters: a ``Cluster``. Leaves: seconds (arrays) and bytes. Costs of a mesh axis are made once and kept. Every answer is
``estimated``: from data sheets and published curves.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from cost_models.collectives import AxisCost, axis_cost, axis_groups
from cost_models.compute import FloatArray, OperatorKind, operator_seconds
from cost_models.hardware import Cluster
from cost_models.memory import usable_bytes
from cost_models.parts import Device


class CostModel:
    """Prices of operators, collectives and memory on a cluster.

    A mesh covers the ranks ``offset_devices`` to ``offset_devices + num_devices``, by default all. Its axes are in
    row-major order, the last one having stride 1.

    Args:
        cluster: what to price on.

    Example:
        >>> costs = CostModel(Cluster.homogeneous(num_nodes=4, devices_per_node=8))
        >>> data, tensor = costs.axis(size=4, stride=8), costs.axis(size=8, stride=1)
        >>> bool(data.seconds("all_reduce", 1e9) > tensor.seconds("all_reduce", 1e9))
        True
    """

    provenance: Literal["estimated"] = "estimated"

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._axes: dict[tuple[int, int, int, int], AxisCost] = {}
        self._devices: dict[tuple[int, int], tuple[Device, ...]] = {}

    def compute_seconds(
        self,
        flops: npt.ArrayLike,
        num_bytes: npt.ArrayLike,
        dtype: str = "float32",
        kind: OperatorKind = "matmul",
        *,
        offset_devices: int | None = None,
        num_devices: int | None = None,
    ) -> FloatArray:
        """Seconds of an operator on the slowest device of the mesh; see ``compute.operator_seconds``.

        Args:
            flops: FLOPs on one device, any shape.
            num_bytes: bytes that one device reads and writes, any shape that broadcasts.
            dtype: of the arithmetic.
            kind: ``matmul``, ``attention``, ``elementwise`` or ``memory``.
            offset_devices: first rank of the mesh.
            num_devices: ranks of the mesh.

        Raises:
            ValueError: an unknown kind, a negative amount, or ranks outside of the cluster.
        """
        first, *others = self.devices(offset_devices, num_devices)
        seconds = operator_seconds(first, flops, num_bytes, dtype, kind)
        for device in others:
            seconds = np.asarray(np.maximum(seconds, operator_seconds(device, flops, num_bytes, dtype, kind)))
        return seconds

    def axis(
        self, size: int, stride: int, offset_devices: int | None = None, num_devices: int | None = None
    ) -> AxisCost:
        """Cost of collectives over all groups ``{base + i * stride}`` of a mesh axis at the same time.

        Args:
            size: ranks in a group.
            stride: product of the sizes of the axes after this one.
            offset_devices: first rank of the mesh.
            num_devices: ranks of the mesh, a multiple of ``size * stride``.

        Raises:
            ValueError: sizes that do not divide, or ranks outside of the cluster.
        """
        first, count = self._mesh(offset_devices, num_devices)
        key = (size, stride, first, count)
        if key not in self._axes:
            self._axes[key] = axis_cost(self.cluster, axis_groups(size, stride, first, count))
        return self._axes[key]

    def hop_seconds(self, first: int, second: int, count: int, num_bytes: float) -> float:
        """Seconds of sending ``num_bytes`` from each of ``count`` ranks from ``first`` to the one at the same place from
        ``second``, all at the same time; 0 between ranks and themselves, or for no bytes.

        Raises:
            ValueError: ranks outside of the cluster.
        """
        if first == second or num_bytes <= 0:
            return 0.0
        self._mesh(first, count)
        self._mesh(second, count)
        key = (-1, first, second, count)
        if key not in self._axes:
            self._axes[key] = axis_cost(self.cluster, [[first + i, second + i] for i in range(count)])
        return float(self._axes[key].seconds("send_recv", np.array([num_bytes]))[0])

    def devices(self, offset_devices: int | None = None, num_devices: int | None = None) -> tuple[Device, ...]:
        """The distinct devices of a mesh, in order of rank."""
        mesh = self._mesh(offset_devices, num_devices)
        if mesh not in self._devices:
            first, count = mesh
            nodes = range(self.cluster.node_of(first), self.cluster.node_of(first + count - 1) + 1)
            self._devices[mesh] = tuple(dict.fromkeys(self.cluster.nodes[node].device for node in nodes))
        return self._devices[mesh]

    def device_memory_bytes(self, rank: int, margin: float = 0.0) -> int:
        """Bytes for tensors on a rank: its memory less the software's context, less ``margin`` of the rest."""
        return usable_bytes(self.cluster.device_of(rank), margin)

    def min_device_memory_bytes(
        self, margin: float = 0.0, offset_devices: int | None = None, num_devices: int | None = None
    ) -> int:
        """The least ``device_memory_bytes`` of a mesh."""
        return min(usable_bytes(device, margin) for device in self.devices(offset_devices, num_devices))

    def _mesh(self, offset_devices: int | None, num_devices: int | None) -> tuple[int, int]:
        total = self.cluster.num_devices
        first = 0 if offset_devices is None else offset_devices
        count = total - first if num_devices is None else num_devices
        if first < 0 or count < 1 or first + count > total:
            raise ValueError(
                f"mesh of {count} devices from rank {first} does not lie in the cluster, which has {total} devices; "
                "give offset_devices and num_devices that do"
            )
        return first, count
