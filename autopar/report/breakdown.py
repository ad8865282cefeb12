"""Where the seconds and the bytes of the chosen plan go.

Enters: a candidate, that is a priced model and the solver's choices. Leaves: sums by kind. The seconds are the solver's
own costs, node by node and edge by edge, so that their sum is the cost that was minimised:

    step = compute + copies + communication of layout changes     operators, and edges between values and their readers
         + communication of parameters + optimizer                parameters
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType

from autopar.codegen.conversions import Wiring
from autopar.costing.candidate import Candidate
from autopar.costing.conversions import Conversions
from autopar.costing.problem import Costed
from autopar.graph import OpGraph
from autopar.layout import Layout
from autopar.plans import Resolved
from cost_models import COLLECTIVE_KINDS, AxisCost


@dataclass(frozen=True)
class Seconds:
    """A step's seconds by kind; ``total`` is the solver's cost.

    ``compute``: operators, forward and backward. ``copies``: what layout changes copy on a device, without traffic.
    ``resharding``: collectives that change layouts, those inside operators and of the loss included (tensor-parallel
    traffic). ``parameters``: gradient reduction and ZeRO gathers. ``optimizer``: the update.
    """

    compute: float
    copies: float
    resharding: float
    parameters: float
    optimizer: float

    @property
    def total(self) -> float:
        return math.fsum((self.compute, self.copies, self.resharding, self.parameters, self.optimizer))


@dataclass(frozen=True)
class Bytes:
    """Bytes on the fullest device by kind; ``momentary`` are held only for a part of the step."""

    parameters: float
    working_copies: float
    gradients: float
    optimizer_states: float
    saved_activations: float
    momentary: float

    @property
    def total(self) -> float:
        parts = (self.parameters, self.working_copies, self.gradients, self.optimizer_states, self.saved_activations)
        return math.fsum((*parts, self.momentary))


@dataclass(frozen=True)
class Conversion:
    """A change of layout that the program makes: of which value, from what to what, and whether a gradient comes back."""

    value: str
    source: Layout
    target: Layout
    has_gradient: bool
    reader: str


def chosen(candidate: Candidate) -> tuple[int, ...]:
    """The solver's choices of a candidate that has some."""
    assert candidate.assignment.choices is not None, "only a plan that was found is explained"
    return candidate.assignment.choices


def seconds_of(candidate: Candidate, resolved: Resolved) -> Seconds:
    """A step's seconds by kind."""
    costed, choices, graph = candidate.costed, chosen(candidate), resolved.graph
    costs = costed.problem.node_costs_seconds
    compute, inside, parameters, optimizer = [], [], [], []
    for operator in graph.operators:
        node = costed.nodes[operator.id]
        part = float(costed.operator_table(operator.id).compute_seconds[choices[node]])
        compute.append(part)
        inside.append(float(costs[node][choices[node]]) - part)
    for parameter in graph.parameters:
        node = costed.nodes[parameter.value]
        part = float(costed.parameter_table(parameter.value).optimizer_seconds[choices[node]])
        optimizer.append(part)
        parameters.append(float(costs[node][choices[node]]) - part)
    edges = [float(e.costs_seconds[choices[e.source], choices[e.target]]) for e in costed.problem.edges]
    copied = math.fsum(copy_seconds(costed, resolved))
    return Seconds(
        compute=math.fsum(compute),
        copies=copied,
        resharding=math.fsum((*inside, *edges, -copied)),
        parameters=math.fsum(parameters),
        optimizer=math.fsum(optimizer),
    )


def copy_seconds(costed: Costed, resolved: Resolved) -> Iterator[float]:
    """What each change of layout copies on a device: its price where links cost nothing."""
    conversions = costed.conversions
    silent = Conversions(conversions.mesh, conversions.cost_model)
    free = MappingProxyType(dict.fromkeys(COLLECTIVE_KINDS, ()))
    silent.axes = [AxisCost(size, free) for size in conversions.mesh.shape]
    for change in conversions_of(resolved):
        prices = silent.prices(resolved.graph.values[change.value], [change.source], [change.target], change.has_gradient)
        yield float(prices.seconds[0, 0])


def conversions_of(resolved: Resolved) -> Iterator[Conversion]:
    """Every change of layout of the program, a shared one once, and the sum of the loss."""
    graph = resolved.graph
    wiring = Wiring(graph, resolved)
    for shared in wiring.shared.values():
        yield Conversion(shared.key[0], shared.source, shared.target, shared.has_gradient, shared.readers[0][0])
    for (operator, index), read in wiring.reads.items():
        if read.converts:
            flows = wiring.flows(graph.operator_of[operator], index)
            yield Conversion(read.key[0], read.source, read.target, flows, operator)
    if graph.loss is not None:
        read = wiring.program_read(graph.loss)
        if read.converts:
            yield Conversion(graph.loss, read.source, read.target, graph.loss in wiring.gradient, "")


def bytes_of(candidate: Candidate, graph: OpGraph) -> Bytes:
    """Bytes on the fullest device by kind; their sum is the candidate's peak."""
    costed, choices = candidate.costed, chosen(candidate)
    kinds = [0.0] * 4
    for parameter in graph.parameters:
        parts = costed.parameter_table(parameter.value).parts[:, choices[costed.nodes[parameter.value]]]
        kinds = [total + float(part) for total, part in zip(kinds, parts, strict=True)]
    kept = candidate.assignment.memory_bytes[0]
    saved = max(0.0, kept - math.fsum(kinds))
    return Bytes(kinds[0], kinds[1], kinds[2], kinds[3], saved_activations=saved, momentary=candidate.moment_bytes)
