"""Hosts: the CPU side of a node, where the states of an optimizer may rest, and the way there from a device.

Enters: a node's device and its number, and the host where one is described. Leaves: a :class:`HostShare`, what one device
has of memory, of the memory's bandwidth and of the link when all devices of the node use them at the same time, as they do
in a step. A host that is not described is the usual one of the device's generation, in proportion to the devices; of a CPU
process it is the process's own memory, to which data is copied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from cost_models.errors import ClusterError
from cost_models.parts import GIVEN, Device, Link, check_fraction, check_positive, check_text, whole_number

DEVICES_OF_A_HOST = 8  # of the machines of the catalogue below, Grace apart

# STREAM on two EPYC 7742 reaches some 340 of 409.6 GB/s (recalled); others assumed alike.
_REACHED = 0.8


@dataclass(frozen=True)
class Host:
    """The CPUs and the memory of a node, and the link from each of its devices to them.

    Args:
        name: any name; shown in reports and errors.
        memory_bytes: of the node, for all of its devices together.
        memory_bandwidth_bytes_per_second: of the node, data sheet figure; ``memory_efficiency`` is what is reached of it.
        link: one device's way to the host; ``ports_per_node`` where several devices share an uplink.
        source: where the figures come from.
        memory_efficiency: share of the bandwidth that a long stream on all cores reaches, 0 < e <= 1.

    Raises:
        ClusterError: a figure is missing, not a number, not finite, or out of range.
    """

    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_second: float
    link: Link
    source: str = GIVEN
    memory_efficiency: float = _REACHED

    def __post_init__(self) -> None:
        what = f"host {self.name!r}"
        check_text("host", "name", self.name)
        check_text(what, "source", self.source)
        object.__setattr__(self, "memory_bytes", whole_number(what, "memory_bytes", self.memory_bytes))
        check_positive(what, "memory_bandwidth_bytes_per_second", self.memory_bandwidth_bytes_per_second)
        check_fraction(what, "memory_efficiency", self.memory_efficiency)
        for key in ("memory_bandwidth_bytes_per_second", "memory_efficiency"):
            object.__setattr__(self, key, float(getattr(self, key)))
        if not isinstance(self.link, Link):
            raise ClusterError(f"{what}: link is {self.link!r}; give a Link (find_link finds one by name)")


@dataclass(frozen=True)
class HostShare:
    """What one device has of its node's host while all devices of the node use it.

    ``memory_bytes``: of its memory; ``memory_bytes_per_second``: read or written by the CPUs; ``link_bytes_per_second``: each
    way, after ``link_seconds`` for each tensor. ``is_own_memory``: the device is a CPU process, and this its own memory.
    """

    memory_bytes: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    link_seconds: float
    is_own_memory: bool = False


def _link(name: str, bandwidth: float, reached: float, source: str) -> Link:
    return Link(name, bandwidth, 10e-6, f"{source}; 10 us to begin a copy, recalled", reached / bandwidth)


# Copies between pinned host memory and one device, large ones.
_PCIE3 = _link("PCIe3 to the host", 16e9, 12e9, "12 of 16 GB/s into a V100, ZaidQureshi/bam issue #54")
_PCIE4 = _link("PCIe4 to the host", 31e9, 25.1e9, "25.1 GB/s into an A100, NVIDIA/nvbandwidth issue #42")
_PCIE5 = _link("PCIe5 to the host", 63e9, 52.8e9, "52.8 GB/s from an H100, NVIDIA/nvbandwidth issue #24")
_C2C = _link("NVLink-C2C to the host", 450e9, 346e9, "346 GB/s into a GH200, NVIDIA/nvbandwidth issue #23")

# The machines that carry eight devices of a generation; memory in all, as sold at the least.
_DGX_1 = Host(
    "2 x Xeon E5-2698 v4", 512 * 2**30, 153.6e9, _PCIE3, "DGX-1; 2 x 4 channels of DDR4-2400 of 8 bytes; recalled"
)
_DGX_A100 = Host(
    "2 x EPYC 7742", 2**40, 409.6e9, _PCIE4,
    "DGX A100: CPUs and 1 TB read at hardwaretimes.com; 2 x 8 channels of DDR4-3200 of 8 bytes, recalled",
)  # fmt: skip
_DGX_H100 = Host(
    "2 x Xeon 8480C", 2**41, 614.4e9, _PCIE5,
    "DGX H100: 2 x 8 modules and 2 TB read at vengineer.hatenablog.com; DDR5-4800 of 8 bytes, recalled",
)  # fmt: skip
_GRACE = Host(
    "Grace", 480 * 10**9, 512e9, _C2C, "LPDDR5X of one Grace, which two devices share; data sheet, recalled"
)

_BY_GENERATION: Mapping[str, Host] = MappingProxyType(
    {"P100": _DGX_1, "V100": _DGX_1, "T4": _DGX_1, "H100": _DGX_H100, "H200": _DGX_H100, "B200": _DGX_H100,
     "B300": _DGX_H100, "MI300": _DGX_H100, "MI325": _DGX_H100, "GB200": _GRACE, "GB300": _GRACE}
)  # fmt: skip


def usual_host(device: Device, num_devices: int) -> Host:
    """The host that ``num_devices`` such devices usually have.

    As much of the machine that carries eight of them as there are devices, two to an uplink (as behind the PCIe switches of
    those machines, recalled); a device of another name has PCIe4's. A CPU process is its own host.
    """
    if device.kind == "cpu":
        rate = device.memory_bandwidth_bytes_per_second
        link = Link("copies in memory", rate * device.memory_efficiency / 2, device.launch_seconds, "reads and writes")
        return Host(
            device.name, device.memory_bytes * num_devices, rate * num_devices, link, device.source, device.memory_efficiency
        )
    generation = device.name.split("-")[0]
    host = _BY_GENERATION.get(generation, _BY_GENERATION.get(generation[:5], _DGX_A100))
    is_grace = host is _GRACE
    part = num_devices / (2 if is_grace else DEVICES_OF_A_HOST)
    return replace(
        host,
        memory_bytes=max(1, int(host.memory_bytes * part)),
        memory_bandwidth_bytes_per_second=host.memory_bandwidth_bytes_per_second * part,
        link=host.link if is_grace else replace(host.link, ports_per_node=math.ceil(num_devices / 2)),
    )


def host_share(device: Device, num_devices: int, described: Host | None = None) -> HostShare:
    """What one of the ``num_devices`` devices of a node has of its host, the usual one unless it is ``described``."""
    host = described or usual_host(device, num_devices)
    sharing = min(1.0, host.link.ports(num_devices) / num_devices)
    return HostShare(
        memory_bytes=host.memory_bytes / num_devices,
        memory_bytes_per_second=host.memory_bandwidth_bytes_per_second * host.memory_efficiency / num_devices,
        link_bytes_per_second=host.link.reached_bytes_per_second * sharing,
        link_seconds=host.link.latency_seconds,
        is_own_memory=described is None and device.kind == "cpu",
    )
