"""Calls whose literals are sizes: global in the graph, local in the program.

A size is written as a number where it is the same on every device, as -1 where it can be left open, and otherwise as the
local size of a named cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autopar.codegen.called import Called, joined
from autopar.codegen.in_order import values_in_order
from autopar.codegen.local_sizes import even_size, part_cuts, ratio_text, size_text
from autopar.codegen.spatial import cuts_space, group_norm_over_space
from autopar.graph import BatchLiteral
from autopar.strategies.pieces import slice_start
from autopar.strategies.signatures import dims_argument


def view_sizes(call: Called, literals: Sequence[Any], dims: Sequence[int]) -> list[str]:
    """Sizes of some dims of a view's result. At most one is left open: the one that follows the batch, if any does."""
    following = [dim for dim, literal in zip(dims, literals, strict=True) if isinstance(literal, BatchLiteral)]
    left_open = [dim for dim, literal in zip(dims, literals, strict=True) if literal == -1]
    shape = call.output_shape()
    uneven = [dim for dim in dims if even_size(shape[dim], call.output_cuts(dim), call.scope) is None]
    open_dim = next(iter([*following, *left_open, *uneven]), None)
    if any(size == 0 for dim, size in enumerate(shape) if dim != open_dim):
        open_dim = None  # torch cannot tell the size of a dim beside an empty one
    found = []
    for dim, literal in zip(dims, literals, strict=True):
        cuts = call.output_cuts(dim)
        if dim == open_dim:
            found.append("-1")
        elif isinstance(literal, BatchLiteral):
            found.append(call.scope.batch_literal(shape[dim], cuts))
        else:
            found.append(size_text(shape[dim], cuts, call.scope))
    return found


def _view(call: Called) -> str:
    sizes = call.given(1, "shape" if call.kind == "reshape" else "size")
    ordered = call.operator.inputs[0] in values_in_order(call.graph)
    name = "view" if ordered and call.kind != "reshape" else "reshape"
    return joined(f"{call.receiver}.{name}", view_sizes(call, sizes, range(len(sizes))))


def _unflatten(call: Called) -> str:
    dim = call.given(1, "dim")
    start = dim if dim >= 0 else dim + len(call.input_shape())
    sizes = call.given(2, "sizes")
    texts = view_sizes(call, sizes, range(start, start + len(sizes)))
    return joined(f"{call.receiver}.unflatten", [str(dim), f"({', '.join(texts)})"])


def _expand(call: Called) -> str:
    sizes = call.given(1, "size")
    given = call.input_shape()
    new = len(sizes) - len(given)
    return joined(f"{call.receiver}.expand", [_expanded(call, dim, sizes[dim], new) for dim in range(len(sizes))])


def _expanded(call: Called, dim: int, literal: Any, new: int) -> str:
    """-1 where the input's own size stays."""
    shape = call.output_shape()
    if dim >= new and call.input_shape()[dim - new] == shape[dim]:
        return "-1"
    return made_size(call, dim, literal)


def made_size(call: Called, dim: int, literal: Any) -> str:
    """A size that nothing but its literal tells."""
    size, cuts = call.output_shape()[dim], call.output_cuts(dim)
    return (
        call.scope.batch_literal(size, cuts) if isinstance(literal, BatchLiteral) else size_text(size, cuts, call.scope)
    )


def _repeat(call: Called) -> str:
    repeats = call.given(1, "repeats") if call.kind == "repeat" else call.given(1, "dims")
    new = len(call.output_shape()) - len(call.input_shape())
    literals = (1,) * (len(call.output_shape()) - len(repeats)) + tuple(repeats)
    texts = []
    for dim, literal in enumerate(literals):
        if literal == 1:
            texts.append("1")
        elif dim < new or call.input_shape()[dim - new] == 1:
            texts.append(made_size(call, dim, literal))
        else:
            texts.append(call.literal(literal))
    return joined(f"{call.receiver}.{call.kind}", texts)


def _repeat_interleave(call: Called) -> str:
    dim = call.given(2, "dim")
    place = (dim or 0) % len(call.input_shape())
    times = ratio_text(
        call.output_shape()[place],
        call.output_cuts(place),
        call.input_shape()[place],
        call.input_cuts(place),
        call.scope,
    )
    return joined(f"{call.receiver}.repeat_interleave", [times] if dim is None else [times, str(dim)])


