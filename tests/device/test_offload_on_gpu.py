"""On a GPU: optimizer states in pinned host memory, updated there, less memory of the device, copies at the speed of the link.

Opt-in (``pytest -m device``).
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.options import PlanOptions
from cost_models import Cluster
from tests.support.models import gpt2

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def trained(offload: str, precision: str) -> tuple[list[float], int, autopar.Parallel]:
    torch.manual_seed(0)
    model, inputs = gpt2(8, 2)
    options = PlanOptions(offload=offload, precision=precision)
    parallel = autopar.parallelize(model, Cluster.local(1, kind="cuda"), inputs, options=options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    losses = []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(5):
        losses.append(float(parallel.step(**inputs)))
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, torch.cuda.memory_allocated(), parallel


@pytest.mark.parametrize("precision", ["model", "bfloat16"])
def test_trained_alike_with_states_on_the_host(precision: str) -> None:
    here, on_device, _ = trained("none", precision)
    there, left, parallel = trained("optimizer", precision)
    assert there == pytest.approx(here, rel=1e-3)
    assert left < on_device
    assert dist.is_initialized() or not parallel.engine.mesh.has_groups
    for slot in parallel.engine.slots.values():
        assert slot.local.device.type == "cpu" and slot.local.is_pinned()
        assert slot.leaf.device.type == "cuda"


def test_the_link_is_as_quick_as_priced() -> None:
    from autopar.runtime import host
    from cost_models import CostModel

    device = torch.device("cuda", 0)
    on_device = torch.empty(2**28, dtype=torch.uint8, device=device)
    there = host.to_host(on_device)
    host.wait(device)
    begin = time.perf_counter()
    for _ in range(8):
        on_device.copy_(there, non_blocking=True)
    host.wait(device)
    reached = 8 * 2**28 / (time.perf_counter() - begin)
    assert reached > 0.7 * CostModel(Cluster.local(1, kind="cuda")).host_share().link_bytes_per_second
