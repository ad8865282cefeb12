"""Clusters: made from names, read from JSON, asked about ranks; and every way to get them wrong."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from cost_models import Cluster, ClusterError, CostModel, Device, Link, Node, find_device, find_link

EXAMPLES = Path(__file__).parents[3] / "examples" / "clusters"

GOOD: dict[str, Any] = {
    "schema_version": 1,
    "name": "two kinds",
    "nodes": [
        {"device": "V100-SXM2-16GB", "num_devices": 4, "link": "NVLink2", "count": 2},
        {
            "device": {
                "name": "mine",
                "kind": "cuda",
                "memory_bytes": 85e9,
                "memory_bandwidth_bytes_per_second": 2e12,
                "peak_flops": {"float32": 19.5e12},
            },
            "num_devices": 8,
            "link": {"name": "fast", "bandwidth_bytes_per_second": 3e11, "latency_seconds": 3e-6},
        },
    ],
    "inter_link": "InfiniBand-HDR",
}


def test_homogeneous_by_names() -> None:
    cluster = Cluster.homogeneous(
        num_nodes=32, devices_per_node=8, device="H100-SXM", intra_link="NVLink4", inter_link="InfiniBand-NDR"
    )
    assert cluster.num_devices == 256
    assert cluster.device_of(255).name == "H100-SXM5-80GB"
    assert (cluster.node_of(0), cluster.node_of(7), cluster.node_of(8), cluster.node_of(255)) == (0, 0, 1, 31)
    assert cluster.inter_link is find_link("InfiniBand-NDR")


def test_homogeneous_by_values() -> None:
    device = Device("mine", "rocm", 2**34, 1e12, {"float32": 1e13})
    link = Link("wire", 1e10, 1e-6)
    cluster = Cluster.homogeneous(num_nodes=2, devices_per_node=3, device=device, intra_link=link, inter_link=link)
    assert cluster.nodes == (Node(device, 3, link),) * 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"num_nodes": 0, "devices_per_node": 8}, "num_nodes is 0"),
        ({"num_nodes": 1, "devices_per_node": -8}, "num_devices is -8"),
        ({"num_nodes": 1, "devices_per_node": 8, "device": "H1000"}, "unknown device 'H1000'"),
        ({"num_nodes": 1, "devices_per_node": 8, "intra_link": "NVLink9"}, "did you mean NVLink"),
        ({"num_nodes": 1, "devices_per_node": 8, "device": 3}, "give a Device"),
    ],
)
def test_homogeneous_refuses(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.homogeneous(**given)
    assert says in str(caught.value)


def test_cluster_refuses() -> None:
    link = find_link("NVLink3")
    with pytest.raises(ClusterError, match="has no nodes"):
        Cluster((), link)
    with pytest.raises(ClusterError, match="give a tuple of Node values"):
        Cluster(7, link)  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match="give Node values"):
        Cluster(("node",), link)  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match="inter_link is 'IB'"):
        Cluster((Node(find_device("T4"), 1, link),), "IB")  # type: ignore[arg-type]


def test_ranks_of_unlike_nodes() -> None:
    cluster = Cluster.from_json(json.dumps(GOOD))
    assert cluster.num_devices == 16
    assert [cluster.node_of(rank) for rank in (0, 3, 4, 7, 8, 15)] == [0, 0, 1, 1, 2, 2]
    assert [cluster.device_of(rank).name for rank in (7, 8)] == ["V100-SXM2-16GB", "mine"]
    for rank in (-1, 16):
        with pytest.raises(ClusterError, match=f"rank {rank} is outside"):
            cluster.node_of(rank)


def test_json_round_trip_and_fingerprint(tmp_path: Path) -> None:
    cluster = Cluster.from_json(json.dumps(GOOD))
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert len(json.loads(cluster.to_json())["nodes"]) == 2
    cluster.save(tmp_path / "cluster.json")
    loaded = Cluster.load(tmp_path / "cluster.json")
    assert loaded == cluster
    assert loaded.to_json() == cluster.to_json()
    assert loaded.fingerprint() == cluster.fingerprint()
    assert len(cluster.fingerprint()) == 64
    other = {**GOOD, "inter_link": "InfiniBand-NDR"}
    assert Cluster.from_json(json.dumps(other)).fingerprint() != cluster.fingerprint()


def test_equal_clusters_have_equal_fingerprints_however_they_are_written() -> None:
    whole = Link("wire", 10**10, 1e-6)
    real = Link("wire", 1e10, 1e-6)
    made = [Cluster.homogeneous(num_nodes=1, devices_per_node=2, intra_link=link) for link in (whole, real)]
    assert made[0].fingerprint() == made[1].fingerprint()
    spread = {**GOOD, "nodes": [{**GOOD["nodes"][0], "count": 1}] * 2 + GOOD["nodes"][1:]}
    assert Cluster.from_json(json.dumps(spread)).fingerprint() == Cluster.from_json(json.dumps(GOOD)).fingerprint()


def test_clusters_pickle_copy_and_hash() -> None:
    cluster = Cluster.from_json(json.dumps(GOOD))
    assert pickle.loads(pickle.dumps(cluster)) == copy.deepcopy(cluster) == cluster
    assert hash(cluster) == hash(copy.deepcopy(cluster))


def _changed(path: tuple[str | int, ...], value: object) -> str:
    data = copy.deepcopy(GOOD)
    where: Any = data
    for key in path[:-1]:
        where = where[key]
    if value is None:
        del where[path[-1]]
    else:
        where[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ("{'nodes': []}", "line 1 column 2"),
        (json.dumps(GOOD)[:-20], "cut off"),
        ("[]", "cluster is []"),
        (_changed(("schema_version",), 2), "schema_version is 2"),
        (_changed(("schema_version",), None), "schema_version is missing"),
        (_changed(("nodes",), []), "at least one node"),
        (_changed(("nodes",), "H100"), "give a list"),
        (_changed(("node",), []), "did you mean 'nodes'"),
        (_changed(("name",), 7), "name is 7"),
        (_changed(("nodes", 0, "device"), "V1000"), "nodes[0].device: unknown device 'V1000'"),
        (_changed(("nodes", 0, "device"), 3), "nodes[0].device is 3"),
        (_changed(("nodes", 0, "num_devices"), "four"), "nodes[0]: num_devices is 'four' (str)"),
        (_changed(("nodes", 0, "num_devices"), 0), "num_devices is 0"),
        (_changed(("nodes", 0, "count"), 1.5), "count is 1.5"),
        (_changed(("nodes", 0, "link"), None), "nodes[0]: link is missing"),
        (_changed(("nodes", 0, "links"), 1), "did you mean 'link'"),
        (_changed(("nodes", 1, "link", "bandwidth_bytes_per_second"), -3e11), "nodes[1].link: link 'fast'"),
        (_changed(("nodes", 1, "link", "bandwith"), 1), "unknown key 'bandwith'"),
        (_changed(("nodes", 1, "device", "peak_flops"), {"float32": "fast"}), "peak_flops['float32'] is 'fast'"),
        (_changed(("nodes", 1, "device", "kind"), None), "kind is missing"),
        (_changed(("nodes", 1, "device", "memory_bytes"), [1]), "memory_bytes is [1] (list)"),
        (_changed(("inter_link",), 5), "inter_link is 5"),
        (_changed(("nodes", 0, "count"), 10**9), "give at most 100000"),
        (_changed(("nodes", 1, "link", "latency_seconds"), 10**400), "finite"),
        (_changed(("nodes", 1, "link", "latency_seconds"), float("nan")), "finite"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_json_refuses(text: str, says: str) -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.from_json(text)
    assert says in str(caught.value)


def test_load_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"missing\.json"):
        Cluster.load(tmp_path / "missing.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ClusterError, match=r"bad\.json: cluster is not JSON"):
        Cluster.load(tmp_path / "bad.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match=r"binary\.json"):
        Cluster.load(tmp_path / "binary.json")


def test_local_divides_the_machine() -> None:
    cluster = Cluster.local(num_devices=4, memory_bytes=32 * 2**30, num_cores=8)
    assert cluster.num_devices == 4
    device = cluster.device_of(0)
    assert (device.kind, device.memory_bytes) == ("cpu", 8 * 2**30)
    crowded = Cluster.local(num_devices=4, memory_bytes=32 * 2**30, num_cores=2).device_of(0)
    assert crowded.flops_per_second("float32") == device.flops_per_second("float32") / 2


def test_local_reads_this_machine() -> None:
    cluster = Cluster.local()
    assert cluster.num_devices == 4
    assert cluster.device_of(3).memory_bytes > 2**20
    assert cluster == Cluster.local(4)


@pytest.mark.parametrize(
    ("name", "num_devices", "num_nodes"),
    [
        ("one-node-8xA100.json", 8, 1),
        ("8-nodes-8xH100.json", 64, 8),
        ("32-nodes-8xH100.json", 256, 32),
        ("mixed-V100-A100.json", 32, 4),
        ("local-4-cpu.json", 4, 1),
    ],
)
def test_examples_load_and_price(name: str, num_devices: int, num_nodes: int) -> None:
    cluster = Cluster.load(EXAMPLES / name)
    assert (cluster.num_devices, len(cluster.nodes)) == (num_devices, num_nodes)
    assert Cluster.from_json(cluster.to_json()) == cluster
    costs = CostModel(cluster)
    assert costs.axis(num_devices, 1).seconds("all_reduce", 1e6) > 0
    assert costs.min_device_memory_bytes(margin=0.05) > 2**30


def test_every_example_is_tested() -> None:
    assert len(list(EXAMPLES.glob("*.json"))) == 5
