"""The programs whose text is kept: one function a program, named like its file.

To add one, write a function here, list it in ``CASES`` and run ``python -m tests.golden.update``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from autopar.codegen import generate
from autopar.mesh import Mesh
from autopar.options import Parallelism, PlanOptions
from autopar.planner import plan_graph
from autopar.tracing import trace
from cost_models import Cluster
from tests.support.models import cross_entropy, gpt2, mlp
from tests.support.pipelines import pipeline_plan
from tests.support.plans import data_parallel_plan, make_plan
from tests.support.shapes import shape


def mlp_data_parallel() -> str:
    """The batch over two axes, parameters at rest sharded (ZeRO-3)."""
    torch.manual_seed(0)
    model, batch = mlp(8)
    graph = trace(model, batch, loss_fn=cross_entropy).graph
    return generate(data_parallel_plan(graph, Mesh((2, 2), ("data", "more")), zero=3), graph)


def collecting_replicated() -> str:
    """A loop over blocks with a result of each read after it."""
    model, batch = shape("collecting", 4)
    graph = trace(model, batch).graph
    return generate(make_plan(graph, Mesh((2,), ("data",))), graph)


def gpt2_data_and_tensor() -> str:
    """A whole model as the planner lays it out: fused q-k-v cut by heads, tied embeddings over the vocabulary."""
    torch.manual_seed(0)
    model, batch = gpt2(8, layers=4)
    graph = trace(model, batch).graph
    cluster = Cluster.homogeneous(num_nodes=2, devices_per_node=2)
    return generate(plan_graph(graph, cluster, PlanOptions(parallelism=Parallelism(data=2, tensor=2), mesh_shape=(2, 2))), graph)


def gpt2_two_stages() -> str:
    """A pipeline of two stages on data x tensor: micro-batches, runs computed again in one stage, whole blocks in the other."""
    torch.manual_seed(0)
    model, batch = gpt2(8, layers=4)
    graph = trace(model, batch).graph
    cuts = ("transformer.h.2.ln_1:layer_norm",)
    return generate(pipeline_plan(graph, cuts, (2, 2), "1f1b", 4, ("selective", "full")), graph)


CASES: dict[str, Callable[[], str]] = {
    case.__name__: case for case in (mlp_data_parallel, collecting_replicated, gpt2_data_and_tensor, gpt2_two_stages)
}
