"""The plan at a glance: the model, the cluster, what each mesh axis does, and what a user should know.

Enters: the stages' views. Leaves: JSON objects.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from autopar.graph import Operator, OpGraph
from autopar.mesh import Mesh
from autopar.report.views import View
from cost_models import Cluster, axis_groups


def model_json(graph: OpGraph, flops: float) -> dict[str, Any]:
    """The model as it was traced; ``flops`` of a step."""
    values = [graph.values[parameter.value] for parameter in graph.parameters]
    return {
        "name": graph.model,
        "num_parameters": sum(value.num_elements for value in values),
        "parameter_bytes": sum(value.num_bytes for value in values),
        "dtype": main_dtype(graph),
        "batch_size": graph.batch_size,
        "inputs": {entry.path: list(graph.values[entry.value].shape) for entry in graph.inputs},
        "training": graph.training,
        "has_loss": graph.loss is not None,
        "num_operators": len(graph.operators),
        "flops_per_step": flops,
        "blocks": {group.name: len(group.blocks) for group in graph.block_groups},
    }


def main_dtype(graph: OpGraph) -> str:
    """The dtype of most parameter bytes."""
    sizes: Counter[str] = Counter()
    for parameter in graph.parameters:
        sizes[graph.values[parameter.value].dtype] += graph.values[parameter.value].num_bytes
    return sizes.most_common(1)[0][0] if sizes else "float32"


def cluster_json(cluster: Cluster) -> dict[str, Any]:
    """Nodes in order, equal ones that follow each other as one entry."""
    nodes = []
    for node, equal in groupby(cluster.nodes):
        nodes.append(
            {
                "count": len(list(equal)),
                "device": node.device.name,
                "num_devices": node.num_devices,
                "link": node.link.name,
                "memory_bytes": node.device.memory_bytes,
                "source": node.device.source,
            }
        )
    return {
        "name": cluster.name,
        "num_devices": cluster.num_devices,
        "nodes": nodes,
        "inter_link": cluster.inter_link.name if len(cluster.nodes) > 1 else None,
    }


def axis_links(cluster: Cluster, mesh: Mesh, axis: int, first_devices: Sequence[int] = (0,)) -> list[str]:
    """The links that a mesh axis communicates over, in the meshes that begin at these devices: within nodes, between them,
    or both."""
    if mesh.shape[axis] == 1:
        return []
    size, stride = mesh.shape[axis], mesh.stride(axis)
    return links_of(
        cluster, [group for first in first_devices for group in axis_groups(size, stride, first, mesh.num_devices)]
    )


def links_of(cluster: Cluster, groups: Sequence[Sequence[int]]) -> list[str]:
    """The links within groups of devices."""
    within, between = dict[str, None](), False
    for group in groups:
        per_node = Counter(cluster.node_of(rank) for rank in group)
        within.update((cluster.nodes[node].link.name, None) for node, count in per_node.items() if count > 1)
        between = between or len(per_node) > 1
    return [*within, *([cluster.inter_link.name] if between else [])]


def mesh_json(views: Sequence[View], cluster: Cluster) -> dict[str, Any]:
    """The mesh of each pipeline rank, and for each axis its links and what it splits, by share of the model's FLOPs."""
    mesh, firsts = views[0].mesh, list(dict.fromkeys(view.first_device for view in views))
    shares = axis_shares(views)
    axes = [
        {
            "name": name,
            "size": size,
            "stride": mesh.stride(axis),
            "links": axis_links(cluster, mesh, axis, firsts),
            "splits": shares[axis],
            "zero": _zero_levels(views, axis),
        }
        for axis, (name, size) in enumerate(zip(mesh.names, mesh.shape, strict=True))
    ]
    return {"shape": list(mesh.shape), "names": list(mesh.names), "axes": axes}


def axis_shares(views: Sequence[View]) -> list[dict[str, float]]:
    """For each axis, the share of the model's FLOPs of which it splits the batch, another dim, or nothing."""
    sums = [{"batch": 0.0, "other": 0.0, "nothing": 0.0} for _ in views[0].mesh.shape]
    for view in views:
        for operator in view.graph.operators:
            signature = view.signature(operator.id)
            if signature is None or not signature.flops:
                continue
            strategy = view.operator_table(operator.id).strategies[view.choice(operator.id)]
            for axis, choice in enumerate(strategy.axes):
                kind = "nothing" if choice.letter is None else "batch" if choice.splits_batch else "other"
                sums[axis][kind] += signature.flops
    totals = [sum(kinds.values()) or 1.0 for kinds in sums]
    return [{kind: part / total for kind, part in kinds.items()} for kinds, total in zip(sums, totals, strict=True)]


