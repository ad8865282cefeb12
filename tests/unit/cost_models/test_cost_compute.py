"""Seconds of operators: published matrix multiplies, limits by hand, and laws."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import DEVICES, OPERATOR_KINDS, OperatorKind, find_device, operator_seconds
from cost_models.compute import arithmetic_flops_per_second, matmul_efficiency, memory_efficiency

AMOUNT = st.floats(min_value=0, max_value=1e18)


@pytest.mark.parametrize(
    ("device", "dtype", "element_bytes", "shape", "tflops", "within"),
    [
        # cuBLASLt, Azure/AI-benchmarking-guide@8fd0c6e1 Azure_Results/ND_A100_v4_results.md and ND_H100_v5_results.md
        ("A100-SXM4-80GB", "float16", 2, (1024, 1024, 1024), 119.4, 0.1),
        ("A100-SXM4-80GB", "float16", 2, (2048, 2048, 2048), 221.8, 0.1),
        ("A100-SXM4-80GB", "float16", 2, (4096, 4096, 4096), 228.0, 0.1),
        ("A100-SXM4-80GB", "float16", 2, (8192, 8192, 8192), 253.7, 0.05),
        ("A100-SXM4-80GB", "float16", 2, (16384, 16384, 16384), 256.5, 0.05),
        ("A100-SXM4-80GB", "float16", 2, (802816, 192, 768), 157.8, 0.05),
        ("H100-SXM5-80GB", "float8", 1, (1024, 1024, 1024), 274.1, 0.25),
        ("H100-SXM5-80GB", "float8", 1, (2048, 2048, 2048), 1011.3, 0.25),
        ("H100-SXM5-80GB", "float8", 1, (8192, 8192, 8192), 1290.1, 0.15),
        ("H100-SXM5-80GB", "float8", 1, (802816, 192, 768), 663.8, 0.15),
        # best shapes, stas00/ml-engineering@744d01e1 compute/accelerator/README.md l.351-361
        ("H100-SXM5-80GB", "bfloat16", 2, (2048, 2048, 13312), 794.5, 0.2),
        ("B200-SXM-180GB", "bfloat16", 2, (1792, 16128, 3072), 1745.0, 0.2),
        ("MI300X", "bfloat16", 2, (10240, 15360, 8192), 668.4, 0.15),
    ],
)
def test_published_matrix_multiplies(
    device: str, dtype: str, element_bytes: int, shape: tuple[int, int, int], tflops: float, within: float
) -> None:
    m, n, k = shape
    flops = 2 * m * n * k
    num_bytes = element_bytes * (m * k + k * n) + 2 * m * n  # float8 inputs give 2-byte results
    alone = replace(find_device(device), sustained_efficiency=1.0)
    seconds = operator_seconds(alone, flops, num_bytes, dtype)
    assert float(flops / seconds / 1e12) == pytest.approx(tflops, rel=within)


def test_large_matrix_multiply_is_bound_by_arithmetic() -> None:
    device = find_device("A100-80GB")
    rate = arithmetic_flops_per_second(device, "bfloat16", "matmul")
    assert rate == pytest.approx(312e12 * 0.869 * 0.946 * device.sustained_efficiency)
    assert float(operator_seconds(device, 1e16, 0, "bfloat16")) == pytest.approx(1e16 / rate, rel=1e-5)


def test_large_copy_is_bound_by_memory_and_small_one_by_launch() -> None:
    device = find_device("A100-80GB")
    assert float(operator_seconds(device, 0, 1e12, kind="memory")) == pytest.approx(1e12 / (2e12 * 0.85), rel=1e-4)
    assert float(operator_seconds(device, 0, 8, kind="memory")) == pytest.approx(device.launch_seconds, rel=1e-3)
    assert np.array_equal(
        operator_seconds(device, [0, 1e12], 1e6, kind="memory"), operator_seconds(device, 0, [1e6, 1e6], kind="memory")
    )


def test_elementwise_uses_vector_units() -> None:
    device = find_device("A100-80GB")
    assert arithmetic_flops_per_second(device, "bfloat16", "elementwise") == 19.5e12
    assert arithmetic_flops_per_second(device, "float64", "elementwise") == 19.5e12
    with pytest.raises(ValueError, match="'memory' has no arithmetic"):
        arithmetic_flops_per_second(device, "float32", "memory")


def test_views_are_free_and_shapes_broadcast() -> None:
    device = find_device("H100")
    seconds = operator_seconds(device, np.zeros((3, 1)), np.array([0.0, 8.0]), "bfloat16")
    assert seconds.shape == (3, 2)
    assert seconds.dtype == np.float64
    assert not seconds[:, 0].any()
    assert seconds[:, 1].all()
    assert operator_seconds(device, [], []).shape == (0,)
    assert operator_seconds(device, 1, 1).shape == ()


def test_efficiency_rises_with_size() -> None:
    device = find_device("H100")
    sizes = np.logspace(3, 18, 60)
    by_flops = matmul_efficiency(device, sizes, "bfloat16")
    by_bytes = memory_efficiency(device, sizes)
    assert (np.diff(by_flops) > 0).all()
    assert (np.diff(by_bytes) > 0).all()
    assert by_flops[-1] == pytest.approx(0.803 * 0.946 * device.sustained_efficiency, rel=1e-4)
    assert by_bytes[-1] == pytest.approx(0.85, rel=1e-4)
    assert float(matmul_efficiency(device, 0, "bfloat16")) == float(memory_efficiency(device, 0)) == 0


def test_refuses() -> None:
    device = find_device("T4")
    for flops in (-1, [1, float("nan")]):
        with pytest.raises(ValueError, match="flops has a value that is negative"):
            operator_seconds(device, flops, 1)
    with pytest.raises(ValueError, match="num_bytes"):
        operator_seconds(device, 1, -1)
    with pytest.raises(ValueError, match="'conv' has no arithmetic"):
        operator_seconds(device, 1, 1, kind="conv")  # type: ignore[arg-type]


@given(
    device=st.sampled_from(sorted(DEVICES)),
    kind=st.sampled_from(OPERATOR_KINDS),
    dtype=st.sampled_from(["float64", "float32", "bfloat16", "int64"]),
    flops=st.tuples(AMOUNT, AMOUNT),
    num_bytes=st.tuples(AMOUNT, AMOUNT),
)
def test_monotone_and_above_the_roofline(
    device: str, kind: OperatorKind, dtype: str, flops: tuple[float, float], num_bytes: tuple[float, float]
) -> None:
    found = find_device(device)
    small, large = operator_seconds(found, sorted(flops), sorted(num_bytes), dtype, kind)
    assert small <= large * (1 + 1e-12)
    assert large >= max(num_bytes) / found.memory_bandwidth_bytes_per_second
    if kind == "matmul":
        assert large >= max(flops) / found.flops_per_second(dtype)
