"""Which integer literals follow the batch: the trace compared with one at another batch size.

Enters: the lowered program, its blocks, and a function that traces again with other shapes (and, for deep models, with
all but the first two blocks of each group left out). Leaves: the operators with :class:`~autopar.graph.BatchLiteral`
where the two traces differ in proportion to the batch; or the operators as they were, and why no other batch works.

The two are aligned operator by operator in the order of the trace. The other batch size is a multiple of the first, so
that what divides the one divides the other, and equals no other size in the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import AutoparError
from autopar.graph import BatchLiteral, BlockGroup, Operator, Ref, Subgraph
from autopar.strategies.elementwise import QUOTIENTS
from autopar.tracing.lowered import Lowered

_QUOTIENTS = tuple(f"aten.{name}.{kind}" for name in QUOTIENTS for kind in ("Tensor", "Scalar"))
MIN_BLOCKS_TO_CUT = 4
KEPT_BLOCKS = 2

Cuts = Mapping[str, tuple[int, ...]]
Retrace = Callable[[int, Cuts], Lowered]


class _Differs(Exception):
    """The two traces cannot be aligned; the message says where."""


@dataclass(frozen=True)
class Marked:
    """Operators with their batch literals, and the dims of values that follow the batch; or, with a reason, as they were."""

    operators: tuple[Operator, ...]
    batch_dims: Mapping[str, tuple[int, ...]]
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
            return _align(lowered, retrace(other, attempt), groups, attempt, (batch, other))
        except _Differs as error:
            reason = str(error)
        except AutoparError as error:
            reason = f"it cannot be traced at a batch of {other}: {error}"
    return Marked(tuple(lowered.operators), {}, reason)


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
    first: Lowered, second: Lowered, groups: tuple[BlockGroup, ...], cuts: Cuts, batches: tuple[int, int]
) -> Marked:
    """The first trace's operators, with the literals marked that are in proportion to the batch in the second."""
    stands_for = _stand_ins(groups, cuts)
    kept = [operator for operator in first.operators if operator.id not in stands_for]
    if len(kept) != len(second.operators):
        raise _Differs(
            f"it has {len(kept)} operators at a batch of {batches[0]}, {len(second.operators)} at {batches[1]}"
        )
    comparison = _Comparison(first, second, groups, batches)
    marked = {ours.id: comparison.mark(ours, twin) for ours, twin in zip(kept, second.operators, strict=True)}
    comparison.check_ends()
    dims = comparison.batch_dims
    for operator in first.operators:
        if operator.id in stands_for:
            kept_one = marked[stands_for[operator.id]]
            marked[operator.id] = _with_marks(operator, kept_one)
            dims.update(
                (ours, dims[theirs]) for ours, theirs in zip(operator.outputs, kept_one.outputs, strict=True) if ours
            )
    return Marked(tuple(marked[operator.id] for operator in first.operators), dims)


def _stand_ins(groups: tuple[BlockGroup, ...], cuts: Cuts) -> dict[str, str]:
    """For each operator of a block that the second trace leaves out, its like in the group's first block."""
    found: dict[str, str] = {}
    for group in groups:
        for block in group.blocks:
            container, _, index = block.path.rpartition(".")
            if container in cuts and int(index) not in cuts[container]:
                found.update(zip(block.operators, group.blocks[0].operators, strict=True))
    return found


class _Comparison:
    """Two traces side by side, operator by operator; values correspond by the operators that make them.

    What reads the last block of a group reads the last of those that are left in a shortened trace, so values at the
    same place of two blocks of one group correspond as well.
    """

    def __init__(
        self, first: Lowered, second: Lowered, groups: tuple[BlockGroup, ...], batches: tuple[int, int]
    ) -> None:
        self.first, self.second = first, second
        self.batch, self.other = batches
        self.twin: dict[str, str] = {}
        self.batch_dims: dict[str, tuple[int, ...]] = {}
        self.place: dict[str, tuple[str, int, int]] = {}
        outputs = {operator.id: operator.outputs for operator in first.operators}
        for group in groups:
            for block in group.blocks:
                for index, name in enumerate(block.operators):
                    for output, value in enumerate(outputs[name]):
                        self.place[value] = (group.name, index, output)

    def mark(self, operator: Operator, twin: Operator) -> Operator:
        if (operator.target, operator.module) != (twin.target, twin.module) or len(operator.outputs) != len(
            twin.outputs
        ):
            raise _Differs(f"{operator.id} is {operator.target} at {self.batch} and {twin.target} at {self.other}")
        for ours, theirs in zip(operator.outputs, twin.outputs, strict=True):
            if ours:
                self.twin[theirs] = ours
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
        elif isinstance(ours, Subgraph) and isinstance(theirs, Subgraph):
            return ours  # a branch has the batch whole
        elif type(ours) is type(theirs):
            if ours == theirs:
                return ours
            follows = type(ours) in (int, float) and ours * self.other == theirs * self.batch
            if follows and (type(ours) is int or (operator.target in _QUOTIENTS and ours.is_integer())):
                return BatchLiteral(int(ours))  # a quotient by a whole number is the same whatever the number's type
        raise _Differs(
            f"{operator.id} ({operator.source}) has {ours!r} at a batch of {self.batch} and {theirs!r} at {self.other}"
        )

    def _same_value(self, ours: str, theirs: str) -> bool:
        twin = self.twin.get(theirs, theirs)
        return ours == twin or (ours in self.place and self.place[ours] == self.place.get(twin))

    def _check_value(self, ours: str, theirs: str) -> None:
        one, two = self.first.values[ours], self.second.values[theirs]
        alike = len(one.shape) == len(two.shape) and all(
            x == y or x * self.other == y * self.batch for x, y in zip(one.shape, two.shape, strict=True)
        )
        if not alike or (one.dtype, one.requires_grad) != (two.dtype, two.requires_grad):
            raise _Differs(
                f"{ours} has the shape {list(one.shape)} at a batch of {self.batch}, {list(two.shape)} at {self.other}"
            )
        self.batch_dims[ours] = tuple(
            dim for dim, (x, y) in enumerate(zip(one.shape, two.shape, strict=True)) if x != y
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
