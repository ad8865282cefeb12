"""The peak of a stage's memory over one step, from when each tensor of a plan is alive.

Enters: a :class:`Costed` stage and the solver's choices. Leaves: bytes. The passes of one micro-batch are a row of slots: the
forward passes of all operators, their backward passes in reverse, the reduction of gradients, the optimizer. Every tensor is
alive from one slot to another, both included:

    what autograd saves         from its operator to the backward pass of the first operator that saved it    `_value`
    what is computed again      the same, and once more from where its run is computed again                  `_value`
    what a conversion makes     to its reader, or to the reader's backward pass where that saved it           `_conversion`
    a gradient                  from its value's last reader's backward pass to its own operator's            `_gradient`
    a parameter's gradient      from the backward pass of its last reader on                                  `_own_gradient`
    the same where it is cast   as autograd makes it until its first reader's, in its master's type from there
    the same under ZeRO-2       from there until its bucket is sent                                           `_scattered`
    a whole parameter, ZeRO-3   around its use, forward and backward                                          `_whole`

The peak is the largest sum over the slots. To it comes what is there throughout: parameters, optimizer states, gradients of
earlier micro-batches, and what the other micro-batches in flight keep. The solver adds up bytes by choice, which cannot say
*when*: it sets aside more (``fitting.py``), the more so the fewer micro-batches there are.

With as many micro-batches in flight as there are, no gradient is there yet when most activations are: they grow as the
activations of the first backward pass go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.costing.kept import KeptBytes, Run
from autopar.costing.operators import TEMPORARIES, OperatorTable
from autopar.costing.parameters import BUCKET_BYTES, ParameterChoice
from autopar.costing.problem import Costed
from autopar.graph import ITEM_BYTES, Operator, Parameter
from autopar.layout import SUMMED_GRADIENT, Shard
from autopar.sharing import Reader

# Pieces of one parameter that AdamW has at the same time beside its states: root and quotient, and the parameter before's
# quotient (torch/optim/adam.py, _single_tensor_adam, which is what DTensors get on every device).
OPTIMIZER_PIECES = 3.0
SUMS = ("aten.add.Tensor", "aten.add_.Tensor")  # whose backward pass hands its gradient on as it is


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
    """Bytes that come and go, by slot, while the tensors of a plan are gone through."""

    costed: Costed
    choices: Sequence[int]
    throughout: float = 0.0
    kept: float = 0.0  # of one micro-batch between its passes
    deltas: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prepared, self.setting = self.costed.prepared, self.costed.setting
        self.graph = self.prepared.graph
        self.keeping = KeptBytes(self.prepared, self.setting)
        self.run_of = self.keeping.run_of
        self.place = {operator.id: index for index, operator in enumerate(self.graph.operators)}
        self.count = len(self.graph.operators)
        self.reduction, self.optimizer = 2 * self.count, 2 * self.count + 1
        self.deltas = [0.0] * (self.optimizer + 2)
        self.grows = self.setting.num_micro_batches == self.setting.in_flight
        runs: dict[Run, list[int]] = {}
        for name, run in self.run_of.items():
            runs.setdefault(run, []).append(self.place[name])
        self.scattered: list[tuple[int, int, float, float]] = []  # slots of last and first part, bytes whole and at rest
        self.first_of = {run: min(places) for run, places in runs.items()}
        self.last_of = {run: max(places) for run, places in runs.items()}

    def peak(self) -> float:
        """The largest sum."""
        for operator in self.graph.operators:
            for value in operator.outputs:
                if value and self._storage(value) == value:
                    self._value(value, operator)
            self._statistics(operator)
        for value in self.graph.received:
            self._value(value, None)
        self._conversions()
        self._gradients()
        self._parameters()
        total = most = 0.0
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
        """Add a tensor."""
        self.deltas[start] += num_bytes
        self.deltas[end + 1] -= num_bytes
        if start < self.count <= end:
            self.kept += num_bytes

    # What the choices say

    def table(self, operator: str) -> tuple[OperatorTable, int]:
        """An operator's table, and its choice."""
        return self.costed.operator_table(operator), self.choices[self.costed.nodes[operator]]

    @cached_property
    def size_of(self) -> dict[str, float]:
        """Bytes of every received and computed value, in the layout in which it is made."""
        found = {value: self._received_bytes(value) for value in self.graph.received}
        for operator in self.graph.operators:
            table, choice = self.table(operator.id)
            outputs = [value for value in operator.outputs if value]
            found.update((v, float(b[choice])) for v, b in zip(outputs, table.output_bytes, strict=True))
        return found

    def _received_bytes(self, value: str) -> float:
        described, column = self.graph.values[value], self.costed.input_columns[value]
        layout = column.distinct[column.which[self.choices[self.costed.nodes[value]]]]
        return float(self.costed.conversions.local_elements(described.shape, layout) * ITEM_BYTES[described.dtype])

    @cached_property
    def made(self) -> dict[Reader | str, float]:
        """Bytes that conversions make, by reader, or by the key of the sharing group that they are for."""
        return dict(self._made())

    def _made(self) -> Iterator[tuple[Reader | str, float]]:
        costed = self.costed
        for edge, made, reader in zip(costed.problem.edges, costed.edges_made, costed.edges_reader, strict=True):
            num_bytes = 0.0 if made is None else float(made[self.choices[edge.source], self.choices[edge.target]])
            if num_bytes:
                yield reader, num_bytes

    def converts(self, operator: str, index: int) -> bool:
        """Whether an operator reads another tensor than the one that its value's operator made."""
        key = self.prepared.group_key((operator, index))
        return (operator, index) in self.made or (key is not None and key in self.made)

    # Values

    def _storage(self, value: str) -> str:
        return self.graph.values[value].storage or value

    @cached_property
    def readers(self) -> dict[str, list[Reader]]:
        """Readers of each storage, through views too."""
        found: dict[str, list[Reader]] = {}
        for operator in self.graph.operators:
            for index, value in enumerate(operator.inputs):
                found.setdefault(self._storage(value), []).append((operator.id, index))
        return found

    def differentiated(self, operator: Operator) -> bool:
        """Whether a gradient flows through some result."""
        return any(value in self.prepared.gradient for value in operator.outputs)

    def saves(self, name: str, index: int) -> bool:
        """Whether autograd keeps this input of an operator."""
        signature = self.prepared.signatures.get(self.prepared.name(name))
        kept = signature is None or index in signature.saved_inputs
        return kept and self.differentiated(self.graph.operator_of[name])

    def _saves_result(self, operator: Operator, value: str) -> bool:
        signature = self.prepared.signatures.get(self.prepared.name(operator.id))
        outputs = [output for output in operator.outputs if output]
        places = [index for index, output in enumerate(outputs) if self._storage(output) == value]
        kept = signature is None or not signature.saved_outputs.isdisjoint(places)
        return kept and self.differentiated(operator)

    def _value(self, value: str, maker: Operator | None) -> None:
        """A computed or received tensor: in forward, and where its run is computed again."""
        place = self.place[maker.id] if maker else 0
        run = self.run_of.get(maker.id) if maker else None
        ends = {None: place if maker else self.back(0), run: place}  # of its first life, and of that in its own run
        direct = self._direct(value)
        savers = [(name, self.place[name]) for name, index in direct if self.saves(name, index)]
        if maker and self._saves_result(maker, value):
            savers.append((maker.id, place))
        for name, saver in savers:
            reads = self.run_of.get(name)
            if reads in ends:
                ends[reads] = max(ends[reads], self.back(saver))
        entered = [self.run_of.get(name) for name, _ in direct]
        slots = [self.back(self.first_of[reads]) for reads in entered if reads is not None and reads != run]
        slots += [self.place[name] for name, _ in self.readers.get(value, ())]
        if value in self.graph.sent or any(output.value == value for output in self.graph.outputs):
            slots.append(self.count - 1)
        ends[None] = max([ends[None], *slots])
        self.alive(place, ends[None], self.size_of[value])
        if run is not None and max(ends.values()) >= self.count:
            again = self.again(run)
            self.alive(again, max(again, ends[run]), self.size_of[value])

    def _direct(self, value: str) -> list[Reader]:
        """Those that read the tensor itself, or views of it."""
        return self._through_views(r for r in self.graph.readers_of.get(value, ()) if not self.converts(*r))

    def _through_views(self, readers: Iterable[Reader]) -> list[Reader]:
        """These readers of a tensor, and those of the views that they make of it."""
        found, waiting = list[Reader](), list(readers)
        while waiting:
            name, index = waiting.pop()
            found.append((name, index))
            operator = self.graph.operator_of[name]
            storage = self._storage(operator.inputs[index])
            views = [value for value in operator.outputs if value and self._storage(value) == storage]
            for value in views:
                waiting += [reader for reader in self.graph.readers_of.get(value, ()) if not self.converts(*reader)]
        return found

    def _statistics(self, operator: Operator) -> None:
        """What an operator keeps besides, and what its backward pass makes beside gradients."""
        if not self.differentiated(operator):
            return
        table, choice = self.table(operator.id)
        place, run = self.place[operator.id], self.run_of.get(operator.id)
        extra = float(table.extra_bytes[choice])
        self.alive(place, self.back(place) if run is None else place, extra)
        if run is not None:
            self.alive(self.again(run), self.back(place), extra)
        size = sum(self.size_of[value] for value in operator.outputs if value)
        beside = extra if "cross_entropy" in operator.target else TEMPORARIES.get(operator.target, 0.0) * size
        beside += float(table.beside_bytes[choice]) + self._in_order(operator)
        self.alive(self.back(place), self.back(place), beside)

    def _in_order(self, operator: Operator) -> float:
        """The fused kernel of attention wants its result's gradient with heads beside one another, as models lay them; where a
        conversion has made it, it is copied (FlashAttentionKernel.cpp)."""
        signature = self.prepared.signatures.get(self.prepared.name(operator.id))
        if signature is None or signature.kind != "attention" or not signature.saved_outputs:
            return 0.0
        value = operator.outputs[0]
        converted = any(self.converts(*reader) for reader in self.graph.readers_of.get(value, ()))
        return self.size_of[value] if converted else 0.0

    def _conversions(self) -> None:
        members: dict[Reader | str, list[Reader]] = {}
        for reader in self.prepared.groups:
            key = self.prepared.group_key(reader)
            if key is not None:
                members.setdefault(key, []).append(reader)
        for made_for, num_bytes in self.made.items():
            self._conversion([made_for] if isinstance(made_for, tuple) else members[made_for], num_bytes)

    def _conversion(self, readers: Sequence[Reader], num_bytes: float) -> None:
        """What a conversion makes, and its gradient."""
        places = [self.place[name] for name, _ in readers]
        end, inside = max(places), dict[Run, int]()
        for name, index in self._through_views(readers):
            run, saved = self.run_of.get(name), self.saves(name, index)
            if run is not None and not self.keeping.is_full(run):
                end = max(end, self.back(self.first_of[run]))  # it is split there: what is sent is in no run
            elif saved and run is None:
                end = max(end, self.back(self.place[name]))
            elif saved and run is not None:
                inside[run] = max(inside.get(run, 0), self.back(self.place[name]))
        self.alive(min(places), end, num_bytes)
        for run, last in inside.items():
            self.alive(self.again(run), last, num_bytes)
        flowing = [self.place[name] for name, index in readers if self.flows(name, index)]
        value = self.graph.operator_of[readers[0][0]].inputs[readers[0][1]]
        if flowing and self.graph.values[value].kind != "parameter":
            self.alive(self.back(max(flowing)), self.back(min(flowing)), num_bytes)

    # Gradients

    def flows(self, name: str, index: int) -> bool:
        """Whether a gradient flows through this input."""
        return self.prepared.flows(self.graph.operator_of[name], index)

    def _gradients(self) -> None:
        """Gradients of computed and received values, in the order in which backward makes them."""
        found: dict[str, _Gradient] = {}
        for operator in reversed(self.graph.operators):
            for value in operator.outputs:
                if value in self.prepared.gradient:
                    self._gradient(value, self.place[operator.id], found)
        for value in self.graph.received:
            if value in self.prepared.gradient:
                self._gradient(value, -1, found)
        for gradient in {id(gradient): gradient for gradient in found.values()}.values():
            self.alive(gradient.start, gradient.end, gradient.num_bytes)

    def _gradient(self, value: str, maker: int, found: dict[str, _Gradient]) -> None:
        """A value's gradient: what the last reader hands on, alive on until the value's operator takes it; what other
        readers add is alive for their slot."""
        size, end = self.size_of[value], self.back(maker)
        if value in self.graph.sent:  # received from the next stage
            found[value] = _Gradient(size, self.count, end)
        flowing = sorted(
            ((self.place[name], index) for name, index in self.graph.readers_of.get(value, ()) if self.flows(name, index)),
            reverse=True,
        )
        is_shared = False
        for number, (place, index) in enumerate(flowing):
            slot = self.back(place)
            shared = found.get(self._handed_on(self.graph.operators[place], index))
            if value not in found and shared is not None:
                following = self.back(flowing[number + 1][0]) if number + 1 < len(flowing) else end
                shared.end = max(shared.end, following)
                found[value], is_shared = shared, True
            elif value not in found or is_shared:  # memory of another's gradient is not added to: the sum is a new tensor
                self.alive(slot, slot, size if is_shared and shared is None else 0.0)
                found[value], is_shared = _Gradient(size, slot, end), False
            elif shared is None:
                self.alive(slot, slot, size)

    def _handed_on(self, operator: Operator, index: int) -> str:
        """The result whose gradient's memory is that of this input's, too; empty for none."""
        outputs = [value for value in operator.outputs if value]
        mine, result = self.graph.values[operator.inputs[index]], self.graph.values[outputs[0]]
        if len(outputs) != 1 or (mine.num_elements, mine.dtype) != (result.num_elements, result.dtype):
            return ""
        signature = self.prepared.signatures.get(self.prepared.name(operator.id))
        is_view = signature is not None and signature.kind in ("view", "free")
        is_sum = operator.target in SUMS and mine.shape == result.shape
        return outputs[0] if (is_view or is_sum) and not self.converts(operator.id, index) else ""

    # Parameters

    def _parameters(self) -> None:
        """What parameters keep and what is held around them, the buckets of gradients at the end, the optimizer's step."""
        largest, buckets = 0.0, {0: 0.0, 1: 0.0}
        for parameter in self.graph.parameters:
            table = self.costed.parameter_table(parameter.value)
            at = self.choices[self.costed.nodes[parameter.value]]
            stored, copy, gradient, states = (float(part) for part in table.parts[:, at])
            choice, value = table.choices[at], self.graph.values[parameter.value]
            elements = self.costed.conversions.local_elements(value.shape, choice.use)
            used, whole = (float(elements * ITEM_BYTES[dtype]) for dtype in (value.dtype, parameter.master or value.dtype))
            landed = float(table.landed_bytes[at])  # on the host that is the device itself, until the optimizer's step
            gradient -= landed
            self.alive(self.reduction, self.optimizer, landed)
            if table.choices[at].offload:  # by then it has gone to the host
                self.alive(self.optimizer, self.optimizer, -gradient)
            self.throughout += stored + copy + states
            self._whole(parameter.value, choice, used)
            if gradient:
                largest = max(largest, stored)
                self._own_gradient(parameter, choice, used, whole, gradient)
                if choice.zero in buckets and self._is_sent(choice):
                    buckets[choice.zero] += whole
        self.throughout += sum(self.graph.values[buffer.value].num_bytes for buffer in self.graph.buffers)
        self._scattered()
        for num_bytes in buckets.values():
            self.alive(self.reduction, self.reduction, min(num_bytes, float(BUCKET_BYTES)))
        self.alive(self.optimizer, self.optimizer, OPTIMIZER_PIECES * largest)

    def _is_sent(self, choice: ParameterChoice) -> bool:
        """Whether the gradient is a sum of several devices' terms."""
        sizes = self.costed.mesh.shape
        return any(state == SUMMED_GRADIENT and size > 1 for state, size in zip(choice.use, sizes, strict=True))

    def _whole(self, value: str, choice: ParameterChoice, used: float) -> None:
        """ZeRO-3's copies of a parameter: from its first to its last use in forward, and in backward from where it is
        gathered again, for a run that is computed again all at once."""
        readers = self.graph.readers_of.get(value, ())
        if choice.zero != 3 or not readers:
            return
        places = [self.place[name] for name, _ in readers]
        self.alive(min(places), max(places), used)
        savers = [name for name, index in readers if self.saves(name, index)]
        if savers:
            slots = [self.back(self.place[name]) for name in savers]
            again = [self.again(self.run_of[name]) for name in savers if name in self.run_of]
            self.alive(min([*slots, *again]), max(slots), used)

    def _own_gradient(
        self, parameter: Parameter, choice: ParameterChoice, used: float, whole: float, resting: float
    ) -> None:
        """``used`` bytes of a whole gradient as autograd makes it, ``whole`` in the type in which it is kept, ``resting``
        where it has been brought to its rest."""
        readers = self.graph.readers_of.get(parameter.value, ())
        flowing = [self.place[name] for name, index in readers if self.flows(name, index)]
        if not flowing:
            return
        start, end, last = self.back(max(flowing)), self.back(min(flowing)), self.optimizer
        if parameter.master:
            self.alive(start, end, used)
            start = end
        self.throughout += 0.0 if self.grows else resting
        new = resting if self.grows else 0.0
        if choice.zero <= 1:
            self.alive(start, last if self.grows else end, whole)
        elif choice.zero == 2:
            self.scattered.append((end, start, whole, new))
        else:
            self.alive(start, end, whole)
            self.alive(end, end, (whole if _is_stacked(choice) else 0.0) + resting - new)
            self.alive(end, last, new)

    def _scattered(self) -> None:
        """ZeRO-2's gradients, which are sent when a bucket of them is full and at the end. The bucket is a copy, and alive
        until the next one is sent."""
        bucket: list[tuple[int, float, float]] = []
        full, sent_at = 0.0, self.reduction
        for number, (end, start, used, resting) in enumerate(sorted(self.scattered)):
            bucket.append((start, used, resting))
            full += used
            is_last = number + 1 == len(self.scattered)
            if full < BUCKET_BYTES and not is_last:
                continue
            sent_at = self.reduction if is_last else end
            for since, whole, piece in bucket:
                self.alive(since, sent_at, whole)
                self.alive(sent_at, self.optimizer, 0.0 if is_last else piece)
                self.alive(self.optimizer, self.optimizer, piece if is_last else 0.0)
            self.alive(sent_at, self.reduction if is_last else min(self.reduction, sent_at + 1), full)
            bucket, full = [], 0.0


def _is_stacked(choice: ParameterChoice) -> bool:
    """Whether the pieces of a gradient are copied one behind the other before they are sent."""
    pairs = zip(choice.storage, choice.use, strict=True)
    return any(isinstance(rest, Shard) and rest != use and rest.dim > 0 for rest, use in pairs)
