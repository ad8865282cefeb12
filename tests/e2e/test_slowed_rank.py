"""Two unlike nodes as two processes over gloo: the plan is uneven, and a rank that lags changes no value."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopar import Cluster, Parallelism, PlanOptions
from autopar.codegen import generate
from autopar.launching import torchrun
from autopar.planner import plan_graph
from autopar.plans import Plan, graphs_of
from autopar.tracing import trace
from cost_models import find_device, find_link
from cost_models.hardware import Node
from tests.support.models import gpt2
from tests.support.timed_pipelines import slow_down, slower, training

pytestmark = pytest.mark.e2e

BATCH, LAYERS, STEPS = 8, 6, 2
FACTOR = 3.0
SCHEDULES = ("1f1b", "zbv")


def make_model() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return gpt2(BATCH, LAYERS)


def unlike(slow_rank: int) -> Cluster:
    device, link = find_device("CPU-core"), find_link("Loopback")
    devices = [slower(device, FACTOR) if rank == slow_rank else device for rank in range(2)]
    return Cluster(tuple(Node(each, 1, link) for each in devices), link)


def planned(schedule: str, slow_rank: int) -> Plan:
    forced = Parallelism(pipeline=2, schedule=schedule, micro_batch_size=2)
    return plan_graph(trace(*make_model()).graph, unlike(slow_rank), PlanOptions(parallelism=forced))


@pytest.mark.parametrize("slow_rank", range(2))
def test_the_slow_node_has_the_smaller_stage(slow_rank: int) -> None:
    plan = planned("1f1b", slow_rank)
    sizes = [len(stage.operators) for stage in graphs_of(plan, trace(*make_model()).graph)]
    order = plan.rank_order or (0, 1)
    by_rank = [sizes[order.index(rank)] for rank in range(2)]
    assert by_rank[slow_rank] < 0.5 * by_rank[1 - slow_rank], by_rank


def test_a_rank_that_lags_changes_no_value(tmp_path: Path) -> None:
    """Of a schedule with messages that meet, and of one whose messages run ahead."""
    graph = trace(*make_model()).graph
    for schedule in SCHEDULES:
        (tmp_path / f"{schedule}.py").write_text(generate(planned(schedule, slow_rank=1), graph))
    assert not torchrun("tests.e2e.test_slowed_rank", [str(tmp_path)], 2, timeout_seconds=300)
    found = torch.load(tmp_path / "losses")
    model, batch = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    expected = []
    for _ in range(STEPS):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    for schedule in SCHEDULES:
        assert found[schedule] == pytest.approx(expected, abs=1e-5), schedule


def main() -> None:
    """One of the two processes: ``-m tests.e2e.test_slowed_rank FOLDER`` under torchrun."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for schedule in SCHEDULES:
        model, batch = make_model()
        given = training((folder / f"{schedule}.py").read_text(), model)
        if dist.get_rank() == 1:
            slow_down(given, FACTOR)
        found[schedule] = [given.step(batch) for _ in range(STEPS)]
    if dist.get_rank() == 0:
        torch.save(found, folder / "losses")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
