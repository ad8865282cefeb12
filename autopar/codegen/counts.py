"""Numbers that are found for all micro-batches before the first one runs: counts of valid labels, and divisors such as
``mask.sum()``.

Enters: the stages of a plan. Leaves: for each count (``micro_batches.Term``) a class that computes from the model's inputs
what is counted, on this rank's part of a micro-batch, and the rows of ``COUNTS``:

    class LossCount(nn.Module):
        def forward(self, labels):
            return F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous().view(-1)

    COUNTS = (Count("loss_count", LossCount, takes=("labels",), axes=(mesh.data,)),)

Labels are counted in the layout in which they are first available, and summed over the axes that cut them. A divisor is
left as the plan leaves its operator's result, a term where devices have terms: what reads it converts it as planned.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.codegen import text
from autopar.codegen.arrange import STAGE, Arrangement
from autopar.codegen.bodies import function_body
from autopar.codegen.changes import change_lines
from autopar.codegen.conversions import Wiring
from autopar.codegen.function import Attributes, Function
from autopar.codegen.naming import unique
from autopar.codegen.scope import Scope
from autopar.codegen.sources import SourceWriter
from autopar.codegen.stages import Part
from autopar.codegen.statements import Change
from autopar.graph import ITEM_BYTES, Operator, OpGraph, Output
from autopar.layout import Shard
from autopar.micro_batches import CLASS_LOSSES
from autopar.plans import Resolved
from autopar.sharing import sharing_groups
from autopar.strategies.loss import COUNT_BYTES, class_loss

_INDENT = 8
IGNORED = -100  # torch's own ignore_index


@dataclass(frozen=True)
class PlannedCount:
    """One count of a stage. ``values`` are what its module computes: labels, and class weights if there are any; or a
    divisor. ``axes`` are those over which the number is all-reduced, ``item_bytes`` each time, once a step.
    """

    name: str
    operator: Operator
    values: tuple[str, ...]
    axes: tuple[int, ...]
    item_bytes: int

    @property
    def ignore_index(self) -> int | None:
        """The label that does not count; None for a divisor."""
        if self.operator.target not in CLASS_LOSSES:
            return None
        return class_loss(self.operator).ignore_index


@dataclass(frozen=True)
class CountTexts:
    """The lines of the modules' classes, the rows of ``COUNTS``, and the names of local variables."""

    classes: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    local_names: set[str] = field(default_factory=set)


def planned_counts(part: Part) -> tuple[PlannedCount, ...]:
    """The counts that a stage's operators need."""
    found = []
    for operator in part.graph.operators:
        term = part.arrangement.terms.get(operator.id)
        if term is None or term.kind != "count":
            continue
        if operator.target not in CLASS_LOSSES:
            found.append(PlannedCount(term.count, operator, operator.outputs, (), 0))
            continue
        loss = class_loss(operator)
        labels, weights = loss.labels, () if loss.weight is None else (loss.weight,)
        item = ITEM_BYTES[part.graph.values[weights[0]].dtype] if weights else COUNT_BYTES
        sizes = part.wiring.resolved.stage.mesh.shape
        axes = (
            axis
            for axis, state in enumerate(part.wiring.layout(labels))
            if isinstance(state, Shard) and sizes[axis] > 1
        )
        found.append(PlannedCount(term.count, operator, (labels, *weights), tuple(axes), item))
    return tuple(found)


def count_part(part: Part, count: PlannedCount) -> Part:
    """The module of a count as a stage of its own, for what it sends while it computes."""
    graph = _leading_to(part.graph, dict.fromkeys(count.values, count.name))
    return Part(part.number, graph, Arrangement(_wiring(part, graph)), (), count.name)


def count_texts(
    parts: Sequence[Part],
    scope: Scope,
    names: Mapping[str, str],
    reserved: frozenset[str] = frozenset(),
    taken: Collection[str] = (),
) -> CountTexts:
    """The text of all counts. ``names`` are those of the model's inputs, by value; ``taken`` are names of other classes."""
    found = CountTexts()
    classes = set(taken)
    for part in parts:
        for count in planned_counts(part):
            name = unique("".join(word.capitalize() for word in count.name.split("_")), classes)
            classes.add(name)
            writer = _CountWriter(part, count, scope, names, reserved)
            found.classes.extend(["", "", *writer.lines(name)])
            found.rows.append(writer.row(name))
            found.local_names.update(writer.local_names)
    return found


