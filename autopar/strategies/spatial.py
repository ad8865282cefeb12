"""Space: how dims that a window slides along are split, and what neighbouring devices send each other for it.

Enters: a convolution, a pooling or a resizing operator. Leaves: a :class:`SpaceDim` for each of its spatial dims. Where the
larger of input and output is a whole multiple of the smaller one, the smaller is a letter ``s0`` and the larger ``(s0 n)``,
so that both are cut at the same places. A device then computes its piece of the output from its piece of the input and a
*halo*: the elements next to it that its neighbours hold. Positions count from 0; ``i`` is of the input, ``o`` of the output,
``k`` of the kernel:

    convolution, pooling      o reads i = o stride - padding + k dilation
    transposed convolution    o reads i where o = i stride - padding + k dilation
    linear, cubic resizing    o reads the 2 or 4 elements around (o + 1/2) / factor - 1/2, those beyond the border repeated

What does not fit (valid convolutions, a size that the stride does not divide, aligned corners) leaves its dim whole.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from autopar.graph import ITEM_BYTES, Operator, OpGraph
from autopar.strategies.rule import Dim, Edge, Halo, Signature, Term
from autopar.strategies.signatures import Extras, number, shape

MINUS_INFINITY = float("-inf")


@dataclass(frozen=True)
class SpaceDim:
    """A spatial dim, the input's and the output's ``index``-th from the left, of ``given`` and ``result`` elements.

    ``padding`` and ``output_padding`` are the operator's. ``splits`` says whether the dim may be split; its letter has then
    ``size`` elements, ``before`` and ``after`` are the halo, and the call on a piece with it is padded by ``local_padding``
    and ``local_output_padding``.
    """

    index: int
    given: int
    result: int
    padding: int = 0
    output_padding: int = 0
    splits: bool = False
    before: int = 0
    after: int = 0
    local_padding: int = 0
    local_output_padding: int = 0

    @property
    def size(self) -> int:
        return self.given if self.result == 1 else min(self.given, self.result)

    @property
    def has_halo(self) -> bool:
        return self.before > 0 or self.after > 0

    def dims(self, letter: str) -> tuple[Dim, Dim]:
        """The dim in the input's and in the output's term."""
        if not self.splits:
            return (self.given,), (self.result,)
        if self.result == 1:  # taken together
            return (letter,), ()
        return _times(letter, self.given // self.size), _times(letter, self.result // self.size)


def _times(letter: str, factor: int) -> Dim:
    return (letter,) if factor == 1 else (letter, factor)


def letter_of(dim: SpaceDim) -> str:
    """``s2`` for dim 2."""
    return f"s{dim.index}"


def space_dims(operator: Operator, graph: OpGraph) -> tuple[SpaceDim, ...]:
    """The spatial dims of an operator; none for one that is not of these families."""
    kind = operator.target.split(".")[1]
    if kind.startswith("conv_transpose"):
        return _transposed(operator, graph)
    if kind.startswith("conv"):
        return _convolved(operator, graph)
    if kind.startswith(("max_pool", "avg_pool")):
        return _pooled(operator, graph)
    if kind.startswith("adaptive_"):
        return _adapted(operator, graph)
    if kind.startswith("upsample_"):
        return _resized(operator, graph)
    return ()


def edge_of(operator: Operator) -> Edge:
    """What lies beyond the border of the whole tensor."""
    kind = operator.target.split(".")[1]
    return "repeat" if kind.startswith("upsample_") else MINUS_INFINITY if kind.startswith("max_pool") else 0.0


def sizes_of(dims: Iterable[SpaceDim]) -> dict[str, int]:
    """The sizes of the letters."""
    return {letter_of(dim): dim.size for dim in dims if dim.splits}


def terms_of(dims: Iterable[SpaceDim]) -> tuple[list[Dim], list[Dim]]:
    """The ends of the input's and of the output's term."""
    pairs = [dim.dims(letter_of(dim)) for dim in dims]
    return [given for given, _ in pairs], [result for _, result in pairs]


def with_space(fields: Extras, operator: Operator, graph: OpGraph, dims: Iterable[SpaceDim]) -> Extras:
    """The fields of a signature whose spatial dims may be split."""
    splitting = [dim for dim in dims if dim.splits]
    value = graph.values[operator.inputs[0]]
    halos = tuple(
        Halo(
            letter_of(dim), dim.index, dim.before, dim.after, ITEM_BYTES[value.dtype], value.requires_grad, edge_of(operator)
        )
        for dim in splitting
        if dim.has_halo
    )  # fmt: skip
    return {**fields, "halos": halos, "spatial": [letter_of(dim) for dim in splitting]}


def exchanged_halos(rule: Signature, split: Container[str]) -> tuple[Halo, ...]:
    """The halos that are exchanged when some letters are split, in their order."""
    return tuple(halo for halo in rule.halos if halo.letter in split)


def halo_section(rule: Signature, halo: Halo, lengths: Mapping[str, float]) -> float:
    """Elements of one row of a halo. ``lengths``: of the pieces of split letters; what earlier exchanges have added to other
    dims is sent too, so that corners arrive."""
    earlier = itertools.takewhile(lambda other: other is not halo, exchanged_halos(rule, lengths))
    sizes = _with_halos(rule, earlier, lengths)
    return math.prod(size for dim, size in enumerate(sizes) if dim != halo.dim)


def copied_elements(rule: Signature, lengths: Mapping[str, float]) -> float:
    """Elements of the copy of the first input with all of its halos around it; 0 where there are none."""
    halos = exchanged_halos(rule, lengths)
    return math.prod(_with_halos(rule, halos, lengths)) if halos else 0.0


def _with_halos(rule: Signature, halos: Iterable[Halo], lengths: Mapping[str, float]) -> list[float]:
    """Sizes of the local first input with some halos around it."""
    sizes = []
    for dim in rule.inputs[0]:
        assert isinstance(dim, tuple), "an image is not divided into parts"
        sizes.append(math.prod(float(f) if isinstance(f, int) else lengths.get(f, float(rule.sizes[f])) for f in dim))
    for halo in halos:
        sizes[halo.dim] += halo.before + halo.after
    return sizes


def letters_of_space(operators: Sequence[Operator], signatures: Mapping[str, Signature]) -> dict[str, tuple[str, ...]]:
    """The letters of each operator that are space, longest first: those that windows slide along, and what lies alike in
    images (of four dims and more) that elementwise operators and norms read and write between them."""
    ruled = [operator for operator in operators if operator.id in signatures]
    found = {operator.id: set(signatures[operator.id].spatial) for operator in ruled}
    marked: set[tuple[str, int]] = set()
    for operator in ruled:
        marked |= _places(operator, signatures[operator.id], found[operator.id])
    size = -1
    while marked and size != len(marked):
        size = len(marked)
        for operator in (*ruled, *reversed(ruled)):
            signature = signatures[operator.id]
            if signature.kind == "elementwise" and not signature.spatial:
                found[operator.id] = _letters_at(operator, signature, marked)
                marked |= _places(operator, signature, found[operator.id])
    sizes = {name: signatures[name].sizes for name in found}
    return {
        name: tuple(sorted(letters, key=lambda letter: (-sizes[name][letter], letter)))
        for name, letters in found.items()
        if letters
    }


def _places(operator: Operator, signature: Signature, letters: Container[str]) -> set[tuple[str, int]]:
    """Values and dims where some letters stand."""
    return {
        (value, index)
        for value, term in _terms(operator, signature)
        for index, dim in enumerate(term)
        if isinstance(dim, tuple) and any(letter in letters for letter in dim)
    }


def _letters_at(operator: Operator, signature: Signature, places: Container[tuple[str, int]]) -> set[str]:
    """The letters that are alone in a dim of an image at one of these places."""
    return {
        dim[0]
        for value, term in _terms(operator, signature)
        for index, dim in enumerate(term)
        if len(term) >= 4
        and isinstance(dim, tuple)
        and len(dim) == 1
        and isinstance(dim[0], str)
        and (value, index) in places
    }


def _terms(operator: Operator, signature: Signature) -> list[tuple[str, Term]]:
    outputs = (value for value in operator.outputs if value)
    return list(zip((*operator.inputs, *outputs), (*signature.inputs, *signature.outputs), strict=True))


def _each(argument: Any, count: int, default: int) -> tuple[int, ...]:
    """A number for each spatial dim: one for all, or none for the default."""
    given = tuple(number(item) for item in argument) if isinstance(argument, tuple) else (number(argument),)
    if not given:
        return (default,) * count
    return given * count if len(given) == 1 else given


def _sizes(operator: Operator, graph: OpGraph, count: int) -> list[tuple[int, int, int]]:
    """Index, input size and output size of the last ``count`` dims."""
    given, result = shape(graph, operator.inputs[0]), shape(graph, operator.outputs[0])
    return [(index, given[index], result[index]) for index in range(len(given) - count, len(given))]


def _whole(sizes: Iterable[tuple[int, int, int]]) -> tuple[SpaceDim, ...]:
    return tuple(SpaceDim(*size) for size in sizes)


def _slid(sizes: tuple[int, int, int], window: tuple[int, int, int, int], most_after: int) -> SpaceDim:
    """A dim along which a window of (extent, stride, padding, dilation) slides; the border may be passed by ``most_after``."""
    index, given, result = sizes
    extent, stride, padding, dilation = window
    reach = dilation * (extent - 1) + 1
    after = max(0, reach - stride - padding)
    fits = given == result * stride and result > 1 and padding < reach and after <= most_after
    whole = SpaceDim(index, given, result, padding)
    return replace(whole, splits=True, before=padding, after=after) if fits else whole


def _convolved(operator: Operator, graph: OpGraph) -> tuple[SpaceDim, ...]:
    kernel = shape(graph, operator.inputs[1])[2:]
    count = len(kernel)
    strides = _each(operator.argument(3, "stride", 1), count, 1)
    dilations = _each(operator.argument(5, "dilation", 1), count, 1)
    padding = operator.argument(4, "padding", 0)
    sizes = _sizes(operator, graph, count)
    if isinstance(padding, str):
        totals = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilations, kernel, strict=True)]
        if any(total % 2 for total in totals):
            return _whole(sizes)  # padded unevenly, which a number cannot say of the dims that stay whole
        paddings = tuple(total // 2 for total in totals)
    else:
        paddings = _each(padding, count, 0)
    windows = zip(kernel, strides, paddings, dilations, strict=True)
    return tuple(_slid(size, window, max(size[1:])) for size, window in zip(sizes, windows, strict=True))


def _transposed(operator: Operator, graph: OpGraph) -> tuple[SpaceDim, ...]:
    kernel = shape(graph, operator.inputs[1])[2:]
    count = len(kernel)
    arguments = ((3, "stride", 1), (4, "padding", 0), (5, "output_padding", 0), (7, "dilation", 1))
    settings = zip(
        *(_each(operator.argument(at, name, base), count, base) for at, name, base in arguments), strict=True
    )
    sizes = _sizes(operator, graph, count)
    return tuple(_widened(*given) for given in zip(sizes, kernel, settings, strict=True))


def _widened(sizes: tuple[int, int, int], extent: int, settings: tuple[int, int, int, int]) -> SpaceDim:
    """A dim of a transposed convolution with (stride, padding, output padding, dilation).

    With ``before`` and ``after`` more elements, the local result begins ``before stride`` too early and ends ``after stride``
    too late: padding takes away as much on both sides, the output padding gives back what is too much.
    """
    index, given, result = sizes
    stride, padding, output_padding, dilation = settings
    reach = dilation * (extent - 1) + 1
    whole = SpaceDim(index, given, result, padding, output_padding)
    if result != given * stride or given < 2 or padding >= reach:
        return whole
    before, after = (reach - 1 - padding) // stride, -(-padding // stride)
    if not 0 <= output_padding + (before - after) * stride < max(stride, dilation):
        before = after = max(before, after)
    more = output_padding + (before - after) * stride
    return replace(
        whole,
        splits=True,
        before=before,
        after=after,
        local_padding=padding + before * stride,
        local_output_padding=more,
    )


def _pooled(operator: Operator, graph: OpGraph) -> tuple[SpaceDim, ...]:
    averages = "avg_pool" in operator.target
    count = int(operator.target.split("pool")[1][0])
    extents = _each(operator.argument(1, "kernel_size"), count, 1)
    strides = tuple(
        stride or extent
        for stride, extent in zip(_each(operator.argument(2, "stride", ()), count, 0), extents, strict=True)
    )
    paddings = _each(operator.argument(3, "padding", 0), count, 0)
    dilations = (1,) * count if averages else _each(operator.argument(4, "dilation", 1), count, 1)
    sizes = _sizes(operator, graph, count)
    windows = list(zip(extents, strides, paddings, dilations, strict=True))
    if operator.argument(4 if averages else 5, "ceil_mode", False) and any(
        result != (given + 2 * window[2] - window[3] * (window[0] - 1) - 1) // window[1] + 1
        for (_, given, result), window in zip(sizes, windows, strict=True)
    ):
        return _whole(sizes)  # the last window is cut off at the border
    if averages and any(paddings) and not operator.argument(5, "count_include_pad", True):
        return _whole(sizes)  # at the border a mean is of fewer elements
    return tuple(_slid(size, window, window[2]) for size, window in zip(sizes, windows, strict=True))


def _adapted(operator: Operator, graph: OpGraph) -> tuple[SpaceDim, ...]:
    """Windows that lie side by side; a mean over the whole dim is a term of a sum."""
    averages = "avg_pool" in operator.target
    count = int(operator.target.split("pool")[1][0])
    return tuple(
        SpaceDim(index, given, result, splits=given % result == 0 and given > 1 and (result > 1 or averages))
        for index, given, result in _sizes(operator, graph, count)
    )


def _resized(operator: Operator, graph: OpGraph) -> tuple[SpaceDim, ...]:
    kind = operator.target.split(".")[1].removeprefix("upsample_")
    sizes = _sizes(operator, graph, int(kind[-2]))
    reach = 0 if "nearest" in kind else 2 if "cubic" in kind else 1
    if reach and operator.argument(2, "align_corners", False):
        return _whole(sizes)
    found = []
    for index, given, result in sizes:
        fits = given > 1 and result % given == 0 and (reach > 0 or nearest_repeats(given, result // given))
        halo = reach if fits and result > given else 0
        found.append(SpaceDim(index, given, result, splits=fits, before=halo, after=halo))
    return tuple(found)


@lru_cache(maxsize=1024)
def nearest_repeats(size: int, factor: int) -> bool:
    """Whether resizing to the nearest repeats every element ``factor`` times: torch finds the place of the nearest in
    float32 (``nearest_idx`` in ATen's UpSample.h), which for some factors is one too low."""
    scale = _in_float32(1 / factor)
    return all(int(_in_float32(place * scale)) == place // factor for place in range(size * factor))


def _in_float32(number: float) -> float:
    found: float = struct.unpack("f", struct.pack("f", number))[0]
    return found
