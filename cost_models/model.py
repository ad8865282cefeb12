"""CostModel: one cluster's prices, ready to be asked many times.

Enters: a ``Cluster``, and a ``Profile`` of it where it was measured. Leaves: seconds (arrays) and bytes. Costs of a mesh
axis are made once and kept. An answer is *measured* where the profile has the operator, or the collective on such groups;
*estimated* from data sheets and published curves otherwise, and then corrected by what was measured of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt

from cost_models.collectives import AxisCost, axis_cost, axis_groups
from cost_models.compute import FloatArray, OperatorKind, operator_seconds
from cost_models.hardware import Cluster
from cost_models.hosts import HostShare, host_share
from cost_models.measured import MeasuredOperators, Provenance, measured_axis
from cost_models.measurements import OperatorEntry
from cost_models.memory import usable_bytes
from cost_models.parts import Device
from cost_models.profile import Profile, groups_key

# How the estimate prices each kind of operators; what is not here costs it nothing.
PRICED: Mapping[str, OperatorKind] = MappingProxyType(
    {"matmul": "matmul", "attention": "attention", "elementwise": "elementwise"}
)
COPY = "copy"  # the curve of a profile that has copies, by bytes read and written


class CostModel:
    """Prices of operators, collectives and memory on a cluster.

    A mesh covers the ranks ``offset_devices`` to ``offset_devices + num_devices``, by default all. Its axes are in
    row-major order, the last one having stride 1.

    Args:
        cluster: what to price on.
        profile: what was measured on it.

    Raises:
        ProfileError: the profile is of other devices.

    Example:
        >>> costs = CostModel(Cluster.homogeneous(num_nodes=4, devices_per_node=8))
        >>> data, tensor = costs.axis(size=4, stride=8), costs.axis(size=8, stride=1)
        >>> bool(data.seconds("all_reduce", 1e9) > tensor.seconds("all_reduce", 1e9))
        True
    """

    def __init__(self, cluster: Cluster, profile: Profile | None = None) -> None:
        if profile is not None:
            profile.check_cluster(cluster)
        self.cluster = cluster
        self.profile = profile
        self._axes: dict[tuple[int, int, int, int], AxisCost] = {}
        self._devices: dict[tuple[int, int], tuple[Device, ...]] = {}
        self.operators = MeasuredOperators(profile, self._estimate) if profile is not None else None

    @property
    def provenance(self) -> Literal["measured", "estimated"]:
        """Whether there are measurements at all."""
        return "estimated" if self.profile is None else "measured"

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
        if kind == "memory" and self.profile is not None and COPY in self.profile.memory:
            amount = np.asarray(num_bytes, dtype=np.float64)
            copying = self.profile.memory[COPY].seconds(amount) * self.profile.correction
            return np.asarray(np.where(amount > 0, copying, 0.0))
        first, *others = self.devices(offset_devices, num_devices)
        seconds = operator_seconds(first, flops, num_bytes, dtype, kind)
        for device in others:
            seconds = np.asarray(np.maximum(seconds, operator_seconds(device, flops, num_bytes, dtype, kind)))
        if kind == "memory" and self.profile is not None:  # estimates of other kinds are corrected by MeasuredOperators
            return np.asarray(seconds * self.profile.correction)
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
            self._axes[key] = self.groups(axis_groups(size, stride, first, count))
        return self._axes[key]

    def groups(self, groups: Sequence[Sequence[int]]) -> AxisCost:
        """Cost of collectives that all ``groups`` run at the same time, measured where the profile has such groups.

        Raises:
            ValueError: no groups, unequal sizes, or a rank in two places.
        """
        estimated = axis_cost(self.cluster, groups)
        if self.profile is None:
            return estimated
        return measured_axis(estimated, self.profile, groups_key(self.cluster, groups))

    def optimizer_seconds(
        self,
        optimizer: str,
        parameter_bytes: npt.ArrayLike,
        moved_bytes: npt.ArrayLike,
        dtype: str,
        *,
        offset_devices: int | None = None,
        num_devices: int | None = None,
    ) -> FloatArray:
        """Seconds in which an optimizer updates a parameter.

        Args:
            optimizer: its name.
            parameter_bytes: of the piece that rests on a device, any shape.
            moved_bytes: what the update reads and writes, in the same shape; the estimate is made from it.
            dtype: of the parameter.
            offset_devices: first rank of the mesh.
            num_devices: ranks of the mesh.
        """
        curve = self.profile.memory.get(f"{optimizer} {dtype}") if self.profile is not None else None
        if curve is not None and self.profile is not None:
            return np.asarray(curve.seconds(parameter_bytes) * self.profile.correction)
        return self.compute_seconds(
            0.0, moved_bytes, dtype, "memory", offset_devices=offset_devices, num_devices=num_devices
        )

    @property
    def copy_provenance(self) -> Provenance:
        """How copies are priced."""
        return "measured" if self.profile is not None and COPY in self.profile.memory else "estimated"

    def optimizer_provenance(self, optimizer: str, dtype: str) -> Provenance:
        """How an optimizer's updates are priced."""
        if self.profile is not None and f"{optimizer} {dtype}" in self.profile.memory:
            return "measured"
        return self.copy_provenance

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
            self._axes[key] = self.groups([[first + i, second + i] for i in range(count)])
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

    def host_share(self, offset_devices: int | None = None, num_devices: int | None = None) -> HostShare:
        """The least that a device of the mesh has of its node's host."""
        first, count = self._mesh(offset_devices, num_devices)
        nodes = range(self.cluster.node_of(first), self.cluster.node_of(first + count - 1) + 1)
        different = dict.fromkeys(self.cluster.nodes[number] for number in nodes)
        shares = [host_share(node.device, node.num_devices, node.host) for node in different]
        return HostShare(
            min(share.memory_bytes for share in shares),
            min(share.memory_bytes_per_second for share in shares),
            min(share.link_bytes_per_second for share in shares),
            max(share.link_seconds for share in shares),
            all(share.is_own_memory for share in shares),
        )

    def _estimate(self, entry: OperatorEntry) -> tuple[float, float]:
        """What the estimate says of a measured operator: seconds of its forward and backward pass."""
        if entry.kind not in PRICED:
            return 0.0, 0.0
        device = self.devices()[0]
        ahead, back = (
            float(operator_seconds(device, flops, num_bytes, entry.dtype, PRICED[entry.kind]))
            for flops, num_bytes in ((entry.flops, entry.num_bytes), (entry.backward_flops, 2 * entry.num_bytes))
        )
        return ahead, back if entry.backward_seconds else 0.0

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
