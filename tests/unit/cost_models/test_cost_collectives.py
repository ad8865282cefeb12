"""Seconds of collectives: published curves, formulas by hand, contention, and laws."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models import (
    COLLECTIVE_KINDS,
    Cluster,
    CollectiveKind,
    Device,
    Link,
    Node,
    axis_cost,
    axis_groups,
    collective_seconds,
    find_device,
    find_link,
)

MIB = 2**20
A100 = Cluster.homogeneous(
    num_nodes=4, devices_per_node=8, device="A100-80GB", intra_link="NVLink3", inter_link="InfiniBand-HDRx4"
)
H100 = Cluster.homogeneous(num_nodes=4, devices_per_node=8)
V100 = Cluster.homogeneous(num_nodes=1, devices_per_node=8, device="V100-16GB", intra_link="NVLink2")
AZURE = "Azure/AI-benchmarking-guide@8fd0c6e1 Azure_Results"
VTRAIN = "VIA-Research/vTrain@f8dda847 trace"

# Plain figures for hand arithmetic: no efficiency, no latency within reach of the sizes used.
DEVICE = Device("toy", "cuda", 2**34, 1e12, {"float32": 1e13})
FAST, SLOW = Link("fast", 100e9, 0.0), Link("slow", 10e9, 0.0)
ONE_PORT = Link("one port", 10e9, 0.0, ports_per_node=1)
LAUNCH = 20e-6


def toy(num_nodes: int, per_node: int, within: Link = FAST, between: Link = SLOW) -> Cluster:
    return Cluster.homogeneous(
        num_nodes=num_nodes, devices_per_node=per_node, device=DEVICE, intra_link=within, inter_link=between
    )


@pytest.mark.parametrize(
    ("cluster", "num_ranks", "num_bytes", "microseconds", "source"),
    [
        (A100, 8, 1 * MIB, 50.66, f"{AZURE}/ND_A100_v4_results.md"),
        (A100, 8, 8 * MIB, 134.3, f"{VTRAIN}/a100/AR_GPU8"),
        (A100, 8, 48 * MIB, 439.4, f"{VTRAIN}/a100/AR_GPU8"),
        (A100, 8, 256 * MIB, 2162.3, f"{VTRAIN}/a100/AR_GPU8"),
        (A100, 8, 1024 * MIB, 8193.0, f"{VTRAIN}/a100/AR_GPU8"),
        (A100, 8, 1024 * MIB, 8237.8, f"{AZURE}/ND_A100_v4_results.md"),
        (A100, 4, 1024 * MIB, 7259.4, f"{VTRAIN}/a100/AR_GPU4"),
        (A100, 2, 1024 * MIB, 5442.8, f"{VTRAIN}/a100/AR_GPU2"),
        (H100, 8, 1 * MIB, 41.99, f"{AZURE}/ND_H100_v5_results.md"),
        (H100, 8, 8 * MIB, 85.28, f"{AZURE}/ND_H100_v5_results.md"),
        (H100, 8, 64 * MIB, 324.6, f"{AZURE}/ND_H100_v5_results.md"),
        (H100, 8, 256 * MIB, 1109.6, f"{AZURE}/ND_H100_v5_results.md"),
        (H100, 8, 1024 * MIB, 4029.3, f"{AZURE}/ND_H100_v5_results.md"),
        (H100, 16, 1024 * MIB, 4523.3, "SkyPilot/Nebius nccl example, 2 nodes of 8, 8 x NDR"),
        (H100, 16, 8192 * MIB, 34468.0, "SkyPilot/Nebius nccl example, 2 nodes of 8, 8 x NDR"),
        (A100, 32, 1024 * MIB, 22096.4, "stas00/ml-engineering@744d01e1 network/benchmarks, 4 nodes"),
        (V100, 8, 1024 * MIB, 13969.0, f"{VTRAIN}/v100/AR_GPU8"),
        (V100, 2, 1024 * MIB, 47610.0, f"{VTRAIN}/v100/AR_GPU2"),
    ],
)
def test_published_all_reduce(
    cluster: Cluster, num_ranks: int, num_bytes: int, microseconds: float, source: str
) -> None:
    """Within a quarter of what was measured."""
    seconds = collective_seconds(cluster, range(num_ranks), "all_reduce", num_bytes)
    assert float(seconds) * 1e6 == pytest.approx(microseconds, rel=0.25), source


def test_algorithms_follow_the_size() -> None:
    a100, h100 = axis_cost(A100, [range(8)]), axis_cost(H100, [range(8)])
    assert [a100.algorithm("all_reduce", size) for size in (1024, 2**30)] == ["tree", "ring"]
    assert [h100.algorithm("all_reduce", size) for size in (1024, 2**30)] == ["tree", "multicast"]
    assert axis_cost(H100, [[0]]).algorithm("all_reduce", 1e9) == "none"
    with pytest.raises(ValueError, match="unknown collective"):
        a100.algorithm("gather", 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "gigabytes"),
    [
        ("all_reduce", 2 * 3 / 4),
        ("all_gather", 3 / 4),
        ("reduce_scatter", 3 / 4),
        ("all_to_all", 3 / 4),
        ("broadcast", 1.0),
        ("send_recv", 1.0),
    ],
)
def test_bytes_on_the_wire_in_one_node(kind: CollectiveKind, gigabytes: float) -> None:
    seconds = collective_seconds(toy(1, 4), range(4), kind, 1e9)
    assert float(seconds) == pytest.approx(LAUNCH + gigabytes * 1e9 / 100e9)


def test_between_nodes_each_group_has_the_card_of_its_device() -> None:
    """Two nodes of four, data parallel over nodes: four groups at once, each on its own card."""
    cluster = toy(2, 4)
    groups = axis_groups(2, 4, 0, 8)
    assert [list(group) for group in groups] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    all_at_once = axis_cost(cluster, groups).seconds("all_gather", 1e9)
    assert float(all_at_once) == pytest.approx(LAUNCH + 0.5e9 / 10e9)
    assert float(collective_seconds(cluster, [0, 4], "all_gather", 1e9)) == pytest.approx(float(all_at_once))


def test_siblings_share_the_port_of_a_node() -> None:
    cluster = toy(2, 4, between=ONE_PORT)
    alone = collective_seconds(cluster, [0, 4], "all_gather", 1e9)
    together = axis_cost(cluster, axis_groups(2, 4, 0, 8)).seconds("all_gather", 1e9)
    assert float(alone) == pytest.approx(LAUNCH + 0.5e9 / 10e9)
    assert float(together) == pytest.approx(LAUNCH + 4 * 0.5e9 / 10e9)
    pair = axis_cost(cluster, axis_groups(2, 4, 0, 8)).seconds("send_recv", 1e9)
    assert float(pair) == pytest.approx(LAUNCH + 4 * 1e9 / 10e9)


def test_four_cards_for_eight_devices() -> None:
    four_cards = Link("four cards", 10e9, 0.0, ports_per_node=4)
    cluster = toy(2, 8, between=four_cards)
    by_group = {
        size_in_node: axis_cost(
            cluster,
            [
                [*range(first, first + size_in_node), *range(8 + first, 8 + first + size_in_node)]
                for first in range(0, 8, size_in_node)
            ],
        )
        for size_in_node in (1, 2, 8)
    }
    out = {size: float(cost.seconds("all_gather", 1e9)) - LAUNCH for size, cost in by_group.items()}
    assert out[1] == pytest.approx(0.5e9 / 5e9)  # eight groups on four cards
    assert out[2] == pytest.approx(0.75e9 / 10e9)  # four groups, a card each
    assert out[8] == pytest.approx(15 / 16 * 1e9 / 40e9)  # one group, all four cards


def test_a_group_over_nodes_uses_all_its_cards() -> None:
    cluster = toy(2, 4)  # 4 x 10 GB/s between nodes, 100 within
    assert float(collective_seconds(cluster, range(8), "all_gather", 1e9)) == pytest.approx(LAUNCH + 7 / 8 * 1e9 / 40e9)
    # each rank sends half of its input to the other node, over its own card
    assert float(collective_seconds(cluster, range(8), "all_to_all", 1e9)) == pytest.approx(LAUNCH + 0.5e9 / 10e9)
    # a ring; a tree would send the buffer up and down
    assert float(collective_seconds(cluster, range(8), "all_reduce", 1e9)) == pytest.approx(LAUNCH + 7 / 4 * 1e9 / 40e9)


@pytest.mark.parametrize(
    ("device", "link", "size", "num_devices", "microseconds"),
    [
        # all-reduce of 1 GiB over the first ranks of a node (VIA-Research/vTrain@f8dda847 trace/a100, trace/v100)
        ("A100-80GB", "NVLink3", 2, 8, 5443),
        ("A100-80GB", "NVLink3", 8, 8, 8193),
        ("V100-16GB", "NVLink2", 2, 8, 47610),
        ("V100-16GB", "NVLink2", 4, 8, 18869),
        ("V100-16GB", "NVLink2", 6, 8, 39121),
        ("V100-16GB", "NVLink2", 8, 8, 13969),
    ],
)
def test_published_groups_of_a_node(device: str, link: str, size: int, num_devices: int, microseconds: float) -> None:
    cluster = Cluster.homogeneous(num_nodes=1, devices_per_node=num_devices, device=device, intra_link=link)
    seconds = float(collective_seconds(cluster, range(size), "all_reduce", 2**30))
    assert seconds == pytest.approx(microseconds * 1e-6, rel=0.05)


def test_groups_apart_on_direct_wires_have_what_a_pair_has() -> None:
    cluster = Cluster.homogeneous(num_nodes=1, devices_per_node=8, device="V100-16GB", intra_link="NVLink2")
    apart, pair = (float(collective_seconds(cluster, ranks, "all_reduce", 2**30)) for ranks in ((0, 2, 4, 6), (0, 1)))
    assert apart == pytest.approx(1.5 * pair, rel=0.01)  # the same wire, 3/2 of the traffic
    switched = Cluster.homogeneous(num_nodes=1, devices_per_node=8, device="A100-80GB", intra_link="NVLink3")
    both = [float(collective_seconds(switched, ranks, "all_reduce", 2**30)) for ranks in ((0, 2, 4, 6), (0, 1, 2, 3))]
    assert both[0] == both[1]


@pytest.mark.parametrize(
    ("kind", "size", "microseconds"),
    [("all_gather", 8, 5010), ("reduce_scatter", 16, 2942), ("all_to_all", 8, 1372), ("all_reduce", 4, 12811)],
)
def test_published_collectives_of_mi250x(kind: CollectiveKind, size: int, microseconds: float) -> None:
    # 256 MiB, microsoft/nnscaler@1585c15d mi200 profile
    cluster = Cluster.homogeneous(num_nodes=1, devices_per_node=16, device="MI250X", intra_link="xGMI-MI250X")
    seconds = float(collective_seconds(cluster, range(size), kind, 2**28))
    assert seconds == pytest.approx(microseconds * 1e-6, rel=0.2)


def test_direct_wires_give_small_groups_less() -> None:
    direct = Link("direct", 70e9, 0.0, direct=True)
    cluster = toy(1, 8, within=direct)
    per_device = [
        1e9 * (n - 1) / n / (float(collective_seconds(cluster, range(n), "all_gather", 1e9)) - LAUNCH)
        for n in (2, 4, 8)
    ]
    assert per_device == pytest.approx([10e9, 30e9, 70e9])


def test_processes_on_shared_cores_share_the_loopback() -> None:
    shared = Link("shared", 10e9, 0.0, ports_per_node=2)
    cluster = toy(1, 4, within=shared)
    alone = float(collective_seconds(cluster, [0, 1], "all_gather", 1e9)) - LAUNCH
    both = float(axis_cost(cluster, [[0, 1], [2, 3]]).seconds("all_gather", 1e9)) - LAUNCH
    assert both == pytest.approx(2 * alone)


def test_send_between_neighbours_takes_the_slowest_hop() -> None:
    cluster = toy(2, 2)
    assert float(collective_seconds(cluster, [0, 1], "send_recv", 1e9)) == pytest.approx(LAUNCH + 1e9 / 100e9)
    assert float(collective_seconds(cluster, [0, 1, 2, 3], "send_recv", 1e9)) == pytest.approx(LAUNCH + 1e9 / 10e9)


def test_unlike_nodes_wait_for_the_slowest() -> None:
    slow_node = Node(find_device("V100-16GB"), 8, find_link("NVLink2"))
    fast_node = Node(find_device("H100"), 8, find_link("NVLink4"))
    mixed = Cluster((slow_node, fast_node), find_link("InfiniBand-HDR"))
    within = axis_cost(mixed, axis_groups(8, 1, 0, 16))
    assert len(within.lines["all_reduce"]) == 2
    alone = [float(collective_seconds(mixed, ranks, "all_reduce", 1e9)) for ranks in (range(8), range(8, 16))]
    assert float(within.seconds("all_reduce", 1e9)) == max(alone) == alone[0]
    # a group over both has no multicast
    assert axis_cost(mixed, [range(16)]).algorithm("all_reduce", 1e9) in ("ring", "tree")


def test_uneven_groups_are_priced() -> None:
    """Groups of three over nodes of four: some lie within a node, some across."""
    cost = axis_cost(toy(3, 4), axis_groups(3, 1, 0, 12))
    assert len(cost.lines["all_gather"]) > 1
    assert float(cost.seconds("all_gather", 1e9)) > LAUNCH + 2 / 3 * 1e9 / 100e9


def test_gloo_on_this_kind_of_machine() -> None:
    """Two processes on two cores, 64 MiB (milliseconds, PyTorch 2.13, loopback, measured once)."""
    local = Cluster.local(2, memory_bytes=2**34, num_cores=2)
    measured = {
        "all_reduce": 38.2,
        "all_gather": 63.6,
        "reduce_scatter": 71.2,
        "all_to_all": 19.6,
        "broadcast": 14.4,
        "send_recv": 13.7,
    }
    for kind in COLLECTIVE_KINDS:
        seconds = collective_seconds(local, [0, 1], kind, 64 * MIB)  # type: ignore[arg-type]
        assert float(seconds) * 1e3 == pytest.approx(measured[kind], rel=0.4), kind


def test_axis_groups() -> None:
    assert [list(g) for g in axis_groups(2, 2, 0, 8)] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert [list(g) for g in axis_groups(2, 1, 8, 4)] == [[8, 9], [10, 11]]
    with pytest.raises(ValueError, match="not a multiple"):
        axis_groups(3, 1, 0, 8)
    with pytest.raises(ValueError, match="give positive numbers"):
        axis_groups(0, 1, 0, 8)


def test_refuses() -> None:
    cost = axis_cost(H100, [range(8)])
    with pytest.raises(ValueError, match="unknown collective 'gather'; known are all_reduce"):
        cost.seconds("gather", 1)  # type: ignore[arg-type]
    for num_bytes in (-1, [1.0, float("nan")]):
        with pytest.raises(ValueError, match="negative or not a number"):
            cost.seconds("all_reduce", num_bytes)
    wrong: list[list[list[int]]] = [[], [[]], [[0, 1], [2]], [[0, 1], [1, 2]]]
    for groups in wrong:
        with pytest.raises(ValueError, match="equal, disjoint, non-empty groups"):
            axis_cost(H100, groups)
    with pytest.raises(ValueError, match="rank 32 is outside"):
        axis_cost(H100, [[31, 32]])


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    catalogue = st.sampled_from(["NVLink2", "NVLink3", "NVLink4", "xGMI-MI300X", "PCIe3", "Loopback"])
    devices = st.sampled_from(["A100-80GB", "H100", "MI300X", "CPU"])
    nodes = [
        Node(find_device(draw(devices)), draw(st.integers(1, 8)), find_link(draw(catalogue)))
        for _ in range(draw(st.integers(1, 4)))
    ]
    between = draw(st.sampled_from(["InfiniBand-NDR", "InfiniBand-HDRx4", "Ethernet-10G"]))
    return Cluster(tuple(nodes), find_link(between))


@settings(max_examples=150)
@given(
    cluster=clusters(),
    kind=st.sampled_from(COLLECTIVE_KINDS),
    split=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    sizes=st.lists(st.floats(0, 1e12), min_size=2, max_size=6),
)
def test_laws(cluster: Cluster, kind: CollectiveKind, split: tuple[int, int], sizes: list[float]) -> None:
    """Monotone in bytes; free for one rank and for no bytes; never faster together than alone."""
    size, stride = split
    whole = cluster.num_devices // (size * stride) * size * stride
    if not whole:
        return
    groups = axis_groups(size, stride, 0, whole)
    together = axis_cost(cluster, groups)
    seconds = together.seconds(kind, sorted(sizes))
    assert np.isfinite(seconds).all()
    assert (np.diff(seconds) >= 0).all()
    assert float(together.seconds(kind, 0)) == 0
    if size == 1:
        assert not seconds.any()
    alone = axis_cost(cluster, groups[:1]).seconds(kind, sorted(sizes))
    assert (alone <= seconds * (1 + 1e-12)).all()


@given(st.integers(0, 5), st.sampled_from(COLLECTIVE_KINDS), st.floats(1e6, 1e10))
def test_more_bandwidth_is_never_slower(doublings: int, kind: CollectiveKind, num_bytes: float) -> None:
    slow = toy(2, 4)
    fast = toy(2, 4, Link("fast", 100e9 * 2**doublings, 0.0), Link("slow", 10e9 * 2**doublings, 0.0))
    ranks = range(8)
    before, after = (collective_seconds(cluster, ranks, kind, num_bytes) for cluster in (slow, fast))
    assert float(after) <= float(before)
