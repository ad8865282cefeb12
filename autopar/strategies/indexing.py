"""Reading and writing at given places: embedding, index, gather, scatter."""

from __future__ import annotations

from autopar.graph import Operator, OpGraph, Ref
from autopar.strategies.pieces import along
from autopar.strategies.rule import Dim, RuleFunction, Signature, Term
from autopar.strategies.signatures import (
    first_shape,
    is_floating,
    letters_in,
    names,
    needs_gradient,
    positive,
    shape,
    signature,
    written,
)


def _embedding(operator: Operator, graph: OpGraph) -> Signature:
    """weight (v k), ids (b..) -> (b.. k). With a split vocabulary, each device looks up its own rows, a partial result.

    Gradients scaled by frequency need all ids, and each id its own row.
    """
    count = len(shape(graph, operator.inputs[1]))
    by_frequency = bool(operator.argument(3, "scale_grad_by_freq", False))
    whole = ["v", *(f"b{index}" for index in range(count))] if by_frequency else []
    return written(operator, graph, "v k, b.. -> b.. k", whole=whole, linear=((0,),), saves=(1,))


def _index(operator: Operator, graph: OpGraph) -> Signature | None:
    """x[..., ids, ...]: dims that are not indexed keep their letter, the indices' own dims are the result's letters."""
    placed = _indexed(operator, graph, operator.argument(1, "indices"))
    if placed is None:
        return None
    source, picked, indices, sizes, whole = placed
    return signature(operator, graph, [source, *indices], [picked], sizes, whole=whole, linear=((0,),),
                     saves=range(1, len(operator.inputs)))  # fmt: skip


def _index_put(operator: Operator, graph: OpGraph) -> Signature | None:
    """x with x[ids] = values, or added to: linear in x and values; the written places must all be here."""
    placed = _indexed(operator, graph, operator.argument(1, "indices"))
    if placed is None:
        return None
    source, picked, indices, sizes, whole = placed
    values = shape(graph, operator.inputs[-1])
    aligned = picked[len(picked) - len(values) :]
    term = tuple(dim if size > 1 else () for dim, size in zip(aligned, values, strict=True))
    whole = whole | letters_in(dim for index in indices for dim in index)
    return signature(operator, graph, [source, *indices, term], [source], sizes, whole=whole,
                     linear=((0, len(indices) + 1),), saves=range(1, len(indices) + 1))  # fmt: skip


Placed = tuple[Term, Term, list[Term], dict[str, int], set[str]]


def _indexed(operator: Operator, graph: OpGraph, given: tuple[Ref | None, ...]) -> Placed | None:
    """Terms of x, of x[ids] and of the indices; letters of the indexed dims are whole. None for masks."""
    x = first_shape(operator, graph)
    ids = [index.value for index in given if index is not None]
    if any(graph.values[value].dtype in ("bool", "uint8") for value in ids):
        return None
    sizes: dict[str, int] = {}
    source = names("d", x, sizes)
    at = [dim for dim, index in enumerate(given) if index is not None]
    spread = max(len(shape(graph, value)) for value in ids)
    widest = [1] * spread
    for value in ids:
        for place, size in enumerate(reversed(shape(graph, value)), start=1):
            widest[-place] = max(widest[-place], size)
    new = names("i", widest, sizes)
    indices: list[Term] = []
    for value in ids:
        own = shape(graph, value)
        aligned = new[spread - len(own) :]
        indices.append(tuple(dim if size > 1 else () for dim, size in zip(aligned, own, strict=True)))
    rest: list[Dim] = [dim for index, dim in enumerate(source) if index not in at]
    adjacent = at == list(range(at[0], at[0] + len(at)))
    start = at[0] if adjacent else 0
    picked = (*rest[:start], *new, *rest[start:])
    whole = letters_in(source[index] for index in at)
    return tuple(source), picked, indices, sizes, whole


def _index_select(operator: Operator, graph: OpGraph) -> Signature:
    sizes: dict[str, int] = {}
    dims = names("d", first_shape(operator, graph), sizes)
    place = positive(operator.argument(1, "dim"), len(dims))
    ids = names("i", shape(graph, operator.inputs[1]) or (1,), sizes)
    output = (*dims[:place], ids[0], *dims[place + 1 :])
    index: Term = tuple(ids) if shape(graph, operator.inputs[1]) else ()
    return signature(operator, graph, [tuple(dims), index], [output], sizes, whole=letters_in([dims[place]]),
                     linear=((0,),), saves=(1,))  # fmt: skip


