"""Any legal plan, however odd, gives the program of the plain model and sends exactly what its ledger says (laws 1 and 2)."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from autopar.codegen import generate, ledger
from autopar.codegen.ledger import totals
from autopar.mesh import Mesh
from autopar.tracing import Traced, trace
from tests.support.models import ZOO, cross_entropy
from tests.support.random_plans import random_plan
from tests.support.running import assert_equal, run_program, values_of
from tests.support.shapes import SHAPES, shape


@cache
def trained(name: str, size: int) -> tuple[nn.Module, dict[str, torch.Tensor], Traced, dict[str, torch.Tensor], Any]:
    """A model after one backward pass, its batch, its trace, its values before, the loss. Tests leave them as they are."""
    torch.manual_seed(0)
    model, batch = shape(name, size) if name in SHAPES else ZOO[name](size)
    model, batch = model.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    traced = trace(model, batch, loss_fn=cross_entropy if name == "mlp" else None)
    values = values_of(model)
    loss = cross_entropy(model(batch["x"]), batch) if name == "mlp" else model(**batch)["loss"]
    loss.backward()
    return model, batch, traced, values, loss.detach()


CASES = [
    ("mlp", 4, (2,)), ("mlp", 5, (3,)), ("mlp", 5, (2, 2)), ("mlp", 4, (3, 2)), ("collecting", 5, (2, 2)), ("adding", 4, (2,)),
    ("showing", 5, (2,)), ("skipping", 4, (2, 2)), ("tying", 5, (2, 2)), ("tying", 4, (2, 2, 2)), ("gpt2", 4, (2,)),
    ("gpt2", 5, (2, 2)), ("moe", 4, (2, 2)), ("resnet", 4, (2,)), ("llama", 5, (2,)), ("bert", 4, (2,)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "size", "sizes"), CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_random_plan(name: str, size: int, sizes: tuple[int, ...], seed: int) -> None:
    model, batch, traced, values, loss = trained(name, size)
    mesh = Mesh(sizes, ("data", "tensor", "more")[: len(sizes)])
    plan = random_plan(traced.graph, mesh, seed)
    ran = run_program(generate(plan, traced.graph), traced, values, batch, mesh.num_devices)
    assert_equal(ran, model, loss)
    assert ran[0].sent == {key: size for key, size in totals(ledger(plan, traced.graph)).items() if size}
