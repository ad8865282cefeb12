"""Operators without a rule: computed replicated, priced, named in the report, and equal to one device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.strategies.registry import registered_targets
from cost_models import Cluster
from tests.support import own_operators as own

# Several outputs, outputs that are not differentiable, tensors by keyword, a user's own library, a higher-order operator.
UNKNOWN = (
    "aten.cummax.default",
    "aten.linalg_qr.default",
    "aten.linalg_inv.default",
    "aten.linalg_slogdet.default",
    "aten.cdist.default",
    "aten.renorm.default",
    "aten.bucketize.Tensor",
    "aten.grid_sampler.default",
    "own.low_and_high.default",
    "own.masked_sum.default",
    "higher_order.cond",
)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.square = nn.Parameter(torch.rand(16, 16) + 4 * torch.eye(16))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        h = h + torch.cummax(h, 1)[0]
        q, r = torch.linalg.qr(self.square)
        h = h @ q + r.diagonal() + torch.linalg.inv(self.square)[0] + torch.linalg.slogdet(self.square)[1]
        h = h + torch.cdist(h, h).sum(-1, keepdim=True)
        h = torch.renorm(h, 2, 0, 5.0)
        h = h + torch.bucketize(h.detach(), torch.linspace(0, 1, 5, dtype=h.dtype)).to(h.dtype)
        grid = torch.tanh(self.square[:4, :4]).reshape(1, 2, 4, 2).expand(h.shape[0], -1, -1, -1)
        h = nn.functional.grid_sample(h[:, None, None].expand(-1, 2, 4, 16), grid, align_corners=False).flatten(1)
        low, high = own.low_and_high(h)
        masked = torch.ops.own.masked_sum(h, mask=h > 0)
        masked = torch.cond(masked.sum() > 0, lambda x: x * 2, lambda x: x.exp(), (masked,))
        return (h.mean(1) + low * high + masked - labels).square().mean()


def test_operators_without_a_rule_are_priced_and_equal() -> None:
    unruled = sorted(set(UNKNOWN) & set(registered_targets()))
    if unruled:
        pytest.fail(f"{unruled} have a rule now; take others for this test")
    torch.manual_seed(0)
    model, inputs = Odd(), {"x": torch.randn(9, 16), "labels": torch.randn(9)}
    plan = autopar.plan(model, Cluster.local(2), inputs, parallelism=autopar.Parallelism(data=2))
    priced = {entry["target"]: entry for entry in plan.report()["fallbacks"]}
    assert set(UNKNOWN) <= set(priced)
    assert all(priced[target]["seconds"] > 0 and priced[target]["whole_bytes"] > 0 for target in UNKNOWN)
    found = autopar.verify(model, plan, inputs)
    assert found.passed, str(found)
