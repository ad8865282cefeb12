"""One operator on one mesh: its strategies, and what each costs in seconds and in bytes kept for backward.

Enters: a canonical operator of a :class:`Prepared` graph, the mesh and its axes' roles. Leaves: an
:class:`OperatorTable`, arrays with one entry per strategy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from autopar.costing.chunks import by_chunks, linear_loss_seconds, together, without_chunks
from autopar.costing.conversions import Conversions, FloatArray
from autopar.costing.measured import measured_seconds
from autopar.costing.prepare import Prepared
from autopar.costing.rings import block_bytes, is_ring, ring_bytes
from autopar.costing.space import halo_bytes, halo_seconds, with_space
from autopar.costing.tables import LayoutColumn, OperatorTable
from autopar.graph import ITEM_BYTES, Operator
from autopar.layout import PARTIAL, REPLICATED, Layout
from autopar.strategies.branches import branch_flops
from autopar.strategies.choices import CHUNKS, AxisChoice, Strategy, axis_choices, piece_fraction, share, strategies
from autopar.strategies.experts import TARGET as MIXTURE
from autopar.strategies.loss import FUSED, class_loss
from autopar.strategies.rule import Exchange, Signature, in_whole_groups, letters_of

Role = Literal["free", "data", "tensor", "context", "ring", "ulysses", "spatial", "expert", "exchanged", "replicated"]
BATCH_ROLES: tuple[Role, ...] = ("data", "exchanged")
CONTEXT_ROLES: tuple[Role, ...] = ("context", "ring", "ulysses")
EXPERT_ROLES: tuple[Role, ...] = ("expert", "exchanged", "replicated")
HEAVY = ("matmul", "attention")

# Tensors of the result's size that a backward pass makes beside the gradients it returns (torch's derivatives.yaml and
# FunctionsManual.cpp): pow (and square) has the power and its product with the exponent. (Cross-entropy has the gradient of the
# log-probabilities.)
TEMPORARIES: Mapping[str, float] = {"aten.pow.Tensor_Scalar": 2.0, "aten.square.default": 2.0, "aten.div.Tensor": 1.0}


def operator_table(
    operator: Operator, prepared: Prepared, conversions: Conversions, roles: Sequence[Role], form: str | None = None
) -> OperatorTable:
    """All strategies of ``operator`` that the axes' roles allow, priced; where there are several ways to compute it, in each
    or in the one that is forced (``form``: ``whole`` or ``chunks``)."""
    usual = _usual_table(operator, prepared, conversions, roles)
    signature = prepared.signatures.get(prepared.name(operator.id))
    if signature is None or operator.target != FUSED:
        return usual
    whole = without_chunks(usual)
    if signature.chunked is None or not signature.chunked.is_offered or form == "whole":
        return whole
    chunked = by_chunks(usual, signature, conversions)
    return chunked if form == CHUNKS else together(whole, chunked)


def _usual_table(
    operator: Operator, prepared: Prepared, conversions: Conversions, roles: Sequence[Role]
) -> OperatorTable:
    signature = prepared.signatures.get(prepared.name(operator.id))
    offer = _offer(_choices(operator, signature, prepared, conversions, roles), conversions.mesh.shape)
    found, columns_in, columns_out, shares = offer.strategies, offer.inputs, offer.outputs, offer.shares
    outputs = [value for value in operator.outputs if value]
    moved = _local_bytes(operator, prepared, conversions, columns_in, columns_out)
    if signature is not None and signature.chunked is not None:
        ahead, back = linear_loss_seconds(signature, found, conversions)
    else:
        ahead, back = _compute_seconds(operator, prepared, signature, conversions, moved, shares)
    if conversions.cost_model.operators is not None:
        columns = columns_in, columns_out
        ahead, back = measured_seconds(operator, prepared, signature, conversions, columns, (ahead, back))
    exchanged = _exchange_seconds(operator, prepared, signature, conversions, found, (ahead, back))
    differentiated = any(value in prepared.gradient for value in outputs)
    forward_flops, backward_flops = _flops(operator, prepared, signature)
    work = forward_flops + (backward_flops if differentiated else 0.0)
    compute = ahead + back
    extra = _extra_bytes(operator, prepared, signature, conversions, columns_in, shares)
    transient = _transient_bytes(operator, prepared, signature, conversions, columns_in, columns_out, shares)
    if signature is not None and signature.halos:  # of a piece with halos there is a copy, and one of its gradient
        copies = halo_bytes(signature, found)
        extra, transient = extra + copies * (0 in signature.saved_inputs), transient + copies
    seconds = compute + exchanged.sum(axis=0) + _loss_seconds(operator, prepared, conversions, columns_out)
    beside = np.zeros(len(found))
    if signature is not None and any(is_ring(signature, strategy) for strategy in found):
        values = zip((*operator.inputs[:3], outputs[0]), (*columns_in[:3], columns_out[0]), strict=True)
        local = [local_bytes(prepared, conversions, value, column) for value, column in values]
        beside = ring_bytes(operator, prepared.graph, signature, found, local)
    if signature is not None and signature.kind == "attention" and differentiated:
        beside = beside + block_bytes(operator, prepared.graph, signature, found, conversions.mesh.shape)
    return OperatorTable(
        found,
        columns_in,
        columns_out,
        seconds,
        compute,
        ahead + exchanged[0],
        back * _weight_share(operator, prepared, signature),
        tuple(local_bytes(prepared, conversions, value, column) for value, column in zip(outputs, columns_out, strict=True)),
        extra,
        transient + beside,
        work * shares,
        beside,
    )


def _extra_bytes(
    operator: Operator,
    prepared: Prepared,
    signature: Signature | None,
    conversions: Conversions,
    inputs: Sequence[LayoutColumn],
    shares: FloatArray,
) -> FloatArray:
    """Bytes of statistics kept for backward, by strategy. A mask that attention turns into numbers is not split with the
    heads."""
    if signature is None:
        return np.zeros(len(shares))
    found: FloatArray = signature.saved_extra_bytes * shares
    if signature.kind == "attention":
        item = ITEM_BYTES[prepared.graph.values[operator.inputs[0]].dtype]
        for value, column in zip(operator.inputs[3:], inputs[3:], strict=True):
            described = prepared.graph.values[value]
            if described.dtype == "bool":
                local = local_bytes(prepared, conversions, value, column)
                found = found + item * (local - described.num_elements * shares)
    return found


def _transient_bytes(
    operator: Operator,
    prepared: Prepared,
    signature: Signature | None,
    conversions: Conversions,
    inputs: Sequence[LayoutColumn],
    outputs: Sequence[LayoutColumn],
    shares: FloatArray,
) -> FloatArray:
    """Bytes that are alive around an operator and not kept, by strategy: the gradients of its results and inputs and what
    its backward pass makes beside them; of an operator without gradients, all that it reads and writes."""
    values = [value for value in (*operator.inputs, *operator.outputs) if value]
    columns = (*inputs, *outputs)
    if not any(value in prepared.gradient for value in operator.outputs):
        return _local_bytes(operator, prepared, conversions, inputs, outputs)
    sizes = [local_bytes(prepared, conversions, value, column) for value, column in zip(values, columns, strict=True)]
    total = np.zeros(len(shares))
    for value, size in zip(values, sizes, strict=True):
        total = total + (size if value in prepared.gradient else 0.0)
    if ("cross_entropy" in operator.target or operator.target == MIXTURE) and signature is not None:
        return total + signature.saved_extra_bytes * shares
    return total + TEMPORARIES.get(operator.target, 0.0) * sizes[-1]


def _weight_share(operator: Operator, prepared: Prepared, signature: Signature | None) -> float:
    """The part of the backward pass that makes a parameter's gradient: half of a contraction's two products."""
    values = prepared.graph.values
    reads = any(values[value].kind == "parameter" for value in operator.inputs)
    return 0.5 if reads and signature is not None and signature.kind == "matmul" else 0.0


def _choices(
    operator: Operator,
    signature: Signature | None,
    prepared: Prepared,
    conversions: Conversions,
    roles: Sequence[Role],
) -> tuple[tuple[AxisChoice, ...], ...]:
    """What each axis may do to an operator."""
    outputs = [value for value in operator.outputs if value]
    flows = (
        [prepared.flows(operator, index) for index in range(len(operator.inputs))],
        [value in prepared.gradient for value in outputs],
    )
    name = prepared.name(operator.id)
    letters = prepared.cuts.get(name)
    per_axis = []
    for axis, (role, size) in enumerate(zip(roles, conversions.mesh.shape, strict=True)):
        choices = prepared.offered.get((operator.id, size))
        if choices is None:
            choices = axis_choices(signature, letters, flows, size)
            choices = tuple(choice for choice in choices if _worth_offering(choice, operator, signature, prepared))
            prepared.offered[operator.id, size] = choices
        space, slides = prepared.space.get(name, ()), bool(signature and signature.spatial)
        choices = with_space(choices, space, slides, role, axis, conversions.mesh.num_devices)
        per_axis.append(_allowed(choices, role, operator, signature, prepared))
    return tuple(per_axis)


@dataclass(frozen=True, eq=False)
class _Offer:
    """Strategies, the layouts that they give each tensor, and the part of the work that falls to the first device."""

    strategies: tuple[Strategy, ...]
    inputs: tuple[LayoutColumn, ...]
    outputs: tuple[LayoutColumn, ...]
    shares: FloatArray


@lru_cache(maxsize=256)
def _offer(per_axis: tuple[tuple[AxisChoice, ...], ...], mesh_shape: tuple[int, ...]) -> _Offer:
    """All that the axes' choices allow together. Many operators of a model have the same choices."""
    found = strategies(per_axis, mesh_shape)
    if not found:  # what the roles force cannot be cut so often: the axes that cannot are left whole
        any_choice = per_axis[0][0]
        whole = AxisChoice("R", (REPLICATED,) * len(any_choice.inputs), (REPLICATED,) * len(any_choice.outputs))
        found = strategies([(*some, whole) for some in per_axis], mesh_shape)
        most = max(_num_split(strategy) for strategy in found)
        found = tuple(strategy for strategy in found if _num_split(strategy) == most)
    inputs, outputs = (
        tuple(LayoutColumn.of(layouts) for layouts in zip(*side, strict=True))
        for side in ([strategy.inputs for strategy in found], [strategy.outputs for strategy in found])
    )
    return _Offer(found, inputs, outputs, np.array([share(strategy) for strategy in found]))


