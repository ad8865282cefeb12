"""The same model at another batch size: a graph for one micro-batch, without tracing again.

Enters: a traced graph, whose values say which of their dims follow the batch. Leaves: the graph as a trace at the other
size would have it; ids stay, so that a plan for one holds for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.errors import InputError
from autopar.graph import BatchLiteral, Operator, OpGraph, Value


def follows_batch(graph: OpGraph) -> bool:
    """Whether the graph can be had at other batch sizes."""
    return any(entry.batch_dim is not None for entry in graph.inputs) or any(
        graph.values[value].batch_dims for value in graph.received
    )


def at_batch(graph: OpGraph, batch_size: int) -> OpGraph:
    """The graph at another batch size (samples of all devices together); the same object whenever it is asked for.

    Raises InputError for a size of less than 1, or for a graph of which only one size works.
    """
    if batch_size == graph.batch_size:
        return graph
    if batch_size < 1 or not follows_batch(graph):
        raise InputError(f"the graph of batch {graph.batch_size} cannot be had at a batch of {batch_size}")
    known: dict[int, OpGraph] = graph._cache.setdefault("at_batch", {})
    if batch_size not in known:
        known[batch_size] = _scaled(graph, batch_size)
    return known[batch_size]


def _scaled(graph: OpGraph, batch_size: int) -> OpGraph:
    follow = graph.of_structure("operators that follow the batch", _following)
    operators = tuple(
        _operator(_by_number(operator, graph), graph.batch_size, batch_size) if operator.id in follow else operator
        for operator in graph.operators
    )
    alike = all(here.target == there.target for here, there in zip(operators, graph.operators, strict=True))
    shapes: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]] = {}
    for value in graph.values.values():
        if value.batch_dims and (value.shape, value.batch_dims) not in shapes:
            shapes[value.shape, value.batch_dims] = _shape(value, graph.batch_size, batch_size)
    return replace(
        graph,
        batch_size=batch_size,
        values={name: _value(value, shapes) for name, value in graph.values.items()},
        operators=operators,
        _cache={"structure": graph._cache.setdefault("structure", {})} if alike else {},
    )


def _following(graph: OpGraph) -> frozenset[str]:
    """Operators that may be called otherwise at another size; of like blocks only the first is looked at."""
    found = {
        operator.id
        for operator in graph.operators
        if graph.canonical.get(operator.id, operator.id) == operator.id
        and (operator.target.startswith("aten.squeeze.") or _has_literals((operator.args, operator.kwargs)))
    }
    return frozenset(op.id for op in graph.operators if graph.canonical.get(op.id, op.id) in found)


def _shape(value: Value, before: int, after: int) -> tuple[int, ...]:
    return tuple(size * after // before if dim in value.batch_dims else size for dim, size in enumerate(value.shape))


def _value(value: Value, shapes: Mapping[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]]) -> Value:
    """The value in its shape at the other size."""
    if not value.batch_dims:
        return value
    return Value(**{**vars(value), "shape": shapes[value.shape, value.batch_dims]})  # a model has thousands: replace is slow


def _by_number(operator: Operator, graph: OpGraph) -> Operator:
    """A squeeze with the numbers of the dims that it drops here: at another size the batch may be a dim of size 1 too."""
    if not operator.target.startswith("aten.squeeze."):
        return operator
    shape, given = graph.values[operator.inputs[0]].shape, operator.argument(1, "dim")
    asked = range(len(shape)) if given is None else given if isinstance(given, tuple) else (given,)
    dims = tuple(dim % len(shape) for dim in asked if shape and shape[dim] == 1)
    if not dims:
        return replace(operator, target="aten.alias.default", args=operator.args[:1], kwargs=())
    return replace(operator, target="aten.squeeze.dims", args=(operator.args[0], dims), kwargs=())


def _operator(operator: Operator, before: int, after: int) -> Operator:
    args, kwargs = _literals(operator.args, before, after), _literals(operator.kwargs, before, after)
    if args is operator.args and kwargs is operator.kwargs:
        return operator
    return replace(operator, args=args, kwargs=kwargs)


def _has_literals(tree: Any) -> bool:
    return isinstance(tree, BatchLiteral) or (isinstance(tree, tuple) and any(map(_has_literals, tree)))


def _literals(tree: Any, before: int, after: int) -> Any:
    """The tree with its batch literals scaled; the same object where there are none."""
    if isinstance(tree, BatchLiteral):
        return BatchLiteral(tree.value * after // before)
    if isinstance(tree, tuple):
        items = tuple(_literals(item, before, after) for item in tree)
        return tree if all(x is y for x, y in zip(items, tree, strict=True)) else items
    return tree


def micro_batch_sizes(batch_size: int, num_micro_batches: int, unit: int = 1) -> tuple[int, ...]:
    """Samples of each micro-batch: multiples of ``unit`` that differ by one unit at most, the larger ones first.

    >>> micro_batch_sizes(14, 3, 2)
    (6, 4, 4)
    """
    units, rest = divmod(batch_size, unit)
    if rest or num_micro_batches < 1 or units < num_micro_batches:
        raise InputError(
            f"a batch of {batch_size} cannot be cut into {num_micro_batches} micro-batches of multiples of {unit} samples"
        )
    each, larger = divmod(units, num_micro_batches)
    return tuple((each + (index < larger)) * unit for index in range(num_micro_batches))
