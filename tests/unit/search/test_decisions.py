"""Twelve cases in each of which one thing is made different, and one decision of the plan must change."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.graph import OpGraph
from autopar.options import Parallelism, PlanOptions
from autopar.planner import plan_graph
from autopar.plans import Plan, Resolved, graphs_of
from autopar.tracing import trace
from cost_models import Cluster, Device, Link, Node

GIB = 2**30


@cache
def llama(
    layers: int = 3, batch: int = 8, sequence: int = 512, hidden: int = 1024, heads: int = 8, inner: int = 4096
) -> OpGraph:
    """A small Llama of bfloat16 on meta."""
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, vocab_size=1000, max_position_embeddings=sequence,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.empty(batch, sequence, dtype=torch.long)
    return trace(model, {"input_ids": tokens, "labels": tokens}).graph


def device(gib: float = 64.0, teraflops: float = 100.0, terabytes: float = 1.0) -> Device:
    """A device with so much memory beside its context."""
    peaks = {"float32": teraflops * 1e11, "bfloat16": teraflops * 1e12}
    return Device("toy", "cuda", int((gib + 1) * GIB), terabytes * 1e12, peaks)


def link(gigabytes: float) -> Link:
    return Link("toy link", gigabytes * 1e9, 5e-6)


def node(one: Device, count: int = 2, gigabytes: float = 100.0) -> Cluster:
    """A cluster of one node."""
    return Cluster((Node(one, count, link(gigabytes)),), link(25))


def nodes(first: Device, second: Device, gigabytes: float = 25.0) -> Cluster:
    """Two nodes of one device each."""
    return Cluster((Node(first, 1, link(100)), Node(second, 1, link(100))), link(gigabytes))


def plan(graph: OpGraph, cluster: Cluster, optimizer: str = "adamw", **forced: object) -> Plan:
    return plan_graph(graph, cluster, PlanOptions(parallelism=Parallelism(**forced), optimizer=optimizer))


def recomputed(found: Plan) -> int:
    """Blocks that compute something again."""
    return sum(mode != "none" for stage in found.stages for modes in stage.recompute.values() for mode in modes)


def levels(found: Plan) -> set[int]:
    """ZeRO levels of the parameters."""
    return {parameter.zero for stage in found.stages for parameter in stage.parameters.values()}


def attention_labels(found: Plan, graph: OpGraph) -> set[str]:
    """What the attentions are split along."""
    resolved = Resolved(found.stages[0], graph)
    return {resolved.operator(op.id).label for op in graph.operators if "dot_product" in op.target}


def num_operators(found: Plan, graph: OpGraph) -> list[int]:
    """Operators of each stage."""
    return [len(stage.operators) for stage in graphs_of(found, graph)]


def test_memory_halved_turns_recomputation_on() -> None:
    graph, forced = llama(layers=4, batch=16), {"data": 2, "micro_batch_size": 16}
    assert recomputed(plan(graph, node(device(2.4)), **forced)) == 0
    assert recomputed(plan(graph, node(device(1.2)), **forced)) > 0


def test_memory_less_again_turns_zero_3_on() -> None:
    graph, forced = llama(layers=4, batch=16), {"data": 2, "micro_batch_size": 16}
    assert 3 not in levels(plan(graph, node(device(1.5)), **forced))
    assert 3 in levels(plan(graph, node(device(0.95)), **forced))


def test_slow_link_between_nodes_makes_a_pipeline_across_them() -> None:
    graph = llama(layers=4, batch=32, sequence=64, hidden=2048, heads=16, inner=8192)  # few activations, many parameters
    assert len(plan(graph, nodes(device(), device(), 100)).stages) == 1
    assert len(plan(graph, nodes(device(), device(), 1)).stages) > 1


def test_larger_batch_goes_through_a_pipeline_in_more_micro_batches() -> None:
    small, large = (
        plan(llama(batch=batch), node(device()), pipeline=2, schedule="1f1b").num_micro_batches for batch in (4, 64)
    )
    assert small < large


def test_slower_node_gets_fewer_operators() -> None:
    graph, slow, forced = llama(), device(teraflops=40, terabytes=0.4), {"pipeline": 2, "schedule": "1f1b"}
    even = num_operators(plan(graph, nodes(device(), device()), **forced), graph)
    uneven = num_operators(plan(graph, nodes(device(), slow), **forced), graph)
    assert max(even) <= 2 * min(even) and uneven[1] < even[1]


def test_small_batch_splits_tensors_and_large_batch_the_data() -> None:
    small = plan(llama(batch=1, sequence=64), node(device()), pipeline=1)
    large = plan(llama(batch=16), node(device()), pipeline=1)
    assert small.stages[0].mesh.names == ("tensor",) and large.stages[0].mesh.names == ("data",)


def test_long_sequence_with_one_head_splits_the_sequence_in_attention() -> None:
    heads, one = (llama(layers=2, batch=1, sequence=8192, hidden=512, inner=1024, heads=heads) for heads in (8, 1))
    assert attention_labels(plan(heads, node(device()), pipeline=1), heads) == {"b1"}
    assert attention_labels(plan(one, node(device()), pipeline=1), one) == {"s"}  # keys too: they pass around a ring


def test_slow_launches_make_fewer_micro_batches() -> None:
    graph, forced = llama(batch=16), {"pipeline": 2, "schedule": "1f1b"}
    quick, slow = (
        plan(graph, node(replace(device(), launch_seconds=seconds)), **forced).num_micro_batches for seconds in (1e-6, 2e-3)
    )
    assert slow < quick


def test_little_memory_on_the_second_node_changes_the_order_of_nodes() -> None:
    graph = llama()
    forced = {"pipeline": 2, "schedule": "1f1b", "micro_batch_size": 2, "recompute": "none"}
    assert plan(graph, nodes(device(8), device(8)), **forced).rank_order == ()
    assert plan(graph, nodes(device(8), device(0.45)), **forced).rank_order == (1, 0)


def test_little_memory_accumulates_gradients_over_micro_batches() -> None:
    graph = llama(layers=2, batch=16)
    assert plan(graph, node(device(8), 1), recompute="none").num_micro_batches == 1
    assert plan(graph, node(device(0.8), 1), recompute="none").num_micro_batches > 1


def test_slow_link_leaves_operators_whole() -> None:
    graph = llama()
    names = [plan(graph, node(device(), gigabytes=rate), pipeline=1, zero=0).stages[0].mesh.names for rate in (200, 5)]
    assert names == [("tensor",), ("replica",)]


def test_tight_memory_takes_a_schedule_that_keeps_less_in_flight() -> None:
    graph, forced = llama(batch=16), {"pipeline": 2, "micro_batch_size": 2, "recompute": "none"}
    ample, tight = (plan(graph, node(device(gib)), **forced) for gib in (8, 0.6))
    assert ample.schedule not in ("gpipe", "1f1b") and tight.schedule == "1f1b"
