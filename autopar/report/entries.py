"""What each operator and each parameter does: one entry for all occurrences in repeated blocks and like stages.

Enters: the stages' views. Leaves: lists of JSON objects, in the model's order. A report is as long for 96 layers as for 2:
what is alike in the model's blocks, and planned and priced alike, is one entry with its number of occurrences and the stages
that have it. Seconds are of a whole step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from autopar.costing.kept import ALWAYS
from autopar.costing.measured import provenance_of_call
from autopar.graph import Operator, OpGraph
from autopar.layout import PARTIAL, Layout, Shard, layout_text
from autopar.report.views import View
from autopar.strategies.choices import CHUNKS, AxisChoice, Strategy
from autopar.strategies.rule import Signature, letters_of

Entry = dict[str, Any]
BY_CHUNKS = "by chunks of rows"  # behind the strategy of an operator that is computed so


Items = Callable[[View], Iterable[tuple[str, Entry]]]  # of a view: each item, and where it is


def _merged(
    views: Sequence[View], canonical: Mapping[str, str], items: Items, describe: Callable[[View, str], Entry]
) -> list[Entry]:
    """One entry for items that have the same canonical name and are described in the same way, with the place of the first."""
    found: dict[tuple[str, str], Entry] = {}
    members: dict[tuple[str, str], set[str]] = {}
    for view in views:
        known: dict[
            str, tuple[Entry, str]
        ] = {}  # what is said of a representative holds for all of its block's variant
        for item, place in items(view):
            same = view.resolved.representative_value(view.resolved.representative_operator(item))
            if same not in known:
                content = describe(view, item)
                known[same] = content, json.dumps(content, sort_keys=True)
            content, written = known[same]
            key = (canonical.get(item, item), written)
            entry = found.setdefault(key, {**place, **content, "stages": []})
            members.setdefault(key, set()).add(item)
            if view.index not in entry["stages"]:
                entry["stages"].append(view.index)
    return [{**entry, "occurrences": len(members[key])} for key, entry in found.items()]


def operator_entries(views: Sequence[View], canonical: Mapping[str, str]) -> list[Entry]:
    """Every distinct operator: where it comes from, how it is split, what it costs."""

    def items(view: View) -> Iterable[tuple[str, Entry]]:
        for operator in view.graph.operators:
            yield operator.id, {"id": operator.id, "module": operator.module, "source": operator.source}

    return _merged(views, canonical, items, _operator)


def _operator(view: View, name: str) -> Entry:
    operator, plan = view.graph.operator_of[name], view.resolved.operator(name)
    table, signature = view.operator_table(name), view.signature(name)
    choice, count = view.choice(name), view.num_micro_batches
    compute = count * float(table.compute_seconds[choice])
    return {
        "target": operator.target,
        "kind": signature.kind if signature else "fallback",
        "strategy": f"{plan.label}, {BY_CHUNKS}" if plan.form == CHUNKS else plan.label,
        "splits": axis_words(table.strategies[choice], signature, view.mesh.names),
        "inputs": layouts_json(plan.inputs),
        "outputs": layouts_json(plan.outputs),
        "provenance": _provenance(view, name),
        "compute_seconds": compute,
        "exchange_seconds": view.seconds(name) - compute,
        "conversion_seconds": view.incoming_seconds[view.node(name)],
        "device_flops": count * float(table.flops[choice]),
        "saved_bytes": _saved_bytes(view, operator),
    }


def _provenance(view: View, name: str) -> str:
    """How an operator's compute seconds were come by."""
    costed, table = view.costed, view.operator_table(name)
    operator = costed.prepared.graph.operator_of[costed.prepared.name(view.names.get(name, name))]
    columns = table.inputs, table.outputs
    return provenance_of_call(operator, costed.prepared, costed.conversions, columns, view.choice(name))


