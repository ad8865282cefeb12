"""Views: the same elements under other dims. Reshapes are factorised, so that a letter stands for the same elements.

``(b s) k -> b s k`` and ``b s (n d) -> b s n d`` follow from the sizes alone: both shapes are cut at the products of
their leading dims, and each stretch between two cuts that divide one another is a letter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from autopar.graph import Operator, OpGraph
from autopar.strategies.rule import Dim, RuleFunction, Signature, Term
from autopar.strategies.signatures import (
    dims_argument,
    first_shape,
    names,
    number,
    only_shape,
    positive,
    shape,
    signature,
)

ALL = ((0,),)


def factorize(source: Sequence[int], target: Sequence[int]) -> tuple[Term, Term, dict[str, int]]:
    """Letters for a reshape; factors that the two shapes do not share stay numbers, which are never split.

    >>> factorize((8, 12), (8, 3, 4))[:2]
    ((('v0',), ('v1', 'v2')), (('v0',), ('v1',), ('v2',)))
    """
    if 0 in source or math.prod(source) != math.prod(target):
        return tuple((size,) for size in source), tuple((size,) for size in target), {}
    chain = [1]
    for point in sorted({*accumulate(source, mul), *accumulate(target, mul)}):
        if point > chain[-1] and point % chain[-1] == 0:
            chain.append(point)
    sizes: dict[str, int] = {}
    ranges: dict[str, tuple[int, int]] = {}
    for index in range(len(chain) - 1):
        start, end = chain[index], chain[index + 1]
        if _within(start, end, source) and _within(start, end, target):
            letter = f"v{len(ranges)}"
            ranges[letter], sizes[letter] = (start, end), end // start
    return _factored(source, ranges), _factored(target, ranges), sizes


def _bounds(dims: Sequence[int]) -> list[tuple[int, int]]:
    """Product of the sizes before each dim, and up to its end."""
    ends = list(accumulate(dims, mul))
    return list(zip([1, *ends[:-1]], ends, strict=True)) if ends else []


def _within(start: int, end: int, dims: Sequence[int]) -> bool:
    """Whether one dim holds the factor from ``start`` to ``end`` of the products from the front."""
    return any(low <= start < end <= high and start % low == 0 and high % end == 0 for low, high in _bounds(dims))


def _factored(dims: Sequence[int], ranges: dict[str, tuple[int, int]]) -> Term:
    found: list[Dim] = []
    for low, high in _bounds(dims):
        factors: list[str | int] = []
        reached = low
        for letter, (start, end) in ranges.items():
            if low <= start < end <= high:
                if start > reached:
                    factors.append(start // reached)
                factors.append(letter)
                reached = end
        if high > reached:
            factors.append(high // reached)
        found.append(tuple(factors))
    return tuple(found)


def _reshape(operator: Operator, graph: OpGraph) -> Signature:
    """view, reshape, flatten and the like; a copy where the result does not share the input's memory."""
    output = operator.outputs[0]
    source, target, sizes = factorize(first_shape(operator, graph), shape(graph, output))
    inputs = [source, *(only_shape(graph, value, output, target, sizes)[0] for value in operator.inputs[1:])]
    shared = graph.values[output].storage not in ("", output) or operator.target.startswith("aten.view")
    return signature(operator, graph, inputs, [target], sizes, linear=ALL, kind="view" if shared else "elementwise")


def _permuted(order: Sequence[int], operator: Operator, graph: OpGraph) -> Signature:
    sizes: dict[str, int] = {}
    dims = names("d", first_shape(operator, graph), sizes)
    return signature(operator, graph, [tuple(dims)], [tuple(dims[i] for i in order)], sizes, linear=ALL, kind="view")


def _permute(operator: Operator, graph: OpGraph) -> Signature:
    count = len(first_shape(operator, graph))
    return _permuted([positive(dim, count) for dim in operator.argument(1, "dims")], operator, graph)


def _transpose(operator: Operator, graph: OpGraph) -> Signature:
    count = len(first_shape(operator, graph))
    first = positive(operator.argument(1, "dim0", operator.argument(1, "axis0")), count)
    second = positive(operator.argument(2, "dim1", operator.argument(2, "axis1")), count)
    order = list(range(count))
    order[first], order[second] = second, first
    return _permuted(order, operator, graph)


def _reversed_dims(operator: Operator, graph: OpGraph) -> Signature:
    """t, numpy_T, mT: all dims, or the last two, the other way round."""
    count = len(first_shape(operator, graph))
    start = count - 2 if "mT" in operator.target or "adjoint" in operator.target else 0
    return _permuted([*range(start), *reversed(range(start, count))], operator, graph)


def _movedim(operator: Operator, graph: OpGraph) -> Signature:
    count = len(first_shape(operator, graph))
    given = (operator.argument(1, "source"), operator.argument(2, "destination"))
    source, target = ([positive(d, count) for d in (dims if isinstance(dims, tuple) else (dims,))] for dims in given)
    rest = iter(dim for dim in range(count) if dim not in source)
    placed = dict(zip(target, source, strict=True))
    return _permuted([placed[i] if i in placed else next(rest) for i in range(count)], operator, graph)


