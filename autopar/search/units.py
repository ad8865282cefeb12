"""A priced short graph as a chain of units: what lies between two neighbouring cut points, with its ports.

Enters: a :class:`~autopar.costing.Costed` of a short graph, its cut points. Leaves: :class:`~autopar.solver.chain.Unit`
values whose tables have the rows of ``ROWS``. Everything that ties a unit to others beside its ports is relaxed so that the
chain stays a lower bound: a value that skips units, or a tied parameter, is read as its reader likes best; masks and other
operators that no parameter leads to cost nothing and may be had by each unit in the layout that suits it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from autopar.costing import Costed
from autopar.costing.conversions import FloatArray
from autopar.graph import OpGraph
from autopar.solver import Edge
from autopar.solver.chain import Factor, Unit
from autopar.staging import derived_operators

# Rows of a unit's tables: seconds of a micro-batch's forward and of its backward pass, seconds once a step, bytes kept
# throughout, bytes kept for each micro-batch in flight; and of the backward pass, what makes parameters' gradients.
ROWS = ("forward_seconds", "backward_seconds", "once_seconds", "kept_bytes", "flying_bytes", "weight_seconds")
KEPT, FLYING = ROWS.index("kept_bytes"), ROWS.index("flying_bytes")


def weights_of(
    forward: float, backward: float, once: float = 0.0, kept: float = 0.0, flying: float = 0.0, weight: float = 0.0
) -> FloatArray:
    """The weights of the rows."""
    return np.array([forward, backward, once, kept, flying, weight])


def line_of(graph: OpGraph) -> list[str]:
    """The operators that lie in stages, in order."""
    derived = derived_operators(graph)
    return [operator.id for operator in graph.operators if operator.id not in derived]


@dataclass(frozen=True, eq=False)
class _Network:
    """The nodes of a short graph's problem with their rows."""

    costed: Costed
    home: Mapping[int, int]  # node -> position of its unit; hubs have none
    edges_of: Mapping[int, Sequence[Edge]]  # by the unit of their target
    rows: dict[Hashable, FloatArray]  # of equal arrays one object
    forward: Mapping[int, FloatArray]  # seconds of the forward pass, by id of an edge's costs

    def node_rows(self, node: int) -> FloatArray:
        problem = self.costed.problem
        key = (id(problem.node_costs_seconds[node]), id(problem.node_memory_bytes[node]))
        if key not in self.rows:
            self.rows[key] = _node_rows(self.costed, node).astype(np.float32)
        return self.rows[key]

    def edge_rows(self, edge: Edge, relaxed: bool) -> FloatArray:
        key = (id(edge.costs_seconds), id(edge.memory_bytes), relaxed)
        if key not in self.rows:
            rows = _edge_rows(self.costed, edge, self.forward.get(id(edge.costs_seconds)))
            self.rows[key] = (np.asarray(rows.min(axis=1)) if relaxed else rows).astype(np.float32)
        return self.rows[key]


@dataclass(frozen=True, eq=False)
class Known:
    """Rows and units made so far from arrays that live as long, by what they are made of."""

    rows: dict[Hashable, FloatArray] = field(default_factory=dict)
    units: dict[Hashable, Unit] = field(default_factory=dict)


def units_of(costed: Costed, starts: Sequence[str], known: Known | None = None) -> list[Unit]:
    """The units of a priced graph; ``starts`` are the first operators of all but the first, in order. Equal units are one
    object, also of those that are ``known`` from the same graph in other modes of recomputation."""
    known = known or Known()
    members = _members(costed.prepared.graph, starts)
    home = _homes(costed, members)
    ports = [_port(costed, names, list(chain.from_iterable(members[at + 1 :]))) for at, names in enumerate(members)]
    edges: dict[int, list[Edge]] = {}
    for edge in costed.problem.edges:
        if edge.target in home:
            edges.setdefault(home[edge.target], []).append(edge)
    forward = {
        id(edge.costs_seconds): seconds
        for edge, seconds in zip(costed.problem.edges, costed.edges_forward, strict=True)
        if seconds is not None
    }
    network = _Network(costed, home, edges, known.rows, forward)
    found = []
    for at in range(len(members)):
        unit = _unit(network, at, ports[at - 1] if at else None, ports[at] if at + 1 < len(members) else None)
        key = (unit.sizes, unit.entry, unit.exit, tuple((factor.variables, id(factor.rows)) for factor in unit.factors))
        found.append(known.units.setdefault(key, unit))
    return found


def momentary_bytes(costed: Costed, starts: Sequence[str]) -> list[float]:
    """For each unit the least bytes that its largest operator holds for a moment, whatever its strategy."""
    return [
        max(float(costed.operator_table(name).transient_bytes.min()) for name in names)
        for names in _members(costed.prepared.graph, starts)
    ]


