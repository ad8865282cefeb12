"""verify() on real processes over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.options import Parallelism, PlanOptions
from autopar.planner import plan_graph
from autopar.plans import Plan
from autopar.tracing import trace
from autopar.verifier import verify, verifying
from autopar.verifier.trial import TrialError
from cost_models import Cluster
from tests.support import models

pytestmark = pytest.mark.e2e


def planned(**degrees: Any) -> tuple[nn.Module, Plan, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, inputs = models.mlp(8)
    graph = trace(model, inputs, loss_fn=models.cross_entropy).graph
    parallelism = Parallelism(pipeline=1, micro_batch_size=8, **degrees)
    return model, plan_graph(graph, Cluster.local(2), PlanOptions(parallelism=parallelism)), inputs


def test_on_processes() -> None:
    model, plan, inputs = planned(data=2, zero=1)
    verify(model, plan, inputs, loss_fn=models.cross_entropy, processes=True, count_collectives=True).require()


def test_a_failing_process_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan, inputs = planned(data=2)
    monkeypatch.setattr(verifying, "generate", lambda *args: "raise RuntimeError('out of order')")
    with pytest.raises(TrialError, match=r"(?s)process \d of 2 failed.*RuntimeError: out of order"):
        verify(model, plan, inputs, loss_fn=models.cross_entropy, processes=True)
