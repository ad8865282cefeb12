"""The peak of a stage's memory over one step, from when each tensor of a plan is alive.

Enters: a :class:`Costed` stage and the solver's choices. Leaves: bytes. A micro-batch's step is a row of slots: the forward
passes of all operators, their backward passes in reverse, the reduction of gradients, the optimizer. Every tensor is alive
from one slot to another, both included:

    what autograd saves         from the operator that makes it to the backward pass of the first one that saved it
    what is computed again      the same, and from where the run is computed again
    a gradient                  from the backward pass of its value's last reader to that of the value's own operator
    a parameter's gradient      from its last reader's backward pass on
    ZeRO's whole parameters     around their use; buckets of gradients until they are sent

and the peak is the largest sum. To that comes what is there throughout: parameters, optimizer states, gradients of earlier
micro-batches, and what the other micro-batches in flight keep. The solver adds up bytes by choice, which cannot say *when*;
its row is a lower bound of this (``kept.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.costing.kept import KeptBytes, Run
from autopar.costing.operators import TEMPORARIES, OperatorTable
from autopar.costing.parameters import BUCKET_BYTES, ParameterChoice
from autopar.costing.problem import Costed
from autopar.graph import ITEM_BYTES, Operator
from autopar.layout import SUMMED_GRADIENT, Shard
from autopar.sharing import Reader

# Pieces of one parameter that AdamW has at the same time beside its states: root and quotient, and the parameter before's
# quotient (torch/optim/adam.py, _single_tensor_adam, which is what DTensors get on every device).
OPTIMIZER_PIECES = 3.0


def peak_bytes(costed: Costed, choices: Sequence[int]) -> float:
    """The most bytes that a device of the stage has allocated at one time in a step."""
    return _Timeline(costed, choices).peak()


@dataclass
class _Gradient:
    """A gradient's memory: bytes, and slots from which to which it is alive."""

    num_bytes: float
    start: int
    end: int


