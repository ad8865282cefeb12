"""Seconds of one operator on one device: a smooth roofline with what a launch and a ramp cost.

Enters: FLOPs and bytes moved (arrays), a dtype, a kind of operator. Leaves: seconds (an array). With

    arithmetic = flops / (peak x efficiency)            peak and efficiency: the device's, by dtype and kind
    memory     = bytes / (bandwidth x efficiency)
    seconds    = launch + ramp + (arithmetic^p + memory^p)^(1/p)           p = 3/2, see _smooth_larger

an operator far on one side of the ridge takes the larger of the two, and one near it somewhat more, as is measured.
Launch and ramp do not depend on the size, hence the efficiency rises with it. Everything is monotone in FLOPs and
bytes. An operator without FLOPs and bytes (a view) takes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from cost_models.parts import Device

FloatArray = npt.NDArray[np.float64]
OperatorKind = Literal["matmul", "attention", "elementwise", "memory"]

OPERATOR_KINDS: tuple[str, ...] = get_args(OperatorKind)

# Device.matmul_efficiency is of the best shape. 16384^3 on A100 reaches 256.5 TFLOP/s where the best shape reaches
# 271.2 (Azure/AI-benchmarking-guide@8fd0c6e1
# Azure_Results/ND_A100_v4_results.md; stas00/ml-engineering@744d01e1 compute/accelerator/README.md l.351).
SHAPE_EFFICIENCY = 0.946

# Seconds in which a matrix multiply or fused attention fills and drains its tiles, beside the launch. 1024^3 takes 18
# us on A100 and 7.8 us (fp8) on H100 where arithmetic takes 8.4 and 1.6: with a launch of 4 us, some 2 to 5 us remain
# (same guide).
RAMP_SECONDS: Mapping[str, float] = MappingProxyType({"cuda": 4e-6, "rocm": 4e-6, "cpu": 0.0})


def operator_seconds(
    device: Device,
    flops: npt.ArrayLike,
    num_bytes: npt.ArrayLike,
    dtype: str = "float32",
    kind: OperatorKind = "matmul",
) -> FloatArray:
    """Seconds of an operator, alone on ``device``.

    Args:
        device: where it runs.
        flops: FLOPs (a multiply-add is two), any shape; for ``memory`` they do not count.
        num_bytes: bytes read and written in memory, any shape that broadcasts against ``flops``.
        dtype: of the arithmetic; one that the device has no peak for runs at the float32 rate.
        kind: ``matmul`` (matrix multiply, convolution), ``attention`` (fused), ``elementwise`` (vector units,
            reductions and norms included) or ``memory`` (copies, gathers).

    Returns:
        Seconds, in the broadcast shape; 0 where FLOPs and bytes are both 0.

    Raises:
        ValueError: an unknown kind, or FLOPs or bytes that are negative or not numbers.
    """
    work = _amounts("flops", flops)
    moved = _amounts("num_bytes", num_bytes)
    memory_seconds = moved / (device.memory_bandwidth_bytes_per_second * device.memory_efficiency)
    if kind == "memory":
        return np.asarray(np.where((work > 0) | (moved > 0), device.launch_seconds + memory_seconds, 0.0))
    arithmetic_seconds = work / arithmetic_flops_per_second(device, dtype, kind)
    body = _smooth_larger(arithmetic_seconds, memory_seconds)
    fixed = device.launch_seconds + (RAMP_SECONDS[device.kind] if kind != "elementwise" else 0.0) * (work > 0)
    return np.asarray(np.where((work > 0) | (moved > 0), fixed + body, 0.0))


def arithmetic_flops_per_second(device: Device, dtype: str, kind: OperatorKind) -> float:
    """FLOP/s that large operators of this kind reach on ``device``: the peak of their units times their efficiency.

    Elementwise operators use the vector units: the float32 rate, or that of float64.

    Raises:
        ValueError: an unknown kind (``memory`` has no arithmetic).
    """
    if kind == "matmul":
        shape = SHAPE_EFFICIENCY if device.kind != "cpu" else 1.0
        return device.flops_per_second(dtype) * device.matmul_efficiency * shape * device.sustained_efficiency
    if kind == "attention":
        return device.flops_per_second(dtype) * device.attention_efficiency
    if kind == "elementwise":
        return device.flops_per_second("float64" if dtype == "float64" else "float32")
    raise ValueError(f"operator kind {kind!r} has no arithmetic; use one of matmul, attention, elementwise")


def matmul_efficiency(device: Device, flops: npt.ArrayLike, dtype: str) -> FloatArray:
    """Share of the dense peak that a matrix multiply of ``flops`` FLOPs reaches, launch included; rises with size."""
    work = _amounts("flops", flops)
    seconds = operator_seconds(device, work, 0.0, dtype, "matmul")
    return np.divide(work, seconds * device.flops_per_second(dtype), out=np.zeros_like(work), where=seconds > 0)


def memory_efficiency(device: Device, num_bytes: npt.ArrayLike) -> FloatArray:
    """Share of the memory bandwidth that a copy of ``num_bytes`` bytes reaches, launch included; rises with size."""
    moved = _amounts("num_bytes", num_bytes)
    seconds = operator_seconds(device, 0.0, moved, kind="memory")
    bandwidth = device.memory_bandwidth_bytes_per_second
    return np.divide(moved, seconds * bandwidth, out=np.zeros_like(moved), where=seconds > 0)


def _smooth_larger(left: FloatArray, right: FloatArray) -> FloatArray:
    """(left^1.5 + right^1.5)^(1/1.5), and never less than the larger.

    The power is fitted to a skinny cuBLASLt multiply where both sides nearly tie, 802816 x 192 x 768: 158 TFLOP/s
    measured and 162 computed for A100 fp16, 664 and 588 for H100 fp8, where the larger alone would give 256 and 729
    (Azure/AI-benchmarking-guide@8fd0c6e1 Azure_Results/ND_A100_v4_results.md, ND_H100_v5_results.md).
    """
    total = left * np.sqrt(left) + right * np.sqrt(right)
    body = np.square(np.cbrt(total))  # much faster than a general power
    return np.asarray(np.maximum(body, np.maximum(left, right)))  # rounding and underflow lose a little


def _amounts(what: str, values: npt.ArrayLike) -> FloatArray:
    amounts = np.asarray(values, dtype=np.float64)
    if not (amounts >= 0).all():
        raise ValueError(f"{what} has a value that is negative or not a number (least {amounts.min()}); give 0 or more")
    return amounts