def _unsqueeze(operator: Operator, graph: OpGraph) -> Signature:
    sizes: dict[str, int] = {}
    dims = names("d", first_shape(operator, graph), sizes)
    place = positive(operator.argument(1, "dim"), len(dims) + 1)
    return signature(
        operator, graph, [tuple(dims)], [(*dims[:place], (), *dims[place:])], sizes, linear=ALL, kind="view"
    )


def _squeeze(operator: Operator, graph: OpGraph) -> Signature:
    given = first_shape(operator, graph)
    sizes: dict[str, int] = {}
    dims = names("d", given, sizes)
    dropped = dims_argument(operator.argument(1, "dim"), len(given))
    kept = [dim for index, dim in enumerate(dims) if index not in dropped or given[index] != 1]
    return signature(operator, graph, [tuple(dims)], [tuple(kept)], sizes, linear=ALL, kind="view")


def _expand(operator: Operator, graph: OpGraph) -> Signature:
    """A new or widened dim is a letter that only the result has. Several inputs (broadcast_tensors) widen together."""
    sizes: dict[str, int] = {}
    target = names("d", shape(graph, operator.outputs[0]), sizes)
    inputs: list[Term] = []
    for value in operator.inputs:
        given = shape(graph, value)
        aligned = target[len(target) - len(given) :]
        inputs.append(tuple(dim if size > 1 else () for dim, size in zip(aligned, given, strict=True)))
    count = len(operator.outputs)
    together = range(len(operator.inputs)) if count > 1 else (0,)
    return signature(operator, graph, inputs, [tuple(target)] * count, sizes, linear=(together,), kind="view")


def _repeat(operator: Operator, graph: OpGraph) -> Signature:
    """repeat and tile: a dim of the result is the input's dim, again and again; a widened dim of size 1 is new."""
    given, target = first_shape(operator, graph), shape(graph, operator.outputs[0])
    padded = (1,) * (len(target) - len(given)) + tuple(given)
    sizes: dict[str, int] = {}
    source: list[Dim] = []
    result: list[Dim] = []
    for index, (small, large) in enumerate(zip(padded, target, strict=True)):
        dim = names(f"d{index}_", (large if small == 1 else small,), sizes)[0]
        source.append(() if small == 1 else dim)
        result.append(dim if small in (1, large) else (large // small, *(dim if isinstance(dim, tuple) else ())))
    term = tuple(source[len(target) - len(given) :])
    return signature(operator, graph, [term], [tuple(result)], sizes, linear=ALL)


def _repeat_interleave(operator: Operator, graph: OpGraph) -> Signature | None:
    """Each element several times in a row: ``n -> (n g)``, which is how key heads meet groups of query heads."""
    given = first_shape(operator, graph)
    if operator.argument(2, "dim") is None and len(given) != 1:
        return None
    place = positive(operator.argument(2, "dim", 0) or 0, len(given))
    sizes: dict[str, int] = {}
    dims = names("d", given, sizes)
    times = number(operator.argument(1, "repeats"))
    old = dims[place]
    assert isinstance(old, tuple)
    new: Dim = old
    if times > 1:
        sizes["g"] = times
        new = (*old, "g")
    result = (*dims[:place], new, *dims[place + 1 :])
    return signature(operator, graph, [tuple(dims)], [result], sizes, linear=ALL)


def _meshgrid(operator: Operator, graph: OpGraph) -> Signature | None:
    if operator.argument(1, "indexing", "ij") != "ij" or any(len(shape(graph, value)) > 1 for value in operator.inputs):
        return None
    sizes: dict[str, int] = {}
    dims = [names(f"m{index}_", shape(graph, value) or (1,), sizes)[0] for index, value in enumerate(operator.inputs)]
    inputs = [(dim,) if shape(graph, value) else () for dim, value in zip(dims, operator.inputs, strict=True)]
    together = (range(len(inputs)),)
    return signature(operator, graph, inputs, [tuple(dims)] * len(inputs), sizes, linear=together, kind="view")


RULES: dict[str, RuleFunction] = {
    **{
        f"aten.{name}": _reshape
        for name in (
            "view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints", "unflatten.int",
            "view_as.default", "reshape_as.default", "ravel.default",
        )
    },
    **{f"aten.{name}": _transpose for name in ("transpose.int", "swapaxes.default", "swapdims.default")},
    **{f"aten.{name}.default": _reversed_dims for name in ("t", "numpy_T", "mT", "adjoint", "matrix_H")},
    "aten.permute.default": _permute,
    "aten.movedim.int": _movedim,
    "aten.movedim.intlist": _movedim,
    "aten.moveaxis.int": _movedim,
    "aten.moveaxis.intlist": _movedim,
    "aten.unsqueeze.default": _unsqueeze,
    **{f"aten.squeeze.{name}": _squeeze for name in ("default", "dim", "dims")},
    **{f"aten.{name}.default": _expand for name in ("expand", "broadcast_to", "broadcast_tensors")},
    "aten.expand_as.default": _expand,
    "aten.repeat.default": _repeat,
    "aten.tile.default": _repeat,
    "aten.repeat_interleave.self_int": _repeat_interleave,
    "aten.meshgrid.indexing": _meshgrid,
    "aten.meshgrid.default": _meshgrid,
}  # fmt: skip