def _split(call: Called) -> str:
    """split of equal parts, chunk, or a tuple of sizes."""
    dim = call.given(2, "dim", 0)
    place = dim % len(call.input_shape())
    count = len(call.operator.outputs)
    end = [] if dim == 0 else [str(dim)]
    sizes = [call.output_shape(index)[place] for index in range(count)]
    if call.kind == "chunk" and len(set(sizes)) == 1:
        return joined(f"{call.receiver}.chunk", [str(count), *end])
    if call.kind == "split" and len(set(sizes)) == 1:
        size = even_size(sizes[0], call.output_cuts(place), call.scope)
        if size is None:
            return joined(f"{call.receiver}.chunk", [str(count), *end])
        return joined(f"{call.receiver}.split", [str(size), *end])
    if not call.input_cuts(place):
        name = "chunk" if call.kind == "chunk" else "split"
        literal = call.given(1, {"chunk": "chunks", "split": "split_size"}.get(call.kind, "split_sizes"))
        return joined(f"{call.receiver}.{name}", [call.literal(literal), *end])
    texts = [size_text(size, call.output_cuts(place, index), call.scope) for index, size in enumerate(sizes)]
    return joined(f"{call.receiver}.split", [f"({', '.join(texts)})", *end])


def _squeeze(call: Called) -> str:
    """The dims by number: a dim of the whole tensor may well have size 1 here."""
    shape = call.input_shape()
    dims = [dim for dim in dims_argument(call.given(1, "dim"), len(shape)) if shape[dim] == 1]
    if not dims:
        return call.names[0]
    return joined(f"{call.receiver}.squeeze", [str(dims[0]) if len(dims) == 1 else str(tuple(dims))])


def at_dim(call: Called, dim: int, inside: str) -> str:
    """``x[:, inside]``, with an ellipsis before a last dim further back."""
    count = len(call.input_shape())
    before = ["..."] if dim == count - 1 and dim > 1 else [":"] * dim
    return f"{call.receiver}[{', '.join([*before, inside])}]"


def _slice(call: Called) -> str:
    shape = call.input_shape()
    place = call.given(1, "dim", 0) % len(shape)
    start, end, step = call.given(2, "start"), call.given(3, "end"), call.given(4, "step", 1)
    length = call.output_shape()[place]
    if step == 1 and length == shape[place]:
        return call.names[0]
    cuts = call.input_cuts(place)
    if not cuts:
        first = "" if start in (None, 0) else call.literal(start)
        open_end = end is None or (not isinstance(end, BatchLiteral) and end >= shape[place])
        last = "" if open_end else call.literal(end)
        return at_dim(call, place, f"{first}:{last}" + (f":{step}" if step != 1 else ""))
    begin = slice_start(call.operator, shape[place])
    before = None if begin == 0 else size_text(begin, part_cuts(cuts, shape[place], 0, begin), call.scope)
    if begin + length == shape[place]:
        return at_dim(call, place, f"{before or ''}:")
    return at_dim(call, place, f"{before or ''}:{_sum(before, size_text(length, call.output_cuts(place), call.scope))}")


def _sum(first: str | None, second: str) -> str:
    if first is None:
        return second
    return str(int(first) + int(second)) if first.isdigit() and second.isdigit() else f"{first} + {second}"


def _narrow(call: Called) -> str:
    dim = call.given(1, "dim")
    place = dim % len(call.input_shape())
    size, length = call.input_shape()[place], call.output_shape()[place]
    cuts = call.input_cuts(place)
    start = call.literal(call.given(2, "start"))
    if cuts and start != "0":
        begin = int(start) % size
        start = size_text(begin, part_cuts(cuts, size, 0, begin), call.scope)
    return joined(f"{call.receiver}.narrow", [str(dim), start, size_text(length, call.output_cuts(place), call.scope)])


def _select(call: Called) -> str:
    place = call.given(1, "dim") % len(call.input_shape())
    return at_dim(call, place, call.literal(call.given(2, "index")))