@dataclass
class _Timeline:
    costed: Costed
    choices: Sequence[int]
    throughout: float = 0.0
    deltas: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.graph, self.prepared, self.setting = self.costed.prepared.graph, self.costed.prepared, self.costed.setting
        self.keeping = KeptBytes(self.prepared, self.setting)
        self.place = {operator.id: index for index, operator in enumerate(self.graph.operators)}
        self.count = len(self.graph.operators)
        self.deltas = [0.0] * (2 * self.count + 3)
        self.grows = self.setting.num_micro_batches == self.setting.in_flight  # no gradients yet where most is in flight
        self.kept = 0.0  # of one micro-batch between its passes
        runs: dict[Run, list[int]] = {}
        for name, run in self.keeping.run_of.items():
            runs.setdefault(run, []).append(self.place[name])
        self.first_of = {run: min(places) for run, places in runs.items()}
        self.last_of = {run: max(places) for run, places in runs.items()}

    def peak(self) -> float:
        for operator in self.graph.operators:
            self._results(operator)
            self._statistics(operator)
        for value in self.graph.received:
            self._saved_value(value, 0, self._received_bytes(value), None)
        self._converted()
        self._gradients()
        self._parameters()
        total, most = 0.0, 0.0
        for delta in self.deltas:
            total += delta
            most = max(most, total)
        return most + self.throughout + (self.setting.in_flight - 1) * self.kept

    # Slots

    def back(self, place: int) -> int:
        """The slot of an operator's backward pass."""
        return 2 * self.count - 1 - place

    def again(self, run: Run) -> int:
        """The slot in which a run is computed again."""
        return self.back(self.last_of[run])

    def alive(self, start: int, end: int, num_bytes: float) -> None:
        self.deltas[start] += num_bytes
        self.deltas[end + 1] -= num_bytes
        if start < self.count <= end:
            self.kept += num_bytes

    # What a choice says

    def table(self, operator: str) -> tuple[OperatorTable, int]:
        return self.costed.operator_table(operator), self.choices[self.costed.nodes[operator]]

    @cached_property
    def size_of(self) -> dict[str, float]:
        """Bytes of every computed or received value here, in the layout in which it is made."""
        found: dict[str, float] = {value: self._received_bytes(value) for value in self.graph.received}
        for operator in self.graph.operators:
            table, choice = self.table(operator.id)
            outputs = [value for value in operator.outputs if value]
            found.update((v, float(b[choice])) for v, b in zip(outputs, table.output_bytes, strict=True))
        return found

    def _received_bytes(self, value: str) -> float:
        described = self.graph.values[value]
        column = self.costed.input_columns[value]
        layout = column.distinct[column.which[self.choices[self.costed.nodes[value]]]]
        return float(self.costed.conversions.local_elements(described.shape, layout) * ITEM_BYTES[described.dtype])

    @cached_property
    def made(self) -> dict[Reader, float]:
        """Bytes that a conversion makes for a reader alone; what it shares with others is in ``made_shared``."""
        return {reader: num_bytes for reader, num_bytes in self._made() if isinstance(reader, tuple)}

    @cached_property
    def made_shared(self) -> dict[str, float]:
        return {key: num_bytes for key, num_bytes in self._made() if isinstance(key, str)}

    def _made(self) -> Iterator[tuple[Reader | str, float]]:
        for edge, made, reader in zip(
            self.costed.problem.edges, self.costed.edges_made, self.costed.edges_reader, strict=True
        ):
            if made is not None:
                num_bytes = float(made[self.choices[edge.source], self.choices[edge.target]])
                if num_bytes:
                    yield reader, num_bytes

    def converts(self, operator: str, index: int) -> bool:
        """Whether an operator reads another tensor than the one its value's operator made."""
        return bool((operator, index) in self.made or self.prepared.group_key((operator, index)) in self.made_shared)

    # Values

    @cached_property
    def readers(self) -> dict[str, list[Reader]]:
        """Readers of each storage, through views too."""
        found: dict[str, list[Reader]] = {}
        for operator in self.graph.operators:
            for index, value in enumerate(operator.inputs):
                found.setdefault(self.graph.values[value].storage or value, []).append((operator.id, index))
        return found

    def differentiated(self, operator: Operator) -> bool:
        return any(value in self.prepared.gradient for value in operator.outputs)

    def saves(self, operator: Operator, index: int) -> bool:
        """Whether autograd keeps this input."""
        signature = self.prepared.signatures.get(self.prepared.name(operator.id))
        return self.differentiated(operator) and (signature is None or index in signature.saved_inputs)

    def _results(self, operator: Operator) -> None:
        outputs = [value for value in operator.outputs if value]
        for value in outputs:
            if (self.graph.values[value].storage or value) == value:
                self._saved_value(value, self.place[operator.id], self.size_of[value], operator)

    def _saved_value(self, value: str, start: int, num_bytes: float, maker: Operator | None) -> None:
        """A tensor in forward, and where its run is computed again."""
        run = self.keeping.run_of.get(maker.id) if maker else None
        end, inside = start, -1
        for name, index in self.readers.get(value, ()):
            reader, reads = self.graph.operator_of[name], self.keeping.run_of.get(name)
            end = max(end, self.place[name])
            if self.converts(name, index):
                continue
            if reads is not None and reads != run:
                end = max(end, self.back(self.first_of[reads]))
            elif self.saves(reader, index):
                inside, end = self._until(reads, self.place[name], inside, end)
        if maker is not None and self._saves_result(maker, value):
            inside, end = self._until(run, self.place[maker.id], inside, end)
        if value in self.graph.sent or any(output.value == value for output in self.graph.outputs):
            end = max(end, self.count - 1)
        self.alive(start, end if maker else max(end, self.back(0)), num_bytes)
        if run is not None:
            self.alive(self.again(run), max(self.again(run), inside), num_bytes if inside >= 0 or end >= self.count else 0.0)

    def _until(self, run: Run | None, saver: int, inside: int, end: int) -> tuple[int, int]:
        """Ends of a tensor's two lives, that of its run's second time and that from forward on, for one that saves it."""
        slot = self.back(saver)
        return (inside, max(end, slot)) if run is None else (max(inside, slot), end)

    def _saves_result(self, operator: Operator, value: str) -> bool:
        if not self.differentiated(operator):
            return False
        signature = self.prepared.signatures.get(self.prepared.name(operator.id))
        outputs = [output for output in operator.outputs if output]
        return any(
            (self.graph.values[output].storage or output) == value
            for index, output in enumerate(outputs)
            if signature is None or index in signature.saved_outputs
        )

    def _statistics(self, operator: Operator) -> None:
        """What an operator keeps besides, and what its backward pass makes beside gradients."""
        if not self.differentiated(operator):
            return
        table, choice = self.table(operator.id)
        place, run = self.place[operator.id], self.keeping.run_of.get(operator.id)
        extra = float(table.extra_bytes[choice])
        if run is None:
            self.alive(place, self.back(place), extra)
        else:
            self.alive(place, place, extra)
            self.alive(self.again(run), self.back(place), extra)
        size = sum(self.size_of[value] for value in operator.outputs if value)
        beside = extra if "cross_entropy" in operator.target else TEMPORARIES.get(operator.target, 0.0) * size
        self.alive(self.back(place), self.back(place), beside)

    def _converted(self) -> None:
        """Tensors that conversions make, and their gradients."""
        for reader, num_bytes in self.made.items():
            self._conversion([reader], num_bytes)
        members: dict[str, list[Reader]] = {}
        for reader in self.prepared.groups:
            key = self.prepared.group_key(reader)
            if key is not None and key in self.made_shared:
                members.setdefault(key, []).append(reader)
        for key, readers in members.items():
            self._conversion(readers, self.made_shared[key])

    def _conversion(self, readers: Sequence[Reader], num_bytes: float) -> None:
        places = [self.place[name] for name, _ in readers]
        start, end = min(places), max(places)
        value = self.graph.operator_of[readers[0][0]].inputs[readers[0][1]]
        inside = -1
        run: Run | None = None
        for name, index in readers:
            reads = self.keeping.run_of.get(name)
            saved = self.saves(self.graph.operator_of[name], index)
            if reads is not None and not self.keeping.is_full(reads):
                end = max(end, self.back(self.first_of[reads]))  # it is split there: what communicates is in no run
            elif reads is not None:
                run = reads
                inside = max(inside, self.back(self.place[name]) if saved else -1)
            elif saved:
                end = max(end, self.back(self.place[name]))
        self.alive(start, end, num_bytes)
        if run is not None and inside >= 0:
            self.alive(self.again(run), inside, num_bytes)
        flows = [self.place[n] for n, i in readers if self.prepared.flows(self.graph.operator_of[n], i)]
        if flows and self.graph.values[value].kind != "parameter":
            self.alive(self.back(max(flows)), self.back(min(flows)), num_bytes)

    # Gradients

    def _gradients(self) -> None:
        """Gradients of computed and received values, in the order in which backward makes them."""
        roots: dict[str, _Gradient] = {}
        for operator in reversed(self.graph.operators):
            for value in operator.outputs:
                if value and value in self.prepared.gradient:
                    self._gradient(value, self.place[operator.id], roots)
        for value in self.graph.received:
            if value in self.prepared.gradient:
                self._gradient(value, -1, roots)
        for gradient in {id(gradient): gradient for gradient in roots.values()}.values():
            self.alive(gradient.start, gradient.end, gradient.num_bytes)

    def _gradient(self, value: str, maker: int, roots: dict[str, _Gradient]) -> None:
        size, end = self.size_of[value], self.back(maker)
        flowing = sorted(
            (
                (self.place[name], index)
                for name, index in self.graph.readers_of.get(value, ())
                if self.prepared.flows(self.graph.operator_of[name], index)
            ),
            reverse=True,
        )
        if value in self.graph.sent:
            roots[value] = _Gradient(size, self.count, end)
        for number, (place, index) in enumerate(flowing):
            slot, operator = self.back(place), self.graph.operators[place]
            shared = roots.get(self._handed_on(operator, index))
            if value not in roots:
                if shared is not None:
                    roots[value] = shared
                    shared.end = max(shared.end, end if number == len(flowing) - 1 else self.back(flowing[number + 1][0]))
                else:
                    roots[value] = _Gradient(size, slot, end)
            elif number == 1 and value not in self.graph.sent and self._is_shared(value, operator, flowing, roots):
                roots[value] = _Gradient(size, slot, end)
                self.alive(slot, slot, 0.0 if shared is not None else size)
            elif shared is None:
                self.alive(slot, slot, size)

    def _is_shared(
        self, value: str, operator: Operator, flowing: Sequence[tuple[int, int]], roots: Mapping[str, _Gradient]
    ) -> bool:
        """Whether the gradient so far is memory of another one's, so that a sum is a new tensor."""
        first = self.graph.operators[flowing[0][0]]
        handed = self._handed_on(first, flowing[0][1])
        return roots.get(handed) is roots[value]

    def _handed_on(self, operator: Operator, index: int) -> str:
        """The result whose gradient's memory is that of this input's; empty for none."""
        if self.converts(operator.id, index):
            return ""
        outputs = [value for value in operator.outputs if value]
        mine, result = self.graph.values[operator.inputs[index]], self.graph.values[outputs[0]]
        if len(outputs) != 1 or mine.num_elements != result.num_elements or mine.dtype != result.dtype:
            return ""
        signature = self.prepared.signatures.get(self.prepared.name(operator.id))
        is_view = signature is not None and signature.kind in ("view", "free")
        is_sum = operator.target in ("aten.add.Tensor", "aten.add_.Tensor") and mine.shape == result.shape
        return outputs[0] if is_view or is_sum else ""

    # Parameters

    def _parameters(self) -> None:
        largest, buckets = 0.0, {0: 0.0, 1: 0.0, 2: 0.0}
        for parameter in self.graph.parameters:
            table = self.costed.parameter_table(parameter.value)
            at = self.choices[self.costed.nodes[parameter.value]]
            stored, copy, gradient, states = (float(part) for part in table.parts[:, at])
            choice, value = table.choices[at], self.graph.values[parameter.value]
            used = float(self.costed.conversions.local_elements(value.shape, choice.use) * ITEM_BYTES[value.dtype])
            self.throughout += stored + copy + states
            self._whole(parameter.value, choice, used)
            if not gradient:
                continue
            largest = max(largest, stored)
            self._parameter_gradient(parameter.value, choice, used, gradient)
            if choice.zero in buckets and self._is_sent(choice):
                buckets[choice.zero] += used
        for buffer in self.graph.buffers:
            self.throughout += self.graph.values[buffer.value].num_bytes
        for num_bytes in buckets.values():
            self.alive(2 * self.count, 2 * self.count, min(num_bytes, float(BUCKET_BYTES)))
        self.alive(2 * self.count + 1, 2 * self.count + 1, OPTIMIZER_PIECES * largest)

    def _is_sent(self, choice: ParameterChoice) -> bool:
        """Whether the gradient is a sum of terms of several devices."""
        sizes = self.costed.mesh.shape
        return any(state == SUMMED_GRADIENT and size > 1 for state, size in zip(choice.use, sizes, strict=True))

    def _reading(self, value: str) -> list[Reader]:
        return list(self.graph.readers_of.get(value, ()))

    def _whole(self, value: str, choice: ParameterChoice, used: float) -> None:
        """ZeRO-3's copies around their use."""
        readers = self._reading(value)
        if choice.zero != 3 or not readers:
            return
        places = [self.place[name] for name, _ in readers]
        self.alive(min(places), max(places), used)
        savers = [(self.place[n], self.keeping.run_of.get(n)) for n, i in readers if self.saves(self.graph.operator_of[n], i)]
        runs = [self.again(run) for _, run in savers if run is not None]
        if savers:
            ends = [self.back(place) for place, _ in savers]
            self.alive(min([*ends, *runs]), max(ends), used)

    def _parameter_gradient(self, value: str, choice: ParameterChoice, used: float, resting: float) -> None:
        flowing = [self.place[n] for n, i in self._reading(value) if self.prepared.flows(self.graph.operator_of[n], i)]
        if not flowing:
            return
        start, end = self.back(max(flowing)), self.back(min(flowing))
        cut = next((state.dim for state, use in zip(choice.storage, choice.use, strict=True) if isinstance(state, Shard) and state != use), 0)
        last = 2 * self.count + 1
        if not self.grows:
            self.throughout += resting
        if choice.zero <= 1:
            self.alive(start, last if self.grows else end, used)
        elif choice.zero == 2:
            self.alive(start, 2 * self.count, used)
            self.alive(2 * self.count + 1, last, resting if self.grows else 0.0)
        else:
            self.alive(start, end, used)
            self.alive(end, end, (used if cut else 0.0) + (0.0 if self.grows else resting))
            self.alive(end, last, resting if self.grows else 0.0)


__all__ = ["peak_bytes"]
