"""Blocks that are alike are read and priced once: what is copied to the others is what pricing each would have given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.batching import at_batch
from autopar.costing import Costed, build, prepare
from autopar.costing.setting import Setting
from autopar.graph import OpGraph
from autopar.mesh import Mesh
from autopar.options import PlanOptions
from autopar.search.shorten import shortened
from autopar.sharing import sharing_groups
from autopar.tracing import trace
from cost_models import Cluster, CostModel
from tests.support import models

MESH = Mesh((2, 2), ("axis0", "axis1"))
MODEL = CostModel(Cluster.homogeneous(num_nodes=1, devices_per_node=4))


@pytest.fixture(scope="module", params=["gpt2", "llama", "t5", "moe"])
def graph(request: pytest.FixtureRequest) -> OpGraph:
    model, inputs = getattr(models, request.param)(8, layers=7)
    return trace(model, inputs).graph


def settings(graph: OpGraph) -> Mapping[str, Setting]:
    """All blocks in one mode, and in each group the first four in one and the others in another."""
    paths = [block.path for group in graph.block_groups for block in group.blocks]
    mixed = {
        block.path: "full" if at < 4 else "selective"
        for group in graph.block_groups
        for at, block in enumerate(group.blocks)
    }
    modes = {mode: dict.fromkeys(paths, mode) for mode in ("none", "selective", "full")}
    return {name: Setting(2, 2, recompute) for name, recompute in {**modes, "mixed": mixed}.items()}


@pytest.mark.parametrize("mode", ["none", "selective", "full", "mixed"])
def test_copied_prices_are_those_of_each_block(graph: OpGraph, mode: str) -> None:
    prepared = prepare(graph)
    assert prepared.between
    setting = settings(graph)[mode]
    copied, each = (
        build(known, MESH, ("free", "free"), MODEL, PlanOptions(), setting)
        for known in (prepared, replace(prepared, between={}))
    )
    assert_same(copied, each)


def assert_same(one: Costed, other: Costed) -> None:
    assert list(one.nodes) == list(other.nodes)
    assert one.edges_reader == other.edges_reader and one.edges_again == other.edges_again
    p, q = one.problem, other.problem
    assert [r.instances for r in p.repeats] == [r.instances for r in q.repeats]
    assert [(e.source, e.target) for e in p.edges] == [(e.source, e.target) for e in q.edges]
    for mine, theirs in (
        (p.node_costs_seconds, q.node_costs_seconds),
        (p.node_memory_bytes, q.node_memory_bytes),
        ([e.costs_seconds for e in p.edges], [e.costs_seconds for e in q.edges]),
        ([e.memory_bytes for e in p.edges], [e.memory_bytes for e in q.edges]),
        (one.edges_forward, other.edges_forward),
        (one.edges_made, other.edges_made),
    ):
        assert len(mine) == len(theirs)
        for x, y in zip(mine, theirs, strict=True):
            assert (x is None) == (y is None) and (x is None or np.array_equal(x, y))


def test_a_block_that_something_else_reads_is_priced_by_itself() -> None:
    model, inputs = models.gpt2(8, layers=7)
    model.config.output_hidden_states = True
    graph = trace(model, inputs).graph
    assert len(graph.outputs) > 2
    assert not prepare(graph).between


class Handed(nn.Module):
    """A block that hands on a view of what the one before it computed, and reads another's parameter where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x + self.b(F.gelu(q) * x), F.gelu(self.a(x)), p.unsqueeze(1).squeeze(1)


class Row(nn.Module):
    def __init__(self, borrows: bool = False) -> None:
        super().__init__()
        self.layers, self.borrows = nn.ModuleList(Handed() for _ in range(10)), borrows

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        p, q, out = x * 2, x * 3, x
        for layer in self.layers:
            out, p, q = layer(out, p, q)
        if self.borrows:
            out = F.linear(out, self.layers[4].a.weight)
        return F.mse_loss(out, y) + (q * q).mean() + p.mean()


def row(borrows: bool = False) -> OpGraph:
    return trace(Row(borrows), {"x": torch.randn(8, 16), "y": torch.randn(8, 16)}).graph


def test_what_is_saved_through_a_view_across_blocks_is_saved_in_the_whole_graph() -> None:
    graph = row()
    assert graph.block_groups
    whole, borrowed = prepare(graph), prepare(graph, prepare(shortened(graph).graph))
    assert borrowed.saved == whole.saved


def test_a_block_whose_parameter_others_read_is_priced_by_itself() -> None:
    plain, borrowing = prepare(row()), prepare(row(borrows=True))
    assert set(plain.between) - set(borrowing.between) == {"layers.4"}


def test_the_short_graph_says_of_the_whole_one_what_that_itself_does(graph: OpGraph) -> None:
    whole, like = prepare(graph), prepare(shortened(graph).graph)
    borrowed = prepare(graph, like)
    for one in fields(whole):
        mine, theirs = getattr(borrowed, one.name), getattr(whole, one.name)
        assert set(mine) == set(theirs) if isinstance(theirs, Mapping) else mine == theirs, one.name
        if isinstance(theirs, Mapping):
            assert all(repr(mine[key]) == repr(theirs[key]) for key in theirs), one.name


def test_copies_at_other_sizes_have_the_same_facts(graph: OpGraph) -> None:
    small = at_batch(graph, 4)
    alone = replace(small, _cache={})
    assert sharing_groups(small) == sharing_groups(alone)
    assert small.readers_of == alone.readers_of and small.canonical == alone.canonical
    assert facts(prepare(small)) == facts(prepare(alone))


def facts(prepared: Any) -> dict[str, Any]:
    return {name: getattr(prepared, name) for name in ("gradient", "groups", "derived", "of_parameters", "between")}
