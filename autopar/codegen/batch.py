"""Which dims follow the batch, and so which batch sizes a program can take beside the planned one.

Enters: a graph and its resolved plan. Leaves: the batch dims of values, and the number that other batches must be a multiple
of. A dim follows the batch when the rules of the operators lead there from a batch dim of an input along their letters;
of a dim made of several letters the first that is long enough carries the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autopar.batching import follows_batch
from autopar.graph import BatchLiteral, Operator, OpGraph
from autopar.layout import Layout, Shard
from autopar.plans import Resolved
from autopar.strategies.registry import signature_of
from autopar.strategies.rule import Part, Signature, Term


class BatchDims:
    """The dims of each value that follow the batch. Repeated blocks are looked at once."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self._dims: dict[str, set[int]] = {
            entry.value: {entry.batch_dim} for entry in graph.inputs if entry.batch_dim is not None
        }
        self._dims.update({value: set(graph.values[value].batch_dims) for value in graph.received})
        for operator in graph.operators if self._dims else ():
            if graph.canonical.get(operator.id, operator.id) == operator.id:
                self._follow(operator)

    def of(self, value: str) -> frozenset[int]:
        """The dims of a value that follow the batch."""
        return frozenset(self._dims.get(self.graph.canonical.get(value, value), ()))

    def whole_dim(self, value: str) -> int | None:
        """The dim that is the batch itself, or None."""
        shape = self.graph.values[value].shape
        return next((dim for dim in sorted(self.of(value)) if shape[dim] == self.graph.batch_size), None)

    def _follow(self, operator: Operator) -> None:
        following = [self.of(value) for value in operator.inputs]
        signature = signature_of(operator, self.graph) if any(following) else None
        outputs = [value for value in operator.outputs if value]
        if signature is None:
            sizes = {
                self.graph.values[value].shape[dim]
                for value, dims in zip(operator.inputs, following, strict=True)
                for dim in dims
            }
            found = [{d for d, size in enumerate(self.graph.values[value].shape) if size in sizes} for value in outputs]
        else:
            letters = self._letters(signature, following)
            found = [{d for d in range(len(term)) if letters & _letters_at(term, d)} for term in signature.outputs]
        for value, dims in zip(outputs, found, strict=True):
            shape = self.graph.values[value].shape
            dims |= _written_dims((operator.args, operator.kwargs), shape)
            self._dims.setdefault(value, set()).update(dims)

    def _letters(self, signature: Signature, following: list[frozenset[int]]) -> set[str]:
        found: set[str] = set()
        for term, dims in zip(signature.inputs, following, strict=True):
            for dim in dims:
                parts = term[dim]
                if isinstance(parts, Part):
                    found.add(parts.letter)
                    continue
                named = [letter for letter in parts if isinstance(letter, str)]
                carrying = [
                    letter
                    for letter in named
                    if signature.sizes[letter] > 1 and signature.sizes[letter] % self.graph.batch_size == 0
                ]
                found.update(carrying[:1] or named)
        return found


def _letters_at(term: Term, dim: int) -> set[str]:
    parts = term[dim]
    return {parts.letter} if isinstance(parts, Part) else {letter for letter in parts if isinstance(letter, str)}


def _written_dims(tree: object, shape: tuple[int, ...]) -> set[int]:
    """Dims of a result of ``shape`` that its arguments say follow the batch: by place in a tuple of sizes, else by size."""
    if isinstance(tree, BatchLiteral):
        return {dim for dim, size in enumerate(shape) if size == tree.value}
    if not isinstance(tree, tuple):
        return set()
    if len(tree) == len(shape) and all(isinstance(item, (int, BatchLiteral)) for item in tree):
        return {dim for dim, item in enumerate(tree) if isinstance(item, BatchLiteral)}
    return {dim for item in tree for dim in _written_dims(item, shape)}


def programs_multiple(stages: Sequence[tuple[OpGraph, Resolved]], dims: Sequence[BatchDims]) -> int | None:
    """What the batch sizes of a program of several stages must be a multiple of; None when it works for one only."""
    found = [batch_multiple(graph, resolved, own) for (graph, resolved), own in zip(stages, dims, strict=True)]
    known = [multiple for multiple in found if multiple is not None]
    multiple = math.lcm(*known)
    return multiple if len(known) == len(found) and stages[0][0].batch_size % multiple == 0 else None


def batch_multiple(graph: OpGraph, resolved: Resolved, dims: BatchDims) -> int | None:
    """What other batch sizes must be a multiple of; None when the program works for the planned batch only."""
    if not follows_batch(graph):
        return None
    multiple = 1
    mesh_shape = resolved.stage.mesh.shape
    for value, layout in layouts_of(graph, resolved):
        for dim in dims.of(value):
            parts = _parts(layout, dim, mesh_shape)
            if parts is None or graph.values[value].shape[dim] % parts:
                return None
            multiple = math.lcm(multiple, parts)
    return None if graph.batch_size % multiple else multiple


def layouts_of(graph: OpGraph, resolved: Resolved) -> Iterator[tuple[str, Layout]]:
    """Every layout that a value is made or read in; of blocks of one variant those of one."""
    yield from ((entry.value, resolved.layout(entry.value)) for entry in graph.inputs)
    yield from ((value, resolved.layout(value)) for value in graph.received)
    yield from ((value, resolved.stage.sent[value]) for value in graph.sent)
    seen: set[str] = set()
    for operator in graph.operators:
        plan_id = resolved.representative_operator(operator.id)
        if plan_id in seen:
            continue
        seen.add(plan_id)
        plan = resolved.stage.operators[plan_id]
        yield from zip(operator.inputs, plan.inputs, strict=True)
        yield from ((value, layout) for value, layout in zip(operator.outputs, plan.outputs, strict=True) if value)


def _parts(layout: Layout, dim: int, mesh_shape: tuple[int, ...]) -> int | None:
    """Into how many pieces a dim is cut; None when a cut is not a plain one."""
    parts = 1
    for state, size in zip(layout, mesh_shape, strict=True):
        if isinstance(state, Shard) and state.dim == dim:
            if not state.cut.is_plain:
                return None
            parts *= size
    return parts
