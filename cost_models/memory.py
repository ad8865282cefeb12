"""Bytes: parameters, gradients, optimizer states, the allocator's rounding, and what a device leaves for tensors.

Enters: numbers of elements (ints, or integer arrays), dtype names, the name of an optimizer. Leaves: bytes, exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from cost_models.parts import Device

Count = TypeVar("Count", int, npt.NDArray[np.int64])

DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "complex128": 16,
        "complex64": 8,
        "float64": 8,
        "float32": 4,
        "tfloat32": 4,
        "bfloat16": 2,
        "float16": 2,
        "float8": 1,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int64": 8,
        "int32": 4,
        "int16": 2,
        "int8": 1,
        "uint8": 1,
        "bool": 1,
    }
)

# Granularity of the allocators: CUDACachingAllocator.cpp kMinBlockSize = 512 (the same code serves ROCm);
# c10/core/alignment.h gAlignment = 64 on CPUs. Both PyTorch.
GRANULARITY_BYTES: Mapping[str, int] = MappingProxyType({"cuda": 512, "rocm": 512, "cpu": 64})

# What a process holds besides tensors. CUDA: some 0.5 GiB of context and kernels, and as much again of cuBLAS
# workspaces and NCCL channel buffers (recalled; varies with driver and number of communicators). ROCm: assumed alike.
# CPU: resident set of a PyTorch 2.13 process with gloo after one backward pass, 233 MiB measured, rounded up.
CONTEXT_BYTES: Mapping[str, int] = MappingProxyType({"cuda": 2**30, "rocm": 2**30, "cpu": 256 * 2**20})

DEFAULT_MARGIN = 0.05  # share of the memory kept free for fragmentation: a choice, not a measurement


@dataclass(frozen=True)
class OptimizerStates:
    """What an optimizer keeps for each parameter element.

    Args:
        name: as in ``OPTIMIZERS``.
        num_states: tensors of the parameter's size.
    """

    name: str
    num_states: int

    def __post_init__(self) -> None:
        if self.num_states < 0:
            raise ValueError(f"optimizer {self.name!r}: num_states is {self.num_states}; give 0 or more")


# Tensors of the parameter's size in each optimizer's state (torch.optim sources; lion: arXiv 2302.06675, algorithm
# 2). Scalar step counts are left out. Factored ones (Adafactor) depend on the shapes and are not here.
OPTIMIZERS: Mapping[str, OptimizerStates] = MappingProxyType(
    {
        name: OptimizerStates(name, num_states)
        for name, num_states in {
            "adamw": 2,
            "adam": 2,
            "amsgrad": 3,
            "adagrad": 1,
            "rmsprop": 1,
            "lion": 1,
            "sgd_momentum": 1,
            "sgd": 0,
            "none": 0,
        }.items()
    }
)


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element; ``torch.float32`` is the same as ``float32``.

    Raises:
        ValueError: an unknown dtype; the message lists the known ones.
    """
    key = dtype.removeprefix("torch.")
    if key not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}; known are {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[key]


def find_optimizer(name: str) -> OptimizerStates:
    """The optimizer of this name.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if name not in OPTIMIZERS:
        raise ValueError(
            f"unknown optimizer {name!r}; known are {', '.join(OPTIMIZERS)}; "
            "for another, pass OptimizerStates(name, num_states)"
        )
    return OPTIMIZERS[name]


def parameter_bytes(num_elements: Count, dtype: str) -> Count:
    """Bytes of parameters that rest in ``dtype``."""
    return num_elements * dtype_bytes(dtype)


def gradient_bytes(num_elements: Count, dtype: str) -> Count:
    """Bytes of gradients that are summed in ``dtype`` (the parameter's own, or float32 where they accumulate in it)."""
    return num_elements * dtype_bytes(dtype)


def optimizer_state_bytes(
    num_elements: Count,
    dtype: str,
    optimizer: str | OptimizerStates = "adamw",
    *,
    state_dtype: str = "float32",
    master_copy: bool = False,
) -> Count:
    """Bytes of what an optimizer keeps, for parameters of ``dtype``.

    Args:
        num_elements: elements that this rank's optimizer updates.
        dtype: of the parameters; states are never narrower than ``state_dtype``, and as wide as the parameters.
        optimizer: a name of ``OPTIMIZERS`` or the states themselves.
        state_dtype: of the states.
        master_copy: a float32 copy of narrower parameters is kept as well.

    Raises:
        ValueError: an unknown dtype or optimizer.

    Example:
        >>> optimizer_state_bytes(1000, "bfloat16", "adamw", master_copy=True)
        12000
    """
    states = find_optimizer(optimizer) if isinstance(optimizer, str) else optimizer
    each = states.num_states * max(dtype_bytes(dtype), dtype_bytes(state_dtype))
    if master_copy and dtype_bytes(dtype) < 4:
        each += 4
    return num_elements * each


def shard_elements(num_elements: Count, num_shards: int) -> Count:
    """Elements of the largest of ``num_shards`` shards (the last one is padded).

    Raises:
        ValueError: fewer than one shard.
    """
    if num_shards < 1:
        raise ValueError(f"num_shards is {num_shards}; give 1 or more")
    return -(-num_elements // num_shards)


def rounded_bytes(num_bytes: Count, kind: str = "cuda") -> Count:
    """What the allocator hands out for one tensor of ``num_bytes``: the next multiple of its granularity, 0 for 0.

    Raises:
        ValueError: an unknown kind of device.
    """
    if kind not in GRANULARITY_BYTES:
        raise ValueError(f"unknown kind of device {kind!r}; known are {', '.join(GRANULARITY_BYTES)}")
    granularity = GRANULARITY_BYTES[kind]
    return -(-num_bytes // granularity) * granularity


def usable_bytes(device: Device, margin: float = DEFAULT_MARGIN) -> int:
    """Bytes for tensors: the device's memory less the context, less ``margin`` of the rest; 0 if nothing remains.

    Raises:
        ValueError: a margin outside of 0 <= margin < 1.
    """
    if not 0 <= margin < 1:
        raise ValueError(f"margin is {margin}; give a share, 0 <= margin < 1")
    return max(0, int((device.memory_bytes - CONTEXT_BYTES[device.kind]) * (1 - margin)))
