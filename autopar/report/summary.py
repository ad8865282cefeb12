"""The plan at a glance: the model, the cluster, what each mesh axis does, and what a step is predicted to take.

Enters: the plan's parts. Leaves: JSON objects.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from autopar.costing.candidate import Candidate
from autopar.graph import OpGraph
from autopar.mesh import Mesh
from autopar.plans import Resolved, StagePlan
from autopar.report.breakdown import Bytes, Seconds, chosen
from cost_models import Cluster, axis_groups


def model_json(graph: OpGraph, candidate: Candidate) -> dict[str, Any]:
    """The model as it was traced."""
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
        "flops_per_step": model_flops(graph, candidate),
        "blocks": {group.name: len(group.blocks) for group in graph.block_groups},
    }


def main_dtype(graph: OpGraph) -> str:
    """The dtype of most parameter bytes."""
    sizes: Counter[str] = Counter()
    for parameter in graph.parameters:
        sizes[graph.values[parameter.value].dtype] += graph.values[parameter.value].num_bytes
    return sizes.most_common(1)[0][0] if sizes else "float32"


def model_flops(graph: OpGraph, candidate: Candidate) -> float:
    """FLOPs of a step on one device, forward and backward, nothing computed twice."""
    prepared = candidate.costed.prepared
    total = 0.0
    for operator in graph.operators:
        signature = prepared.signatures.get(prepared.name(operator.id))
        if signature is not None:
            differentiated = any(value in prepared.gradient for value in operator.outputs)
            total += signature.flops + (signature.backward_flops if differentiated else 0.0)
    return total


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


def axis_links(cluster: Cluster, mesh: Mesh, axis: int) -> list[str]:
    """The links that a mesh axis communicates over: within nodes, between them, or both."""
    if mesh.shape[axis] == 1:
        return []
    within, between = dict[str, None](), False
    for group in axis_groups(mesh.shape[axis], mesh.stride(axis), 0, mesh.num_devices):
        per_node = Counter(cluster.node_of(rank) for rank in group)
        within.update((cluster.nodes[node].link.name, None) for node, count in per_node.items() if count > 1)
        between = between or len(per_node) > 1
    return [*within, *([cluster.inter_link.name] if between else [])]


def mesh_json(candidate: Candidate, resolved: Resolved, cluster: Cluster) -> dict[str, Any]:
    """The mesh, and for each axis its links and what it splits, by share of the model's FLOPs."""
    mesh = resolved.stage.mesh
    shares = axis_shares(candidate, resolved.graph, mesh)
    axes = [
        {
            "name": name,
            "size": size,
            "stride": mesh.stride(axis),
            "links": axis_links(cluster, mesh, axis),
            "splits": shares[axis],
            "zero": _zero_levels(resolved, axis),
        }
        for axis, (name, size) in enumerate(zip(mesh.names, mesh.shape, strict=True))
    ]
    return {"shape": list(mesh.shape), "names": list(mesh.names), "axes": axes}


def axis_shares(candidate: Candidate, graph: OpGraph, mesh: Mesh) -> list[dict[str, float]]:
    """For each axis, the share of the model's FLOPs of which it splits the batch, another dim, or nothing."""
    costed, choices = candidate.costed, chosen(candidate)
    sums = [{"batch": 0.0, "other": 0.0, "nothing": 0.0} for _ in mesh.shape]
    for operator in graph.operators:
        signature = costed.prepared.signatures.get(costed.prepared.name(operator.id))
        if signature is None or not signature.flops:
            continue
        strategy = costed.operator_table(operator.id).strategies[choices[costed.nodes[operator.id]]]
        for axis, choice in enumerate(strategy.axes):
            kind = "nothing" if choice.letter is None else "batch" if choice.splits_batch else "other"
            sums[axis][kind] += signature.flops
    totals = [sum(kinds.values()) or 1.0 for kinds in sums]
    return [{kind: part / total for kind, part in kinds.items()} for kinds, total in zip(sums, totals, strict=True)]


def _zero_levels(resolved: Resolved, axis: int) -> dict[str, int]:
    """How many bytes of parameters rest at each ZeRO level on an axis: sharded there where their use is not."""
    found: Counter[str] = Counter()
    for parameter in resolved.graph.parameters:
        plan = resolved.parameter(parameter.value)
        same = str(plan.use[axis])[0] == str(plan.storage[axis])[0] or str(plan.storage[axis])[0] != "S"
        found[str(0 if same else plan.zero)] += resolved.graph.values[parameter.value].num_bytes
    return dict(sorted(found.items()))


