"""The programs whose text is kept: one function a program, named like its file.

To add one, write a function here, list it in ``CASES`` and run ``python -m tests.golden.update``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from autopar.codegen import generate
from autopar.mesh import Mesh
from autopar.tracing import trace
from tests.support.models import cross_entropy, mlp
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


CASES: dict[str, Callable[[], str]] = {case.__name__: case for case in (mlp_data_parallel, collecting_replicated)}