def _worth_offering(
    choice: AxisChoice, operator: Operator, signature: Signature | None, prepared: Prepared
) -> bool:
    """Leave out what costs time to search and saves nothing.

    Operators that no parameter leads to (masks, positions) are split along the batch or not at all. Partial values are
    carried through where that can save something: where they are added to others, or change shape or type. A gradient is
    left partial only where it is then summed once for several readers, or together with those of all parameters.
    """
    if operator.id in prepared.derived:
        return choice.label == "R" or choice.splits_batch
    if signature is None or choice.label not in ("P", "G"):
        return True
    values = prepared.graph.values
    if choice.label == "P":
        alike = {(values[v].shape, values[v].dtype) for v in (*operator.inputs[:1], *operator.outputs[:1])}
        added = sum(state is PARTIAL for state in choice.inputs) > 1
        return signature.kind not in HEAVY and (added or len(alike) > 1)
    summed_once = any(prepared.num_conversions(value) > 1 for value in operator.outputs if value)
    return operator.id in prepared.of_parameters or (signature.kind not in HEAVY and summed_once)


def _num_split(strategy: Strategy) -> int:
    return sum(choice.letter is not None for choice in strategy.axes)


def _allowed(
    choices: Sequence[AxisChoice], role: Role, operator: Operator, signature: Signature | None, prepared: Prepared
) -> tuple[AxisChoice, ...]:
    """What a role leaves: a data axis splits the batch and nothing else, any other forced axis anything but the batch.

    Contractions and attention must be split by a forced axis where they can be: on a tensor axis along a dim of their
    parameter where they have one, on a context axis along another (the sequence, once the batch is out). Attention on a
    context axis is split along queries and keys, around a ring, or along heads; on a spatial axis space is split. On an
    axis for experts mixtures are split along them, and all else is free, but where tokens are to be exchanged: then the axis
    splits the batch everywhere else.
    """
    experts = signature.experts if signature is not None else frozenset()
    if signature is not None and experts and role in EXPERT_ROLES:
        joint = set(signature.joint)
        ways = {"exchanged": joint or experts, "replicated": experts - joint}.get(role, experts)
        return tuple([choice for choice in choices if choice.letter in ways] or choices)
    if role in ("free", "expert", "replicated"):
        return tuple(choices)
    if role in BATCH_ROLES:
        kept = [c for c in choices if c.letter is None or (c.splits_batch and c.letter not in experts)]
    else:
        kept = [choice for choice in choices if not choice.splits_batch]
    wanted = _to_split(role, operator, signature, prepared)
    return tuple([choice for choice in kept if choice.letter in wanted] or kept)