def _gather(operator: Operator, graph: OpGraph) -> Signature:
    """x[ids along dim]: the ids' own dim may be split, x's may not; dims that ids read in part stay whole."""
    given, ids = shape(graph, operator.inputs[0]), shape(graph, operator.inputs[1])
    sizes: dict[str, int] = {}
    if not given:
        return signature(operator, graph, [(), tuple(names("i", ids, sizes))], [()], sizes, linear=((0,),))
    place = positive(operator.argument(1, "dim"), len(given))
    source = names("d", given, sizes)
    index = names("i", ids, sizes)
    for dim, (size, part) in enumerate(zip(given, ids, strict=True)):
        if dim != place and size == part:
            index[dim] = source[dim]
        elif dim != place:
            source[dim], index[dim] = (size,), (part,)
    whole = letters_in([source[place]])
    return signature(operator, graph, [tuple(source), tuple(index)], [tuple(index)], sizes, whole=whole,
                     linear=((0,),), saves=(0, 1))  # fmt: skip


def _scatter(operator: Operator, graph: OpGraph) -> Signature | None:
    """x with values written, or added, at ids along a dim, which stays whole, as do dims that ids cover in part."""
    given, ids = shape(graph, operator.inputs[0]), shape(graph, operator.inputs[1])
    if not given or operator.target.endswith("reduce"):
        return None
    place = positive(operator.argument(1, "dim"), len(given))
    partly = [dim for dim, sizes in enumerate(zip(given, ids, strict=True)) if len(set(sizes)) > 1]
    if len(operator.inputs) == 3:
        partly += [
            d for d, sizes in enumerate(zip(ids, shape(graph, operator.inputs[2]), strict=True)) if len(set(sizes)) > 1
        ]
    zero = len(operator.inputs) == 2 and operator.argument(3, "value") == 0
    linear = ((0, 2),) if len(operator.inputs) == 3 else ((0,),) if zero else ()
    return along(
        operator, graph, {place, *partly}, linear if is_floating(graph, operator.inputs[0]) else (), saves=(1,)
    )


def _index_add(operator: Operator, graph: OpGraph) -> Signature:
    """x with rows of source added at ids."""
    sizes: dict[str, int] = {}
    dims = names("d", first_shape(operator, graph), sizes)
    place = positive(operator.argument(1, "dim"), len(dims))
    ids = names("i", shape(graph, operator.inputs[1]), sizes)
    source = (*dims[:place], *ids, *dims[place + 1 :])
    whole = letters_in([dims[place], *ids])
    linear = ((0, 2),) if "add" in operator.target or "copy" in operator.target else ()
    return signature(operator, graph, [tuple(dims), tuple(ids), source], [tuple(dims)], sizes, whole=whole,
                     linear=linear, saves=_kept_of_source(operator, graph))  # fmt: skip


def _kept_of_source(operator: Operator, graph: OpGraph) -> tuple[int, ...]:
    """Ids and source: where only x has a gradient index_add keeps neither, since it hands that one on."""
    added = "add" in operator.target and not needs_gradient(operator, graph)[2]
    return () if added else (1, 2)


def _one_hot(operator: Operator, graph: OpGraph) -> Signature:
    sizes: dict[str, int] = {}
    dims = names("d", first_shape(operator, graph), sizes)
    width = shape(graph, operator.outputs[0])[-1]
    return signature(operator, graph, [tuple(dims)], [(*dims, (width,))], sizes)


RULES: dict[str, RuleFunction] = {
    "aten.embedding.default": _embedding,
    "aten.index.Tensor": _index,
    "aten.index_put.default": _index_put,
    "aten.index_select.default": _index_select,
    "aten.gather.default": _gather,
    **{f"aten.{name}": _scatter for name in ("scatter.src", "scatter.value", "scatter_add.default")},
    **{f"aten.{name}.default": _index_add for name in ("index_add", "index_copy")},
    "aten.one_hot.default": _one_hot,
}
