"""Every collective that one training step of a program issues on the first device.

Enters: a plan and its graph. Leaves: :class:`Entry` values. They follow the same ``Wiring`` as the program's text, so that they
are what runs: changes of layout, what operators exchange themselves, parameters gathered and gradients reduced, the
loss. Repeated blocks are counted, not written out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from autopar.codegen.conversions import Wiring
from autopar.graph import ITEM_BYTES, Operator, OpGraph, Parameter
from autopar.layout import REPLICATED, SUMMED_GRADIENT, Cut, Layout, Split, local_size
from autopar.plans import Plan, Resolved
from autopar.reshard import Traffic, step_traffic, steps, traffic
from autopar.strategies.registry import signature_of
from autopar.strategies.rule import Signature

Phase = Literal["forward", "backward", "gradient", "parameter"]


@dataclass(frozen=True)
class Entry:
    """``count`` collectives of ``kind`` on ``axis``, each of ``num_bytes`` as of ``reshard.Traffic``.

    ``phase``: ``forward`` and ``backward`` of activations, ``gradient`` for reductions of parameters' gradients, ``parameter``
    for gathers of parameters. ``what`` is the operator that reads, or the parameter (of a repeated block: its
    representative's).
    """

    kind: str
    axis: str
    num_bytes: int
    phase: Phase
    what: str
    count: int = 1


def totals(entries: Iterable[Entry]) -> dict[tuple[str, str], int]:
    """Bytes by kind and axis."""
    found: Counter[tuple[str, str]] = Counter()
    for entry in entries:
        found[entry.kind, entry.axis] += entry.num_bytes * entry.count
    return dict(found)


def ledger(plan: Plan, graph: OpGraph) -> list[Entry]:
    """All collectives of a training step, in the order of the forward pass, alike ones added up."""
    assert len(plan.stages) == 1, f"this version counts programs of one stage, the plan has {len(plan.stages)}"
    return _Ledger(Wiring(graph, Resolved(plan.stages[0], graph))).entries()


class _Ledger:
    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self.graph = wiring.graph
        self.resolved = wiring.resolved
        self.mesh = wiring.resolved.stage.mesh
        self._exchanges: dict[str, tuple[tuple[Traffic, bool], ...]] = {}
        self._signatures: dict[str, Signature | None] = {}

    def entries(self) -> list[Entry]:
        counts: Counter[Entry] = Counter()
        for entry in self._all():
            if entry.num_bytes:
                counts[entry] += 1
        return [
            Entry(entry.kind, entry.axis, entry.num_bytes, entry.phase, entry.what, count)
            for entry, count in counts.items()
        ]

    def _all(self) -> Iterator[Entry]:
        graph, wiring = self.graph, self.wiring
        done: set[tuple[str, str]] = set()
        for operator in wiring.live:
            what = self.resolved.representative_operator(operator.id)
            for index, value in enumerate(operator.inputs):
                read = wiring.reads[operator.id, index]
                if read.key in wiring.shared and read.key not in done:
                    done.add(read.key)
                    shared = wiring.shared[read.key]
                    yield from self._conversion(value, shared.source, shared.target, shared.has_gradient, what)
                if read.converts:
                    flows = wiring.flows(operator, index)
                    yield from self._conversion(value, read.source, read.target, flows, what)
            yield from self._operator(operator, what)
        for buffer in graph.buffers:
            if buffer.updated is not None:
                read = wiring.program_read(buffer.updated)
                yield from self._conversion(buffer.updated, read.source, read.target, False, buffer.name)
        if graph.loss is not None:
            read = wiring.program_read(graph.loss)
            yield from self._conversion(graph.loss, read.source, read.target, graph.loss in wiring.gradient, "loss")
        for parameter in graph.parameters:
            yield from self._parameter(parameter)

    def _conversion(self, value: str, source: Layout, target: Layout, flows: bool, what: str) -> Iterator[Entry]:
        described = self.graph.values[value]
        item = ITEM_BYTES[described.dtype]
        ahead, back = traffic(source, target, described.shape, self.mesh.shape, item, flows)
        yield from (self._entry(sent, "forward", what) for sent in ahead)
        yield from (self._entry(sent, "backward", what) for sent in back)

    def _entry(self, sent: Traffic, phase: Phase, what: str) -> Entry:
        return Entry(sent.kind, self.mesh.names[sent.axis], sent.num_bytes, phase, what)

    # -- what operators exchange themselves ------------------------------------------------------------------------

    def _signature(self, operator: Operator) -> Signature | None:
        name = self.resolved.representative_operator(operator.id)
        if name not in self._signatures:
            self._signatures[name] = signature_of(operator, self.graph)
        return self._signatures[name]

    def _operator(self, operator: Operator, what: str) -> Iterator[Entry]:
        if what not in self._exchanges:
            self._exchanges[what] = tuple(self._exchanged(operator))
        differentiated = any(value in self.wiring.gradient for value in operator.outputs)
        for sent, backward in self._exchanges[what]:
            if differentiated or not backward:
                yield self._entry(sent, "backward" if backward else "forward", what)

    def _exchanged(self, operator: Operator) -> Iterator[tuple[Traffic, bool]]:
        rule = self._signature(operator)
        if rule is None or not rule.exchanges:
            return
        letters = self._letters(self.resolved.operator(operator.id).label, rule)
        for exchange in rule.exchanges:
            num_bytes = exchange.item_bytes
            for letter in exchange.letters:
                splits = letters.get(letter, [])
                pieces: tuple[Split, ...] = tuple((cut, self.mesh.shape[axis], 0) for axis, cut in splits)
                num_bytes *= local_size(rule.sizes[letter], pieces) if pieces else rule.sizes[letter]
            num_bytes += exchange.more_elements * exchange.item_bytes
            for axis, _ in letters.get(exchange.letter, []):
                if self.mesh.shape[axis] > 1:
                    for _ in range(exchange.count):
                        yield Traffic(axis, exchange.kind, num_bytes), exchange.backward

    def _letters(self, label: str, rule: Signature) -> dict[str, list[tuple[int, Cut]]]:
        """The axes that split each letter, from a strategy's label such as ``b R`` or ``n[3x768/64] b``."""
        found: dict[str, list[tuple[int, Cut]]] = {}
        for axis, chosen in enumerate(label.split(" ")):
            letter, _, cut = chosen.removesuffix("]").partition("[")
            if letter in rule.sizes and letter not in ("R", "G", "P"):
                found.setdefault(letter, []).append((axis, Cut.parse(cut) if cut else Cut.plain(rule.sizes[letter])))
        return found

    # -- parameters ------------------------------------------------------------------------------------------------

    def _parameter(self, parameter: Parameter) -> Iterator[Entry]:
        """Gathers from rest to use, and the way back for the gradient: its steps in reverse.

        Under ZeRO-3 a parameter is gathered again in backward when some operator has kept it for that.
        """
        value = parameter.value
        what = self.resolved.representative_value(value)
        plan = self.wiring.parameter(value)
        readers = [
            (name, index) for name, index in self.graph.readers_of.get(value, ()) if (name, index) in self.wiring.reads
        ]
        trained = parameter.trainable and value in self.wiring.gradient
        described = self.graph.values[value]
        current = tuple(REPLICATED if state == SUMMED_GRADIENT else state for state in plan.storage)
        for step in steps(current, plan.use):
            ahead, back = step_traffic(step, current, described.shape, self.mesh.shape, ITEM_BYTES[described.dtype])
            current = (*current[: step.axis], step.target, *current[step.axis + 1 :])
            if self.mesh.shape[step.axis] == 1:
                continue
            if ahead and (readers or plan.zero != 3):
                yield self._entry(ahead, "parameter", what)
                if plan.zero == 3 and trained and any(self._keeps(*reader) for reader in readers):
                    yield self._entry(ahead, "parameter", what)
            if back and trained:
                yield self._entry(back, "gradient", what)

    def _keeps(self, name: str, index: int) -> bool:
        """Whether an operator keeps the memory of this input for backward: itself, or through views."""
        operator = self.graph.operator_of[name]
        if not any(value in self.wiring.gradient for value in operator.outputs):
            return False
        read = self.wiring.reads[name, index]
        shared = self.wiring.shared.get(read.key)
        changes = [(shared.source, shared.target)] if shared else []
        changes += [(read.source, read.target)] if read.converts else []
        if any(step.name not in ("copy_to", "keep_first_gradient") for pair in changes for step in steps(*pair)):
            return False
        rule = self._signature(operator)
        if rule is None or index in rule.saved_inputs:
            return True
        storage = self.graph.values[operator.inputs[index]].storage
        views = [value for value in operator.outputs if value and self.graph.values[value].storage == storage]
        readers = [
            reader for view in views for reader in self.graph.readers_of.get(view, ()) if reader in self.wiring.reads
        ]
        return any(self._keeps(*reader) for reader in readers)
