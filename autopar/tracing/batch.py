"""Which integer literals follow the batch: the trace compared with one at another batch size.

Enters: the lowered program, its blocks, and a function that traces again with other shapes (and, for deep models, with
all but the first two blocks of each group left out). Leaves: the operators with :class:`~autopar.graph.BatchLiteral`
where the two traces differ in proportion to the batch; or the operators as they were, and why no other batch works.

The other batch size is a multiple of the first, so that what divides the one divides the other, and equals no other
size in the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import AutoparError
from autopar.graph import BatchLiteral, BlockGroup, Operator, Ref
from autopar.tracing.lower import Lowered

MIN_BLOCKS_TO_CUT = 4
KEPT_BLOCKS = 2

Retrace = Callable[[int, Mapping[str, tuple[int, ...]]], Lowered]


class _Differs(Exception):
    """The two traces cannot be aligned; the message says where."""


@dataclass(frozen=True)
class Marked:
    """Operators with their batch literals; or, with a reason, as they were."""

    operators: tuple[Operator, ...]
    reason: str | None = None


def mark_batch(
    lowered: Lowered, groups: tuple[BlockGroup, ...], batch: int, children: Mapping[str, int], retrace: Retrace
) -> Marked:
    """Mark the literals that follow the batch. ``children`` counts the modules of each container that may be cut."""
    other = _other_batch(lowered, batch)
    cuts = _cuts(groups, children)
    reason = ""
    for attempt in ([cuts] if cuts else []) + [{}]:
        try:
            second = retrace(other, attempt)
            return Marked(_align(lowered, second, groups if attempt else (), batch, other))
        except _Differs as error:
            reason = str(error)
        except AutoparError as error:
            reason = f"it cannot be traced at a batch of {other}: {error}"
    return Marked(tuple(lowered.operators), reason)


def _other_batch(lowered: Lowered, batch: int) -> int:
    """A multiple of the batch that is no size or literal of the program."""
    taken = {size for value in lowered.values.values() for size in value.shape}
    for operator in lowered.operators:
        taken.update(_integers((operator.args, operator.kwargs)))
    return next(batch * factor for factor in range(2, 10**6) if batch * factor not in taken)


def _integers(tree: Any) -> set[int]:
    if isinstance(tree, tuple):
        return {number for item in tree for number in _integers(item)}
    return {tree} if type(tree) is int else set()


def _cuts(groups: tuple[BlockGroup, ...], children: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """For each long container, the children to keep: all but the later blocks of each group."""
    dropped: dict[str, set[int]] = {}
    for group in groups:
        if len(group.blocks) >= MIN_BLOCKS_TO_CUT:
            places = [block.path.rpartition(".") for block in group.blocks[KEPT_BLOCKS:]]
            dropped.setdefault(places[0][0], set()).update(int(index) for _, _, index in places)
    return {
        path: tuple(index for index in range(children[path]) if index not in gone)
        for path, gone in dropped.items()
        if path in children
    }


def _align(
    first: Lowered, second: Lowered, groups: tuple[BlockGroup, ...], batch: int, other: int
) -> tuple[Operator, ...]:
    """The first trace's operators, with the literals marked that are in proportion to the batch in the second."""
    comparison = _Comparison(first, second, groups, batch, other)
    marked: dict[str, Operator] = {}
    theirs = {operator.id: operator for operator in second.operators}
    for operator in first.operators:
        twin = theirs.pop(operator.id, None)
        if twin is None and operator.id in comparison.stands_for:
            continue
        if twin is None:
            raise _Differs(f"{operator.id} is not there at a batch of {other}")
        marked[operator.id] = comparison.mark(operator, twin)
    if theirs:
        raise _Differs(f"{next(iter(theirs))} is only there at a batch of {other}")
    comparison.check_ends()
    for name, kept in comparison.stands_for.items():
        if name not in marked:
            marked[name] = _with_marks(comparison.operators[name], marked[kept])
    return tuple(marked[operator.id] for operator in first.operators)


