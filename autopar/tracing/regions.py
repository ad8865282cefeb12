"""Higher-order operators: a region without gradient or under autocast is written into its surroundings, ``torch.cond`` is an
operator with branches, any other one is refused by its name.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch._ops import HigherOrderOperator

from autopar.tracing import branches
from autopar.tracing.autocast import Autocast
from autopar.tracing.targets import region_name


class Lowering(branches.Lowering, Protocol):
    """A lowering with what regions change while they last."""

    grad_enabled: bool
    autocast: Autocast | None

    def device_type(self) -> str: ...


def region(lowering: Lowering, node: torch.fx.Node, target: HigherOrderOperator, env: dict[torch.fx.Node, Any]) -> Any:
    """The places of what a higher-order operator makes."""
    name = region_name(target)
    if name == "wrap_with_set_grad_enabled":
        enabled, body, *arguments = node.args
        before, lowering.grad_enabled = lowering.grad_enabled, bool(enabled)
        results = lowering.run_graph(env[body], [env[item] for item in arguments])  # type: ignore[index]
        lowering.grad_enabled = before
        return tuple(results)
    if name == "wrap_with_autocast":
        device_type, dtype, enabled, _, body, *arguments = node.args
        before_region = lowering.autocast
        if device_type == lowering.device_type():
            assert isinstance(dtype, torch.dtype), "autocast has a type"
            lowering.autocast = Autocast(lowering.device_type(), dtype) if enabled else None
        results = lowering.run_graph(env[body], [env[item] for item in arguments])  # type: ignore[index]
        lowering.autocast = before_region
        return tuple(results)
    if name == "cond":
        return branches.conditional(lowering, node, env)
    lowering.fail(f"uses the higher-order operator {name}, which autopar cannot plan; write it with plain operators")