class _CountWriter:
    """Writes the module of one count."""

    def __init__(
        self, part: Part, count: PlannedCount, scope: Scope, names: Mapping[str, str], reserved: frozenset[str]
    ) -> None:
        self.count, self.scope, self.reserved = count, scope, reserved
        words = ("divisor",) if count.ignore_index is None else ("labels", "weight")
        self.graph = _leading_to(part.graph, dict(zip(count.values, words, strict=False)))
        self.wiring = _wiring(part, self.graph)
        self.takes = [names[entry.value] for entry in self.graph.inputs]
        self.local_names: set[str] = set()

    def row(self, class_name: str) -> str:
        """The entry of ``COUNTS``."""
        arguments = [text.quoted(self.count.name), class_name]
        arguments += [f"takes={text.tuple_text([text.quoted(name) for name in self.takes])}"] if self.takes else []
        axes = [self.scope.axis(axis) for axis in self.count.axes]
        arguments += [f"axes={text.tuple_text(axes)}"] if axes else []
        ignored = self.count.ignore_index if len(self.count.values) == 1 else None
        arguments += [f"ignore_index={ignored}"] if ignored != IGNORED else []
        return f"{self.scope.runtime('Count')}({', '.join(arguments)})"

    def lines(self, class_name: str) -> list[str]:
        """The class. It computes for one micro-batch as if there were no others, so nothing is scaled."""
        terms, self.scope.terms = self.scope.terms, {}
        try:
            return self._lines(class_name)
        finally:
            self.scope.terms = terms

    def _lines(self, class_name: str) -> list[str]:
        arrangement = Arrangement(self.wiring)
        sources, made = SourceWriter(arrangement, self.scope).write(STAGE, "")
        body = function_body(arrangement, STAGE)
        attributes = Attributes(sources, {})
        function = Function(arrangement, STAGE, body, attributes, self.scope, frozenset(), self.reserved)
        function.give_inputs(self.takes)
        main = function.lines()
        main += self._weighed(function) if len(self.count.values) > 1 else self._returned(function)
        self.local_names = function.used_names
        header = f"def forward({', '.join(['self', *function.arguments])}):"
        init = ["    def __init__(self):", "        super().__init__()", *made, ""] if made else []
        return [
            f"class {class_name}(nn.Module):",
            *text.line(f'"""{self._words()}"""', 4),
            "",
            *init,
            *text.line(header, 4, function.argument_layouts()),
            *function.batch_line(main),
            *main,
        ]

    def _words(self) -> str:
        source = f" of {self.count.operator.source}" if self.count.operator.source else ""
        if self.count.ignore_index is None:
            return f"This rank's part of the divisor{source}, for one micro-batch."
        weights = ", with their weights" if len(self.count.values) > 1 else ""
        return f"The labels whose number the loss{source} is divided by{weights}, for one micro-batch."

    def _returned(self, function: Function) -> list[str]:
        return text.line(f"return {function.expression((self.count.values[0], ''))}", _INDENT)

    def _weighed(self, function: Function) -> list[str]:
        """The sum of the class weights of valid labels."""
        labels, weight = ((value, "") for value in self.count.values)
        written, lines = function.expression(weight), []
        layout = self.wiring.layout(weight[0])
        if layout != self.wiring.whole:
            name = function.new_name("weight")
            change = Change((weight,), ((weight[0], "@whole"),), layout, self.wiring.whole, False)
            described = self.graph.values[weight[0]]
            lines += change_lines(
                change, written, name, described, self.wiring.resolved.stage.mesh, self.scope, _INDENT
            )
            written = name
        given, valid = function.expression(labels), function.new_name("valid")
        lines += text.line(f"{valid} = {given} != {self.count.ignore_index}", _INDENT)
        return lines + text.line(f"return ({written}[{given}.where({valid}, 0)] * {valid}).sum()", _INDENT)


def _leading_to(graph: OpGraph, wanted: Mapping[str, str]) -> OpGraph:
    """The part of a graph that computes some values, given with names, from inputs and constants."""
    needed = set(wanted)
    operators = []
    for operator in reversed(graph.operators):
        if not needed.isdisjoint(operator.outputs):
            operators.append(operator)
            needed.update(operator.inputs)
    return replace(
        graph,
        inputs=tuple(entry for entry in graph.inputs if entry.value in needed),
        parameters=(),
        buffers=(),
        constants=tuple(constant for constant in graph.constants if constant.value in needed),
        operators=tuple(reversed(operators)),
        outputs=tuple(Output(value, name) for value, name in wanted.items()),
        loss=None,
        block_groups=(),
        received=(),
        sent=(),
        _cache={},
    )


def _wiring(part: Part, graph: OpGraph) -> Wiring:
    """The wiring of a part of a stage's graph, every operator on its own as the stage's plan has it."""
    resolved = part.wiring.resolved
    operators = {operator.id: resolved.operator(operator.id) for operator in graph.operators}
    shared = {
        f"{graph.operator_of[name].inputs[index]}{group}": operators[name].inputs[index]
        for (name, index), group in sharing_groups(graph).items()
    }
    stage = replace(
        resolved.stage, operators=operators, parameters={}, shared=shared, variants={}, recompute={}, sent={}
    )
    given = {entry.value: part.wiring.layout(entry.value) for entry in graph.inputs}
    return Wiring(graph, Resolved(stage, graph), (), given)
