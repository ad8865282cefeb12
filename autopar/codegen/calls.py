"""One operator of the graph as the Python expression that computes it on local tensors.

Enters: the operator, expressions for its tensors and their layouts. Leaves: the expression as a person would write it:
``F.layer_norm(x, (768,), w, b)``, ``x.view(-1, 1024, 12, 64)``, ``x @ y``. Every operator can be written: those without a
spelling of their own are called through ``torch.ops``. Sizes become local (``sized.py``); operators whose local result is
not a part of the whole result call the runtime (``axis_aware.py``).

    scope = Scope(mesh, graph.batch_size)
    text = call(operator, ["x", "w"], layouts_in, layouts_out, graph, mesh, scope)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.codegen.axis_aware import AXIS_AWARE, ring_attention
from autopar.codegen.branches import COND, conditional
from autopar.codegen.called import Called, atom, joined
from autopar.codegen.experts import mixture
from autopar.codegen.in_order import values_in_order
from autopar.codegen.scope import Scope
from autopar.codegen.sized import SIZED, short
from autopar.codegen.spatial import OVER_SPACE, with_halos
from autopar.codegen.spellings import INFIX, PREFIX, PROPERTIES, SAME, Spelling, spellings
from autopar.graph import Operator, OpGraph, Ref
from autopar.layout import Layout
from autopar.mesh import Mesh


def call(
    operator: Operator,
    inputs: Sequence[str],
    input_layouts: Sequence[Layout],
    output_layouts: Sequence[Layout],
    graph: OpGraph,
    mesh: Mesh,
    scope: Scope,
) -> str:
    """The expression that computes ``operator`` from local ``inputs``; a tuple where it has several outputs.

    ``inputs`` and ``input_layouts`` are in the order of ``operator.inputs``; ``output_layouts`` of its outputs that are
    tensors. What the text needs around it is added to ``scope``.
    """
    assert mesh == scope.mesh, f"the scope is for {scope.mesh}, the call for {mesh}"
    assert len(inputs) == len(input_layouts) == len(operator.inputs), (
        f"{operator.id} reads {len(operator.inputs)} tensors"
    )
    operator, names = with_halos(operator, inputs, input_layouts, graph, scope)
    called = Called(operator, names, tuple(input_layouts), tuple(output_layouts), graph, scope)
    if called.stand_in is not None:
        return called.stand_in
    over_space = OVER_SPACE[operator.target](called) if operator.target in OVER_SPACE else None
    if over_space is not None:
        return over_space
    special = AXIS_AWARE.get(operator.target) or SIZED.get(operator.target) or _SPECIAL.get(operator.target)
    if special is not None:
        return special(called)
    if operator.target in INFIX:
        return _infix(called)
    if operator.target in PREFIX:
        return PREFIX[operator.target] + called.receiver
    if operator.target in PROPERTIES:
        return f"{called.receiver}.{PROPERTIES[operator.target]}"
    if operator.target in SAME:
        return called.names[0]
    return _usual(called)


def _usual(called: Called) -> str:
    """The call in its usual form where it has one."""
    spelling = spellings().get(called.operator.target)
    return (_spelled(called, spelling) if spelling else None) or _by_name(called)


def _by_name(called: Called) -> str:
    """``torch.ops.library.name.overload(...)``: any operator."""
    arguments = [*called.args, *(f"{name}={text}" for name, text in called.kwargs.items())]
    return joined(f"torch.ops.{called.operator.target}", arguments)


def _spelled(called: Called, spelling: Spelling) -> str | None:
    """The call in its usual form; None where it has arguments that this form lacks."""
    args = called.args[1:] if spelling.is_method else called.args
    raw = called.operator.args[1:] if spelling.is_method else called.operator.args
    rest = dict(called.kwargs)
    if len(args) > len(spelling.parameters):
        return None
    arguments: list[str] = []
    skipped = False
    for position, parameter in enumerate(spelling.parameters):
        text = args[position] if position < len(args) else rest.pop(parameter.source, None)
        if text is not None and (parameter.name == "dim" or "pool" in spelling.callee):
            text = short(text)
        if text is None or not parameter.written or text == parameter.default:
            skipped = skipped or not parameter.keyword_only
        elif parameter.unpacked:
            inside = raw[position] if position < len(raw) else ()
            arguments.extend(_items(called, inside))
        elif skipped or parameter.keyword_only:
            arguments.append(f"{parameter.name}={text}")
        else:
            arguments.append(text)
    if rest:
        return None
    if spelling.is_method:
        return joined(f"{called.receiver}{spelling.callee}", arguments)
    name = spelling.callee
    return joined(called.scope.functional(name[2:]) if name.startswith("F.") else name, arguments)


def _items(called: Called, argument: object) -> list[str]:
    """What is in a tuple argument: all tensors, or numbers."""
    items = argument if isinstance(argument, tuple) else (argument,)
    if any(isinstance(item, Ref) for item in items):
        return list(called.names[: len(items)])
    return [called.literal(item) for item in items]


def _infix(called: Called) -> str:
    sign = INFIX[called.operator.target]
    if called.kwargs.get("alpha", "1") != "1" or len(called.args) != 2:
        return _by_name(called)
    left, right = (atom(text) for text in called.args)
    if sign == "**" and left.startswith("-"):
        left = f"({left})"
    if sign == "+" and right.startswith("-") and right[1:].isdigit():
        sign, right = "-", right[1:]
    return f"{left} {sign} {right}"


def _reverse_minus(called: Called) -> str:
    """rsub(x, y) is y - x."""
    if called.given(2, "alpha", 1) != 1:
        return _by_name(called)
    return f"{atom(called.args[1])} - {called.receiver}"


def _cast(called: Called) -> str:
    """Nothing where the dtype stays: everything is on the mesh's device."""
    source, target = called.dtype(called.operator.inputs[0]), called.dtype(called.outputs[0])
    if source == target:
        return f"{called.receiver}.clone()" if called.kind == "_to_copy" or called.given(3, "copy") else called.names[0]
    return f"{called.receiver}.to(torch.{target})"


