"""Where the seconds and the bytes of each stage go.

Enters: a view of a stage. Leaves: sums by kind. The seconds are the solver's own costs, node by node and edge by edge, so
that their sum is the cost that was minimised, of all micro-batches of a step:

    busy = compute + copies + communication of layout changes     operators, and edges between values and their readers
         + the same again where a block is recomputed
         + communication of parameters + optimizer + offload      parameters
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TypeVar

from autopar.costing.conversions import Conversions
from autopar.graph import Operator
from autopar.layout import REPLICATED, Layout
from autopar.report.views import View
from cost_models import COLLECTIVE_KINDS, AxisCost


@dataclass(frozen=True)
class Seconds:
    """A stage's seconds of a step by kind; ``total`` is the solver's cost.

    ``compute``: operators, forward and backward. ``copies``: what layout changes copy on a device, without traffic.
    ``resharding``: collectives that change layouts, those inside operators and of the loss included (tensor-parallel
    traffic). ``recomputation``: forward passes done again in backward, with their layout changes. ``parameters``:
    gradient reduction and ZeRO gathers. ``optimizer``: the update. ``offload``: copies of gradients to the host and of updated
    parameters back.
    """

    compute: float = 0.0
    copies: float = 0.0
    resharding: float = 0.0
    recomputation: float = 0.0
    parameters: float = 0.0
    optimizer: float = 0.0
    offload: float = 0.0

    @property
    def total(self) -> float:
        return math.fsum(vars(self).values())

    def to_json(self) -> dict[str, float]:
        """By kind, as the report names them."""
        return {
            "compute_seconds": self.compute,
            "copies_seconds": self.copies,
            "resharding_seconds": self.resharding,
            "recomputation_seconds": self.recomputation,
            "parameter_communication_seconds": self.parameters,
            "optimizer_seconds": self.optimizer,
            "offload_seconds": self.offload,
        }


@dataclass(frozen=True)
class Bytes:
    """Bytes on a device by kind; ``momentary`` are held only for a part of the step. ``on_host``: for this device in the host's
    memory, no part of the total."""

    parameters: float = 0.0
    working_copies: float = 0.0
    gradients: float = 0.0
    optimizer_states: float = 0.0
    saved_activations: float = 0.0
    momentary: float = 0.0
    on_host: float = 0.0

    @property
    def total(self) -> float:
        return math.fsum(size for kind, size in vars(self).items() if kind != "on_host")

    def to_json(self, available_bytes: float, host_available_bytes: float) -> dict[str, float]:
        """By kind, as the report names them."""
        return {
            "parameter_bytes": self.parameters,
            "working_copy_bytes": self.working_copies,
            "gradient_bytes": self.gradients,
            "optimizer_state_bytes": self.optimizer_states,
            "saved_activation_bytes": self.saved_activations,
            "momentary_bytes": self.momentary,
            "total_bytes": self.total,
            "available_bytes": available_bytes,
            "host_bytes": self.on_host,
            "host_available_bytes": host_available_bytes,
        }


Sums = TypeVar("Sums", Seconds, Bytes)


def added(parts: Iterable[Sums], kind: type[Sums]) -> Sums:
    """The sum, kind by kind."""
    listed = list(parts)
    return kind(**{field.name: math.fsum(getattr(part, field.name) for part in listed) for field in fields(kind)})


@dataclass(frozen=True)
class Conversion:
    """A change of layout that the program makes: of which value, from what to what, and whether a gradient comes back."""

    value: str
    source: Layout
    target: Layout
    has_gradient: bool


def seconds_of(view: View) -> Seconds:
    """A stage's seconds by kind."""
    count = view.num_micro_batches
    compute, inside, again = [], [], []
    for operator in view.graph.operators:
        table, choice = view.operator_table(operator.id), view.choice(operator.id)
        compute.append(count * float(table.compute_seconds[choice]))
        inside += [view.seconds(operator.id), -compute[-1]]
        if view.names[operator.id] in view.keeping.run_of:
            again.append(count * (float(table.forward_seconds[choice]) + _fixed_seconds(view, operator)))
    parameters, optimizer, offload = [], [], []
    for parameter in view.graph.parameters:
        table_ = view.parameter_table(parameter.value)
        optimizer.append(float(table_.optimizer_seconds[view.choice(parameter.value)]))
        offload.append(float(table_.offload_seconds[view.choice(parameter.value)]))
        parameters += [view.seconds(parameter.value), -optimizer[-1], -offload[-1]]
    again += _edges_again(view)
    copied = count * math.fsum(copy_seconds(view))
    return Seconds(
        compute=math.fsum(compute),
        copies=copied,
        resharding=math.fsum((*inside, *view.incoming_seconds, *(-seconds for seconds in again), -copied)),
        recomputation=math.fsum(again),
        parameters=math.fsum(parameters),
        optimizer=math.fsum(optimizer),
        offload=math.fsum(offload),
    )