def _members(graph: OpGraph, starts: Sequence[str]) -> list[list[str]]:
    """The operators of each unit."""
    line = line_of(graph)
    place = {name: index for index, name in enumerate(line)}
    ends = [*(place[start] for start in starts), len(line)]
    return [line[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _homes(costed: Costed, members: Sequence[Sequence[str]]) -> dict[int, int]:
    """The unit of each node: an operator's own, that of the first reader of a parameter or of a sharing group."""
    graph, nodes = costed.prepared.graph, costed.nodes
    home = {nodes[name]: at for at, names in enumerate(members) for name in names}
    for parameter in graph.parameters:
        readers = [home[nodes[name]] for name, _ in graph.readers_of.get(parameter.value, ()) if nodes[name] in home]
        home[nodes[parameter.value]] = min(readers, default=0)
    for reader in costed.prepared.groups:
        key = costed.prepared.group_key(reader)
        if key is not None and key in nodes and nodes[reader[0]] in home:
            home[nodes[key]] = min(home[nodes[reader[0]]], home.get(nodes[key], len(members)))
    return home


def _port(costed: Costed, names: Sequence[str], later: Sequence[str]) -> int:
    """The node of the operator that makes most of what later units read of this one."""
    graph = costed.prepared.graph
    read = {value for name in later for value in graph.operator_of[name].inputs}
    sizes = {
        name: sum(graph.values[value].num_bytes for value in graph.operator_of[name].outputs if value in read)
        for name in names
    }
    best = max(reversed(names), key=lambda name: sizes[name])
    return costed.nodes[best]


def _unit(network: _Network, at: int, entry: int | None, exit_: int | None) -> Unit:
    """The unit at a position, on its own variables."""
    home, problem = network.home, network.costed.problem
    variables: dict[int, int] = {}
    sizes: list[int] = []
    factors: list[Factor] = []

    def variable(node: int) -> int:
        if node not in variables:
            variables[node] = len(sizes)
            sizes.append(problem.node_costs_seconds[node].size)
        return variables[node]

    own = sorted(node for node, unit in home.items() if unit == at)
    factors.extend(Factor((variable(node),), network.node_rows(node)) for node in own)
    for edge in network.edges_of.get(at, ()):
        if home.get(edge.source, at) == at or edge.source == entry:
            factors.append(Factor((variable(edge.source), variable(edge.target)), network.edge_rows(edge, False)))
        else:
            factors.append(Factor((variable(edge.target),), network.edge_rows(edge, True)))
    if entry is not None:
        variable(entry)
    return Unit(
        tuple(sizes), tuple(factors), None if entry is None else variables[entry],
        None if exit_ is None else variable(exit_),
    )  # fmt: skip


def _node_rows(costed: Costed, node: int) -> FloatArray:
    """The rows of a node's choices."""
    problem, setting = costed.problem, costed.setting
    seconds, memory = problem.node_costs_seconds[node], problem.node_memory_bytes[node]
    kept = np.zeros_like(seconds) if memory is None else memory[0]
    nothing = np.zeros_like(seconds)
    name = problem.names[node]
    if name in costed.prepared.graph.values and costed.prepared.graph.values[name].kind == "parameter":
        once = costed.parameter_table(name).once_seconds
        return np.stack([nothing, (seconds - once) / setting.num_micro_batches, once, kept, nothing, nothing])
    each = seconds / setting.num_micro_batches
    forward = weight = nothing
    if name in costed.prepared.graph.operator_of:
        table = costed.operator_table(name)
        forward, weight = table.forward_seconds, table.weight_seconds
    ahead, back = _passes(each, forward)
    return np.stack([ahead, back, nothing, nothing, kept / setting.in_flight, np.minimum(weight, back)])


def _edge_rows(costed: Costed, edge: Edge, forward: FloatArray | None) -> FloatArray:
    """The rows of an edge's pairs of choices."""
    seconds = edge.costs_seconds / costed.setting.num_micro_batches
    nothing = np.zeros_like(seconds)
    flying = nothing if edge.memory_bytes is None else edge.memory_bytes[0] / costed.setting.in_flight
    ahead, back = _passes(seconds, nothing if forward is None else forward)
    return np.stack([ahead, back, nothing, nothing, flying, nothing])


def _passes(each: FloatArray, forward: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Seconds of the forward and of the backward pass; infinite both where a choice is absent."""
    finite = np.isfinite(each)
    ahead = np.where(finite, np.minimum(forward, each), np.inf)
    return ahead, np.where(finite, each, np.inf) - np.where(finite, ahead, 0.0)
