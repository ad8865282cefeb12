"""Each stage: where it is, what it holds, its seconds and bytes; and the predicted step of all together.

Enters: the stages' views, the simulated step. Leaves: JSON objects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

from autopar.graph import OpGraph
from autopar.report.breakdown import Bytes, Seconds, added, bytes_of
from autopar.report.views import View
from autopar.staging import derived_operators
from cost_models import Hops, Simulation

Item = TypeVar("Item")


def stages_json(
    views: Sequence[View], seconds: Sequence[Seconds], graph: OpGraph, hops: Hops
) -> list[dict[str, Any]]:
    """All stages in the order of the model, each with its ``seconds``. ``like`` is the first stage that is planned in the same
    way."""
    return [
        {
            "index": view.index,
            "pipeline_rank": view.rank,
            "first_device": view.first_device,
            "num_devices": view.mesh.num_devices,
            "mesh_shape": list(view.mesh.shape),
            "like": view.like,
            **_modules(view, several=len(views) > 1),
            "blocks": _blocks(view, graph),
            "in_flight": view.costed.setting.in_flight,
            "seconds": _seconds(view, own, hops),
            "memory": bytes_of(view).to_json(view.candidate.available_bytes, view.candidate.host_available_bytes),
        }
        for view, own in zip(views, seconds, strict=True)
    ]


def _seconds(view: View, seconds: Seconds, hops: Hops) -> dict[str, float]:
    """A micro-batch's seconds, those of once a step, and those of the whole step by kind. Messages run beside the computing,
    so that their seconds are no part of ``busy_seconds``."""
    times, index = view.times, view.index
    ahead = hops.forward_seconds[index] if index < len(hops.forward_seconds) else 0.0
    back = hops.backward_seconds[index - 1] if index else 0.0
    return {
        "forward_seconds": times.forward_seconds,
        "backward_seconds": times.backward_input_seconds + times.backward_weight_seconds,
        "backward_weight_seconds": times.backward_weight_seconds,
        "once_seconds": times.once_seconds,
        "busy_seconds": seconds.total,
        **seconds.to_json(),
        "send_recv_seconds": view.num_micro_batches * (ahead + back),
    }


def _modules(view: View, several: bool) -> dict[str, str]:
    """The modules of a stage's first and last operators, those that no parameter leads to left out."""
    derived = derived_operators(view.graph) if several else frozenset()
    modules = [operator.module for operator in view.graph.operators if operator.id not in derived and operator.module]
    return {"first_module": modules[0] if modules else "", "last_module": modules[-1] if modules else ""}


def _blocks(view: View, graph: OpGraph) -> list[dict[str, Any]]:
    """The whole blocks of a stage: ``variants`` says which are sharded alike, ``recompute`` what is computed again."""
    whole = {group.name: [block.path for block in group.blocks] for group in graph.block_groups}
    found = []
    for group in view.graph.block_groups:
        variants = view.plan.variants.get(group.name, (0,) * len(group.blocks))
        modes = view.plan.recompute.get(group.name, ("none",) * len(group.blocks))
        paths = whole.get(group.name, [])
        found.append(
            {
                "group": group.name,
                "first_block": group.blocks[0].path,
                "last_block": group.blocks[-1].path,
                "num_blocks": len(group.blocks),
                "num_in_model": len(paths) or len(group.blocks),
                "num_variants": max(variants, default=0) + 1,
                "variants": runs(variants),
                "recompute": runs(modes),
            }
        )
    return found


def runs(items: Sequence[Item]) -> list[list[Item | int]]:
    """Run lengths: 0 0 0 1 -> [[0, 3], [1, 1]]."""
    return [[item, len(list(equal))] for item, equal in groupby(items)]


def predicted_json(
    views: Sequence[View],
    seconds: Sequence[Seconds],
    simulation: Simulation,
    step_seconds: float,
    batch_size: int,
    work: Mapping[str, Any],
) -> dict[str, Any]:
    """The predicted step. ``breakdown`` is the mean over the pipeline ranks and adds up to the step; ``memory`` is that of
    the devices of the fullest rank, all of its stages together."""
    ranks = sorted({view.rank for view in views})
    kinds = added(seconds, Seconds)
    mean = {kind: seconds / len(ranks) for kind, seconds in kinds.to_json().items()}
    idle = step_seconds - math.fsum(mean.values())
    memory = {rank: added((bytes_of(view) for view in views if view.rank == rank), Bytes) for rank in ranks}
    available = {rank: math.fsum(v.candidate.available_bytes for v in views if v.rank == rank) for rank in ranks}
    host = {rank: max(v.candidate.host_available_bytes for v in views if v.rank == rank) for rank in ranks}
    fullest = max(ranks, key=lambda rank: memory[rank].total / available[rank])
    return {
        "step_seconds": step_seconds,
        "samples_per_second": batch_size / step_seconds if step_seconds > 0 else None,
        "breakdown": {**mean, "idle_seconds": idle if idle > 1e-9 * step_seconds else 0.0},
        "bubble_fraction": max(0.0, simulation.bubble_fraction) if len(ranks) > 1 else 0.0,
        "memory": {**memory[fullest].to_json(available[fullest], host[fullest]), "pipeline_rank": fullest},
        "mfu": dict(work),
    }
