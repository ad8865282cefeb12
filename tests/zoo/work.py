"""How much of a model's work a plan computes split, and which operators it computes whole on every device.

The work of an operator is its rule's, forward and backward; that of one without a rule is counted by torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar.gradients import has_gradient
from autopar.graph import Operator, OpGraph
from autopar.layout import Shard
from autopar.plans import Plan, Resolved, graphs_of
from autopar.strategies import signature_of
from tests.support.interpret import run_operator


@dataclass(frozen=True)
class Work:
    """FLOPs of a step over all operators, and by target of those that are whole on the axes looked at."""

    total: float
    whole: dict[str, float]

    @property
    def split_share(self) -> float:
        """The part of the FLOPs that is computed split."""
        return 1.0 - sum(self.whole.values()) / self.total if self.total else 1.0

    def shares(self) -> dict[str, float]:
        """Targets computed whole with their part of all FLOPs, the largest first."""
        return {target: flops / max(self.total, 1.0) for target, flops in Counter(self.whole).most_common()}


def work_of(plan: Plan, graph: OpGraph, axes: Sequence[int] | None = None) -> Work:
    """The work of all stages; an operator is split where one of ``axes`` (by default any axis) shards a tensor of it."""
    total = 0.0
    whole: Counter[str] = Counter()
    for stage, part in zip(plan.stages, graphs_of(plan, graph), strict=True):
        resolved, gradient = Resolved(stage, part), has_gradient(part)
        looked_at = range(stage.mesh.num_axes) if axes is None else axes
        for operator in part.operators:
            flops = flops_of(operator, part, gradient)
            planned = resolved.operator(operator.id)
            states = [layout[axis] for layout in (*planned.inputs, *planned.outputs) for axis in looked_at]
            total += flops
            if not any(isinstance(state, Shard) for state in states):
                whole[operator.target] += flops
    return Work(total, dict(whole))


def tensor_axes(plan: Plan) -> list[int]:
    """The axes of a plan with a forced tensor axis that do not split the batch."""
    return [axis for axis, name in enumerate(plan.stages[0].mesh.names) if not name.startswith("data")]


def flops_of(operator: Operator, graph: OpGraph, gradient: frozenset[str]) -> float:
    """Forward and backward on whole tensors."""
    signature = signature_of(operator, graph)
    differentiated = any(value in gradient for value in operator.outputs)
    if signature is not None:
        return signature.flops + (signature.backward_flops if differentiated else 0.0)
    elements = sum(graph.values[value].num_elements for value in operator.outputs if value)
    return max(float(elements), _counted(operator, graph)) * (3.0 if differentiated else 1.0)


def _counted(operator: Operator, graph: OpGraph) -> float:
    """FLOPs of the matrix products inside an operator, forward, as torch counts them; 0 where it cannot run without values."""
    values = {
        name: torch.empty(graph.values[name].shape, dtype=getattr(torch, graph.values[name].dtype), device="meta")
        for name in operator.inputs
    }
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            run_operator(operator, values, graph.batch_size, graph.batch_size)
    except (RuntimeError, NotImplementedError, AttributeError):
        return 0.0
    return float(counter.get_total_flops())