def _to_split(role: Role, operator: Operator, signature: Signature | None, prepared: Prepared) -> set[str]:
    """The letters of which a forced axis splits one where it can; none where it may do as it likes."""
    heavy = signature is not None and signature.kind in HEAVY
    if signature is None or not (heavy or (role in CONTEXT_ROLES and "cross_entropy" in operator.target)):
        return set()
    if role in CONTEXT_ROLES:
        return _context_letters(role, operator, signature, prepared)
    if role == "spatial":
        return set(signature.spatial)
    own = None if role in BATCH_ROLES else _parameter_letters(operator, signature, prepared)
    return set(signature.sizes) if own is None else own


def sequence_letters(operator: Operator, signature: Signature, prepared: Prepared) -> set[str]:
    """Letters whose split is one of the sequence: rows of a product with a parameter, queries and keys together."""
    if signature.kind == "attention":
        return set(signature.joint)
    if signature.kind != "matmul" or _parameter_letters(operator, signature, prepared) is None:
        return set()
    return _context_letters("context", operator, signature, prepared)


def _context_letters(role: Role, operator: Operator, signature: Signature, prepared: Prepared) -> set[str]:
    """Letters that a context axis splits: those of a contraction's result that its parameter lacks, those of attention, the
    rows of cross-entropy."""
    if "cross_entropy" in operator.target:
        return set(letters_of(signature.inputs[operator.inputs.index(class_loss(operator).labels)]))
    results = {letter for term in signature.outputs for letter in letters_of(term)}
    if signature.kind != "attention":
        return results - (_parameter_letters(operator, signature, prepared) or set())
    heads = results - {member for members in signature.joint.values() for member in members}
    return (heads if role != "ring" else set()) | (set(signature.joint) if role != "ulysses" else set())


