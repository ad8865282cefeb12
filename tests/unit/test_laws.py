"""Laws that hold between parts: one set of named steps everywhere, programs as long for 96 blocks as for 4."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from autopar import runtime
from autopar.codegen import generate
from autopar.layout import PARTIAL, REPLICATED, SUMMED_GRADIENT, Cut, Shard
from autopar.options import Parallelism, PlanOptions
from autopar.planner import plan_graph
from autopar.reshard import COLLECTIVES, step_name, steps
from autopar.runtime import steps as runtime_steps
from autopar.tracing import trace
from cost_models import Cluster

STATES = (REPLICATED, SUMMED_GRADIENT, PARTIAL, Shard(0, Cut.plain(4)), Shard(1, Cut.plain(4)))


def test_reshard_and_runtime_have_the_same_steps() -> None:
    named = {step_name(a, b) for a in STATES for b in STATES} - {None}
    defined = {
        name
        for name, item in vars(runtime_steps).items()
        if callable(item) and getattr(item, "__module__", "") == runtime_steps.__name__ and not name.startswith("_")
        and not isinstance(item, type)
    }  # fmt: skip
    assert named == set(COLLECTIVES)
    assert set(COLLECTIVES) <= defined
    assert all(callable(getattr(runtime, name)) for name in COLLECTIVES)


def test_every_step_of_a_change_is_named() -> None:
    layouts = [(a, b) for a in STATES for b in STATES]
    used = {step.name for source in layouts for target in layouts for step in steps(source, target)}
    assert used == set(COLLECTIVES)


def program(layers: int) -> str:
    """A GPT of the given depth for 8 devices."""
    config = GPT2Config(
        n_embd=1024, n_layer=layers, n_head=16, vocab_size=50257, n_positions=512, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = GPT2LMHeadModel(config), torch.empty(8, 512, dtype=torch.long)
    graph = trace(model, {"input_ids": ids, "labels": ids}).graph
    options = PlanOptions(parallelism=Parallelism(pipeline=1, micro_batch_size=8))
    return generate(plan_graph(graph, Cluster.homogeneous(num_nodes=1, devices_per_node=8), options), graph)


def test_program_of_96_layers_is_as_long_as_that_of_4() -> None:
    shallow, deep = program(4).splitlines(), program(96).splitlines()
    assert len(shallow) == len(deep) < 400, (len(shallow), len(deep))
