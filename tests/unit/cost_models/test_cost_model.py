"""CostModel: answers for meshes and parts of them, kept axes, and speed."""

import time

import numpy as np
import pytest

from cost_models import Cluster, CostModel, Node, find_device, find_link, operator_seconds, usable_bytes

H100 = Cluster.homogeneous(num_nodes=4, devices_per_node=8)
MIXED = Cluster(
    (Node(find_device("V100-16GB"), 8, find_link("NVLink2")), Node(find_device("A100-80GB"), 8, find_link("NVLink3"))),
    find_link("InfiniBand-HDR"),
)


def test_slowest_device_decides() -> None:
    costs = CostModel(MIXED)
    flops = np.array([1e9, 1e12])
    v100, a100 = (operator_seconds(find_device(name), flops, 1e6, "float16") for name in ("V100-16GB", "A100-80GB"))
    assert np.array_equal(costs.compute_seconds(flops, 1e6, "float16"), np.maximum(v100, a100))
    upper = costs.compute_seconds(flops, 1e6, "float16", offset_devices=8)
    assert np.array_equal(upper, a100)
    assert np.array_equal(costs.compute_seconds(flops, 1e6, "float16", offset_devices=0, num_devices=8), v100)
    assert [device.name for device in costs.devices()] == ["V100-SXM2-16GB", "A100-SXM4-80GB"]
    assert [device.name for device in costs.devices(8)] == ["A100-SXM4-80GB"]


def test_axes_are_kept_and_differ_by_place() -> None:
    costs = CostModel(MIXED)
    assert costs.axis(8, 1) is costs.axis(8, 1, 0, 16)
    lower, upper = (costs.axis(8, 1, first, 8).seconds("all_reduce", 1e9) for first in (0, 8))
    assert float(lower) > float(upper)
    assert float(costs.axis(8, 1).seconds("all_reduce", 1e9)) == float(lower)


def test_axis_within_a_node_is_faster_than_across() -> None:
    costs = CostModel(H100)
    sizes = np.logspace(3, 10, 8)
    for kind in ("all_reduce", "all_gather", "all_to_all", "send_recv"):
        within = costs.axis(4, 1).seconds(kind, sizes)
        across = costs.axis(4, 8).seconds(kind, sizes)
        assert (within < across).all(), kind


def test_axis_of_one_is_free() -> None:
    assert not CostModel(H100).axis(1, 8).seconds("all_gather", np.logspace(0, 12, 5)).any()


def test_memory() -> None:
    costs = CostModel(MIXED)
    assert costs.device_memory_bytes(0) == usable_bytes(find_device("V100-16GB"), 0.0)
    assert costs.device_memory_bytes(15, margin=0.1) == usable_bytes(find_device("A100-80GB"), 0.1)
    assert costs.min_device_memory_bytes() == costs.device_memory_bytes(0)
    assert costs.min_device_memory_bytes(0.1, offset_devices=8) == costs.device_memory_bytes(8, 0.1)
    assert costs.provenance == "estimated"


@pytest.mark.parametrize(("first", "count"), [(-1, None), (32, None), (0, 33), (8, 0), (31, 2)])
def test_refuses_meshes_outside_of_the_cluster(first: int, count: int | None) -> None:
    with pytest.raises(ValueError, match="does not lie in the cluster, which has 32 devices"):
        CostModel(H100).axis(1, 1, first, count)


def test_refuses_sizes_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="32 devices are not a multiple of size 3"):
        CostModel(H100).axis(3, 1)


def test_fast_enough_to_be_asked_thousands_of_times() -> None:
    """Generous bounds (a slow machine): about 20 microseconds and 10 milliseconds here."""
    costs = CostModel(Cluster.homogeneous(num_nodes=512, devices_per_node=8))
    start = time.perf_counter()
    axis = costs.axis(64, 8)
    assert time.perf_counter() - start < 2.0
    sizes = np.linspace(0, 1e9, 2000)
    start = time.perf_counter()
    for _ in range(50):
        axis.seconds("all_reduce", sizes)
        costs.compute_seconds(sizes, sizes, "bfloat16")
    assert time.perf_counter() - start < 1.0
