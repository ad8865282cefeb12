"""Hybrid sharding: parameters sharded over some of the devices that share the batch, replicated over the others."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autopar import verify
from autopar.codegen.ledger import ledger, totals
from autopar.errors import InputError
from autopar.forcing import check_degrees
from autopar.layout import Shard
from autopar.options import PRECISIONS, Parallelism, PlanOptions
from autopar.planner import plan_graph
from autopar.plans import Plan
from autopar.tracing import Traced, trace
from cost_models import Cluster
from cost_models.parts import Device, Link

WIDTH, LAYERS, BATCH = 64, 3, 16

pytestmark = pytest.mark.usefixtures("one_thread")


class Layers(nn.Module):
    """A chain of layers without a bias: all parameters are as large."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


@cache
def traced() -> tuple[nn.Module, Tensor, Traced]:
    torch.manual_seed(0)
    model, x = Layers().double(), torch.randn(BATCH, WIDTH, dtype=torch.float64)
    return model, x, trace(model, (x,))


def planned(cluster: Cluster, **forced: object) -> Plan:
    settings = {"data": 4, "pipeline": 1, "micro_batch_size": BATCH, "recompute": "none", **forced}
    options = PlanOptions(parallelism=Parallelism(**settings), memory_margin=0.0)  # type: ignore[arg-type]
    return plan_graph(traced()[2].graph, cluster, options, compare=False)


def two_nodes(across_bytes_per_second: float, bytes_per_element: float = 1e3) -> Cluster:
    """Two nodes of two devices that hold so many bytes for each element of the model's parameters."""
    memory = int(LAYERS * WIDTH**2 * bytes_per_element) + 2**30
    device = Device("small", "cuda", memory, 1e12, {"float32": 1e12}, launch_seconds=1e-9, source="made up")
    inside, across = Link("inside", 1e9, 1e-9), Link("across", across_bytes_per_second, 1e-9)
    return Cluster.homogeneous(num_nodes=2, devices_per_node=2, device=device, intra_link=inside, inter_link=across)


def storages(plan: Plan) -> set[tuple[str, int]]:
    """How parameters rest, S or R for each axis, and their ZeRO levels."""
    kept = plan.stages[0].parameters.values()
    words = {id(one): "".join("S" if isinstance(state, Shard) else "R" for state in one.storage) for one in kept}
    return {(words[id(one)], one.zero) for one in kept}


@pytest.mark.parametrize("size", [16, 8], ids=["one micro-batch", "two"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_forced_and_equal(zero: int, size: int) -> None:
    """Shards inside the nodes at every level; the sum across is of the shard, once a step, and all is sent as planned."""
    model, x, found = traced()
    plan = planned(two_nodes(1e9), zero=zero, zero_size=2, micro_batch_size=size)
    assert plan.stages[0].mesh.shape == (2, 2)
    assert storages(plan) == {("RS", zero)}
    counts, whole = BATCH // size, LAYERS * WIDTH**2 * 8
    sent = totals(ledger(plan, found.graph))
    outer, inner = plan.stages[0].mesh.names
    assert sent["reduce_scatter", inner] == whole * (counts if zero >= 2 else 1)
    assert sent["all_reduce", outer] - 8 * counts == whole // 2  # 8: the loss of each micro-batch
    assert ("all_gather", outer) not in sent and ("reduce_scatter", outer) not in sent
    verify(model, plan, (x,), count_collectives=True).require()


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_price_is_what_is_sent(zero: int) -> None:
    """With several micro-batches too: gradients across are summed once."""
    report = planned(two_nodes(1e8), zero=zero, zero_size=2, micro_batch_size=4).report()
    sent = [entry for entry in report["collectives"]["entries"] if entry["phase"] in ("gradient", "parameter")]
    seconds = sum(entry["seconds"] for entry in sent)
    assert report["predicted"]["breakdown"]["parameter_communication_seconds"] == pytest.approx(seconds, rel=0.02)


def test_the_search_shards_inside_slow_links() -> None:
    """Where whole parameters do not fit (float64 with gradient and two states: 32 bytes an element, activations beside).
    Across a slow link hybrid sharding is best, across one as quick as inside all four share what they must."""
    slow = planned(two_nodes(1e6, 33.0))
    assert storages(slow) == {("RS", 2)}
    quick = planned(two_nodes(1e9, 33.0))
    assert {words for words, level in storages(quick) if level} == {"S"}


def test_it_needs_memory() -> None:
    """Where a half does not fit, a quarter must travel across the slow link."""
    tight = planned(two_nodes(1e6, 26.0))
    assert {words for words, _ in storages(tight)} <= {"S", "SS"}


def test_all_that_share_the_batch() -> None:
    """A zero_size of all of them is no hybrid: a mesh of one axis will do."""
    plan = planned(two_nodes(1e9), zero=3, zero_size=4)
    assert storages(plan) <= {("S", 3), ("SS", 3)}


def test_without_forced_data() -> None:
    """On a mesh that is searched as well."""
    plan = planned(two_nodes(1e9), data=None, tensor=1, zero=2, zero_size=2)
    assert storages(plan) == {("RS", 2)}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.relu(self.up(x)))).square().mean()


@pytest.mark.parametrize("zero", [1, 3])
def test_a_forced_level_holds_for_every_parameter(zero: int) -> None:
    """Also where a cast would rather have its gradient summed in the narrower type."""
    model, given = Small(), (torch.randn(8, 64),)
    options = PlanOptions(precision="autocast", parallelism=Parallelism(data=4, zero=zero))
    graph = trace(model, given, precision=PRECISIONS["autocast"]).graph
    plan = plan_graph(graph, two_nodes(1e9), options)
    assert {(p.zero, sum(isinstance(s, Shard) for s in p.storage)) for p in plan.stages[0].parameters.values()} == {(zero, 1)}
    assert verify(model, plan, given).passed


@pytest.mark.parametrize(
    ("forced", "words"),
    [
        ({"zero": 3, "zero_size": 1}, "at least 2"),
        ({"zero_size": 2}, "give zero="),
        ({"zero": 0, "zero_size": 2}, "give zero="),
        ({"data": 4, "zero": 1, "zero_size": 3}, "divides data"),
    ],
)
def test_what_cannot_be_asked(forced: dict[str, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Parallelism(**forced)  # type: ignore[arg-type]


def test_what_cannot_be_laid_out() -> None:
    with pytest.raises(InputError, match="zero_size=3 cannot be laid out on 4 devices"):
        planned(two_nodes(1e9), data=None, zero=1, zero_size=3)
    with pytest.raises(InputError, match=r"zero_size=2 cannot be laid out on 4 devices as a mesh of \(4,\)"):
        check_degrees(4, PlanOptions(mesh_shape=(4,), parallelism=Parallelism(zero=1, zero_size=2)))
