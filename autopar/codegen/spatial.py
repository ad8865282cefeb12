"""Calls of convolutions, pooling and resizing on pieces of an image: with halos from the neighbours around the piece.

    F.conv2d(halo(x, 2, mesh.spatial, 1, 1), weight, padding=(0, 1))        rows are cut, columns are whole

A dim that has a halo is not padded: the halo is its padding, also at the borders of the whole image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autopar.codegen.called import Called, atom, joined
from autopar.codegen.local_sizes import cuts_of, even_size, num_parts, size_text
from autopar.codegen.scope import Scope
from autopar.graph import Operator, OpGraph
from autopar.layout import Layout
from autopar.strategies.rule import Edge
from autopar.strategies.spatial import MINUS_INFINITY, SpaceDim, edge_of, space_dims

_POOL_PADDING = 3
_CONVOLUTION_PADDING = 4
_OUTPUT_PADDING = 5
_EDGES: dict[Edge, str] = {"repeat": '"repeat"', MINUS_INFINITY: 'float("-inf")'}


def with_halos(
    operator: Operator, names: Sequence[str], layouts: Sequence[Layout], graph: OpGraph, scope: Scope
) -> tuple[Operator, tuple[str, ...]]:
    """What is called, and on which tensors: the first one with the halos that the layouts of the inputs make it have."""
    dims = space_dims(operator, graph)
    split = [dim for dim in dims if dim.has_halo and cuts_of(layouts[0], dim.index, scope)]
    if not split:
        return operator, tuple(names)
    text, edge = names[0], edge_of(operator)
    for dim in split:
        ((axis, _),) = cuts_of(layouts[0], dim.index, scope)
        arguments = [text, str(dim.index), scope.axis(axis), str(dim.before), str(dim.after), _EDGES.get(edge, "")]
        text = joined(scope.runtime("halo"), [argument for argument in arguments if argument])
    return _locally_padded(operator, dims, split), (text, *names[1:])


def _locally_padded(operator: Operator, dims: Sequence[SpaceDim], split: Sequence[SpaceDim]) -> Operator:
    """The operator with the padding of the dims that have no halo."""
    kind = operator.target.split(".")[1]
    if kind.startswith("upsample"):
        return operator
    paddings = tuple(dim.local_padding if dim in split else dim.padding for dim in dims)
    if "pool" in kind:
        return _with_argument(operator, _POOL_PADDING, "padding", paddings)
    operator = _with_argument(operator, _CONVOLUTION_PADDING, "padding", paddings)
    if "transpose" in kind:
        more = tuple(dim.local_output_padding if dim in split else dim.output_padding for dim in dims)
        return _with_argument(operator, _OUTPUT_PADDING, "output_padding", more)
    return replace(operator, target=operator.target.replace(".padding", ".default"))


def _with_argument(operator: Operator, position: int, name: str, argument: Any) -> Operator:
    """The operator with another argument, where it has it, or else by name."""
    if position < len(operator.args):
        return replace(operator, args=(*operator.args[:position], argument, *operator.args[position + 1 :]))
    others = tuple(pair for pair in operator.kwargs if pair[0] != name)
    return replace(operator, kwargs=(*others, (name, argument)))


def cuts_space(call: Called) -> bool:
    """Whether an image (rows, channels, space) is split along space."""
    return any(call.input_cuts(dim) for dim in range(2, len(call.input_shape())))


def group_norm_over_space(call: Called, groups: str, scales: Sequence[str], eps: float, width: int) -> str:
    """Group norm with exchanged statistics. ``scales``: weight and bias; ``width``: channels in a group."""
    shape = call.input_shape()
    axes = sorted({axis for dim in range(2, len(shape)) for axis, _ in call.input_cuts(dim)})
    listed = ", ".join(call.scope.axis(axis) for axis in axes) + ("," if len(axes) == 1 else "")
    count = width * math.prod(shape[2:])
    return joined(
        call.scope.runtime("group_norm"), [call.names[0], groups, *scales, repr(eps), str(count), f"({listed})"]
    )


def _instance_norm(call: Called) -> str | None:
    """Every channel a group of its own. Backward keeps a copy of the weight, as torch's does, and not the parameter, which
    under ZeRO-3 would be gathered again."""
    if not cuts_space(call):
        return None
    weight, bias = call.args[1:3]
    scales = [weight if weight == "None" else f"{weight}.clone()", bias]
    return group_norm_over_space(call, f"{call.receiver}.shape[1]", scales, call.given(7, "eps"), 1)


def _adapted(call: Called) -> str | None:
    """The sizes here; a mean over a dim that is split counts as much as this device has of it."""
    dims = space_dims(call.operator, call.graph)
    if not any(call.input_cuts(dim.index) for dim in dims):
        return None
    sizes = [size_text(dim.result, call.output_cuts(dim.index), call.scope) for dim in dims]
    size = sizes[0] if len(set(sizes)) == 1 else f"({', '.join(sizes)})"
    text = joined(call.scope.functional(call.kind), [call.names[0], size])
    for dim in dims:
        cuts = call.input_cuts(dim.index)
        if not cuts or dim.result > 1:
            continue
        even = even_size(dim.given, cuts, call.scope) is not None
        here = size_text(dim.given, cuts, call.scope)
        text += f" / {num_parts(cuts, call.scope)}" if even else f" * ({here} / {dim.given})"
    return text


def _resized(call: Called) -> str | None:
    """The sizes here; what the halo has been resized to is cut off."""
    dims = space_dims(call.operator, call.graph)
    split = [dim for dim in dims if call.input_cuts(dim.index)]
    if not split:
        return None
    scales = _scales(call, len(dims))
    sizes, crops = [], [":"] * len(call.output_shape())
    for place, dim in enumerate(dims):
        size = size_text(dim.result, call.output_cuts(dim.index), call.scope)
        if dim in split:
            scales[place] = None
            if dim.has_halo:
                factor = dim.result // dim.given
                more = (dim.before + dim.after) * factor
                size = str(int(size) + more) if size.isdigit() else f"{size} + {more}"
                crops[dim.index] = f"{dim.before * factor}:-{dim.after * factor}"
        sizes.append(size)
    corners = [] if "nearest" in call.kind else ["False"]
    target = call.operator.target.rpartition(".")[0]
    written = [] if not any(scales) else [repr(scale) for scale in scales]
    shape = f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})"
    text = joined(f"torch.ops.{target}.default", [call.names[0], shape, *corners, *written])
    while crops and crops[-1] == ":":
        crops.pop()
    return f"{atom(text)}[{', '.join(crops)}]" if crops else text


def _scales(call: Called, count: int) -> list[float | None]:
    """The factors that are given for the spatial dims."""
    first = 2 if "nearest" in call.kind else 3
    if call.operator.target.endswith("vec"):
        return list(call.given(first, "scale_factors") or (None,) * count)
    names = ("scales",) if count == 1 else ("scales_d", "scales_h", "scales_w")[-count:]
    return [call.given(first + place, name) for place, name in enumerate(names)]


_KINDS = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")

# None from one of these: space is whole, the call is the usual one.
OVER_SPACE: dict[str, Callable[[Called], str | None]] = {
    "aten.instance_norm.default": _instance_norm,
    **{f"aten.adaptive_{kind}_pool{n}d.default": _adapted for kind in ("avg", "max") for n in (1, 2, 3)},
    **{f"aten.upsample_{kind}.{overload}": _resized for kind in _KINDS for overload in ("vec", "default")},
}
