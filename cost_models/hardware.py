"""Cluster: nodes with their devices and links, from names, from JSON, or from this machine.

Enters: names of the catalogue, or ``Device`` and ``Link`` values. Leaves: a frozen ``Cluster``, in which rank r is the
r-th device counted through the nodes in order. Nodes may differ in every respect. JSON: see ``cluster_json``.
"""

from __future__ import annotations

import bisect
import hashlib
import os
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Literal

from cost_models import detection
from cost_models.catalogue import find_device, find_link
from cost_models.cluster_json import cluster_to_json, parse_cluster
from cost_models.errors import ClusterError
from cost_models.hosts import Host
from cost_models.nvml import detected_gpus
from cost_models.parts import Device, Link, check_text, whole_number


@dataclass(frozen=True)
class Node:
    """``num_devices`` equal devices that share a host, joined by ``link``. ``host``: its CPUs and memory, by default those
    that such devices usually have (``hosts.usual_host``)."""

    device: Device
    num_devices: int
    link: Link
    host: Host | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.device, Device):
            raise ClusterError(f"node: device is {self.device!r}; give a Device (find_device finds one by name)")
        if not isinstance(self.link, Link):
            raise ClusterError(f"node: link is {self.link!r}; give a Link (find_link finds one by name)")
        what = f"node of {self.device.name}"
        object.__setattr__(self, "num_devices", whole_number(what, "num_devices", self.num_devices))
        if self.host is not None and not isinstance(self.host, Host):
            raise ClusterError(f"{what}: host is {self.host!r}; give a Host, or leave it out for the usual one")