class _Comparison:
    """Two traces side by side; with groups, the second has only the first blocks of each."""

    def __init__(self, first: Lowered, second: Lowered, groups: tuple[BlockGroup, ...], batch: int, other: int) -> None:
        self.first, self.second, self.batch, self.other = first, second, batch, other
        self.operators = {operator.id: operator for operator in first.operators}
        self.stands_for: dict[str, str] = {}
        self.place: dict[str, tuple[str, int, int]] = {}
        for group in groups:
            for block in group.blocks:
                for index, (name, kept) in enumerate(zip(block.operators, group.blocks[0].operators, strict=True)):
                    self.stands_for[name] = kept
                    for output, value in enumerate(self.operators[name].outputs):
                        self.place[value] = (group.name, index, output)

    def mark(self, operator: Operator, twin: Operator) -> Operator:
        if operator.target != twin.target or len(operator.outputs) != len(twin.outputs):
            raise _Differs(f"{operator.id} is {operator.target} at {self.batch} and {twin.target} at {self.other}")
        for ours, theirs in zip(operator.outputs, twin.outputs, strict=True):
            if ours:
                self._check_value(ours, theirs)
        args = self._mark(operator.args, twin.args, operator)
        kwargs = self._mark(operator.kwargs, twin.kwargs, operator)
        changed = (args, kwargs) != (operator.args, operator.kwargs)
        return replace(operator, args=args, kwargs=kwargs) if changed else operator

    def check_ends(self) -> None:
        """Inputs, outputs, loss and constants must correspond as well."""
        first, second = self.first, self.second
        ends = [(x.value, y.value) for x, y in zip(first.outputs, second.outputs, strict=False)]
        if first.loss is not None and second.loss is not None:
            ends.append((first.loss, second.loss))
        if len(first.outputs) != len(second.outputs) or not all(self._same_value(x, y) for x, y in ends):
            raise _Differs(f"its outputs are others at a batch of {self.other}")
        if first.constants != second.constants:
            raise _Differs("a tensor written in its code depends on the batch size")

    def _mark(self, ours: Any, theirs: Any, operator: Operator) -> Any:
        if isinstance(ours, Ref) and isinstance(theirs, Ref):
            if self._same_value(ours.value, theirs.value):
                return ours
        elif isinstance(ours, tuple) and isinstance(theirs, tuple):
            if len(ours) == len(theirs):
                return tuple(self._mark(x, y, operator) for x, y in zip(ours, theirs, strict=True))
        elif type(ours) is type(theirs):
            if ours == theirs:
                return ours
            if type(ours) is int and ours * self.other == theirs * self.batch:
                return BatchLiteral(ours)
        raise _Differs(
            f"{operator.id} ({operator.source}) has {ours!r} at a batch of {self.batch} and {theirs!r} at {self.other}"
        )

    def _same_value(self, ours: str, theirs: str) -> bool:
        return ours == theirs or (ours in self.place and self.place[ours] == self.place.get(theirs))

    def _check_value(self, ours: str, theirs: str) -> None:
        one, two = self.first.values[ours], self.second.values[theirs]
        alike = len(one.shape) == len(two.shape) and all(
            x == y or x * self.other == y * self.batch for x, y in zip(one.shape, two.shape, strict=True)
        )
        if not alike or (one.dtype, one.requires_grad) != (two.dtype, two.requires_grad):
            raise _Differs(
                f"{ours} has the shape {list(one.shape)} at a batch of {self.batch}, {list(two.shape)} at {self.other}"
            )


def _with_marks(operator: Operator, kept: Operator) -> Operator:
    """The operator with batch literals where its twin in the kept block has them."""

    def copy(ours: Any, theirs: Any) -> Any:
        if isinstance(theirs, BatchLiteral):
            return theirs
        if isinstance(ours, tuple):
            return tuple(copy(x, y) for x, y in zip(ours, theirs, strict=True))
        return ours

    return replace(operator, args=copy(operator.args, kept.args), kwargs=copy(operator.kwargs, kept.kwargs))
