"""Pooling and resizing of images: rows and channels may be split, and space where windows fit (``spatial.py``)."""

from __future__ import annotations

import math

from autopar.graph import Operator, OpGraph
from autopar.strategies.pieces import along
from autopar.strategies.rule import RuleFunction, Signature
from autopar.strategies.signatures import Extras, first_shape, names, shape, signature
from autopar.strategies.spatial import sizes_of, space_dims, terms_of, with_space

INDEX_BYTES = 8


def _pool(space: int, linear: bool) -> RuleFunction:
    """The last ``space`` dims are pooled. Max pooling keeps the places of the maxima, 64-bit, with its input; where it returns
    them, they are places in the whole image."""

    def rule(operator: Operator, graph: OpGraph) -> Signature:
        count = len(first_shape(operator, graph))
        elements = graph.values[operator.outputs[0]].num_elements
        if len(operator.outputs) > 1:
            return along(operator, graph, range(count - space, count), saves=(0,), saves_outputs=(1,))
        extra = 0.0 if linear else float(elements * INDEX_BYTES)
        mean = linear and "adaptive" in operator.target and elements == math.prod(first_shape(operator, graph)[:-space])
        saves = () if mean else (0,)  # a mean over all of space needs nothing of it
        fields: Extras = {"linear": ((0,),) if linear else (), "saves": saves, "saves_extra_bytes": extra}
        return _over_space(operator, graph, fields)

    return rule


def _resize(operator: Operator, graph: OpGraph) -> Signature:
    assert len(shape(graph, operator.outputs[0])) == len(first_shape(operator, graph)), "resizing keeps the number of dims"
    return _over_space(operator, graph, {"linear": ((0,),)})


def _over_space(operator: Operator, graph: OpGraph, fields: Extras) -> Signature:
    """One tensor in and out, with the dims before space alike."""
    space = space_dims(operator, graph)
    sizes = sizes_of(space)
    before = names("b", first_shape(operator, graph)[: space[0].index], sizes)
    given, result = terms_of(space)
    fields = with_space(fields, operator, graph, space)
    return signature(operator, graph, [(*before, *given)], [(*before, *result)], sizes, **fields)


def _pixel_shuffle(operator: Operator, graph: OpGraph) -> Signature:
    """b (c r r) h w -> b c (h r) (w r): what becomes space stays together."""
    given, result = first_shape(operator, graph), shape(graph, operator.outputs[0])
    sizes: dict[str, int] = {}
    dims = names("b", [*given[:-3], result[-3]], sizes)
    channel = dims[-1]
    assert isinstance(channel, tuple), "a dim of an image is no part"
    source = (*dims[:-1], (*channel, given[-3] // result[-3]), (given[-2],), (given[-1],))
    return signature(operator, graph, [source], [(*dims, (result[-2],), (result[-1],))], sizes, linear=((0,),))


RULES: dict[str, RuleFunction] = {
    **{f"aten.max_pool{n}d.default": _pool(n, linear=False) for n in (1, 2, 3)},
    **{f"aten.avg_pool{n}d.default": _pool(n, linear=True) for n in (1, 2, 3)},
    **{f"aten.adaptive_avg_pool{n}d.default": _pool(n, linear=True) for n in (1, 2, 3)},
    **{f"aten.adaptive_max_pool{n}d.default": _pool(n, linear=False) for n in (1, 2, 3)},
    **{
        f"aten.upsample_{kind}.{overload}": _resize
        for kind in (
            "nearest1d", "nearest2d", "nearest3d", "bilinear2d", "bicubic2d", "linear1d", "trilinear3d",
        )
        for overload in ("vec", "default")
    },
    "aten.pixel_shuffle.default": _pixel_shuffle,
}  # fmt: skip
