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
from tests.support.attention import Attention, squares

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


@pytest.mark.slow
def test_a_ring_on_three_processes() -> None:
    """Uneven pieces of keys and values from process to process, rows traded first; what is sent is what is planned."""
    torch.manual_seed(0)
    model, inputs = Attention(12, 4, 2), (torch.randn(2, 11, 12),)
    graph = trace(model, inputs, loss_fn=squares).graph
    options = PlanOptions(parallelism=Parallelism(pipeline=1, context=3, context_form="ring", micro_batch_size=2))
    plan = plan_graph(graph, Cluster.local(3), options)
    verify(model, plan, inputs, loss_fn=squares, processes=True, count_collectives=True).require()


def test_a_failing_process_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan, inputs = planned(data=2)
    monkeypatch.setattr(verifying, "generate", lambda *args: "raise RuntimeError('out of order')")
    with pytest.raises(TrialError, match=r"(?s)process \d of 2 failed.*RuntimeError: out of order"):
        verify(model, plan, inputs, loss_fn=models.cross_entropy, processes=True)
