"""What does not fit is refused with the least memory, and the least number of devices, that would do."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from autopar.errors import InfeasibleError
from autopar.options import Parallelism, PlanOptions
from autopar.planner import plan_graph
from cost_models import Cluster
from cost_models.memory import CONTEXT_BYTES
from tests.unit.search.test_decisions import device as toy
from tests.unit.search.test_decisions import llama, node, plan, recomputed

GIB = 2**30


def refusal(cluster: Cluster, options: PlanOptions) -> str:
    with pytest.raises(InfeasibleError) as caught:
        plan_graph(llama(), cluster, options)
    return str(caught.value)


def with_gib(cluster: Cluster, gib: float, margin: float) -> Cluster:
    """The same cluster, each device with so much for tensors."""
    first = cluster.nodes[0]
    whole = int(gib * GIB / (1 - margin)) + CONTEXT_BYTES[first.device.kind] + 1
    return replace(cluster, nodes=(replace(first, device=replace(first.device, memory_bytes=whole)),))


@pytest.mark.slow
def test_refusal_names_memory_and_number_of_devices_that_do() -> None:
    options, cluster = PlanOptions(), node(toy(0.25), 2)
    text = refusal(cluster, options)
    needed = float(re.search(r"([\d.]+) GiB on each device would do", text)[1])
    count = int(re.search(r"(\d+) of these devices would do \(", text)[1])
    assert re.search(r"the leanest one \(.*(mesh|stages)", text)
    assert plan_graph(llama(), with_gib(cluster, needed, options.memory_margin), options).num_devices == 2
    assert plan_graph(llama(), node(toy(0.25), count), options).num_devices == count


def test_nothing_is_said_of_more_devices_where_degrees_are_forced() -> None:
    text = refusal(node(toy(0.2), 2), PlanOptions(parallelism=Parallelism(data=2)))
    assert "GiB on each device would do" in text and "more of these devices" not in text


def test_slow_link_does_not_make_a_model_infeasible() -> None:
    forced = {"data": 2, "micro_batch_size": 16}
    assert recomputed(plan(llama(layers=4, batch=16), node(toy(1.2), gigabytes=5), **forced)) > 0
