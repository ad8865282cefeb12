"""Every collective that one training step of a program issues, as seen by the first device of each stage.

Enters: a plan and its graph. Leaves: :class:`Entry` values. They follow the same ``Wiring`` as the program's text, so that they
are what runs: changes of layout, what operators exchange themselves, parameters gathered and gradients reduced, the
loss, what stages send one another. Repeated blocks and micro-batches are counted, not written out; micro-batches of
different sizes are counted each with its own bytes.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autopar.batching import micro_batch_sizes
from autopar.codegen.bodies import computed_again
from autopar.codegen.counts import count_part, planned_counts
from autopar.codegen.exchanges import exchanged
from autopar.codegen.kept import keeps
from autopar.codegen.stages import Part, num_pipeline_ranks, parts, rank_of_stage, tied
from autopar.graph import ITEM_BYTES, Operator, OpGraph, Parameter
from autopar.layout import REPLICATED, SUMMED_GRADIENT, Layout, local_shape
from autopar.plans import Plan
from autopar.reshard import Traffic, is_in_bucket, step_traffic, steps, traffic
from autopar.sharing import Reader
from autopar.strategies.registry import signature_of

Phase = Literal["forward", "backward", "recompute", "gradient", "parameter"]

LOSS_BYTES = 16  # the loss on its way to the other pipeline ranks: its value and its dtype, each as a float64
STAGES = "stages"  # the name of the axis along which stages lie


@dataclass(frozen=True)
class Entry:
    """``count`` collectives of ``kind`` on ``axis``, each of ``num_bytes`` as of ``reshard.Traffic``.

    ``phase``: ``forward`` and ``backward`` of activations, ``recompute`` for a forward pass that is done again in backward,
    ``gradient`` for reductions of parameters' gradients, ``parameter`` for gathers of parameters. ``what`` is the operator
    that reads, the value sent, or the parameter (of a repeated block: its representative's). ``in_bucket``: it is a part of
    one collective of many parameters. ``stage`` has the first device that takes part; what is sent from stage to stage
    (``send_recv`` on the axis ``stages``) counts where it is sent.
    """

    kind: str
    axis: str
    num_bytes: int
    phase: Phase
    what: str
    count: int = 1
    stage: int = 0
    in_bucket: bool = False


def totals(entries: Iterable[Entry]) -> dict[tuple[str, str], int]:
    """Bytes by kind and axis."""
    found: Counter[tuple[str, str]] = Counter()
    for entry in entries:
        found[entry.kind, entry.axis] += entry.num_bytes * entry.count
    return dict(found)


def ledger(
    plan: Plan, graph: OpGraph, pipeline_rank: int | None = None, made: Sequence[Part] | None = None
) -> list[Entry]:
    """All collectives of a training step, stage by stage in the order of the forward pass, alike ones added up.

    With ``pipeline_rank`` only those of the stages that it has. ``made``: the plan's parts, where they are at hand.
    """
    sizes = Counter(micro_batch_sizes(plan.batch_size, plan.num_micro_batches, plan.micro_batch_unit))
    counts: Counter[Entry] = Counter()
    for size, times in sizes.items():
        stages = made if made is not None and size == plan.micro_batch_size else parts(plan, graph, size)
        for part in stages:
            own = _StageLedger(part)
            for entry in (*own.each(), *_handed_on(plan, stages, part)):
                counts[entry] += times
            for entry in _while_counting(plan, part):
                counts[entry] += times
            if size == plan.micro_batch_size:
                counts.update(own.once())
        if size == plan.micro_batch_size:
            counts.update(_counted(plan, stages))
            counts.update(_between_stages(plan, graph, stages))
    found = sorted(counts.items(), key=lambda item: item[0].stage)
    return [
        replace(entry, count=count)
        for entry, count in found
        if entry.num_bytes and (pipeline_rank is None or rank_of_stage(plan, entry.stage) == pipeline_rank)
    ]


def _handed_on(plan: Plan, stages: Sequence[Part], part: Part) -> Iterator[Entry]:
    """What a stage hands on to the next, and the gradients that come back for it, unless both are on one rank."""
    after = part.number + 1
    if after == len(stages) or rank_of_stage(plan, part.number) == rank_of_stage(plan, after):
        return
    stage = part.wiring.resolved.stage
    for value in part.graph.sent:
        num_bytes = _local_bytes(part, value, stage.sent[value])
        yield Entry("send_recv", STAGES, num_bytes, "forward", value, stage=part.number)
        if value in part.wiring.gradient:
            yield Entry("send_recv", STAGES, num_bytes, "backward", value, stage=after)


def _local_bytes(part: Part, value: str, layout: Layout, dtype: str | None = None) -> int:
    """Bytes of a value on the stage's first device; with ``dtype``, of something of its shape."""
    described = part.graph.values[value]
    shape = local_shape(described.shape, layout, part.wiring.resolved.stage.mesh.shape)
    return math.prod(shape) * ITEM_BYTES[dtype or described.dtype]


def _first_stages(plan: Plan) -> list[int]:
    """The first stage of each pipeline rank."""
    first: dict[int, int] = {}
    for number in range(len(plan.stages)):
        first.setdefault(rank_of_stage(plan, number), number)
    return list(first.values())


def _while_counting(plan: Plan, part: Part) -> Iterator[Entry]:
    """What the modules that find numbers of labels send for every micro-batch, on every pipeline rank for itself."""
    for count in planned_counts(part):
        module = _StageLedger(count_part(part, count))
        wiring = module.wiring
        sent = list(module.each())
        for weight in count.values[1:]:
            sent += module.conversion(weight, wiring.layout(weight), wiring.whole, False, count.operator.id)
        yield from (replace(entry, stage=stage) for entry in sent for stage in _first_stages(plan))


def _counted(plan: Plan, stages: Sequence[Part]) -> Iterator[Entry]:
    """Numbers of labels that are found before the first micro-batch, on every pipeline rank for itself."""
    for part in stages:
        for count in planned_counts(part):
            for axis, stage in itertools.product(count.axes, _first_stages(plan)):
                name = part.wiring.resolved.stage.mesh.names[axis]
                yield Entry("all_reduce", name, count.item_bytes, "forward", count.operator.id, stage=stage)


def _between_stages(plan: Plan, graph: OpGraph, stages: Sequence[Part]) -> Iterator[Entry]:
    """Once a step: the loss to every pipeline rank, the gradients of parameters that several of them have."""
    if num_pipeline_ranks(plan) == 1:
        return
    if graph.loss is not None:
        for stage in _first_stages(plan):
            yield Entry("broadcast", STAGES, LOSS_BYTES, "forward", "loss", stage=stage)
    trainable = {parameter.value for parameter in graph.parameters if parameter.trainable}
    for value, holders in tied([part.graph for part in stages]).items():
        ranks: dict[int, int] = {}
        for holder in holders:
            ranks.setdefault(rank_of_stage(plan, holder), holder)
        if len(ranks) == 1 or value not in trainable or value not in stages[holders[0]].wiring.gradient:
            continue
        for holder in ranks.values():
            part = stages[holder]
            num_bytes = _local_bytes(part, value, part.wiring.parameter(value).storage, part.graph.masters[value])
            yield Entry("all_reduce", STAGES, num_bytes, "gradient", value, stage=holder)


class _StageLedger:
    """What one stage issues among its own devices."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.wiring = part.wiring
        self.graph = part.graph
        self.resolved = part.wiring.resolved
        self.mesh = self.resolved.stage.mesh
        self.again, self.runs = computed_again(part.arrangement)
        self._wanted_again: dict[str, bool] = {}
        self._sent: dict[tuple[str, bool, bool, bool], tuple[Entry, ...]] = {}
        self._exchanges: dict[tuple[str, bool], tuple[tuple[Traffic, bool], ...]] = {}

    def each(self) -> Iterator[Entry]:
        """For every micro-batch."""
        graph, wiring = self.graph, self.wiring
        done: set[tuple[str, str]] = set()
        for operator in wiring.live:
            what = self.resolved.representative_operator(operator.id)
            place = self.part.arrangement.place(operator.id)
            for index, value in enumerate(operator.inputs):
                read = wiring.reads[operator.id, index]
                if read.key in wiring.shared and read.key not in done:
                    done.add(read.key)
                    shared = wiring.shared[read.key]
                    again = self.part.arrangement.conversion_place[read.key] in self.again
                    yield from self.conversion(value, shared.source, shared.target, shared.has_gradient, what, again)
                if read.converts:
                    flows = wiring.flows(operator, index)
                    yield from self.conversion(value, read.source, read.target, flows, what, place in self.again)
            yield from self._operator(operator, what, place in self.again)
        for buffer in graph.buffers:
            if buffer.updated is not None:
                read = wiring.program_read(buffer.updated)
                again = self.part.arrangement.source_place[buffer.value] in self.again
                yield from self.conversion(buffer.updated, read.source, read.target, False, buffer.name, again)
        ends = [(graph.loss, wiring.program_read(graph.loss), "loss")] if graph.loss is not None else []
        ends += [(value, wiring.sent_read(value), value) for value in graph.sent]
        for value, read, what in ends:
            yield from self.conversion(value, read.source, read.target, value in wiring.gradient, what)
        for parameter in graph.parameters:
            yield from self._parameter(parameter, once=False)

    def once(self) -> Iterator[Entry]:
        """Once a step."""
        for parameter in self.graph.parameters:
            yield from self._parameter(parameter, once=True)

    def conversion(
        self, value: str, source: Layout, target: Layout, flows: bool, what: str, again: bool = False
    ) -> Iterator[Entry]:
        """A change of layout; ``again``: its forward pass is done twice."""
        described = self.graph.values[value]
        item = ITEM_BYTES[described.dtype]
        ahead, back = traffic(source, target, described.shape, self.mesh.shape, item, flows)
        yield from (self._entry(sent, "forward", what) for sent in ahead)
        yield from (self._entry(sent, "recompute", what) for sent in ahead if again)
        yield from (self._entry(sent, "backward", what) for sent in back)

    def _entry(self, sent: Traffic, phase: Phase, what: str) -> Entry:
        return Entry(sent.kind, self.mesh.names[sent.axis], sent.num_bytes, phase, what, stage=self.part.number)

    def _operator(self, operator: Operator, what: str, again: bool) -> Iterator[Entry]:
        """What an operator exchanges itself."""
        term = self.part.arrangement.terms.get(operator.id)
        key = (what, term is not None and term.kind == "count")
        if key not in self._exchanges:
            label = self.resolved.operator(operator.id).label
            self._exchanges[key] = tuple(exchanged(signature_of(operator, self.graph), label, self.mesh, key[1]))
        differentiated = any(value in self.wiring.gradient for value in operator.outputs)
        for sent, backward in self._exchanges[key]:
            if differentiated or not backward:
                yield self._entry(sent, "backward" if backward else "forward", what)
            if again and not backward:
                yield self._entry(sent, "recompute", what)

    def _parameter(self, parameter: Parameter, once: bool) -> Sequence[Entry]:
        """What is sent of a parameter, and of its gradient; the same of those that one stands for."""
        value = parameter.value
        what = self.resolved.representative_value(value)
        readers = [reader for reader in self.graph.readers_of.get(value, ()) if reader in self.wiring.reads]
        trained = parameter.trainable and value in self.wiring.gradient
        key = (what, once, trained, bool(readers))
        if key not in self._sent:
            self._sent[key] = tuple(self._sent_of(value, what, once, trained, readers))
        return self._sent[key]

    def _sent_of(
        self, value: str, what: str, once: bool, trained: bool, readers: Sequence[Reader]
    ) -> Iterator[Entry]:
        """Gathers from rest to use, and the way back for the gradient: its steps in reverse.

        Under ZeRO-3 a parameter is gathered, and its gradient scattered, for every micro-batch; gathered again in backward
        when some operator has kept it for that, or is computed again. Under ZeRO-2 the gradient is scattered for every
        micro-batch. What is still a sum over other axes is summed once a step. Gradients are sent in the master's dtype.
        """
        plan = self.wiring.parameter(value)
        described = self.graph.values[value]
        current = tuple(REPLICATED if state == SUMMED_GRADIENT else state for state in plan.storage)
        way = steps(current, plan.use)
        shared = is_in_bucket(plan.zero, way)
        for step in way:
            items = (ITEM_BYTES[described.dtype], ITEM_BYTES[self.graph.masters[value]])
            ahead, back = (
                step_traffic(step, current, described.shape, self.mesh.shape, item)[way] for way, item in enumerate(items)
            )
            current = (*current[: step.axis], step.target, *current[step.axis + 1 :])
            if self.mesh.shape[step.axis] == 1:
                continue
            if ahead and once == (plan.zero != 3) and (readers or plan.zero != 3):
                yield replace(self._entry(ahead, "parameter", what), in_bucket=shared)
                if plan.zero == 3 and trained and self._is_wanted_again(what, readers):
                    yield self._entry(ahead, "parameter", what)
            if back and trained and once == (plan.zero < 2 or back.kind == "all_reduce"):
                in_bucket = shared or back.kind == "all_reduce"
                yield replace(self._entry(back, "gradient", what), in_bucket=in_bucket)

    def _is_wanted_again(self, what: str, readers: Sequence[Reader]) -> bool:
        """Whether a gathered parameter is needed in backward by some of its readers; ``what`` is its representative."""
        if what not in self._wanted_again:
            place_of = self.part.arrangement.place
            self._wanted_again[what] = any(
                name in self.runs or place_of(name) in self.again or keeps(self.wiring, name, index)
                for name, index in readers
            )
        return self._wanted_again[what]