def _parameter_letters(operator: Operator, signature: Signature, prepared: Prepared) -> set[str] | None:
    """Letters of the operator's largest parameter; None when it reads no parameter."""
    values = prepared.graph.values
    places = [i for i, value in enumerate(operator.inputs) if values[value].kind == "parameter"]
    if not places:
        return None
    largest = max(places, key=lambda index: values[operator.inputs[index]].num_elements)
    return set(letters_of(signature.inputs[largest]))


def _local_bytes(
    operator: Operator,
    prepared: Prepared,
    conversions: Conversions,
    inputs: Sequence[LayoutColumn],
    outputs: Sequence[LayoutColumn],
) -> FloatArray:
    """Bytes that one forward pass reads and writes on the first device, by strategy."""
    values = [value for value in (*operator.inputs, *operator.outputs) if value]
    total = np.zeros(len((*inputs, *outputs)[0].which) if values else 1)
    for value, column in zip(values, (*inputs, *outputs), strict=True):
        total = total + local_bytes(prepared, conversions, value, column)
    return total


def local_bytes(prepared: Prepared, conversions: Conversions, value: str, column: LayoutColumn) -> FloatArray:
    """Bytes of a value on the first device, by choice."""
    described = prepared.graph.values[value]
    item = described.num_bytes / max(described.num_elements, 1)
    return np.asarray(conversions.elements_of(described.shape, column.distinct)[column.which] * item)


def _flops(operator: Operator, prepared: Prepared, signature: Signature | None) -> tuple[float, float]:
    """FLOPs of the forward and of the backward pass on whole tensors, as far as they are known."""
    return (signature.flops, signature.backward_flops) if signature else branch_flops(operator, prepared.graph)


