"""Devices and links check themselves; the catalogue finds them, and says what it knows when it does not."""

import dataclasses

import pytest

from cost_models import DEVICES, LINKS, ClusterError, Device, Link, find_device, find_link
from cost_models.catalogue import _DEVICE_ALIASES, _LINK_ALIASES

GOOD_DEVICE = {
    "name": "toy",
    "kind": "cuda",
    "memory_bytes": 16 * 2**30,
    "memory_bandwidth_bytes_per_second": 900e9,
    "peak_flops": {"float32": 15e12, "float16": 120e12},
}
GOOD_LINK = {"name": "wire", "bandwidth_bytes_per_second": 1e9, "latency_seconds": 1e-6}


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("name", "", "name is ''"),
        ("kind", "tpu", "use one of cuda, rocm, cpu"),
        ("memory_bytes", 0, "more than zero"),
        ("memory_bytes", 1.5, "whole number"),
        ("memory_bandwidth_bytes_per_second", -1.0, "memory_bandwidth_bytes_per_second is -1.0"),
        ("memory_bandwidth_bytes_per_second", float("nan"), "finite"),
        ("memory_bandwidth_bytes_per_second", "fast", "(str)"),
        ("memory_bandwidth_bytes_per_second", True, "(bool)"),
        ("peak_flops", {}, "peak_flops is {}"),
        ("peak_flops", {"float16": 1e12}, "no 'float32'"),
        ("peak_flops", {"float32": 1e12, "fp16": 1e12}, "unknown dtype 'fp16'"),
        ("peak_flops", {"float32": 0}, "more than zero"),
        ("launch_seconds", -1e-6, "zero or more"),
        ("matmul_efficiency", 1.2, "at most 1"),
        ("attention_efficiency", 0, "more than zero"),
        ("source", None, "source is None"),
    ],
)
def test_device_refuses(field: str, value: object, says: str) -> None:
    with pytest.raises(ClusterError) as caught:
        Device(**{**GOOD_DEVICE, field: value})  # type: ignore[arg-type]
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("name", " ", "name is ' '"),
        ("bandwidth_bytes_per_second", 0, "bandwidth_bytes_per_second is 0"),
        ("bandwidth_bytes_per_second", -5e9, "-5000000000.0"),
        ("latency_seconds", float("inf"), "finite"),
        ("efficiency", 1.01, "at most 1"),
        ("ports_per_node", 0, "ports_per_node is 0"),
        ("ports_per_node", 2.5, "whole number"),
        ("direct", 1, "use true or false"),
        ("multicast", "yes", "use true or false"),
        ("multicast_efficiency", 1.5, "at most 1"),
        ("efficiency_by_size", 0.5, "give pairs"),
        ("efficiency_by_size", [[2, 1.5]], "at most 1"),
        ("efficiency_by_size", [[8, 0.5], [2, 0.4]], "rising"),
    ],
)
def test_link_refuses(field: str, value: object, says: str) -> None:
    with pytest.raises(ClusterError) as caught:
        Link(**{**GOOD_LINK, field: value})  # type: ignore[arg-type]
    assert says in str(caught.value)


def test_error_is_a_value_error() -> None:
    assert issubclass(ClusterError, ValueError)


def test_parts_are_frozen_hashable_and_keep_their_own_peaks() -> None:
    peaks = {"float32": 15e12}
    device = Device(**{**GOOD_DEVICE, "peak_flops": peaks})  # type: ignore[arg-type]
    peaks["float32"] = 1.0
    assert device.flops_per_second("float32") == 15e12
    assert len({device, dataclasses.replace(device)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        device.name = "other"  # type: ignore[misc]


def test_whole_floats_become_ints_and_ints_become_floats() -> None:
    device = Device(**{**GOOD_DEVICE, "memory_bytes": 80e9, "memory_bandwidth_bytes_per_second": 10**12})  # type: ignore[arg-type]
    assert isinstance(device.memory_bytes, int)
    assert isinstance(device.memory_bandwidth_bytes_per_second, float)


def test_dtype_without_a_figure_runs_at_the_float32_rate() -> None:
    v100 = find_device("V100-16GB")
    assert "bfloat16" not in v100.peak_flops
    assert v100.flops_per_second("bfloat16") == v100.flops_per_second("float32") == 15.7e12


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("H100-SXM", "H100-SXM5-80GB"),
        ("h100 sxm", "H100-SXM5-80GB"),
        ("NVIDIA H100", "H100-SXM5-80GB"),
        ("A100-80GB", "A100-SXM4-80GB"),
        ("a100_40gb", "A100-SXM4-40GB"),
        ("RTX 4090", "RTX-4090"),
        ("AMD MI300X", "MI300X"),
        ("cpu", "CPU-core"),
    ],
)
def test_device_spellings(spelling: str, name: str) -> None:
    assert find_device(spelling).name == name


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("nvlink 4", "NVLink4"),
        ("IB-NDR", "InfiniBand-NDR"),
        ("infiniband hdr", "InfiniBand-HDR"),
        ("PCIe 4.0", "PCIe4"),
    ],
)
def test_link_spellings(spelling: str, name: str) -> None:
    assert find_link(spelling).name == name


def test_every_name_and_alias_is_found() -> None:
    assert all(find_device(name) is DEVICES[name] for name in DEVICES)
    assert all(find_link(name) is LINKS[name] for name in LINKS)
    assert all(find_device(alias) is DEVICES[name] for alias, name in _DEVICE_ALIASES.items())
    assert all(find_link(alias) is LINKS[name] for alias, name in _LINK_ALIASES.items())


def test_every_figure_has_a_source_and_is_of_a_sane_size() -> None:
    for device in DEVICES.values():
        assert len(device.source) > 10, device.name
        assert 2**31 < device.memory_bytes < 2**39, device.name
        assert max(device.peak_flops.values()) < 2e16, device.name
        assert 0 < device.launch_seconds < 1e-4, device.name
    for link in LINKS.values():
        assert len(link.source) > 10, link.name
        assert 1e8 < link.bandwidth_bytes_per_second <= 2e12, link.name
        assert 0 < link.latency_seconds < 1e-3, link.name


def test_unknown_device_names_near_ones_and_all() -> None:
    with pytest.raises(ClusterError) as caught:
        find_device("H100-SMX")
    text = str(caught.value)
    assert "unknown device 'H100-SMX'; did you mean " in text
    assert "H100-SXM5-80GB" in text.split("?", maxsplit=1)[0]
    assert all(name in text for name in DEVICES)


def test_ambiguous_name_is_not_guessed() -> None:
    with pytest.raises(ClusterError, match="A100-SXM4-80GB"):
        find_device("A100")


def test_unknown_link_lists_all() -> None:
    with pytest.raises(ClusterError) as caught:
        find_link("carrier pigeon")
    assert all(name in str(caught.value) for name in LINKS)
    with pytest.raises(ClusterError, match=r"\(int\)"):
        find_link(4)  # type: ignore[arg-type]
