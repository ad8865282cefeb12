"""GPUs of this machine as NVML describes them: kind and memory, and how they are joined.

Enters: the module ``pynvml`` (package nvidia-ml-py), or one that answers alike. Leaves: :class:`Gpus`, None where there is
no driver or no GPU. A GPU that the catalogue has keeps its figures there; of another, what NVML knows is computed with.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from cost_models.catalogue import find_device, find_link
from cost_models.errors import ClusterError
from cost_models.parts import Device, Link

# NVML's names of kinds of boards -> the catalogue's. NVML calls SXM boards by their memory ("NVIDIA H100 80GB HBM3",
# "NVIDIA A100-SXM4-80GB", "NVIDIA H200").
BOARDS = {
    "H100 80GB HBM3": "H100-SXM5-80GB",
    "H100 PCIe": "H100-PCIe-80GB",
    "H200": "H200-SXM-141GB",
    "A100-PCIE-40GB": "A100-PCIe-40GB",
    "A100 80GB PCIe": "A100-PCIe-80GB",
    "B200": "B200-SXM-180GB",
    "GB200": "GB200-186GB",
    "Tesla P100-SXM2-16GB": "P100-SXM2-16GB",
    "Tesla V100-SXM2-16GB": "V100-SXM2-16GB",
    "Tesla V100-SXM2-32GB": "V100-SXM2-32GB",
    "Tesla V100-PCIE-16GB": "V100-PCIe-16GB",
    "Tesla V100-PCIE-32GB": "V100-PCIe-32GB",
}
# nvmlNvlinkVersion_t (nvml.h) -> the catalogue's link, and bytes/s of one of its wires in one direction: 20 GB/s for NVLink
# 1, 25 for 2 to 4, 50 for 5 (a device has 4, 6, 12, 18 and 18 of them, as the catalogue's sums have it).
NVLINKS = {
    1: ("NVLink1", 20e9),
    2: ("NVLink2", 25e9),
    3: ("NVLink2", 25e9),
    4: ("NVLink3", 25e9),
    5: ("NVLink3", 25e9),
    6: ("NVLink4", 25e9),
    7: ("NVLink5", 50e9),
}
MOST_NVLINKS = 18  # NVML_NVLINK_MAX_LINKS
PCIE = {3: "PCIe3", 4: "PCIe4", 5: "PCIe5"}
SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
CLOCK_SM, CLOCK_MEMORY = 1, 2  # nvmlClockType_t


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a machine, equal in kind, and what joins them."""

    device: Device
    count: int
    link: Link


def load_nvml() -> ModuleType | None:
    """The module that speaks to the driver; None where it is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    module: ModuleType = pynvml
    return module


def detected_gpus(nvml: Any = None) -> Gpus | None:
    """The GPUs of this machine. ``nvml``: the module, by default ``pynvml`` where it is installed.

    Raises:
        ClusterError: the GPUs are of several kinds.
    """
    module = nvml or load_nvml()
    if module is None:
        return None
    try:
        module.nvmlInit()
    except module.NVMLError:  # no driver
        return None
    try:
        handles = [module.nvmlDeviceGetHandleByIndex(index) for index in range(module.nvmlDeviceGetCount())]
        if not handles:
            return None
        devices = Counter(_device(module, handle) for handle in handles)
        if len(devices) > 1:
            kinds = ", ".join(f"{count} x {device.name}" for device, count in devices.items())
            raise ClusterError(
                f"the GPUs of this machine are of several kinds ({kinds}): describe the cluster in JSON, a node for each kind"
            )
        return Gpus(next(iter(devices)), len(handles), _link(module, handles))
    finally:
        module.nvmlShutdown()


def _device(nvml: Any, handle: Any) -> Device:
    name = nvml.nvmlDeviceGetName(handle)
    name = name.decode() if isinstance(name, bytes) else str(name)
    memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    plain = name.removeprefix("NVIDIA ")
    try:
        found = find_device(BOARDS.get(plain, plain))
    except ClusterError:
        return _computed(nvml, handle, name, memory)
    return replace(found, memory_bytes=memory, source=f"{found.source}; memory from NVML")


def _computed(nvml: Any, handle: Any, name: str, memory: int) -> Device:
    """A GPU that the catalogue does not have: a fused multiply-add per core and clock, two transfers per clock of memory."""
    cores, width = nvml.nvmlDeviceGetNumGpuCores(handle), nvml.nvmlDeviceGetMemoryBusWidth(handle)
    core_clock, memory_clock = (1e6 * nvml.nvmlDeviceGetMaxClockInfo(handle, kind) for kind in (CLOCK_SM, CLOCK_MEMORY))
    return Device(
        name,
        "cuda",
        memory,
        2 * memory_clock * width / 8,
        {"float32": 2 * cores * core_clock},
        source="computed from NVML's cores, clocks and bus width; no tensor cores counted: measure with 'autopar profile'",
    )


def _link(nvml: Any, handles: list[Any]) -> Link:
    """NVLink by its active wires, through a switch or from GPU to GPU; else PCIe."""
    wires = [_wires(nvml, handle) for handle in handles]
    fewest = min(wires, key=len)
    if len(handles) > 1 and fewest:
        version, _ = fewest[0]
        name, each = NVLINKS.get(version, NVLINKS[max(NVLINKS)])
        switched = all(kind == SWITCH for own in wires for _, kind in own)
        known = find_link(name)
        return replace(
            known,
            bandwidth_bytes_per_second=each * len(fewest),
            direct=not switched,
            multicast=known.multicast and switched,
            source=f"{known.source}; {len(fewest)} active links a GPU from NVML",
        )
    generation = min(int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)) for handle in handles)
    width = min(int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)) for handle in handles)
    known = find_link(PCIE[min(max(generation, min(PCIE)), max(PCIE))])
    return replace(
        known,
        bandwidth_bytes_per_second=known.bandwidth_bytes_per_second * width / 16,
        source=f"{known.source}; {width} lanes from NVML",
    )


def _wires(nvml: Any, handle: Any) -> list[tuple[int, int]]:
    """Of each active NVLink of a GPU its version, and the kind of device at its other end."""
    found = []
    for number in range(MOST_NVLINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, number):
                continue
            version = int(nvml.nvmlDeviceGetNvLinkVersion(handle, number))
            found.append((version, int(nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, number))))
        except nvml.NVMLError:  # no such link on this kind of GPU
            break
    return found
