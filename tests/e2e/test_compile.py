"""A planned program under torch.compile, on two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.codegen import generate
from autopar.options import Parallelism
from autopar.planner import plan
from autopar.runtime import Engine, load_program
from autopar.tracing import trace
from cost_models import Cluster
from tests.e2e.test_runtime_gloo import spawn
from tests.support.mixtures import mixtral
from tests.support.models import llama
from tests.support.running import values_of

pytestmark = pytest.mark.e2e


def losses_of(
    model: nn.Module, inputs: dict[str, Any], forced: Parallelism, num_steps: int, **compiling: Any
) -> tuple[Tensor, Tensor]:
    """The losses of a training on two ranks, of the program as it is and compiled."""
    graph = trace(model, inputs).graph
    cluster = Cluster.local(2, memory_bytes=2**33, num_cores=2)
    source = generate(plan(model, cluster, inputs, parallelism=forced), graph)
    values = values_of(model)
    losses = []
    for compiled in (False, True):
        engine = Engine(load_program(source))
        engine.load(values.__getitem__)
        if compiled:
            engine.compile(backend="aot_eager", **compiling)
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
        steps = []
        for _ in range(num_steps):
            steps.append(engine.step(**inputs))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(torch.stack(steps))
    plain, other = losses
    return plain, other


def run_compiled_llama() -> None:
    torch.manual_seed(0)
    model, inputs = llama(4, layers=2)
    forced = Parallelism(pipeline=1, micro_batch_size=4, tensor=2)
    plain, compiled = losses_of(model, inputs, forced, 3, fullgraph=True)
    torch.testing.assert_close(plain, compiled, rtol=1e-6, atol=0)
    assert plain[0] > plain[-1]


def run_compiled_experts() -> None:
    """What an expert does is a function of the program, called from one that is not compiled."""
    model, inputs = mixtral()
    forced = Parallelism(pipeline=1, micro_batch_size=8, expert=2, expert_form="exchanged")
    plain, compiled = losses_of(model, inputs, forced, 2)
    torch.testing.assert_close(plain, compiled, rtol=1e-10, atol=0)
    assert plain[0] > plain[1]


@pytest.mark.slow
def test_a_program_with_experts_compiles() -> None:
    spawn(run_compiled_experts)


def test_a_planned_program_compiles() -> None:
    spawn(run_compiled_llama)
