"""Where models can be cut, and the graphs of the stages: well formed, complete, nothing twice."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from torch import nn

from autopar.batching import at_batch
from autopar.costing import prepare
from autopar.errors import InputError
from autopar.graph import OpGraph, check
from autopar.staging import MAX_RELAYED, cut_points, derived_operators, stage_graphs
from autopar.tracing import trace
from tests.support.models import ZOO, cross_entropy
from tests.support.pipelines import even_cuts

UNET_CUTS = ("middle.first:conv2d", "up.1.first:conv2d")


@cache
def graph_of(name: str, size: int = 4) -> OpGraph:
    torch.manual_seed(0)
    model, batch = ZOO[name](size)
    return trace(model, batch, loss_fn=cross_entropy if name == "mlp" else None).graph


@pytest.mark.parametrize("name", ZOO)
def test_few_values_are_alive_at_a_cut_point(name: str) -> None:
    graph = graph_of(name)
    points = cut_points(graph)
    assert points
    assert all(1 <= len(point.values) <= MAX_RELAYED for point in points)
    for point in points:
        before, after = stage_graphs(graph, (point.operator,))
        assert before.sent == after.received == point.values


@pytest.mark.parametrize(
    ("name", "least"), [("gpt2", 6), ("llama", 6), ("bert", 6), ("vit", 6), ("t5", 12), ("resnet", 6), ("moe", 3)]
)
def test_a_model_can_be_cut_between_and_inside_its_blocks(name: str, least: int) -> None:
    assert len(cut_points(graph_of(name))) >= least


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_between_the_blocks_of_a_decoder_one_value_is_alive(name: str) -> None:
    assert {len(point.values) for point in cut_points(graph_of(name))} == {1}


def cuts_for(name: str, graph: OpGraph) -> tuple[str, ...]:
    return UNET_CUTS if name == "unet" else even_cuts(graph, 2 if name in ("mlp", "moe") else 3)


@pytest.mark.parametrize("name", ZOO)
def test_stage_graphs_are_well_formed_and_complete(name: str) -> None:
    graph = graph_of(name)
    stages = stage_graphs(graph, cuts_for(name, graph))
    derived = derived_operators(graph)
    for stage in stages:
        check(stage)
    assert not stages[0].received
    assert not stages[-1].sent
    for before, after in itertools.pairwise(stages):
        assert before.sent == after.received
    own = [operator.id for stage in stages for operator in stage.operators if operator.id not in derived]
    assert sorted(own) == sorted(operator.id for operator in graph.operators if operator.id not in derived)
    assert {parameter.value for stage in stages for parameter in stage.parameters} == {p.value for p in graph.parameters}
    assert {buffer.value for stage in stages for buffer in stage.buffers} == {b.value for b in graph.buffers}
    outputs = [output.path for stage in stages for output in stage.outputs]
    assert sorted(outputs) == sorted(output.path for output in graph.outputs)
    assert [stage.loss for stage in stages] == [None] * (len(stages) - 1) + [graph.loss]


@pytest.mark.parametrize("name", ["gpt2", "t5", "unet"])
def test_stages_of_another_batch_are_the_stages_at_that_batch(name: str) -> None:
    graph = graph_of(name)
    cuts = cuts_for(name, graph)
    for stage, other in zip(stage_graphs(graph, cuts), stage_graphs(graph_of(name, 2), cuts), strict=True):
        smaller = at_batch(stage, 2)
        assert {v: smaller.values[v].shape for v in smaller.values} == {v: other.values[v].shape for v in other.values}


def test_a_skip_is_relayed_by_the_stages_between() -> None:
    first, second, third = stage_graphs(graph_of("unet"), UNET_CUTS)
    relayed = set(first.sent) & set(second.sent)
    assert relayed == {"down.0:relu"}
    assert relayed <= set(third.received)
    assert all(second.values[value].kind == "received" for value in relayed)
    assert relayed.isdisjoint(second.readers_of)


def test_a_tied_parameter_is_in_both_stages() -> None:
    first, last = stage_graphs(graph_of("gpt2"), even_cuts(graph_of("gpt2"), 2))
    tied = {p.value for p in first.parameters} & {p.value for p in last.parameters}
    assert tied == {"transformer.wte.weight"}


def test_blocks_that_are_cut_are_no_blocks() -> None:
    graph = graph_of("gpt2")
    first, last = stage_graphs(graph, ("transformer.h.1.ln_2:layer_norm",))
    paths = [[block.path for group in stage.block_groups for block in group.blocks] for stage in (first, last)]
    assert paths == [["transformer.h.0"], ["transformer.h.2"]]


def test_masks_are_computed_in_each_stage_that_reads_them() -> None:
    graph = graph_of("llama")
    stages = stage_graphs(graph, even_cuts(graph, 3))
    derived = derived_operators(graph)
    shared = [{op.id for op in stage.operators if op.id in derived} for stage in stages]
    assert shared[1] & shared[2]
    assert all(len(stage.received) == 1 for stage in stages[1:])


def test_without_cuts_the_stage_is_the_graph() -> None:
    assert stage_graphs(graph_of("mlp"), ()) == (graph_of("mlp"),)


@pytest.mark.parametrize(
    "cuts", [("lm_head:linear", "transformer.h.0.ln_1:layer_norm"), ("no such",), ("transformer.h.0:add",) * 2]
)
def test_cuts_that_are_none_are_refused(cuts: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="no operators of the graph"):
        stage_graphs(graph_of("gpt2"), cuts)


class Odd(nn.Module):
    """A loss before the last operators, outputs that nothing computes, a parameter and a buffer that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.ones(2))
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        x = self.first(x).relu()
        x = self.second(x) * mask
        loss = x.square().mean()
        return {"loss": loss, "more": self.third(x).relu(), "mask": mask, "not": ~mask}


def test_everything_has_a_home() -> None:
    graph = trace(Odd(), {"x": torch.randn(2, 4), "mask": torch.ones(2, 4, dtype=torch.bool)}).graph
    cut = next(op.id for op in graph.operators if op.module == "third")
    stages = stage_graphs(graph, ("second:linear", cut))
    for stage in stages:
        check(stage)
    assert [[p.name for p in stage.parameters] for stage in stages] == [
        ["unused", "first.weight", "first.bias"], ["second.weight", "second.bias"], ["third.weight", "third.bias"],
    ]  # fmt: skip
    assert [buffer.name for stage in stages for buffer in stage.buffers] == ["calls"]
    assert [stage.loss for stage in stages] == [None, None, graph.loss]
    assert graph.loss in stages[1].sent
    assert [sorted(o.path for o in stage.outputs) for stage in stages] == [[], [], ["loss", "mask", "more", "not"]]


def test_what_reads_only_what_was_received_may_be_split_like_any_other() -> None:
    """Operators without parameters behind them split the batch or nothing; parameters are behind what was received."""
    graph = graph_of("llama")
    later = stage_graphs(graph, even_cuts(graph, 2))[1]
    readers = {operator.id for operator in later.operators if set(operator.inputs) & set(later.received)}
    assert readers and not readers & prepare(later).derived
