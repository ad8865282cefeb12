"""Bytes of training, by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import (
    OPTIMIZERS,
    Device,
    OptimizerStates,
    dtype_bytes,
    find_device,
    find_optimizer,
    gradient_bytes,
    optimizer_state_bytes,
    parameter_bytes,
    rounded_bytes,
    shard_elements,
    usable_bytes,
)
from cost_models.memory import CONTEXT_BYTES


def test_mixed_precision_adam_is_sixteen_bytes_a_parameter() -> None:
    """The 2 + 2 + 12 of the ZeRO paper (Rajbhandari et al. 2020, section 3.1)."""
    total = parameter_bytes(1000, "bfloat16") + gradient_bytes(1000, "bfloat16")
    total += optimizer_state_bytes(1000, "bfloat16", "adamw", master_copy=True)
    assert total == 16 * 1000


@pytest.mark.parametrize(
    ("dtype", "optimizer", "options", "each"),
    [
        ("float32", "adamw", {}, 8),
        ("float32", "adamw", {"master_copy": True}, 8),
        ("bfloat16", "adamw", {}, 8),
        ("bfloat16", "adamw", {"state_dtype": "bfloat16"}, 4),
        ("float64", "adamw", {}, 16),
        ("float32", "sgd", {}, 0),
        ("float16", "sgd", {"master_copy": True}, 4),
        ("float32", "sgd_momentum", {}, 4),
        ("float32", "none", {}, 0),
        ("torch.float32", OptimizerStates("mine", 5), {}, 20),
    ],
)
def test_optimizer_states(dtype: str, optimizer: str | OptimizerStates, options: dict[str, object], each: int) -> None:
    assert optimizer_state_bytes(10, dtype, optimizer, **options) == 10 * each  # type: ignore[arg-type]


def test_arrays_of_elements() -> None:
    elements = np.array([1, 1000, 3])
    assert optimizer_state_bytes(elements, "float32").tolist() == [8, 8000, 24]
    assert rounded_bytes(elements).tolist() == [512, 1024, 512]
    assert shard_elements(elements, 2).tolist() == [1, 500, 2]


@pytest.mark.parametrize(
    ("num_bytes", "kind", "rounded"),
    [(0, "cuda", 0), (1, "cuda", 512), (512, "rocm", 512), (513, "cuda", 1024), (65, "cpu", 128)],
)
def test_rounding(num_bytes: int, kind: str, rounded: int) -> None:
    assert rounded_bytes(num_bytes, kind) == rounded


@given(st.integers(0, 2**50), st.integers(0, 2**50))
def test_rounding_is_monotone_and_tight(left: int, right: int) -> None:
    assert 0 <= rounded_bytes(left) - left < 512
    assert (rounded_bytes(left) <= rounded_bytes(right)) or left > right


@given(st.integers(0, 2**40), st.integers(1, 2**12))
def test_shards_cover_everything(num_elements: int, num_shards: int) -> None:
    shard = shard_elements(num_elements, num_shards)
    assert num_elements <= shard * num_shards < num_elements + num_shards


def test_usable_bytes() -> None:
    device = find_device("A100-80GB")
    assert usable_bytes(device, 0.0) == device.memory_bytes - 2**30
    assert usable_bytes(device, 0.5) == (device.memory_bytes - 2**30) // 2
    assert usable_bytes(device) < usable_bytes(device, 0.0)
    tiny = Device("tiny", "cuda", 2**20, 1e9, {"float32": 1e12})
    assert usable_bytes(tiny) == 0
    for margin in (-0.1, 1.0):
        with pytest.raises(ValueError, match="0 <= margin < 1"):
            usable_bytes(device, margin)
    assert CONTEXT_BYTES["cpu"] == 256 * 2**20


def test_refuses_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"unknown dtype 'fp32'; known are .*float32"):
        dtype_bytes("fp32")
    with pytest.raises(ValueError, match="unknown optimizer 'adam_w'; known are adamw"):
        find_optimizer("adam_w")
    with pytest.raises(ValueError, match="unknown kind of device"):
        rounded_bytes(1, "tpu")
    with pytest.raises(ValueError, match="num_shards is 0"):
        shard_elements(8, 0)
    with pytest.raises(ValueError, match="num_states is -1"):
        OptimizerStates("mine", -1)
    assert all(find_optimizer(name).name == name for name in OPTIMIZERS)
