"""Fourier transforms: the dims that are transformed stay whole, the others are free."""

from __future__ import annotations

import math

from autopar.graph import ITEM_BYTES, Operator, OpGraph
from autopar.strategies.pieces import along
from autopar.strategies.rule import RuleFunction, Signature
from autopar.strategies.signatures import dims_argument, first_shape, number, shape

ALL = ((0,),)  # linear
KEEP_REAL = ("fft.", "ifft.", "rfft", "ihfft.")  # transforms whose backward keeps a real input (fft_r2c in ATen)


def _one_dim(operator: Operator, graph: OpGraph) -> Signature:
    return _transformed(operator, graph, dims_argument(operator.argument(2, "dim", -1), _num_dims(operator, graph)))


def _two_dims(operator: Operator, graph: OpGraph) -> Signature:
    return _transformed(
        operator, graph, dims_argument(operator.argument(2, "dim", (-2, -1)), _num_dims(operator, graph))
    )


def _several_dims(operator: Operator, graph: OpGraph) -> Signature:
    """All dims unless they are given; with sizes alone the last ones."""
    count, sizes = _num_dims(operator, graph), operator.argument(1, "s")
    given = operator.argument(2, "dim")
    if given is None and sizes is not None:
        given = tuple(range(count - len(sizes), count))
    return _transformed(operator, graph, dims_argument(given, count))


def _shifted(operator: Operator, graph: OpGraph) -> Signature:
    dims = dims_argument(operator.argument(1, "dim"), _num_dims(operator, graph))
    return along(operator, graph, dims, ALL)


def _num_dims(operator: Operator, graph: OpGraph) -> int:
    return len(first_shape(operator, graph))


def _transformed(operator: Operator, graph: OpGraph, dims: tuple[int, ...]) -> Signature:
    """5 n log2 n FLOPs for n elements, the customary count (FFTW's benchmark methodology), half of it where one side is
    real."""
    given, result = first_shape(operator, graph), shape(graph, operator.outputs[0])
    points = math.prod(max(given[dim], result[dim]) for dim in dims)
    rows = math.prod(size for dim, size in enumerate(given) if dim not in dims)
    values = (graph.values[operator.inputs[0]], graph.values[operator.outputs[0]])
    real = any(not value.dtype.startswith("complex") for value in values)
    flops = 5.0 * rows * points * math.log2(max(points, 2)) * (0.5 if real else 1.0)
    padded = _padded_bytes(operator, graph, dims)
    if not operator.target.split("_")[1].startswith(KEEP_REAL) or values[0].dtype.startswith("complex"):
        return along(operator, graph, dims, ALL, flops=flops)
    saves = () if padded else (0,)
    return along(operator, graph, dims, ALL, flops=flops, saves=saves, saves_extra_bytes=padded)


def _padded_bytes(operator: Operator, graph: OpGraph, dims: tuple[int, ...]) -> float:
    """Bytes of the input padded to the lengths that are transformed; 0 where it need not be."""
    lengths = operator.argument(1, "n") if len(dims) == 1 else operator.argument(1, "s")
    value = graph.values[operator.inputs[0]]
    wanted = dict(zip(dims, lengths if isinstance(lengths, tuple) else (lengths,), strict=False)) if lengths else {}
    sizes = [max(size, number(wanted.get(dim, size))) for dim, size in enumerate(value.shape)]
    return float(math.prod(sizes) * ITEM_BYTES[value.dtype]) if tuple(sizes) != value.shape else 0.0


RULES: dict[str, RuleFunction] = {
    **{f"aten.fft_{name}.default": _one_dim for name in "fft ifft rfft irfft hfft ihfft".split()},
    **{f"aten.fft_{name}.default": _two_dims for name in "fft2 ifft2 rfft2 irfft2".split()},
    **{f"aten.fft_{name}.default": _several_dims for name in "fftn ifftn rfftn irfftn".split()},
    **{f"aten.fft_{name}.default": _shifted for name in "fftshift ifftshift".split()},
}
