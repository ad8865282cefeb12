"""Pooling and resizing of images: rows and channels may be split, space stays whole."""

from __future__ import annotations

from autopar.graph import Operator, OpGraph
from autopar.strategies.pieces import along
from autopar.strategies.rule import RuleFunction, Signature
from autopar.strategies.signatures import first_shape, names, shape, signature

INDEX_BYTES = 8


def _pool(space: int, linear: bool) -> RuleFunction:
    """The last ``space`` dims are pooled. Max pooling keeps the places of the maxima, 64-bit, with its input."""

    def rule(operator: Operator, graph: OpGraph) -> Signature:
        count = len(first_shape(operator, graph))
        elements = graph.values[operator.outputs[0]].num_elements
        returned = len(operator.outputs) > 1
        extra = 0.0 if linear or returned else float(elements * INDEX_BYTES)
        return along(
            operator, graph, range(count - space, count), ((0,),) if linear else (), saves=(0,),
            saves_outputs=(1,) if returned else (), saves_extra_bytes=extra,
        )  # fmt: skip

    return rule


def _resize(operator: Operator, graph: OpGraph) -> Signature:
    count = len(first_shape(operator, graph))
    assert len(shape(graph, operator.outputs[0])) == count, "resizing keeps the number of dims"
    return along(operator, graph, range(2, count), ((0,),))


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
