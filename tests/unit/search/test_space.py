"""Which arrangements are searched, and what is said where nothing is left of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.options import Parallelism, PlanOptions
from autopar.planner import plan_graph
from autopar.search.space import Grid, counts_of, micro_batch_counts
from autopar.tracing import trace
from cost_models import Cluster


def test_every_number_of_micro_batches_that_divides_the_batch() -> None:
    assert micro_batch_counts(12, PlanOptions(), True) == [1, 2, 3, 4, 6, 12]
    assert micro_batch_counts(12, PlanOptions(), False) == [1]
    assert micro_batch_counts(10, PlanOptions(Parallelism(micro_batch_size=4)), True) == [3]


@pytest.mark.parametrize(
    ("batch", "shares", "expected"),
    [
        (12, 2, [1, 2, 3, 6]),  # of 12, 6, 4 and 2 samples
        (12, 3, [1, 2, 4]),
        (10, 4, [1, 2]),  # no size is a multiple of 4: those of which every device has a sample
        (2, 4, [1]),
    ],
)
def test_a_forced_data_axis_shares_every_micro_batch(batch: int, shares: int, expected: list[int]) -> None:
    counts = micro_batch_counts(batch, PlanOptions(), True)
    assert counts_of(Grid(1, (shares,), ("data",), (0,)), counts, batch) == expected
    assert counts_of(Grid(1, (2, shares), ("tensor", "data"), (0,)), counts, batch) == expected
    assert counts_of(Grid(1, (shares,), ("free",), (0,)), counts, batch) == counts


class Net(nn.Module):
    """Three layers, with a batch norm that keeps the samples together if asked to."""

    def __init__(self, coupled: bool = False) -> None:
        super().__init__()
        norm = [nn.BatchNorm1d(8)] if coupled else []
        self.layers = nn.Sequential(nn.Linear(8, 8), *norm, nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("zero", [0, 3])
def test_a_forced_data_axis_is_one_of_the_plan(zero: int) -> None:
    graph = trace(Net(), {"x": torch.randn(4, 8)}).graph
    plan = plan_graph(graph, Cluster.local(2), PlanOptions(Parallelism(data=2, zero=zero, pipeline=1)))
    assert plan.stages[0].mesh.names == ("data",) and plan.micro_batch_size % 2 == 0


@pytest.mark.parametrize(
    ("coupled", "forced", "texts"),
    [
        (False, {"pipeline": 1, "schedule": "1f1b"}, ("schedule=1f1b", "pipeline=1")),
        (False, {"pipeline": 2, "schedule": "single"}, ("schedule=single", "pipeline=2")),
        (False, {"pipeline": 2, "schedule": "1f1b", "micro_batch_size": 4}, ("schedule=1f1b", "micro_batch_size=4")),
        (True, {"micro_batch_size": 1}, ("micro_batch_size=1", "batch_norm")),
        (True, {"schedule": "1f1b"}, ("schedule=1f1b", "batch_norm")),
    ],
)
def test_what_cannot_be_had_together_is_named(coupled: bool, forced: dict[str, object], texts: tuple[str, ...]) -> None:
    graph = trace(Net(coupled), {"x": torch.randn(4, 8)}).graph
    with pytest.raises(AutoparError) as error:
        plan_graph(graph, Cluster.local(2), PlanOptions(Parallelism(**forced)))  # type: ignore[arg-type]
    assert all(text in str(error.value) for text in texts), str(error.value)