def stages_json(graph: OpGraph, stage: StagePlan) -> list[dict[str, Any]]:
    """Each stage with its devices and blocks; ``variants`` says which blocks are sharded alike."""
    blocks = [
        {
            "group": group.name,
            "num_blocks": len(group.blocks),
            "num_variants": max(stage.variants.get(group.name, (0,))) + 1,
            "variants": runs(stage.variants.get(group.name, (0,) * len(group.blocks))),
        }
        for group in graph.block_groups
    ]
    return [
        {
            "index": 0,
            "first_device": 0,
            "num_devices": stage.mesh.num_devices,
            "mesh_shape": list(stage.mesh.shape),
            "blocks": blocks,
        }
    ]


def runs(numbers: Sequence[int]) -> list[list[int]]:
    """Run lengths: 0 0 0 1 -> [[0, 3], [1, 1]]."""
    return [[number, len(list(equal))] for number, equal in groupby(numbers)]


def predicted_json(
    seconds: Seconds, memory: Bytes, candidate: Candidate, graph: OpGraph, cluster: Cluster
) -> dict[str, Any]:
    """The predicted step."""
    step = candidate.assignment.cost_seconds
    return {
        "provenance": "estimated",
        "step_seconds": step,
        "samples_per_second": graph.batch_size / step if step > 0 else None,
        "breakdown": {
            "compute_seconds": seconds.compute,
            "copies_seconds": seconds.copies,
            "resharding_seconds": seconds.resharding,
            "parameter_communication_seconds": seconds.parameters,
            "optimizer_seconds": seconds.optimizer,
        },
        "memory": {
            "parameter_bytes": memory.parameters,
            "working_copy_bytes": memory.working_copies,
            "gradient_bytes": memory.gradients,
            "optimizer_state_bytes": memory.optimizer_states,
            "saved_activation_bytes": memory.saved_activations,
            "momentary_bytes": memory.momentary,
            "total_bytes": memory.total,
            "available_bytes": candidate.available_bytes,
        },
        "mfu": utilisation(step, candidate, graph, cluster),
    }


def utilisation(step_seconds: float, candidate: Candidate, graph: OpGraph, cluster: Cluster) -> dict[str, Any]:
    """Model FLOPs over what the devices could do in the step at their peak, and how much of the work is done twice."""
    dtype, flops = main_dtype(graph), model_flops(graph, candidate)
    peak = math.fsum(node.num_devices * node.device.flops_per_second(dtype) for node in cluster.nodes)
    costed, choices = candidate.costed, chosen(candidate)
    done = cluster.num_devices * math.fsum(
        float(costed.operator_table(operator.id).flops[choices[costed.nodes[operator.id]]])
        for operator in graph.operators
    )
    return {
        "value": flops / (step_seconds * peak) if step_seconds > 0 else 0.0,
        "model_flops": flops,
        "peak_flops_per_second": peak,
        "dtype": dtype,
        "peak_source": "; ".join(dict.fromkeys(f"{node.device.name}: {node.device.source}" for node in cluster.nodes)),
        "repeated_work": max(0.0, done / flops - 1.0) if flops > 0 else 0.0,
    }


def warnings_of(
    candidate: Candidate, graph: OpGraph, stage: StagePlan, repeated_work: float, gap: float, max_variants: int
) -> list[str]:
    """What a user should know before relying on the plan."""
    found = list(graph.warnings)
    if graph.loss is None:
        found.append("the model has no loss: nothing is differentiated, and the step is a forward pass; give loss_fn=")
    if repeated_work > 0.05:
        found.append(
            f"{100 * repeated_work:.0f}% more FLOPs are computed than the model has: some operators are computed whole on "
            "several devices (they do not divide, or splitting them costs more than it saves); so these devices are in "
            "part idle"
        )
    limited = [group for group, numbers in stage.variants.items() if max(numbers, default=0) + 1 >= max_variants]
    if gap > 1e-6 and limited:
        found.append(
            f"blocks of {', '.join(limited)} have {max_variants} variants, as many as max_variants allows; without this "
            f"limit a step could be up to {100 * gap:.2g}% faster"
        )
    fallbacks = {graph.operator_of[name].target for name in candidate.costed.prepared.fallbacks}
    if fallbacks:
        found.append(
            f"no sharding rule for {', '.join(sorted(fallbacks))}: computed whole on every device (see fallbacks)"
        )
    return found
