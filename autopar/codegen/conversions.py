"""Where the program changes layouts: for each reader of a value, what it reads and into what it converts that.

Enters: a graph and its resolved plan. Leaves: :class:`Wiring`, followed by the program's text and by the ledger alike, so that
the conversions counted are those written. A reader converts privately, except the members of a sharing group: they read
one copy, converted once. The program itself reads the loss and the new statistics of buffers, both replicated, and
what it hands to the next stage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from autopar.gradients import has_gradient
from autopar.graph import Operator, OpGraph
from autopar.layout import REPLICATED, Layout
from autopar.plans import ParameterPlan, Resolved
from autopar.sharing import Reader, sharing_groups

Key = tuple[
    str, str
]  # a value's id, and which copy of it: "" as its operator leaves it, else the group it is converted for


@dataclass(frozen=True)
class Read:
    """One reading of a value: the copy that is read, that copy's layout, and the layout wanted."""

    key: Key
    source: Layout
    target: Layout

    @property
    def converts(self) -> bool:
        return self.source != self.target


@dataclass(frozen=True)
class Shared:
    """A conversion for a group of readers. ``has_gradient``: whether a gradient flows back through it."""

    key: Key
    source: Layout
    target: Layout
    readers: tuple[Reader, ...]
    has_gradient: bool


class Wiring:
    """Every reading of every value of a graph under a plan.

    ``live`` are the operators whose results reach an output, the loss, a buffer or the next stage; ``shared`` the group
    conversions that change something; ``gradient`` the values that a gradient flows through (by default as the graph
    says). ``given`` are the layouts of inputs that are handed out otherwise than the plan of this stage says.
    """

    def __init__(
        self,
        graph: OpGraph,
        resolved: Resolved,
        gradient: Collection[str] | None = None,
        given: Mapping[str, Layout] | None = None,
    ) -> None:
        self.graph = graph
        self.resolved = resolved
        self.live = live_operators(graph)
        self.gradient = frozenset(has_gradient(graph) if gradient is None else graph.values.keys() & gradient)
        self.whole: Layout = (REPLICATED,) * resolved.stage.mesh.num_axes
        self.reads: dict[Reader, Read] = {}
        self.shared: dict[Key, Shared] = {}
        self._groups = sharing_groups(graph)
        self._available: dict[str, Layout] = dict(given or {})
        for operator in self.live:
            self._connect(operator)

    def layout(self, value: str) -> Layout:
        """The layout in which a value is first available."""
        if value not in self._available:
            self._available[value] = self.resolved.layout(value)
        return self._available[value]

    def parameter(self, value: str) -> ParameterPlan:
        """The plan of a parameter; one that nobody reads rests replicated if the plan does not name it."""
        try:
            return self.resolved.parameter(value)
        except KeyError:
            return ParameterPlan(self.whole, self.whole)

    def flows(self, operator: Operator, index: int) -> bool:
        """Whether a gradient flows back through an operator's tensor input."""
        if operator.inputs[index] not in self.gradient:
            return False
        return any(value in self.gradient for value in operator.outputs)

    def program_read(self, value: str) -> Read:
        """How the program reads a value that it wants whole on every device."""
        return Read((value, ""), self.layout(value), self.whole)

    def sent_read(self, value: str) -> Read:
        """How the program reads a value that it hands to the next stage."""
        return Read((value, ""), self.layout(value), self.resolved.stage.sent[value])

    def _connect(self, operator: Operator) -> None:
        wanted = self.resolved.operator(operator.id).inputs
        for index, value in enumerate(operator.inputs):
            available = self.layout(value)
            group = self._groups.get((operator.id, index))
            if group is None or self.graph.values[value].kind in ("buffer", "constant"):  # these are cut for nothing
                self.reads[operator.id, index] = Read((value, ""), available, wanted[index])
                continue
            target = self.resolved.shared(value, group)
            assert target == wanted[index], (
                f"{operator.id} wants input {index} in another layout than its group {group}"
            )
            if available == target:
                self.reads[operator.id, index] = Read((value, ""), target, target)
                continue
            key = (value, group)
            self.reads[operator.id, index] = Read(key, target, target)
            earlier = self.shared.get(key)
            readers = (*earlier.readers, (operator.id, index)) if earlier else ((operator.id, index),)
            flows = self.flows(operator, index) or (earlier is not None and earlier.has_gradient)
            self.shared[key] = Shared(key, available, target, readers, flows)


def live_operators(graph: OpGraph) -> tuple[Operator, ...]:
    """Operators whose results reach an output, the loss, a buffer's new value or the next stage, in order."""
    wanted = {output.value for output in graph.outputs} | {buffer.updated for buffer in graph.buffers}
    wanted.update(graph.sent)
    wanted.add(graph.loss)
    kept = []
    for operator in reversed(graph.operators):
        if not wanted.isdisjoint(operator.outputs):
            kept.append(operator)
            wanted.update(operator.inputs)
    return tuple(reversed(kept))
