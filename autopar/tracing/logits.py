"""The last linear layer and the cross-entropy of its result, made one operator where nothing else reads the logits.

Between the two may stand what treats all classes alike: views and slices of rows, a number that logits are multiplied by, a
cast, ``log_softmax`` before a loss of log-probabilities. Views and products are then made of what the layer reads: in place of
``[rows, classes]`` they have ``[rows, width]``.
What the operator computes, and in which forms, says ``strategies/logits.py``.

Enters: the lowered program, without outputs that are not wanted. Leaves: the same, with such pairs replaced.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from autopar.graph import Operator, Ref, TorchName, Value
from autopar.strategies.loss import FUSED, MEAN, SUM, class_loss
from autopar.tracing.lowered import Lowered

_LINEAR = "aten.linear.default"
_ENTROPY = "aten.cross_entropy_loss.default"
_OF_LOGARITHMS = ("aten.nll_loss_nd.default", "aten.nll_loss.default", "aten.nll_loss2d.default")
_VIEWS = ("view", "reshape", "_unsafe_view")
_SAME = ("contiguous", "clone", "alias")
_CASTS = ("to", "_to_copy")
_SCALES = ("aten.mul.Tensor", "aten.div.Tensor", "aten.mul.Scalar", "aten.div.Scalar")


def only_loss(lowered: Lowered) -> None:
    """Leave out all outputs but the loss, and make logits that only the loss reads a part of it."""
    lowered.outputs = [output for output in lowered.outputs if output.value == lowered.loss]
    makers = {value: place for place, operator in enumerate(lowered.operators) for value in operator.outputs if value}
    for place, operator in reversed(list(enumerate(lowered.operators))):
        if operator.target == _ENTROPY or operator.target in _OF_LOGARITHMS:
            chain = _chain(lowered, makers, operator)
            if chain is not None:
                _fold(lowered, place, chain)


@dataclass(frozen=True)
class _Chain:
    """Places of the operators that lead from the layer's result to the loss, the layer first, and the type that logits are
    brought to, if any."""

    places: tuple[int, ...]
    dtype: str | None


def _chain(lowered: Lowered, makers: dict[str, int], loss: Operator) -> _Chain | None:
    """What leads to the logits of a loss; None where they are not a layer's result, or not the loss's alone."""
    facts = class_loss(loss)
    if facts.reduction not in (MEAN, SUM) or "float" in lowered.values[facts.labels].dtype:
        return None
    wanted = (
        {output.value for output in lowered.outputs} | {lowered.loss} | {buffer.updated for buffer in lowered.buffers}
    )
    value, found, dtypes = loss.inputs[0], list[int](), list[str]()
    takes_logarithms = loss.target in _OF_LOGARITHMS
    while True:
        readers = sum(operator.inputs.count(value) for operator in lowered.operators)
        if value not in makers or readers != 1 or value in wanted:
            return None
        found.append(makers[value])
        maker = lowered.operators[makers[value]]
        if maker.target == _LINEAR:
            break
        before, after = (lowered.values[name].dtype for name in (maker.inputs[0], value))
        if before != after:
            dtypes.append(after)
        takes_logarithms = takes_logarithms and maker.target != "aten.log_softmax.int"
        value = maker.inputs[0]
    if takes_logarithms or len(dtypes) > 1 or any("float" not in dtype for dtype in dtypes):
        return None
    chain = _Chain(tuple(reversed(found)), dtypes[0] if dtypes else None)
    return chain if _rewritten(lowered, chain, loss) is not None else None


def _fold(lowered: Lowered, place: int, chain: _Chain) -> None:
    """Put the pair's operator in the loss's place; the layer is left behind, for ``drop_dead``."""
    loss = lowered.operators[place]
    rewritten = _rewritten(lowered, chain, loss)
    assert rewritten is not None, "looked at before"
    changed, values, rows, at = rewritten
    for number, operator in changed.items():
        lowered.operators[number] = operator
    lowered.values.update(values)
    shape = lowered.values[rows].shape
    if at != len(shape) - 1:  # classes come before some of the rows' dims
        dims = (*(dim for dim in range(len(shape)) if dim != at), at)
        name = f"{loss.id}_rows"
        ordered = replace(
            loss, id=name, target="aten.permute.default", args=(Ref(rows), dims), kwargs=(), outputs=(name,)
        )
        described = replace(lowered.values[rows], id=name, shape=tuple(shape[dim] for dim in dims))
        lowered.values[name] = described
        lowered.nests[name] = lowered.nests[loss.id]
        lowered.operators.insert(place, ordered)
        rows, place = name, place + 1
    layer = lowered.operators[chain.places[0]]
    facts = class_loss(loss)
    weight = None if facts.weight is None else Ref(facts.weight)
    dtype = None if chain.dtype is None else TorchName(f"torch.{chain.dtype}")
    args = (
        Ref(rows), layer.args[1], layer.argument(2, "bias"), Ref(facts.labels), weight, facts.reduction, facts.ignore_index,
        facts.label_smoothing, dtype,
    )  # fmt: skip
    lowered.operators[place] = replace(loss, target=FUSED, args=args, kwargs=())


_Rewritten = tuple[dict[int, Operator], dict[str, Value], str, int]


def _rewritten(lowered: Lowered, chain: _Chain, loss: Operator) -> _Rewritten | None:
    """The chain's views made of what the layer reads: operators by place, their values, the last one and the dim of its width;
    None where something cannot be one."""
    layer = lowered.operators[chain.places[0]]
    x, weight = (lowered.values[value] for value in layer.inputs[:2])
    if len(weight.shape) != 2 or len(x.shape) < 2:
        return None
    classes, width = weight.shape
    changed, values, at = dict[int, Operator](), dict[str, Value](), len(x.shape) - 1
    are_logits = True  # not their logarithms yet
    for place in chain.places[1:]:
        operator = lowered.operators[place]
        name = operator.target.split(".")[1]
        if name in _CASTS:
            continue
        if name == "log_softmax":
            if operator.argument(1, "dim") % len(x.shape) != at or loss.target not in _OF_LOGARITHMS:
                return None
            are_logits = False
            continue
        before, after = (lowered.values[value] for value in (operator.inputs[0], operator.outputs[0]))
        may_scale = are_logits and after.dtype == x.dtype and layer.argument(2, "bias") is None
        if operator.target in _SCALES and not may_scale:
            return None
        moved = _moved(operator, name, before.shape, after.shape, at)
        if moved is None:
            return None
        args, target = [Ref(x.id), *operator.args[1:]], operator.target
        if name in _VIEWS:
            target = "aten.reshape.default"  # what the layer reads may be out of order where its result is not
            if args[1][moved] != -1:
                args[1] = (*args[1][:moved], width, *args[1][moved + 1 :])
        changed[place] = replace(operator, target=target, args=tuple(args))
        shape = (*after.shape[:moved], width, *after.shape[moved + 1 :])
        shares = before.storage == after.storage
        x = Value(after.id, shape, x.dtype, x.requires_grad, storage=x.storage if shares else after.id)
        values[x.id], at = x, moved
    rows = (*x.shape[:at], *x.shape[at + 1 :])
    fits = at == 1 and lowered.values[class_loss(loss).labels].shape == rows
    return (changed, values, x.id, at) if fits and classes > 1 else None


def _moved(operator: Operator, name: str, before: tuple[int, ...], after: tuple[int, ...], at: int) -> int | None:
    """Where an operator leaves the dim ``at``; None where it is no view or copy of rows, or does something to that dim."""
    if name in _SAME:
        return at
    if operator.target in _SCALES:
        return (
            at
            if not operator.kwargs and isinstance(operator.args[0], Ref) and isinstance(operator.args[1], (int, float))
            else None
        )
    if name in _VIEWS or name == "flatten":
        outer, inner = math.prod(before[:at]), math.prod(before[at + 1 :])
        places = (
            dim
            for dim, size in enumerate(after)
            if size == before[at] and math.prod(after[:dim]) == outer and math.prod(after[dim + 1 :]) == inner
        )
        return next(places, None)
    dims = len(before)
    if name == "slice":
        return at if operator.argument(1, "dim", 0) % dims != at else None
    if name == "select":
        dim = operator.args[1] % dims
        return None if dim == at else at - (dim < at)
    order: list[Any] | None = None
    if name == "permute":
        order = [dim % dims for dim in operator.args[1]]
    elif name == "transpose":
        order = list(range(dims))
        one, other = (dim % dims for dim in operator.args[1:3])
        order[one], order[other] = other, one
    return None if order is None else order.index(at)
