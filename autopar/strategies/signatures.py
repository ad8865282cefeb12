"""What the families build their signatures with: letters for dims, and the fields that follow from the operator.

A family's function names the terms; :func:`signature` adds the work, and leaves out what only backward would need where
no gradient flows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from autopar.graph import BatchLiteral, Operator, OpGraph, refs
from autopar.strategies.rule import (
    Chunked,
    CostKind,
    Dim,
    Exchange,
    Halo,
    Signature,
    Term,
    letters_of,
    parse,
    shapes_of,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Extras(TypedDict, total=False):
    """Fields of a :class:`Signature` beside its terms. ``saves`` are input and ``saves_outputs`` output positions."""

    linear: Iterable[Iterable[int]]
    additive: Iterable[int]
    whole: Iterable[str]
    parts: Mapping[str, tuple[int, ...]]
    exchanges: tuple[Exchange, ...]
    halos: tuple[Halo, ...]
    spatial: Iterable[str]
    experts: Iterable[str]
    replicated_after: Iterable[str]
    kind: CostKind
    flops: float
    backward_flops: float
    saves: Iterable[int]
    saves_outputs: Iterable[int]
    saves_extra_bytes: float
    random: bool
    counted: bool
    joint: Mapping[str, tuple[str, ...]]
    apart: Iterable[str]
    summed: Iterable[int]
    chunked: Chunked | None


def signature(
    operator: Operator,
    graph: OpGraph,
    inputs: Iterable[Term],
    outputs: Iterable[Term],
    sizes: Mapping[str, int],
    **extras: Unpack[Extras],
) -> Signature:
    """A signature; work defaults to one operation per element of the result (none for views), backward to the same."""
    backward = differentiated(operator, graph)
    kind = extras.get("kind", "elementwise")
    elements = sum(graph.values[value].num_elements for value in operator.outputs if value)
    flops = extras.get("flops", float(elements) if kind == "elementwise" else 0.0)
    return Signature(
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        sizes=dict(sizes),
        parts=extras.get("parts", {}),
        whole=frozenset(extras.get("whole", ())),
        exchanges=extras.get("exchanges", ()),
        halos=extras.get("halos", ()),
        spatial=frozenset(extras.get("spatial", ())),
        experts=frozenset(extras.get("experts", ())),
        replicated_after=frozenset(extras.get("replicated_after", ())),
        linear=tuple(frozenset(group) for group in extras.get("linear", ()) if _is_sum(operator, graph, group)),
        additive=frozenset(extras.get("additive", ())),
        kind=kind,
        flops=flops,
        backward_flops=extras.get("backward_flops", flops) if backward else 0.0,
        saved_inputs=frozenset(extras.get("saves", ())) if backward else frozenset(),
        saved_outputs=frozenset(extras.get("saves_outputs", ())) if backward else frozenset(),
        saved_extra_bytes=extras.get("saves_extra_bytes", 0.0) if backward else 0.0,
        random=extras.get("random", False),
        counted=extras.get("counted", False),
        joint=extras.get("joint", {}),
        apart=frozenset(extras.get("apart", ())),
        summed=frozenset(extras.get("summed", ())),
        chunked=extras.get("chunked"),
    )


def _is_sum(operator: Operator, graph: OpGraph, group: Iterable[int]) -> bool:
    """Whether the tensors of a linear group may be terms of a sum: only floating point ones are."""
    outputs = (value for value in operator.outputs if value)
    return all(is_floating(graph, value) for value in (*(operator.inputs[i] for i in group), *outputs))


def written(operator: Operator, graph: OpGraph, text: str, **extras: Unpack[Extras]) -> Signature:
    """A signature from a rule's text."""
    inputs, outputs, sizes = parse(text, shapes_of(operator, graph))
    return signature(operator, graph, inputs, outputs, sizes, **extras)


def needs_gradient(operator: Operator, graph: OpGraph) -> tuple[bool, ...]:
    """For each tensor input, whether a gradient flows into it."""
    return tuple(graph.values[value].requires_grad for value in operator.inputs)


def differentiated(operator: Operator, graph: OpGraph) -> bool:
    """Whether backward passes through the operator."""
    return any(needs_gradient(operator, graph)) and any(
        graph.values[value].requires_grad for value in operator.outputs if value
    )


def shape(graph: OpGraph, value: str) -> tuple[int, ...]:
    """Shape of a value."""
    return graph.values[value].shape


def first_shape(operator: Operator, graph: OpGraph) -> tuple[int, ...]:
    """Shape of the first tensor input."""
    return shape(graph, operator.inputs[0])


def is_floating(graph: OpGraph, value: str) -> bool:
    """Whether a value's elements are floating point or complex."""
    return graph.values[value].dtype.startswith(("float", "bfloat", "complex"))


def names(prefix: str, shape: Sequence[int], sizes: dict[str, int]) -> list[Dim]:
    """One letter per dim (``x0 x1 ...``), entered into ``sizes``; dims of size 1 have none."""
    dims: list[Dim] = []
    for index, size in enumerate(shape):
        if size == 1:
            dims.append(())
        else:
            sizes[f"{prefix}{index}"] = size
            dims.append((f"{prefix}{index}",))
    return dims


def letters_in(dims: Iterable[Dim]) -> set[str]:
    """All letters of some dims."""
    return set(letters_of(tuple(dims)))


def positive(dim: int, num_dims: int) -> int:
    """A dim counted from the front."""
    return dim + num_dims if dim < 0 else dim


def number(argument: Any) -> int:
    """An integer argument at the traced batch."""
    return argument.value if isinstance(argument, BatchLiteral) else int(argument)


def dims_argument(argument: Any, num_dims: int) -> tuple[int, ...]:
    """Dims given as None (all), one number or several, counted from the front."""
    if argument is None or argument == ():
        return tuple(range(num_dims))
    given = argument if isinstance(argument, tuple) else (argument,)
    return tuple(sorted(positive(dim, num_dims) for dim in given))


def tensors_in(argument: Any) -> int:
    """How many tensors an argument holds."""
    return sum(1 for _ in refs((argument,)))


def place_in_inputs(operator: Operator, position: int, name: str) -> int | None:
    """The index in ``operator.inputs`` of the tensor given as argument ``position`` or ``name``; None without one."""
    if not tensors_in(operator.argument(position, name)):
        return None
    if position < len(operator.args):
        return tensors_in(operator.args[:position])
    earlier = [key for key, _ in operator.kwargs]
    before = tuple(value for _, value in operator.kwargs[: earlier.index(name)])
    return tensors_in(operator.args) + tensors_in(before)


def only_shape(graph: OpGraph, value: str, output: str, like: Term, sizes: dict[str, int]) -> tuple[Term, set[str]]:
    """The term of an input of which only shape or dtype is read, and the letters that nothing follows from.

    It has the letters of the output where the shapes agree, so that it may lie alike; otherwise letters of its own.
    """
    if shape(graph, value) == shape(graph, output):
        return like, set()
    term = tuple(names("unread", shape(graph, value), sizes))
    return term, letters_in(term)