def _compute_seconds(
    operator: Operator,
    prepared: Prepared,
    signature: Signature | None,
    conversions: Conversions,
    moved: FloatArray,
    shares: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Seconds of the forward and of the backward pass, by strategy."""
    kind = signature.kind if signature else "elementwise"
    if kind in ("view", "free"):
        return np.zeros(len(moved)), np.zeros(len(moved))
    outputs = [value for value in operator.outputs if value]
    values = [prepared.graph.values[value] for value in (*outputs, *operator.inputs)]
    floats = [value.dtype for value in values if "float" in value.dtype]
    dtype = floats[0] if floats else "float32"
    model = conversions.cost_model
    priced: Literal["matmul", "attention", "elementwise"] = (
        "matmul" if kind == "matmul" else "attention" if kind == "attention" else "elementwise"
    )
    flops, backward_flops = _flops(operator, prepared, signature)
    ahead = model.compute_seconds(flops * shares, moved, dtype, priced, **conversions.where)
    if not any(value in prepared.gradient for value in outputs):
        return ahead, np.zeros(len(moved))
    return ahead, model.compute_seconds(backward_flops * shares, 2 * moved, dtype, priced, **conversions.where)


def _exchange_seconds(
    operator: Operator,
    prepared: Prepared,
    signature: Signature | None,
    conversions: Conversions,
    found: Sequence[Strategy],
    compute: tuple[FloatArray, FloatArray],
) -> FloatArray:
    """Seconds (forward and backward, strategies) of collectives that the operator performs itself, on each axis that splits
    a letter which needs them; of those that overlap with ``compute`` what is left when it ends."""
    seconds: FloatArray = np.zeros((2, len(found)))
    hidden: FloatArray = np.zeros((2, len(found)))
    if signature is None:
        return seconds
    differentiated = any(value in prepared.gradient for value in operator.outputs)
    exchanges = [exchange for exchange in signature.exchanges if differentiated or not exchange.backward]
    for (axis, cost), exchange in itertools.product(enumerate(conversions.axes), exchanges):
        places = [place for place, strategy in enumerate(found) if strategy.axes[axis].letter == exchange.letter]
        if places:
            amounts = [_exchanged_bytes(exchange, signature, found[place]) for place in places]
            times = exchange.times(conversions.mesh.shape[axis])
            into = hidden if exchange.overlaps else seconds
            into[int(exchange.backward), places] += times * cost.seconds(exchange.kind, amounts)
    if signature.halos:
        seconds += halo_seconds(signature, conversions, found, differentiated)
    return seconds + np.maximum(0.0, hidden - np.stack(compute) * _overlapped_share(found, signature))


def _overlapped_share(found: Sequence[Strategy], signature: Signature) -> FloatArray:
    """The part of an operator's work that is done while pieces are on their way: all but that with a device's own."""
    rings = [[parts for letter, (_, parts) in strategy.split.items() if letter in signature.joint] for strategy in found]
    return np.array([1.0 - 1.0 / parts[0] if parts else 0.0 for parts in rings])


def _exchanged_bytes(exchange: Exchange, signature: Signature, strategy: Strategy) -> float:
    """Bytes of one collective of an exchange on the first device."""
    elements = 1.0
    for letter in exchange.letters:
        split = [strategy.split[name] for name in signature.splitting(letter) if name in strategy.split]
        elements *= signature.sizes[letter] * math.prod(piece_fraction(*pieces) for pieces in split)
        elements *= 0.5 if letter == exchange.halved else 1.0
    if exchange.alike is not None:
        letter, group = exchange.alike
        apart = letter in strategy.split and not in_whole_groups(*strategy.split[letter], group)
        elements /= 1 if apart else group
    return (elements + exchange.more_elements) * exchange.item_bytes


def _loss_seconds(
    operator: Operator, prepared: Prepared, conversions: Conversions, outputs: Sequence[LayoutColumn]
) -> FloatArray | float:
    """The sum of the loss over devices, so that each has all of it."""
    graph = prepared.graph
    if graph.loss is None or graph.loss not in operator.outputs:
        return 0.0
    column = outputs[[value for value in operator.outputs if value].index(graph.loss)]
    whole: Layout = (REPLICATED,) * conversions.mesh.num_axes
    prices = conversions.prices(graph.values[graph.loss], column.distinct, [whole], True)
    return np.asarray(prices.seconds[column.which, 0])


__all__ = ["HEAVY", "LayoutColumn", "OperatorTable", "Role", "local_bytes", "operator_table", "sequence_letters"]
