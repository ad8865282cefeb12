"""Parameters whose shards travel together are priced by the bytes of full buckets, others one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.costing.parameters import BUCKET_BYTES
from autopar.layout import REPLICATED, SUMMED_GRADIENT, Cut, Shard
from autopar.options import Parallelism, PlanOptions
from autopar.planner import plan_graph
from autopar.profiler.needs import needs_of
from autopar.reshard import is_in_bucket, steps
from autopar.tracing import trace
from cost_models import Cluster, CostModel

LOCAL = Cluster.local(2, kind="cpu", num_cores=2)


def sent(zero: int) -> list[dict[str, Any]]:
    """What a plan sends of a model with many small parameters."""
    layers = [torch.nn.Linear(16, 16) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    graph = trace(model, (torch.zeros(8, 16),), loss_fn=lambda outputs, inputs: outputs.square().mean()).graph
    forced = Parallelism(pipeline=1, data=2, zero=zero, micro_batch_size=8)
    entries = plan_graph(graph, LOCAL, PlanOptions(parallelism=forced)).report()["collectives"]["entries"]
    return [entry for entry in entries if entry["phase"] in ("parameter", "gradient")]


@pytest.mark.parametrize("zero", [1, 2])
def test_shards_share_a_collective(zero: int) -> None:
    axis = CostModel(LOCAL).axis(2, 1)
    found = sent(zero)
    assert {entry["kind"] for entry in found} == {"all_gather", "reduce_scatter"}
    for entry in found:
        of_a_bucket = float(axis.seconds(entry["kind"], float(BUCKET_BYTES)))
        share = entry["count"] * entry["num_bytes"] / BUCKET_BYTES
        assert entry["seconds"] == pytest.approx(share * of_a_bucket)


def test_gathers_around_each_use_go_alone() -> None:
    axis = CostModel(LOCAL).axis(2, 1)
    for entry in sent(3):
        alone = entry["count"] * float(axis.seconds(entry["kind"], float(entry["num_bytes"])))
        assert entry["seconds"] == pytest.approx(alone)


def test_what_travels_together() -> None:
    first, second = Shard(0, Cut.plain(8)), Shard(1, Cut.plain(8))
    assert is_in_bucket(1, steps((first,), (SUMMED_GRADIENT,)))
    hybrid = steps((first, REPLICATED), (SUMMED_GRADIENT, SUMMED_GRADIENT))  # its sum is another collective
    assert is_in_bucket(1, hybrid) and is_in_bucket(2, hybrid) and not is_in_bucket(3, hybrid)
    assert not is_in_bucket(1, steps((REPLICATED,), (SUMMED_GRADIENT,)))
    assert not is_in_bucket(1, steps((first, second), (SUMMED_GRADIENT, SUMMED_GRADIENT)))


def test_a_bucket_of_gradients_is_measured() -> None:
    """Also where no tensor of the model is as large."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    graph = trace(model, (torch.zeros(8, 64),), loss_fn=lambda outputs, inputs: outputs.square().mean()).graph
    gradients = sum(graph.values[parameter.value].num_bytes for parameter in graph.parameters)
    assert needs_of(graph, LOCAL, PlanOptions()).sizes[-1] >= gradients
    assert gradients > 4 * max(value.num_bytes for value in graph.values.values())