def _made(call: Called) -> str:
    """zeros, ones, full, empty and new_*: ``(sizes)``, the value if there is one, dtype and device."""
    new = call.kind.startswith("new_")
    position = 1 if new else 0
    sizes = call.given(position, "size")
    texts = [made_size(call, dim, literal) for dim, literal in enumerate(sizes)]
    arguments = [f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"]
    if call.kind in ("full", "new_full"):
        arguments.append(call.literal(call.given(position + 1, "fill_value")))
    dtype = dict(call.operator.kwargs).get("dtype")
    if dtype is not None:
        arguments.append(f"dtype={call.literal(dtype)}")
    if not new:
        arguments.append("device=mesh.device")
    return joined(f"{call.receiver}.{call.kind}" if new else f"torch.{call.kind}", arguments)


def _group_norm(call: Called) -> str:
    """The number of groups here. Where space is split, the runtime's own: statistics over all of it."""
    channels = call.input_shape()[1]
    width = channels // call.given(1, "num_groups")
    groups = ratio_text(channels, call.input_cuts(1), width, (), call.scope)
    if cuts_space(call):
        return group_norm_over_space(call, groups, [*call.args[2:4], "None", "None"][:2], call.given(4, "eps", 1e-5), width)
    arguments = [call.names[0], groups, *call.args[2:5]]
    while len(arguments) > 2 and arguments[-1] in ("None", "1e-05"):
        arguments.pop()
    return joined(call.scope.functional("group_norm"), arguments)


_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


def _convolution(call: Called) -> str:
    """The number of groups here; what is at its default (strides and dilations of one, no padding) is left out."""
    transposed = "transpose" in call.kind
    order = _TRANSPOSED if transposed else _CONVOLUTION
    texts = dict(zip(order, call.args, strict=False)) | call.kwargs
    groups = call.given(6, "groups", 1)
    if groups != 1:
        channels = call.input_shape()[1]
        texts["groups"] = ratio_text(channels, call.input_cuts(1), channels // groups, _inner_cuts(call), call.scope)
    arguments = [texts["input"], texts["weight"]]
    skipped = False
    for name in order[2:]:
        text = texts.get(name)
        if text is None or text in _NEUTRAL[name]:
            skipped = True
        elif skipped:
            arguments.append(f"{name}={short(text)}")
        else:
            arguments.append(short(text))
    return joined(call.scope.functional(call.kind), arguments)


def _inner_cuts(call: Called) -> Any:
    """How the channels of one group are cut: as dim 1 of the weight is."""
    return call.input_cuts(1, 1) if "transpose" not in call.kind else ()


def _tuples(item: str) -> set[str]:
    return {item, f"({item},)", f"({item}, {item})", f"({item}, {item}, {item})"}


_NEUTRAL = {
    "bias": {"None"}, "stride": _tuples("1"), "padding": _tuples("0") | {'"valid"'}, "output_padding": _tuples("0"),
    "dilation": _tuples("1"), "groups": {"1"},
}  # fmt: skip


def short(text: str) -> str:
    """``(2, 2)`` as ``2``."""
    items = text.strip("()").replace(" ", "").strip(",").split(",")
    return items[0] if text.startswith("(") and len(set(items)) == 1 and items[0].lstrip("-").isdigit() else text


SIZED: dict[str, Callable[[Called], str]] = {
    **{f"aten.{name}.default": _view for name in ("view", "reshape", "_unsafe_view")},
    "aten.unflatten.int": _unflatten,
    "aten.expand.default": _expand,
    "aten.broadcast_to.default": _expand,
    "aten.repeat.default": _repeat,
    "aten.tile.default": _repeat,
    "aten.repeat_interleave.self_int": _repeat_interleave,
    **{f"aten.{name}": _split for name in ("split.Tensor", "split.sizes", "split_with_sizes.default", "chunk.default")},
    **{f"aten.squeeze.{overload}": _squeeze for overload in ("default", "dim", "dims")},
    "aten.slice.Tensor": _slice,
    "aten.narrow.default": _narrow,
    "aten.select.int": _select,
    **{
        f"aten.{name}.default": _made
        for name in ("zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "new_empty")
    },
    "aten.empty.memory_format": _made,
    "aten.group_norm.default": _group_norm,
    **{f"aten.conv{n}d.{overload}": _convolution for n in (1, 2, 3) for overload in ("default", "padding")},
    "aten.conv_transpose1d.default": _convolution,
    "aten.conv_transpose2d.input": _convolution,
    "aten.conv_transpose3d.input": _convolution,
}
