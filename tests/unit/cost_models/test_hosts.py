"""Hosts: their usual figures, what a device has of one, and clusters that describe theirs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from cost_models import Cluster, ClusterError, CostModel, Host, Link, Node, find_device
from cost_models.hosts import host_share, usual_host

BUS = Link("bus", 1e10, 1e-6, efficiency=0.5)
HOST = Host("mine", 2**40, 4e11, BUS, memory_efficiency=0.5)
A100, H100, CORE = find_device("A100-80GB"), find_device("H100-SXM"), find_device("CPU-core")


@pytest.mark.parametrize(
    ("device", "name"),
    [("V100-32GB", "2 x Xeon E5-2698 v4"), ("A100-80GB", "2 x EPYC 7742"), ("H200", "2 x Xeon 8480C"), ("GB200", "Grace"),
     ("MI300X", "2 x Xeon 8480C"), ("RTX-4090", "2 x EPYC 7742")],
)  # fmt: skip
def test_the_usual_host_of_a_generation(device: str, name: str) -> None:
    assert usual_host(find_device(device), 8).name == name


def test_an_eighth_of_a_machine_for_each_device() -> None:
    one, eight = host_share(A100, 1), host_share(A100, 8)
    assert one.memory_bytes == eight.memory_bytes == 2**37
    assert one.memory_bytes_per_second == pytest.approx(0.8 * 409.6e9 / 8) == eight.memory_bytes_per_second
    assert one.link_bytes_per_second == pytest.approx(25.1e9), "as measured"
    assert eight.link_bytes_per_second == pytest.approx(25.1e9 / 2), "two to an uplink"


def test_what_is_described_is_divided_by_the_devices() -> None:
    share = host_share(H100, 4, HOST)
    assert (share.memory_bytes, share.memory_bytes_per_second) == (2**38, 5e10)
    assert (share.link_bytes_per_second, share.link_seconds) == (5e9, 1e-6)
    two_ports = replace(HOST, link=replace(BUS, ports_per_node=2))
    assert host_share(H100, 4, two_ports).link_bytes_per_second == 2.5e9


def test_a_cpu_process_is_its_own_host() -> None:
    share = host_share(CORE, 4)
    assert share.is_own_memory and share.memory_bytes == CORE.memory_bytes
    reached = CORE.memory_bandwidth_bytes_per_second * CORE.memory_efficiency
    assert share.link_bytes_per_second == pytest.approx(reached / 2), "a copy reads and writes"
    assert not host_share(CORE, 4, HOST).is_own_memory


def test_of_a_mesh_over_several_nodes_the_least() -> None:
    link = Link("link", 1e11, 0.0)
    cluster = Cluster((Node(H100, 2, link, HOST), Node(H100, 2, link, replace(HOST, memory_bytes=2**30))), link)
    assert CostModel(cluster).host_share(0, 2).memory_bytes == 2**39
    assert CostModel(cluster).host_share().memory_bytes == 2**29


def test_json_says_what_is_described_only() -> None:
    plain = Cluster.homogeneous(num_nodes=2, devices_per_node=8)
    assert "host" not in plain.to_json()
    described = replace(plain, nodes=tuple(replace(node, host=HOST) for node in plain.nodes))
    assert Cluster.from_json(described.to_json()) == described
    assert described.fingerprint() != plain.fingerprint()
    document = json.loads(described.to_json())
    document["nodes"][0]["host"]["link"] = "PCIe4"
    host = Cluster.from_json(json.dumps(document)).nodes[0].host
    assert host is not None and host.link.name == "PCIe4"


@pytest.mark.parametrize(
    ("change", "words"),
    [({"memory_bytes": 0}, "nodes.0..host: host 'mine': memory_bytes is 0"), ({"size": 3}, "unknown key 'size'"),
     ({"link": "PCIe9"}, "host.link: unknown link 'PCIe9'"), ({"memory_efficiency": 1.5}, "a share, so give at most 1"),
     ({"memory_bandwidth_bytes_per_second": -1.0}, "more than zero")],
)  # fmt: skip
def test_json_of_a_host_that_cannot_be(change: dict[str, object], words: str) -> None:
    cluster = Cluster((Node(H100, 2, BUS, HOST),), BUS)
    document = json.loads(cluster.to_json())
    document["nodes"][0]["host"].update(change)
    with pytest.raises(ClusterError, match=words):
        Cluster.from_json(json.dumps(document))


def test_parts_of_other_kinds() -> None:
    with pytest.raises(ClusterError, match="host is 'PCIe4'; give a Host"):
        Node(H100, 2, BUS, "PCIe4")  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match="link is 'PCIe4'; give a Link"):
        Host("mine", 2**40, 1e11, "PCIe4")  # type: ignore[arg-type]
