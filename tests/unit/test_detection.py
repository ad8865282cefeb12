"""Detection on machines that exist as files under /proc and /sys, and as a module that answers as NVML does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.detection import UNKNOWN_NETWORK, gathered_cluster, host_name, joined, machine_of
from autopar.errors import InputError
from cost_models import Cluster, ClusterError, detection, find_device, find_link, hardware, nvml


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# -- /proc and /sys ----------------------------------------------------------------------------------------------------


def test_processor_and_memory(tmp_path: Path) -> None:
    root = written(
        tmp_path,
        {
            "proc/cpuinfo": "processor : 0\nmodel name\t: Fancy CPU 9000\nflags : fpu\n",
            "proc/meminfo": "MemTotal:       16384 kB\nMemFree:  1 kB\n",
        },
    )
    assert detection.processor(root) == "Fancy CPU 9000"
    assert detection.memory_bytes(root) == 16384 * 1024
    written(root, {"sys/fs/cgroup/memory.max": "1048576\n"})
    assert detection.memory_bytes(root) == 2**20
    written(root, {"sys/fs/cgroup/memory.max": "max\n"})
    assert detection.memory_bytes(root) == 16384 * 1024


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    assert detection.processor(tmp_path) == "unknown"
    assert detection.memory_bytes(tmp_path) is None
    assert detection.network_link(tmp_path) is None
    assert detection.num_cores(tmp_path) >= 1
    assert detection.network_namespace(tmp_path) == ""


def test_cores_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "given_cores", lambda: frozenset(range(8)))
    assert detection.num_cores(tmp_path) == 8
    assert detection.num_cores(written(tmp_path, {"sys/fs/cgroup/cpu.max": "250000 100000\n"})) == 2
    assert detection.num_cores(written(tmp_path, {"sys/fs/cgroup/cpu.max": "50000 100000\n"})) == 1
    assert detection.num_cores(written(tmp_path, {"sys/fs/cgroup/cpu.max": "max 100000\n"})) == 8


def port(card: str, rate: str, state: str = "4: ACTIVE", layer: str = "InfiniBand") -> dict[str, str]:
    place = f"sys/class/infiniband/{card}/ports/1"
    return {f"{place}/rate": f"{rate}\n", f"{place}/state": f"{state}\n", f"{place}/link_layer": f"{layer}\n"}


def test_infiniband_ports_of_the_highest_rate_count(tmp_path: Path) -> None:
    ports = [port(f"mlx5_{number}", "400 Gb/sec (4X NDR)") for number in range(4)]
    ports += [port("mlx5_8", "100 Gb/sec (4X EDR)"), port("mlx5_9", "400 Gb/sec (4X NDR)", "1: DOWN")]
    for files in ports:
        written(tmp_path, files)
    link = detection.network_link(tmp_path)
    assert link is not None
    assert (link.name, link.bandwidth_bytes_per_second, link.ports_per_node) == ("InfiniBand-NDR", 50e9, 4)
    assert "4 active ports of 400 Gbit/s in /sys" in link.source
    assert link.efficiency == find_link("InfiniBand-NDR").efficiency


def test_ports_that_carry_ethernet(tmp_path: Path) -> None:
    link = detection.network_link(written(tmp_path, port("mlx5_0", "100 Gb/sec (4X EDR)", layer="Ethernet")))
    assert link is not None and link.name == "RoCE-100G" and link.ports_per_node == 1


def card(name: str, speed: str, state: str = "up", real: bool = True) -> dict[str, str]:
    place = f"sys/class/net/{name}"
    return {f"{place}/speed": speed, f"{place}/operstate": state, **({f"{place}/device/vendor": "x"} if real else {})}


def test_ethernet_cards(tmp_path: Path) -> None:
    for files in (
        card("eth0", "25000"),
        card("eth1", "25000"),
        card("eth2", "100000", "down"),
        card("veth", "99999", real=False),
    ):
        written(tmp_path, files)
    link = detection.network_link(tmp_path)
    assert link is not None
    assert (link.name, link.bandwidth_bytes_per_second, link.ports_per_node) == ("Ethernet-25G", 3.125e9, 2)


def test_a_card_that_does_not_know_its_rate(tmp_path: Path) -> None:
    assert detection.network_link(written(tmp_path, card("eth0", "-1"))) is None


def test_memory_bandwidth_is_a_rate_of_this_world() -> None:
    assert 1e8 < detection.memory_bandwidth_bytes_per_second(rounds=1) < 1e13


# -- NVML --------------------------------------------------------------------------------------------------------------


class NvmlError(Exception):
    pass


class FakeNvml:
    """Answers as pynvml does for ``count`` equal GPUs. ``wires``: (version, kind at the other end) of each NVLink."""

    NVMLError = NvmlError

    def __init__(self, name: str, count: int, wires: list[tuple[int, int]], names: list[str] | None = None) -> None:
        self.names, self.wires, self.open = names or [name] * count, wires, 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.names[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=80 * 2**30)

    def nvmlDeviceGetNumGpuCores(self, handle: int) -> int:
        return 10_000

    def nvmlDeviceGetMemoryBusWidth(self, handle: int) -> int:
        return 384

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        return {1: 2000, 2: 10_000}[kind]

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= len(self.wires):
            raise NvmlError("not supported")
        return int(self.wires[link][0] > 0)

    def nvmlDeviceGetNvLinkVersion(self, handle: int, link: int) -> int:
        return self.wires[link][0]

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return self.wires[link][1]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 8


SWITCH, GPU, DEAD = 2, 0, 0


def test_h100_on_switches() -> None:
    fake = FakeNvml("NVIDIA H100 80GB HBM3", 8, [(6, SWITCH)] * 18)
    found = nvml.detected_gpus(fake)
    assert found is not None and found.count == 8 and fake.open == 0
    assert found.device.name == "H100-SXM5-80GB" and found.device.memory_bytes == 80 * 2**30
    assert found.device.peak_flops == find_device("H100-SXM").peak_flops
    assert (found.link.name, found.link.bandwidth_bytes_per_second) == ("NVLink4", 450e9)
    assert found.link.multicast and not found.link.direct


def test_wires_from_gpu_to_gpu() -> None:
    found = nvml.detected_gpus(FakeNvml("Tesla V100-SXM2-16GB", 4, [(3, GPU)] * 5 + [(DEAD, GPU)]))
    assert found is not None and found.device.name == "V100-SXM2-16GB"
    assert (found.link.name, found.link.bandwidth_bytes_per_second, found.link.direct) == ("NVLink2", 125e9, True)


def test_pcie_by_generation_and_lanes() -> None:
    found = nvml.detected_gpus(FakeNvml("NVIDIA A100 80GB PCIe", 2, []))
    assert found is not None and found.device.name == "A100-PCIe-80GB"
    assert (found.link.name, found.link.bandwidth_bytes_per_second) == ("PCIe4", 15.5e9)


def test_a_gpu_that_nobody_knows() -> None:
    found = nvml.detected_gpus(FakeNvml("NVIDIA Marvel 1", 1, []))
    assert found is not None
    assert found.device.peak_flops == {"float32": 2 * 10_000 * 2e9}
    assert found.device.memory_bandwidth_bytes_per_second == 2 * 10e9 * 48
    assert "computed from NVML" in found.device.source


def test_gpus_of_several_kinds() -> None:
    fake = FakeNvml("", 0, [], names=["NVIDIA H100 PCIe", "Tesla T4"])
    with pytest.raises(ClusterError, match=r"several kinds \(1 x H100-PCIe-80GB, 1 x T4\)"):
        nvml.detected_gpus(fake)


def test_no_driver_and_no_gpu() -> None:
    fake = FakeNvml("", 0, [])
    assert nvml.detected_gpus(fake) is None and fake.open == 0
    fake.nvmlInit = lambda: (_ for _ in ()).throw(NvmlError("driver not loaded"))  # type: ignore[method-assign]
    assert nvml.detected_gpus(fake) is None


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    fake = FakeNvml("NVIDIA H100 80GB HBM3", count, [(6, SWITCH)] * 18)
    monkeypatch.setattr(nvml, "load_nvml", lambda: fake)


def test_local_cluster_is_of_gpus_where_there_are_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 4)
    cluster = Cluster.local(4)
    assert (cluster.num_devices, cluster.device_of(0).name) == (4, "H100-SXM5-80GB")
    assert cluster.nodes[0].link.name == "NVLink4"
    assert Cluster.local(8).device_of(0).kind == "cpu"
    assert Cluster.local(4, kind="cpu").device_of(0).kind == "cpu"
    with pytest.raises(ClusterError, match="has 4 GPUs that NVML knows and 8 are wanted"):
        Cluster.local(8, kind="cuda")
    with pytest.raises(ClusterError, match="kind is 'tpu'"):
        Cluster.local(8, kind="tpu")  # type: ignore[arg-type]


def test_local_cluster_with_measured_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware.detection, "memory_bandwidth_bytes_per_second", lambda: 7e9)
    device = Cluster.local(2, num_cores=2, memory_bytes=2**34, measure=True).device_of(0)
    assert device.memory_bandwidth_bytes_per_second == 7e9 and "measured here" in device.source


# -- together under torchrun -------------------------------------------------------------------------------------------


def test_hosts_are_joined() -> None:
    small = Cluster.local(1, memory_bytes=2**33, num_cores=1)
    large = Cluster.local(3, memory_bytes=2**35, num_cores=3)
    fast, slow = (Cluster(small.nodes, find_link(name)).to_json() for name in ("InfiniBand-NDR", "Ethernet-25G"))
    described = [small.to_json(), *[large.to_json()] * 3]
    cluster = joined(["a", "b", "b", "b"], described, [fast, slow, slow, slow])
    assert cluster.nodes == (small.nodes[0], large.nodes[0])
    assert cluster.inter_link.name == "Ethernet-25G"
    assert joined(["a", "b", "b", "b"], described, [""] * 4).inter_link.name == UNKNOWN_NETWORK
    assert joined(["b"] * 3, [large.to_json()] * 3, [slow] * 3) == large
    with pytest.raises(InputError, match="not neighbours in rank"):
        joined(["a", "b", "a"], described, [""] * 3)


def test_one_host_is_this_machine() -> None:
    assert gathered_cluster(lambda value: [value] * 2, on_cpu=True) == Cluster.local(2, kind="cpu")
    assert host_name() == host_name() != ""
    machine = machine_of(Cluster.local(2, kind="cpu"))
    assert (machine.kind, machine.devices_per_node, machine.threads) == ("cpu", (2,), 1)


def test_a_host_without_its_gpus_fails_everywhere() -> None:
    with pytest.raises(ClusterError, match="0 GPUs that NVML knows"):
        gathered_cluster(lambda value: [value], on_cpu=False)