def _zero_levels(views: Sequence[View], axis: int) -> dict[str, int]:
    """How many bytes of parameters rest at each ZeRO level on an axis: sharded there where their use is not."""
    levels: dict[str, tuple[int, int]] = {}
    for view in views:
        for parameter in view.graph.parameters:
            plan = view.resolved.parameter(parameter.value)
            same = str(plan.use[axis])[0] == str(plan.storage[axis])[0] or str(plan.storage[axis])[0] != "S"
            levels[parameter.value] = (0 if same else plan.zero, view.graph.values[parameter.value].num_bytes)
    found: Counter[str] = Counter()
    for level, num_bytes in levels.values():
        found[str(level)] += num_bytes
    return dict(sorted(found.items()))


def work_json(
    views: Sequence[View], micro_batches: float, step_seconds: float, graph: OpGraph, cluster: Cluster
) -> dict[str, Any]:
    """Model FLOPs over what the devices could do in the step at their peak; ``repeated_work`` is what several devices do
    alike, as a part of the model's FLOPs; ``recomputed_work`` what is done again in backward, as a part of what is done
    once. ``micro_batches``: how many of the largest size make a step."""
    dtype, flops = main_dtype(graph), model_flops(views, micro_batches)
    peak = math.fsum(node.num_devices * node.device.flops_per_second(dtype) for node in cluster.nodes)
    done, again = _done_flops(views, micro_batches)
    return {
        "value": flops / (step_seconds * peak) if step_seconds > 0 else 0.0,
        "model_flops": flops,
        "peak_flops_per_second": peak,
        "dtype": dtype,
        "peak_source": "; ".join(dict.fromkeys(f"{node.device.name}: {node.device.source}" for node in cluster.nodes)),
        "repeated_work": max(0.0, done / flops - 1.0) if flops > 0 else 0.0,
        "recomputed_work": again / done if done > 0 else 0.0,
    }


def model_flops(views: Sequence[View], micro_batches: float) -> float:
    """FLOPs of a step on one device, forward and backward, nothing computed twice."""
    found: dict[str, float] = {}
    for view in views:
        for operator in view.graph.operators:
            signature = view.signature(operator.id)
            if signature is not None:
                differentiated = any(view.has_gradient(value) for value in operator.outputs)
                found[operator.id] = signature.flops + (signature.backward_flops if differentiated else 0.0)
    return math.fsum(found.values()) * micro_batches


def _done_flops(views: Sequence[View], micro_batches: float) -> tuple[float, float]:
    """FLOPs of a step on all devices together, and those of forward passes that are done again."""
    done, again = [], []
    for view in views:
        runs, known = view.keeping.run_of, dict[tuple[str, int, bool], tuple[float, float]]()
        for operator in view.graph.operators:
            recomputed = view.names[operator.id] in runs
            key = view.canonical(operator.id), view.choice(operator.id), recomputed
            if key not in known:
                known[key] = _flops_of(view, operator, recomputed)
            done.append(known[key][0])
            again.append(known[key][1])
    return math.fsum(done) * micro_batches, math.fsum(again) * micro_batches


def _flops_of(view: View, operator: Operator, recomputed: bool) -> tuple[float, float]:
    """FLOPs of an operator on all devices for a micro-batch, and those of its forward pass where that is done again."""
    flops = view.mesh.num_devices * float(view.operator_table(operator.id).flops[view.choice(operator.id)])
    signature = view.signature(operator.id)
    if not recomputed or signature is None or not signature.flops:
        return flops, 0.0
    differentiated = any(view.has_gradient(value) for value in operator.outputs)
    both = signature.flops + (signature.backward_flops if differentiated else 0.0)
    return flops, flops * signature.flops / both


def warnings_of(
    views: Sequence[View], graph: OpGraph, repeated_work: float, gap: float, max_variants: int
) -> list[str]:
    """What a user should know before relying on the plan."""
    found = list(graph.warnings)
    if graph.loss is None:
        found.append("the model has no loss: nothing is differentiated, and the step is a forward pass; give loss_fn=")
    if repeated_work > 0.05:
        found.append(
            f"the devices together compute {1 + repeated_work:.3g} times the model's FLOPs: some operators are computed "
            "whole on several devices (they do not divide, or splitting them costs more than it saves)"
        )
    limited = {
        group: None
        for view in views
        for group, numbers in view.plan.variants.items()
        if max(numbers, default=0) + 1 >= max_variants
    }
    if gap > 1e-6 and limited:
        found.append(
            f"blocks of {', '.join(limited)} have {max_variants} variants, as many as max_variants allows; without this "
            f"limit a step could be up to {100 * gap:.2g}% faster"
        )
    without = {
        operator.target for view in views for operator in view.graph.operators if view.signature(operator.id) is None
    }
    if without:
        found.append(
            f"no sharding rule for {', '.join(sorted(without))}: computed whole on every device (see fallbacks)"
        )
    return found
