"""Taking tensors apart and joining them: split, chunk, slice, select, cat, stack, pad, roll.

A dim that is taken apart is cut within each part on its own (``Part``): GPT-2's fused q-k-v by heads, three parts
alike, or query and grouped key heads, unlike parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.graph import Operator, OpGraph
from autopar.strategies.rule import Dim, Part, RuleFunction, Signature, Term
from autopar.strategies.signatures import (
    Extras,
    dims_argument,
    first_shape,
    letters_in,
    names,
    number,
    positive,
    shape,
    signature,
)

ALL = ((0,),)


def _split(operator: Operator, graph: OpGraph) -> Signature | None:
    """split, split_with_sizes, chunk: the parts are what the outputs hold."""
    given = first_shape(operator, graph)
    place = positive(operator.argument(2, "dim", 0), len(given))
    parts = tuple(shape(graph, value)[place] for value in operator.outputs)
    if sum(parts) != given[place] or 0 in parts:
        return None
    sizes: dict[str, int] = {}
    dims = names("d", given, sizes)
    if len(parts) == 1:
        return signature(operator, graph, [tuple(dims)], [tuple(dims)], sizes, linear=ALL, kind="view")
    letter = f"d{place}"
    outputs = [(*dims[:place], Part(letter, i), *dims[place + 1 :]) for i in range(len(parts))]
    return signature(operator, graph, [tuple(dims)], outputs, sizes, parts={letter: parts}, linear=ALL, kind="view")


def _slice(operator: Operator, graph: OpGraph) -> Signature | None:
    """A slice is the middle one of three parts; with a step its dim stays whole."""
    given, result = first_shape(operator, graph), shape(graph, operator.outputs[0])
    place = positive(operator.argument(1, "dim", 0), len(given))
    start, step = slice_start(operator, given[place]), number(operator.argument(4, "step", 1))
    return _one_part(operator, graph, place, start if step == 1 else None, result[place])


def _narrow(operator: Operator, graph: OpGraph) -> Signature | None:
    given, result = first_shape(operator, graph), shape(graph, operator.outputs[0])
    place = positive(operator.argument(1, "dim"), len(given))
    start = positive(number(operator.argument(2, "start")), given[place])
    return _one_part(operator, graph, place, start, result[place])


def slice_start(operator: Operator, size: int) -> int:
    """Where a slice of a dim of ``size`` begins."""
    start = operator.argument(2, "start")
    return 0 if start is None else max(0, min(positive(number(start), size), size))


def _one_part(operator: Operator, graph: OpGraph, place: int, start: int | None, length: int) -> Signature:
    given = first_shape(operator, graph)
    sizes: dict[str, int] = {}
    dims = names("d", given, sizes)
    if start == 0 and length == given[place]:
        return signature(operator, graph, [tuple(dims)], [tuple(dims)], sizes, linear=ALL, kind="view")
    letter = f"d{place}"
    if start is None or given[place] == 1 or length == 0:
        rest: list[Dim] = [*dims[:place], (length,), *dims[place + 1 :]]
        return signature(
            operator,
            graph,
            [tuple(dims)],
            [tuple(rest)],
            sizes,
            whole=letters_in([dims[place]]),
            linear=ALL,
            kind="view",
        )
    parts = tuple(size for size in (start, length, given[place] - start - length) if size)
    index = 1 if start else 0
    output = (*dims[:place], Part(letter, index), *dims[place + 1 :])
    return signature(operator, graph, [tuple(dims)], [output], sizes, parts={letter: parts}, linear=ALL, kind="view")


def _select(operator: Operator, graph: OpGraph) -> Signature:
    sizes: dict[str, int] = {}
    dims = names("d", first_shape(operator, graph), sizes)
    place = positive(operator.argument(1, "dim"), len(dims))
    whole = letters_in([dims[place]])
    output = (*dims[:place], *dims[place + 1 :])
    return signature(operator, graph, [tuple(dims)], [output], sizes, whole=whole, linear=ALL, kind="view")


def _unbind(operator: Operator, graph: OpGraph) -> Signature:
    sizes: dict[str, int] = {}
    dims = names("d", first_shape(operator, graph), sizes)
    place = positive(operator.argument(1, "dim", 0), len(dims))
    output = (*dims[:place], *dims[place + 1 :])
    return signature(
        operator, graph, [tuple(dims)], [output] * len(operator.outputs), sizes, whole=letters_in([dims[place]]),
        linear=ALL, kind="view",
    )  # fmt: skip


def _cat(operator: Operator, graph: OpGraph) -> Signature | None:
    """The inverse of split."""
    shapes = [shape(graph, value) for value in operator.inputs]
    result = shape(graph, operator.outputs[0])
    if any(len(given) != len(result) for given in shapes):
        return None
    place = positive(operator.argument(1, "dim", 0), len(result))
    parts = tuple(given[place] for given in shapes)
    sizes: dict[str, int] = {}
    dims = names("d", result, sizes)
    together = (range(len(shapes)),)
    if len(parts) == 1 or 0 in parts or len(letters_in([dims[place]])) == 0:
        inputs: list[Term] = [(*dims[:place], (part,), *dims[place + 1 :]) for part in parts]
        output = (*dims[:place], (result[place],), *dims[place + 1 :])
        return signature(operator, graph, inputs, [output], sizes, linear=together)
    letter = f"d{place}"
    inputs = [(*dims[:place], Part(letter, i), *dims[place + 1 :]) for i in range(len(parts))]
    return signature(operator, graph, inputs, [tuple(dims)], sizes, parts={letter: parts}, linear=together)


def _stack(operator: Operator, graph: OpGraph) -> Signature:
    sizes: dict[str, int] = {}
    dims = names("d", first_shape(operator, graph), sizes)
    count = len(operator.inputs)
    place = positive(operator.argument(1, "dim", 0), len(dims) + 1)
    output = (*dims[:place], (count,), *dims[place:])
    return signature(operator, graph, [tuple(dims)] * count, [output], sizes, linear=(range(count),))


def along(
    operator: Operator, graph: OpGraph, whole_dims: Iterable[int], linear: Sequence[Iterable[int]] = (),
    saves: Iterable[int] = (), saves_outputs: Iterable[int] = (), saves_extra_bytes: float = 0.0,
    flops: float | None = None,
) -> Signature:  # fmt: skip
    """An operator that works along some dims, the same for all tensors, and element by element along the others; of one
    FLOP for each element of the result unless ``flops`` are given."""
    kept_whole = set(whole_dims)
    sizes: dict[str, int] = {}
    result = names("d", first_shape(operator, graph), sizes)
    whole = letters_in(result[index] for index in kept_whole)
    terms: list[Term] = []
    for value in (*operator.inputs, *(value for value in operator.outputs if value)):
        given = shape(graph, value)
        terms.append(tuple((size,) if i in kept_whole else result[i] for i, size in enumerate(given)))
    count = len(operator.inputs)
    fields: Extras = {"whole": whole, "linear": linear, "saves": saves, "saves_outputs": saves_outputs}
    fields["saves_extra_bytes"] = saves_extra_bytes
    if flops is not None:
        fields["flops"] = flops
    return signature(operator, graph, terms[:count], terms[count:], sizes, **fields)


def _pad(operator: Operator, graph: OpGraph) -> Signature:
    given = first_shape(operator, graph)
    amounts = [number(amount) for amount in operator.argument(1, "pad")]
    padded = [len(given) - 1 - index // 2 for index, amount in enumerate(amounts) if amount]
    constant = "constant_pad" in operator.target or operator.argument(2, "mode", "constant") == "constant"
    zero = operator.argument(3 if "constant_pad" not in operator.target else 2, "value") in (None, 0)
    return along(operator, graph, padded, ALL if zero or not constant else (), saves=() if constant else (0,))


def _roll(operator: Operator, graph: OpGraph) -> Signature:
    given = first_shape(operator, graph)
    return along(operator, graph, dims_argument(operator.argument(2, "dims", ()), len(given)), ALL)


def _flip(operator: Operator, graph: OpGraph) -> Signature:
    return along(operator, graph, dims_argument(operator.argument(1, "dims"), len(first_shape(operator, graph))), ALL)


def _diff(operator: Operator, graph: OpGraph) -> Signature:
    place = positive(operator.argument(2, "dim", -1), len(first_shape(operator, graph)))
    return along(operator, graph, (place,), (range(len(operator.inputs)),))


def _triangle(operator: Operator, graph: OpGraph) -> Signature:
    count = len(first_shape(operator, graph))
    return along(operator, graph, (count - 2, count - 1), ALL)


def _slice_scatter(operator: Operator, graph: OpGraph) -> Signature:
    """x with a slice of it replaced: linear in both together."""
    place = positive(operator.argument(2, "dim", 0), len(first_shape(operator, graph)))
    return along(operator, graph, (place,), ((0, 1),))


def _select_scatter(operator: Operator, graph: OpGraph) -> Signature:
    sizes: dict[str, int] = {}
    dims = names("d", first_shape(operator, graph), sizes)
    place = positive(operator.argument(2, "dim"), len(dims))
    whole = letters_in([dims[place]])
    source = (*dims[:place], *dims[place + 1 :])
    return signature(operator, graph, [tuple(dims), source], [tuple(dims)], sizes, whole=whole, linear=((0, 1),))


def _unfold(operator: Operator, graph: OpGraph) -> Signature:
    """Sliding windows along a dim, each a row of a new last dim."""
    sizes: dict[str, int] = {}
    result = shape(graph, operator.outputs[0])
    dims = names("d", first_shape(operator, graph), sizes)
    place = positive(operator.argument(1, "dimension"), len(dims))
    output = (*dims[:place], (result[place],), *dims[place + 1 :], (result[-1],))
    whole = letters_in([dims[place]])
    return signature(operator, graph, [tuple(dims)], [output], sizes, whole=whole, linear=ALL, kind="view")


RULES: dict[str, RuleFunction] = {
    **{f"aten.{name}": _split for name in ("split.Tensor", "split.sizes", "split_with_sizes.default", "chunk.default")},
    "aten.slice.Tensor": _slice,
    "aten.narrow.default": _narrow,
    "aten.select.int": _select,
    "aten.unbind.int": _unbind,
    **{f"aten.{name}.default": _cat for name in ("cat", "concat", "concatenate")},
    "aten.stack.default": _stack,
    "aten.pad.default": _pad,
    "aten.constant_pad_nd.default": _pad,
    "aten.roll.default": _roll,
    "aten.flip.default": _flip,
    "aten.diff.default": _diff,
    "aten.tril.default": _triangle,
    "aten.triu.default": _triangle,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.select_scatter.default": _select_scatter,
    "aten.unfold.default": _unfold,
}
