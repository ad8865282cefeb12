"""The search finds by itself what experts choose by hand, where it is the best. One stage and one micro-batch here."""

from __future__ import annotations

from collections import Counter

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autopar.codegen.ledger import ledger
from autopar.graph import OpGraph
from autopar.options import Parallelism, PlanOptions
from autopar.planner import plan_graph
from autopar.plans import Plan, Resolved
from autopar.reshard import steps
from autopar.tracing import trace
from cost_models import Cluster

HIDDEN = 8192
WHOLE = PlanOptions(parallelism=Parallelism(pipeline=1, micro_batch_size=256, recompute="none"))


def llama(layers: int, batch: int, sequence: int, hidden: int = HIDDEN, heads: int = 64, inner: int = 28672) -> OpGraph:
    """A Llama of bfloat16 on meta with a vocabulary of 32000."""
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, vocab_size=32000, max_position_embeddings=sequence,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.empty(batch, sequence, dtype=torch.long)
    return trace(model, {"input_ids": tokens, "labels": tokens}).graph


def labels(plan: Plan, graph: OpGraph, axis: int, but_for_block: int | None = None) -> dict[str, set[str]]:
    """The letters that each kind of layer splits on an axis, over all blocks; cuts left out."""
    resolved = Resolved(plan.stages[0], graph)
    found: dict[str, set[str]] = {}
    left_out = () if but_for_block is None else graph.block_groups[0].blocks[but_for_block].operators
    for operator in graph.operators:
        if operator.id in left_out:
            continue
        if operator.target.split(".")[1] in ("linear", "addmm", "scaled_dot_product_attention"):
            name = operator.id.split(":")[0].split(".")[-1]
            letter = resolved.operator(operator.id).label.split()[axis].split("[")[0]
            found.setdefault(name, set()).add(letter)
    return found


COLUMN_THEN_ROW = {
    "q_proj": {"n"}, "k_proj": {"n"}, "v_proj": {"n"}, "self_attn": {"b1"}, "o_proj": {"k"},
    "gate_proj": {"n"}, "up_proj": {"n"}, "down_proj": {"k"},
}  # fmt: skip


def block_sums(plan: Plan, graph: OpGraph, block: int) -> Counter[str]:
    """Forward collectives on activations inside one block, by kind."""
    resolved = Resolved(plan.stages[0], graph)
    found: Counter[str] = Counter()
    kinds = {"reduce_from": "all_reduce", "all_reduce": "all_reduce", "reduce_scatter": "reduce_scatter"}
    kinds |= {"gather": "all_gather", "all_gather": "all_gather", "all_to_all": "all_to_all"}
    done = set()
    for name in graph.block_groups[0].blocks[block].operators:
        operator = graph.operator_of[name]
        for value, wanted in zip(operator.inputs, resolved.operator(name).inputs, strict=True):
            if graph.values[value].kind == "computed" and (value, wanted) not in done:
                done.add((value, wanted))
                found.update(kinds[s.name] for s in steps(resolved.layout(value), wanted) if s.name in kinds)
    return found


def test_tensor_parallelism_where_weights_dominate() -> None:
    graph = llama(layers=10, batch=8, sequence=64)
    plan = plan_graph(graph, Cluster.homogeneous(num_nodes=1, devices_per_node=8), WHOLE)
    mesh = plan.stages[0].mesh
    assert mesh.shape == (8,) and mesh.names == ("tensor",)
    found = labels(plan, graph, 0)
    assert {name: found[name] for name in COLUMN_THEN_ROW} == COLUMN_THEN_ROW
    sums = block_sums(plan, graph, 5)
    reduced = sums["all_reduce"] + sums["reduce_scatter"]
    assert reduced == 2 and sums["all_gather"] == sums["reduce_scatter"] and not sums["all_to_all"], sums


def test_tensor_inside_the_nodes_and_data_across_them() -> None:
    graph = llama(layers=12, batch=64, sequence=768, inner=16384)
    cluster = Cluster.homogeneous(num_nodes=4, devices_per_node=8, inter_link="InfiniBand-HDRx4")
    plan = plan_graph(graph, cluster, WHOLE)
    mesh = plan.stages[0].mesh
    assert mesh.shape == (4, 8) and mesh.names == ("data", "tensor"), str(mesh)
    # The first block may do otherwise with what the embedding hands it.
    across, inside = (labels(plan, graph, axis, but_for_block=0) for axis in (0, 1))
    assert set().union(*(across[name] for name in COLUMN_THEN_ROW)) == {"b0"}, across
    assert not any("b0" in letters for letters in inside.values()), inside
    columns_and_rows = {name: letters for name, letters in COLUMN_THEN_ROW.items() if name != "o_proj"}
    assert {name: inside[name] for name in columns_and_rows} == columns_and_rows


def test_zero_where_activations_dominate_and_states_do_not_fit() -> None:
    graph = llama(layers=24, batch=16, sequence=4096, hidden=4096, heads=32, inner=11008)
    cluster = Cluster.homogeneous(num_nodes=1, devices_per_node=8)
    plan = plan_graph(graph, cluster, WHOLE)
    assert plan.stages[0].mesh.names == ("data",)
    found = labels(plan, graph, 0)
    assert all(letters == {"b0"} for letters in found.values()), found
    large = [p for value, p in plan.stages[0].parameters.items() if graph.values[value].num_elements > 2**24]
    assert large and all(parameter.zero in (2, 3) or "S" in str(parameter.use) for parameter in large)
    data = plan.report()["alternatives"]["by_hand"]["data"]
    assert data["missing_bytes"] > 0, "replicated states must not fit, or this test shows nothing"


def test_pure_data_parallelism_for_a_small_model() -> None:
    config = GPT2Config(
        n_embd=384, n_layer=6, n_head=6, vocab_size=5000, n_positions=256, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model, tokens = GPT2LMHeadModel(config), torch.empty(256, 256, dtype=torch.long)
    graph = trace(model, {"input_ids": tokens, "labels": tokens}).graph
    plan = plan_graph(graph, Cluster.homogeneous(num_nodes=1, devices_per_node=8), WHOLE)
    assert plan.stages[0].mesh.shape == (8,) and plan.stages[0].mesh.names == ("data",)
    assert {parameter.zero for parameter in plan.stages[0].parameters.values()} == {0}
    sent = {entry.phase for entry in ledger(plan, graph)}
    assert "gradient" in sent


def test_plan_is_the_same_twice() -> None:
    graph = llama(layers=2, batch=8, sequence=64, hidden=256, heads=4, inner=512)
    cluster = Cluster.homogeneous(num_nodes=1, devices_per_node=4)
    assert plan_graph(graph, cluster, WHOLE).to_json() == plan_graph(graph, cluster, WHOLE).to_json()
