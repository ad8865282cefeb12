"""What each operator and each parameter does: one entry for all occurrences in repeated blocks.

Enters: the plan of each operator (resolved), and the candidate that it came from. Leaves: lists of JSON objects, in the model's
order. A report is as long for 96 layers as for 2: the entry of a block's representative has the number of occurrences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from autopar.costing.candidate import Candidate
from autopar.graph import Operator, OpGraph
from autopar.layout import PARTIAL, Layout, Shard, layout_text
from autopar.plans import Resolved
from autopar.report.breakdown import chosen
from autopar.strategies.choices import AxisChoice, Strategy
from autopar.strategies.rule import Signature, letters_of

Entry = dict[str, Any]


def operator_entries(candidate: Candidate, resolved: Resolved) -> list[Entry]:
    """Every distinct operator: where it comes from, how it is split, what it costs."""
    costed, choices = candidate.costed, chosen(candidate)
    graph, stage = resolved.graph, resolved.stage
    occurrences = Counter(resolved.representative_operator(operator.id) for operator in graph.operators)
    changes = _conversion_seconds(candidate)
    entries = []
    for operator in graph.operators:
        if operator.id not in occurrences:
            continue
        node = costed.nodes[operator.id]
        choice = choices[node]
        table, plan = costed.operator_table(operator.id), stage.operators[operator.id]
        strategy = table.strategies[choice]
        signature = costed.prepared.signatures.get(costed.prepared.name(operator.id))
        compute = float(table.compute_seconds[choice])
        entries.append(
            {
                "id": operator.id,
                "module": operator.module,
                "source": operator.source,
                "target": operator.target,
                "kind": signature.kind if signature else "fallback",
                "strategy": plan.label,
                "splits": axis_words(strategy, signature, stage.mesh.names),
                "inputs": layouts_json(plan.inputs),
                "outputs": layouts_json(plan.outputs),
                "compute_seconds": compute,
                "exchange_seconds": float(costed.problem.node_costs_seconds[node][choice]) - compute,
                "conversion_seconds": changes[node],
                "device_flops": float(table.flops[choice]),
                "saved_bytes": float(table.saved_bytes[choice]),
                "occurrences": occurrences[operator.id],
            }
        )
    return entries


def layouts_json(layouts: Sequence[Layout]) -> list[str]:
    """Layouts in words, one word per mesh axis."""
    return [layout_text(layout) for layout in layouts]


def _conversion_seconds(candidate: Candidate) -> list[float]:
    """Seconds of the conversions into each node of the problem."""
    choices, problem = chosen(candidate), candidate.costed.problem
    found = [0.0] * problem.num_nodes
    for edge in problem.edges:
        found[edge.target] += float(edge.costs_seconds[choices[edge.source], choices[edge.target]])
    return found


def axis_words(strategy: Strategy, signature: Signature | None, names: Sequence[str]) -> dict[str, str]:
    """What each axis splits, in words: ``batch``, ``output dim 1``, ``sum over k``, or ``whole``."""
    return {name: _words(choice, signature) for name, choice in zip(names, strategy.axes, strict=True)}


def _words(choice: AxisChoice, signature: Signature | None) -> str:
    if choice.letter is None or signature is None:
        return "partial sums pass" if choice.label == "P" else "whole"
    if choice.splits_batch:
        return "batch"
    for index, state in enumerate(choice.outputs):
        if isinstance(state, Shard):
            dims = len(signature.outputs[index])
            return f"output dim {state.dim} of {dims}"
    if any(state == PARTIAL for state in choice.outputs):
        return f"sum over {choice.letter}"
    inside = [index for index, term in enumerate(signature.inputs) if choice.letter in letters_of(term)]
    return f"{choice.letter} of input {inside[0]}" if inside else choice.letter


def parameter_entries(candidate: Candidate, resolved: Resolved) -> list[Entry]:
    """Every distinct parameter: how it is used and how it rests, its bytes on a device by kind, its seconds."""
    costed, choices = candidate.costed, chosen(candidate)
    graph, stage = resolved.graph, resolved.stage
    occurrences = Counter(resolved.representative_value(parameter.value) for parameter in graph.parameters)
    entries = []
    for parameter in graph.parameters:
        if parameter.value not in occurrences:
            continue
        choice = choices[costed.nodes[parameter.value]]
        table, plan = costed.parameter_table(parameter.value), stage.parameters[parameter.value]
        value = graph.values[parameter.value]
        kinds = ("parameter_bytes", "working_copy_bytes", "gradient_bytes", "optimizer_state_bytes")
        optimizer = float(table.optimizer_seconds[choice])
        entries.append(
            {
                "names": list(parameter.names),
                "shape": list(value.shape),
                "dtype": value.dtype,
                "trainable": parameter.trainable,
                "use": layout_text(plan.use),
                "storage": layout_text(plan.storage),
                "zero": plan.zero,
                **{kind: float(table.parts[row, choice]) for row, kind in enumerate(kinds)},
                "momentary_bytes": float(table.transient_bytes[choice]),
                "communication_seconds": float(table.seconds[choice]) - optimizer,
                "optimizer_seconds": optimizer,
                "occurrences": occurrences[parameter.value],
            }
        )
    return entries


def fallback_entries(candidate: Candidate, graph: OpGraph) -> list[Entry]:
    """Operators that no rule covers: each device computes them whole. Their price is theirs and that of gathering inputs."""
    costed, choices = candidate.costed, chosen(candidate)
    changes = _conversion_seconds(candidate)
    without = set(costed.prepared.fallbacks)
    grouped: dict[str, list[Operator]] = {}
    for operator in graph.operators:
        if operator.id in without:
            grouped.setdefault(operator.target, []).append(operator)
    entries = []
    for target, operators in grouped.items():
        nodes = [costed.nodes[operator.id] for operator in operators]
        seconds = sum(float(costed.problem.node_costs_seconds[node][choices[node]]) for node in nodes)
        saved = sum(
            float(costed.operator_table(op.id).saved_bytes[choices[n]]) for op, n in zip(operators, nodes, strict=True)
        )
        entries.append(
            {
                "target": target,
                "occurrences": len(operators),
                "modules": list(dict.fromkeys(operator.module for operator in operators))[:8],
                "source": operators[0].source,
                "seconds": seconds + sum(changes[node] for node in nodes),
                "saved_bytes": saved,
                "whole_bytes": sum(_whole_bytes(operator, graph) for operator in operators),
            }
        )
    return entries


def _whole_bytes(operator: Operator, graph: OpGraph) -> int:
    """Bytes of an operator's tensors, which every device holds whole."""
    return sum(graph.values[value].num_bytes for value in (*operator.inputs, *operator.outputs) if value)
