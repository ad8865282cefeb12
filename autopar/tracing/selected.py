"""Rows that a mask selects: how many they are depends on its values, what they are used for may not.

Two uses are written in plain operators of fixed shape, exact for any mask:

* ``x[mask].view(batch, -1, width)[:, -1]``, the last selected row of each sample: encoders and decoders with a head for
  classification find the last word so (T5, BART). Of ``n`` selected rows sample ``b`` of ``B`` ends with number
  ``(b + 1) * (n / B)``, counted from one;
* ``y[mask] = f(x[mask])`` where ``f`` works row by row: adapters and experts for some of the samples (X-MOD). All rows are
  computed, and those selected are taken.

Enters: nodes of the fx graph that read what is not known. Leaves: the same, carried along, or the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from autopar.graph import Ref, TorchName
from autopar.tracing.autocast import Lowering
from autopar.tracing.lowered import Unknown
from autopar.tracing.places import Place
from autopar.tracing.targets import SHAPED_BY_VALUES

_Env = dict[torch.fx.Node, Any]

_TO_THE_END = 2**31  # no dim is longer
# Row by row, and finite with a finite gradient for any finite row: what is computed for the others leaves no trace.
_BY_ROW = frozenset(
    f"aten.{name}"
    for name in "linear.default layer_norm.default gelu.default relu.default silu.default tanh.default sigmoid.default "
    "add.Tensor sub.Tensor mul.Tensor neg.default".split()
)

_WITH_WEIGHTS = frozenset(("aten.linear.default", "aten.layer_norm.default"))


class Writing(Lowering, Protocol):
    """What results are written with."""

    autocast: Any

    def value_of(self, place: Place) -> str: ...
    def arguments(self, node: torch.fx.Node, env: _Env) -> tuple[tuple[Any, ...], dict[str, Any]]: ...


@dataclass(frozen=True)
class Rows(Unknown):
    """Those rows of ``source`` that ``mask``, over its first dims, selects. Both are values."""

    source: str
    mask: str


@dataclass(frozen=True)
class _Grouped(Rows):
    """``x[mask].view(num_groups, -1, ...)``."""

    num_groups: int


def unknown_result(
    lowering: Writing, node: torch.fx.Node, target: torch._ops.OpOverload, env: _Env, line: str
) -> Unknown | None:
    """What stands for the result of an operator that makes a number, or a tensor whose shape is not known; None where it
    makes neither."""
    name = target._schema.name.split("::")[1]
    if name in SHAPED_BY_VALUES:
        return Unknown(f"uses {name}, so that a shape or number depends on the values of a tensor", line)
    result = node.meta.get("val")
    tensors = [x for x in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(x, torch.Tensor)]
    strange = next((list(x.shape) for x in tensors if not all(type(size) is int for size in x.shape)), None)
    if strange is None:
        return None
    fact = f"makes a tensor whose shape {strange} depends on the values of another"
    if str(target) == "aten.index.Tensor":
        source, mask = lowering.value_of(env[node.args[0]]), _mask(lowering, node, env)  # type: ignore[index]
        if mask is not None:
            return Rows(fact, line, source, mask)
    return Unknown(fact, line)


def _mask(lowering: Writing, node: torch.fx.Node, env: _Env) -> str | None:
    """The value of the only index of an ``index`` or ``index_put``, where it is a mask."""
    indices: Any = node.args[1]
    place = env.get(indices[0]) if len(indices) == 1 else None
    if not isinstance(place, Place) or lowering.fakes[place.value].dtype != torch.bool:
        return None
    return lowering.value_of(place)


def carried(lowering: Writing, node: torch.fx.Node, env: _Env, unknown: Unknown) -> Unknown | str:
    """What an operator makes of an unknown tensor: unknown again, or the value of its result."""
    name, args = str(node.target), node.args[1:]
    if type(unknown) is Rows:
        if name in ("aten.view.default", "aten.reshape.default"):
            return _grouped(lowering, unknown, args[0])
        if name in _BY_ROW and lowering.autocast is None:
            return _by_row(lowering, node, env, unknown)
    if isinstance(unknown, _Grouped):
        if name == "aten.slice.Tensor" and args[0] != 1 and args[1] in (0, None) and args[2] >= _TO_THE_END:  # type: ignore[operator]
            return unknown
        if name == "aten.select.int" and tuple(args) == (1, -1):
            return _last_rows(lowering, unknown)
    return Unknown(unknown.fact, unknown.line)


def _grouped(lowering: Writing, rows: Rows, shape: Any) -> Unknown:
    width = tuple(lowering.fakes[rows.source].shape[lowering.fakes[rows.mask].dim() :])
    if len(shape) > 1 and type(shape[0]) is int and shape[1] == -1 and tuple(shape[2:]) == width:
        return _Grouped(rows.fact, rows.line, rows.source, rows.mask, shape[0])
    return Unknown(rows.fact, rows.line)


def _by_row(lowering: Writing, node: torch.fx.Node, env: _Env, rows: Rows) -> Unknown:
    """The operator on all rows, where it is seen to treat them alike and apart."""
    read = {item: env[item] for item in node.all_input_nodes}
    unknown = [item for item in read.values() if isinstance(item, Unknown)]
    rank = lowering.fakes[rows.source].dim()
    others = [lowering.fakes[item.value].dim() for item in read.values() if isinstance(item, Place)]
    alike = all(type(item) is Rows and item.mask == rows.mask for item in unknown)
    if str(node.target) in _WITH_WEIGHTS:
        apart = rank > 1 and isinstance(read[node.args[0]], Rows) and len(unknown) == 1  # type: ignore[index]
    else:
        apart = all(dim < rank for dim in others)  # what has no dim for the rows is the same for all
    if not (alike and apart and lowering.fakes[rows.mask].dim() == 1):
        return Unknown(rows.fact, rows.line)
    places = {item: Place(found.source, 0) if isinstance(found, Rows) else found for item, found in read.items()}
    args, kwargs = lowering.arguments(node, places)
    if str(node.target) == "aten.layer_norm.default" and len(args[1]) >= rank:
        return Unknown(rows.fact, rows.line)
    return replace(rows, source=lowering.emit(str(node.target), args, kwargs)[0])


def put_back(lowering: Writing, node: torch.fx.Node, env: _Env, unknown: Unknown) -> str | None:
    """The value of ``y`` after ``y[mask] = rows``, where the rows are those of the same mask."""
    if str(node.target) != "aten.index_put_.default" or type(unknown) is not Rows or len(node.args) > 3:
        return None
    place = env[node.args[0]]  # type: ignore[index]
    if not isinstance(place, Place) or env[node.args[2]] is not unknown or _mask(lowering, node, env) != unknown.mask:  # type: ignore[index]
        return None
    before, rows, mask = lowering.value_of(place), lowering.fakes[unknown.source], lowering.fakes[unknown.mask]
    if (lowering.fakes[before].shape, lowering.fakes[before].dtype) != (rows.shape, rows.dtype):
        return None
    shape = (*mask.shape, *[1] * (rows.dim() - mask.dim()))
    wide = lowering.emit("aten.reshape.default", (Ref(unknown.mask), shape), {})[0]
    return lowering.emit("aten.where.self", (Ref(wide), Ref(unknown.source), Ref(before)), {})[0]


def _last_rows(lowering: Writing, wanted: _Grouped) -> str:
    """The last selected row of each group."""

    def emit(target: str, *args: Any, **kwargs: Any) -> Ref:
        return Ref(lowering.emit(target, args, kwargs)[0])

    shape, masked = lowering.fakes[wanted.source].shape, lowering.fakes[wanted.mask].shape
    rows = math.prod(masked)
    flat = emit("aten.reshape.default", Ref(wanted.mask), (rows,))
    numbers = emit("aten.cumsum.default", flat, 0)
    total = emit("aten.select.int", numbers, 0, -1)
    each = emit("aten.div.Tensor_mode", total, wanted.num_groups, rounding_mode="floor")
    groups = emit("aten.cumsum.default", emit("aten.new_ones.default", numbers, (wanted.num_groups,)), 0)
    ends = emit("aten.unsqueeze.default", emit("aten.mul.Tensor", groups, each), 1)
    hit = emit("aten.logical_and.default", emit("aten.eq.Tensor", ends, numbers), flat)
    places = emit("aten.argmax.default", emit("aten.to.dtype", hit, TorchName("torch.int64")), 1)
    listed = emit("aten.reshape.default", Ref(wanted.source), (rows, *shape[len(masked) :]))
    return emit("aten.index_select.default", listed, 0, places).value