@dataclass(frozen=True)
class Cluster:
    """Nodes and the link between them. Rank r is the r-th device, counted through ``nodes`` in order.

    Args:
        nodes: at least one; they may differ.
        inter_link: what joins the nodes (unused while there is one). Its ``ports_per_node`` says how many network cards
            a node has, ``None`` being one for each device.
        name: any name; shown in reports.

    Raises:
        ClusterError: no nodes, or something that is not a node or link.

    Example:
        >>> Cluster.homogeneous(num_nodes=32, devices_per_node=8).num_devices
        256
    """

    nodes: tuple[Node, ...]
    inter_link: Link
    name: str = "cluster"

    def __post_init__(self) -> None:
        if not isinstance(self.nodes, (tuple, list)):
            raise ClusterError(f"nodes is {self.nodes!r}; give a tuple of Node values")
        object.__setattr__(self, "nodes", tuple(self.nodes))
        if not self.nodes:
            raise ClusterError("the cluster has no nodes; give at least one node with its device, number and link")
        for node in self.nodes:
            if not isinstance(node, Node):
                raise ClusterError(f"nodes holds {node!r}; give Node values")
        if not isinstance(self.inter_link, Link):
            raise ClusterError(f"inter_link is {self.inter_link!r}; give a Link (find_link finds one by name)")
        check_text("cluster", "name", self.name)

    @classmethod
    def homogeneous(
        cls,
        *,
        num_nodes: int,
        devices_per_node: int,
        device: str | Device = "H100-SXM",
        intra_link: str | Link = "NVLink4",
        inter_link: str | Link = "InfiniBand-NDR",
        name: str | None = None,
    ) -> Cluster:
        """Equal nodes. ``device`` and the links are names of the catalogue or values of your own.

        Raises:
            ClusterError: an unknown name (the message lists the known ones), or a number below 1.
        """
        count = whole_number("cluster", "num_nodes", num_nodes)
        found = find_device(device) if isinstance(device, str) else device
        within = find_link(intra_link) if isinstance(intra_link, str) else intra_link
        between = find_link(inter_link) if isinstance(inter_link, str) else inter_link
        node = Node(found, devices_per_node, within)
        return cls((node,) * count, between, name or f"{count} x {node.num_devices} {node.device.name}")

    @classmethod
    def local(
        cls,
        num_devices: int = 4,
        *,
        kind: Literal["cpu", "cuda"] | None = None,
        memory_bytes: int | None = None,
        num_cores: int | None = None,
        measure: bool = False,
    ) -> Cluster:
        """This machine: ``num_devices`` of its GPUs where it has as many, else CPU processes that talk over loopback (gloo).

        GPUs are as NVML describes them (package nvidia-ml-py), joined by the NVLink or PCIe that it finds. A CPU process is
        the catalogue's ``CPU-core``; memory is the machine's (or container's), divided among the processes. More processes
        than cores share them: their rates fall and the steps of the loopback slow down in proportion.

        Args:
            num_devices: GPUs or processes.
            kind: ``cpu`` for processes in any case, ``cuda`` for GPUs or an error.
            memory_bytes: of the whole machine; read from the operating system if left out.
            num_cores: of the whole machine; read from the operating system if left out.
            measure: measure the memory's bandwidth (half a second) in place of the catalogue's figure.

        Raises:
            ClusterError: the memory cannot be read here, there are fewer GPUs, or a number is below 1.
        """
        count = whole_number("local cluster", "num_devices", num_devices)
        if kind not in (None, "cpu", "cuda"):
            raise ClusterError(f"local cluster: kind is {kind!r}; give 'cpu', 'cuda' or nothing")
        described = memory_bytes is not None or num_cores is not None
        gpus = detected_gpus() if kind == "cuda" or (kind is None and not described) else None
        if gpus is not None and gpus.count >= count:
            between = detection.network_link() or find_link("Ethernet-10G")
            return cls((Node(gpus.device, count, gpus.link),), between, f"this machine, {count} GPUs")
        if kind == "cuda":
            raise ClusterError(
                f"this machine has {gpus.count if gpus else 0} GPUs that NVML knows and {count} are wanted: install "
                "nvidia-ml-py, or describe the cluster (Cluster.homogeneous)"
            )
        return cls._of_processes(count, memory_bytes, num_cores, measure)

    @classmethod
    def _of_processes(cls, count: int, memory_bytes: int | None, num_cores: int | None, measure: bool) -> Cluster:
        """CPU processes of this machine."""
        total = (
            detection.memory_bytes() if memory_bytes is None else whole_number("machine", "memory_bytes", memory_bytes)
        )
        if total is None:
            raise ClusterError("cannot read this machine's memory from /proc/meminfo; pass memory_bytes=")
        cores = detection.num_cores() if num_cores is None else whole_number("machine", "num_cores", num_cores)
        core, loopback = find_device("CPU-core"), find_link("Loopback")
        if measure:
            bandwidth = detection.memory_bandwidth_bytes_per_second()
            core = replace(
                core,
                memory_bandwidth_bytes_per_second=bandwidth,
                source=f"{core.source}; memory bandwidth measured here",
            )
        crowd = max(1.0, count / cores)
        device = replace(
            core,
            memory_bytes=max(1, total // count),
            memory_bandwidth_bytes_per_second=core.memory_bandwidth_bytes_per_second / crowd,
            peak_flops={dtype: flops / crowd for dtype, flops in core.peak_flops.items()},
            launch_seconds=core.launch_seconds * crowd,
        )
        ports = cores if crowd > 1 else None
        link = replace(loopback, latency_seconds=loopback.latency_seconds * crowd, ports_per_node=ports)
        return cls((Node(device, count, link),), loopback, f"this machine, {count} processes")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """Read a JSON file; see ``from_json``.

        Raises:
            ClusterError: no such file, or what ``from_json`` raises, with the path.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
            raise ClusterError(f"cannot read the cluster file {os.fspath(path)!r}: {reason}; check the path") from error
        try:
            return cls.from_json(text)
        except ClusterError as error:
            raise ClusterError(f"{os.fspath(path)}: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        """Read JSON text (the form is in ``cluster_json``).

        Raises:
            ClusterError: not JSON, truncated, unknown or missing keys, wrong types, unknown names, values out of range.
        """
        described = parse_cluster(text)
        nodes = tuple(
            node
            for entry in described.nodes
            for node in (Node(entry.device, entry.num_devices, entry.link, entry.host),) * entry.count
        )
        return cls(nodes, described.inter_link, described.name)

    def to_json(self) -> str:
        """JSON text with every figure spelled out; equal consecutive nodes are one entry with a ``count``."""
        nodes = [(node.device, node.num_devices, node.link, node.host) for node in self.nodes]
        return cluster_to_json(self.name, nodes, self.inter_link)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``to_json()`` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def fingerprint(self) -> str:
        """SHA-256 (hex) of the JSON text: equal if and only if everything about the clusters is equal."""
        return hashlib.sha256(self.to_json().encode("utf-8")).hexdigest()

    @cached_property
    def first_ranks(self) -> tuple[int, ...]:
        """First rank of every node, and the number of devices at the end."""
        return (0, *accumulate(node.num_devices for node in self.nodes))

    @property
    def num_devices(self) -> int:
        """Devices in all nodes."""
        return self.first_ranks[-1]

    def node_of(self, rank: int) -> int:
        """Index of the node that holds ``rank``.

        Raises:
            ClusterError: the rank is outside of the cluster.
        """
        if not 0 <= rank < self.num_devices:
            raise ClusterError(f"rank {rank} is outside of the cluster; it has ranks 0 to {self.num_devices - 1}")
        return bisect.bisect_right(self.first_ranks, rank) - 1

    def device_of(self, rank: int) -> Device:
        """The device of ``rank``.

        Raises:
            ClusterError: the rank is outside of the cluster.
        """
        return self.nodes[self.node_of(rank)].device