def _fixed_seconds(view: View, operator: Operator) -> float:
    """Seconds in which an operator converts the buffers and constants that it reads, which rest replicated."""
    whole: Layout = (REPLICATED,) * view.mesh.num_axes
    conversions, total = view.costed.conversions, 0.0
    for index, value in enumerate(operator.inputs):
        described = view.graph.values[value]
        if described.kind in ("buffer", "constant"):
            wanted = view.resolved.operator(operator.id).inputs[index]
            total += float(conversions.prices(described, [whole], [wanted], False).seconds[0, 0])
    return total


def _edges_again(view: View) -> Iterator[float]:
    """Seconds of the conversions that are done again in backward."""
    costed, choices = view.costed, view.choices
    for edge, forward, again in zip(costed.problem.edges, costed.edges_forward, costed.edges_again, strict=True):
        if again and forward is not None:
            yield view.num_micro_batches * float(forward[choices[edge.source], choices[edge.target]])


def copy_seconds(view: View) -> Iterator[float]:
    """What each change of layout copies on a device for a micro-batch: its price where links cost nothing."""
    conversions = view.costed.conversions
    silent = Conversions(conversions.mesh, conversions.cost_model, view.costed.setting.first_rank)
    free = MappingProxyType(dict.fromkeys(COLLECTIVE_KINDS, ()))
    silent.axes = [AxisCost(size, free) for size in conversions.mesh.shape]
    for change in conversions_of(view):
        prices = silent.prices(view.graph.values[change.value], [change.source], [change.target], change.has_gradient)
        yield float(prices.seconds[0, 0])


def conversions_of(view: View) -> Iterator[Conversion]:
    """Every change of layout of a stage, a shared one once, the sum of the loss, and what is handed on."""
    graph, wiring = view.graph, view.wiring
    for shared in wiring.shared.values():
        yield Conversion(shared.key[0], shared.source, shared.target, shared.has_gradient)
    for (operator, index), read in wiring.reads.items():
        if read.converts:
            flows = wiring.flows(graph.operator_of[operator], index)
            yield Conversion(read.key[0], read.source, read.target, flows)
    ends = [(graph.loss, wiring.program_read(graph.loss))] if graph.loss is not None else []
    ends += [(value, wiring.sent_read(value)) for value in graph.sent]
    for value, read in ends:
        if read.converts:
            yield Conversion(value, read.source, read.target, value in wiring.gradient)


def bytes_of(view: View) -> Bytes:
    """Bytes on a stage's devices by kind; their sum is the candidate's peak."""
    kinds = [0.0] * 4
    for parameter in view.graph.parameters:
        parts = view.parameter_table(parameter.value).parts[:, view.choice(parameter.value)]
        kinds = [total + float(part) for total, part in zip(kinds, parts, strict=True)]
    saved = max(0.0, view.candidate.assignment.memory_bytes[0] - math.fsum(kinds))
    candidate = view.candidate
    return Bytes(kinds[0], kinds[1], kinds[2], kinds[3], saved, candidate.moment_bytes, candidate.host_bytes)