def _saved_bytes(view: View, operator: Operator) -> float:
    """What an operator's results and statistics add to what is kept of each micro-batch in flight."""
    role, choice = view.keeping.role(view.names[operator.id]), view.choice(operator.id)
    table, differentiated = (
        view.operator_table(operator.id),
        any(view.has_gradient(value) for value in operator.outputs),
    )
    saved = float(table.extra_bytes[choice]) if role.extra == ALWAYS and differentiated else 0.0
    for num_bytes, kept in zip(table.output_bytes, role.outputs, strict=True):
        saved += float(num_bytes[choice]) if kept == ALWAYS else 0.0
    return saved


def layouts_json(layouts: Sequence[Layout]) -> list[str]:
    """Layouts in words, one word per mesh axis."""
    return [layout_text(layout) for layout in layouts]


def axis_words(strategy: Strategy, signature: Signature | None, names: Sequence[str]) -> dict[str, str]:
    """What each axis splits, in words: ``batch``, ``experts``, ``output dim 1``, ``sum over k``, or ``whole``."""
    return {name: _words(choice, signature) for name, choice in zip(names, strategy.axes, strict=True)}


def _words(choice: AxisChoice, signature: Signature | None) -> str:
    if choice.letter is None or signature is None:
        return "partial sums pass" if choice.label == "P" else "whole"
    if choice.letter in signature.experts:
        return "experts, tokens exchanged" if choice.letter in signature.joint else "experts"
    if choice.letter in signature.joint:
        return "sequence, around a ring"
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


def parameter_entries(views: Sequence[View], canonical: Mapping[str, str]) -> list[Entry]:
    """Every distinct parameter: how it is used and how it rests, its bytes on a device by kind, its seconds."""

    def items(view: View) -> Iterable[tuple[str, Entry]]:
        for parameter in view.graph.parameters:
            yield parameter.value, {"names": list(parameter.names), "trainable": parameter.trainable}

    return _merged(views, canonical, items, _parameter)


def _parameter(view: View, value: str) -> Entry:
    choice = view.choice(value)
    table, plan, described = view.parameter_table(value), view.resolved.parameter(value), view.graph.values[value]
    kinds = ("parameter_bytes", "working_copy_bytes", "gradient_bytes", "optimizer_state_bytes")
    optimizer, offload = float(table.optimizer_seconds[choice]), float(table.offload_seconds[choice])
    return {
        "shape": list(described.shape),
        "dtype": described.dtype,
        "use": layout_text(plan.use),
        "storage": layout_text(plan.storage),
        "zero": plan.zero,
        **{kind: float(table.parts[row, choice]) for row, kind in enumerate(kinds)},
        "momentary_bytes": float(table.transient_bytes[choice]),
        "offload": plan.offload,
        "host_bytes": float(table.host_bytes[choice]),
        "communication_seconds": float(table.seconds[choice]) - optimizer - offload,
        "optimizer_seconds": optimizer,
        "offload_seconds": offload,
    }


def fallback_entries(views: Sequence[View]) -> list[Entry]:
    """Operators that no rule covers: each device computes them whole. Their price is theirs and that of gathering inputs,
    in all stages together."""
    found: dict[str, Entry] = {}
    modules: dict[str, dict[str, None]] = {}
    for view in views:
        without = set(view.costed.prepared.fallbacks)
        for operator in view.graph.operators:
            if view.names[operator.id] not in without:
                continue
            start = {"target": operator.target, "occurrences": 0, "modules": [], "source": operator.source}
            zeros = {"seconds": 0.0, "saved_bytes": 0.0, "whole_bytes": 0}
            entry = found.setdefault(operator.target, {**start, **zeros})
            modules.setdefault(operator.target, {})[operator.module] = None
            entry["occurrences"] += 1
            entry["seconds"] += view.seconds(operator.id) + view.incoming_seconds[view.node(operator.id)]
            entry["saved_bytes"] += view.kept_bytes(operator.id)
            entry["whole_bytes"] += _whole_bytes(operator, view.graph)
    return [{**entry, "modules": list(modules[target])[:8]} for target, entry in found.items()]


def _whole_bytes(operator: Operator, graph: OpGraph) -> int:
    """Bytes of an operator's tensors, which every device holds whole."""
    return sum(graph.values[value].num_bytes for value in (*operator.inputs, *operator.outputs) if value)