def _einsum(called: Called) -> str:
    return joined("torch.einsum", [called.literal(called.given(0, "equation")), *called.names])


def _index(called: Called) -> str:
    """``x[:, i, j]``."""
    names = iter(called.names[1:])
    inside = [":" if index is None else next(names) for index in called.given(1, "indices")]
    return f"{called.receiver}[{', '.join(inside)}]"


def _index_put(called: Called) -> str:
    indices = called.given(1, "indices")
    if any(index is None for index in indices):
        return _by_name(called)
    names = called.names[1 : 1 + len(indices)]
    inside = f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"
    accumulate = ["accumulate=True"] if called.given(3, "accumulate", False) else []
    return joined(f"{called.receiver}.index_put", [inside, called.names[-1], *accumulate])


def _reversed_dims(called: Called) -> str:
    count = len(called.input_shape())
    return (
        f"{called.receiver}.T"
        if count == 2
        else joined(f"{called.receiver}.permute", [str(d) for d in reversed(range(count))])
    )


def _fill(called: Called) -> str:
    if called.operator.target.endswith("Tensor"):
        return f"{atom(called.names[1])}.expand_as({called.names[0]}).to({atom(called.names[0])}.dtype)"
    return joined("torch.full_like", [called.names[0], called.args[1]])


def _copy(called: Called) -> str:
    text = f"{atom(called.names[1])}.expand_as({called.names[0]})"
    source, target = called.dtype(called.operator.inputs[1]), called.dtype(called.outputs[0])
    return text if source == target else f"{text}.to(torch.{target})"


def _view_as_complex(called: Called) -> str:
    """The last dim must lie in one piece."""
    ordered = called.operator.inputs[0] in values_in_order(called.graph)
    return joined("torch.view_as_complex", [called.names[0] if ordered else f"{called.receiver}.contiguous()"])


def _attention(called: Called) -> str:
    """Around a ring where keys are split along the sequence; else torch's own call."""
    if called.input_cuts(len(called.input_shape(1)) - 2, 1):
        return ring_attention(called)
    return _spelled(called, spellings()[called.operator.target]) or _by_name(called)


def _experts(called: Called) -> str:
    return mixture(called, call)


def _scatter(called: Called) -> str:
    """slice_scatter and select_scatter, which torch differentiates of real numbers only."""
    if not called.dtype(called.outputs[0]).startswith("complex"):
        return _usual(called)
    x, source, *rest = called.args
    dim = called.given(2, "dim", 0) % len(called.input_shape())  # counted from the end it would be another of the pairs'
    options = [f"{name}={text}" for name, text in called.kwargs.items() if name != "dim"]
    pairs = [f"torch.view_as_real({text})" for text in (x, source)]
    return f"torch.view_as_complex({joined(f'torch.{called.kind}', [*pairs, str(dim), *rest[1:], *options])})"


def _conditional(called: Called) -> str:
    return conditional(called, call)


_SPECIAL: dict[str, Callable[[Called], str]] = {
    "autopar.experts.default": _experts,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.rsub.Tensor": _reverse_minus,
    "aten.rsub.Scalar": _reverse_minus,
    **{f"aten.to.{overload}": _cast for overload in ("dtype", "dtype_layout", "device")},
    "aten._to_copy.default": _cast,
    "aten.einsum.default": _einsum,
    "aten.index.Tensor": _index,
    "aten.index_put.default": _index_put,
    "aten.numpy_T.default": _reversed_dims,
    "aten.fill.Scalar": _fill,
    "aten.fill.Tensor": _fill,
    "aten.copy.default": _copy,
    "aten.view_as_complex.default": _view_as_complex,
    COND: _conditional,
    "aten.slice_scatter.default": _scatter,
    "aten.select_scatter.default": _scatter,
}
