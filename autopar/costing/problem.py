"""The whole model on one mesh as a ``solver.Problem``, and the solver's choices as a ``StagePlan``.

One node per operator (its strategies), per input (the layout in which it is handed out), per parameter (use and storage)
and per sharing group (the layout its readers want); edges price conversions. Arrays are made once per repeated block and
referenced by every occurrence, so the work does not grow with depth. Two memory rows: bytes kept throughout a step, and
none other: what is held for a moment is added by the planner (``moment_bytes``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from autopar.costing.conversions import Conversions, FloatArray
from autopar.costing.operators import LayoutColumn, OperatorTable, Role, operator_table
from autopar.costing.parameters import ParameterTable, parameter_table
from autopar.costing.prepare import Prepared
from autopar.graph import Block, Operator
from autopar.layout import PARTIAL, REPLICATED, SUMMED_GRADIENT, Layout
from autopar.mesh import Mesh
from autopar.options import PlanOptions
from autopar.plans import OperatorPlan, ParameterPlan, StagePlan
from autopar.solver import Edge, Problem, Repeat
from cost_models import CostModel

Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class Costed:
    """A model priced on one mesh.

    Nodes of ``problem`` are, in this order, ``operators``, ``inputs``, ``parameters`` and ``shared``; each of the four
    maps an id to its node. The tables are by canonical id.
    """

    mesh: Mesh
    roles: tuple[Role, ...]
    prepared: Prepared
    conversions: Conversions
    problem: Problem
    nodes: dict[str, int]
    operator_tables: dict[str, OperatorTable]
    input_columns: dict[str, LayoutColumn]
    parameter_tables: dict[str, ParameterTable]
    shared_columns: dict[str, LayoutColumn]

    def operator_table(self, operator: str) -> OperatorTable:
        return self.operator_tables[self.prepared.name(operator)]

    def parameter_table(self, value: str) -> ParameterTable:
        return self.parameter_tables[self.prepared.name(value)]


@dataclass
class _Builder:
    """Gathers nodes and edges; arrays are kept by canonical key, so that like blocks share them."""

    prepared: Prepared
    conversions: Conversions
    roles: tuple[Role, ...]
    options: PlanOptions
    nodes: dict[str, int] = field(default_factory=dict)
    costs: list[FloatArray] = field(default_factory=list)
    memory: list[FloatArray | None] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    kept: dict[Hashable, object] = field(default_factory=dict)
    tables: dict[str, OperatorTable] = field(default_factory=dict)
    inputs: dict[str, LayoutColumn] = field(default_factory=dict)
    parameters: dict[str, ParameterTable] = field(default_factory=dict)
    shared: dict[str, LayoutColumn] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], Item]) -> Item:
        """``make()`` the first time, the same object ever after."""
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]  # type: ignore[return-value]

    def node(self, name: str, costs: FloatArray, memory: FloatArray | None) -> None:
        self.nodes[name] = len(self.costs)
        self.costs.append(costs)
        self.memory.append(memory)


def build(prepared: Prepared, mesh: Mesh, roles: Sequence[Role], cost_model: CostModel, options: PlanOptions) -> Costed:
    """Price every choice of every operator and parameter of a model on ``mesh``. The memory budget is left open."""
    builder = _Builder(prepared, Conversions(mesh, cost_model), tuple(roles), options)
    _add_operators(builder)
    _add_sources(builder)
    _add_shared(builder)
    for operator in prepared.graph.operators:
        for index in range(len(operator.inputs)):
            _add_edge(builder, operator, index)
    problem = Problem(
        tuple(builder.costs),
        tuple(builder.memory),
        tuple(builder.edges),
        np.array([np.inf]),
        _repeats(builder),
        tuple(builder.nodes),
    )
    return Costed(
        mesh, tuple(roles), prepared, builder.conversions, problem, builder.nodes,
        builder.tables, builder.inputs, builder.parameters, builder.shared,
    )  # fmt: skip


def _add_operators(builder: _Builder) -> None:
    prepared = builder.prepared
    for operator in prepared.graph.operators:
        name = prepared.name(operator.id)
        if name not in builder.tables:
            builder.tables[name] = operator_table(
                prepared.graph.operator_of[name], prepared, builder.conversions, builder.roles
            )
        table = builder.tables[name]
        costs = builder.once(("cost", name), lambda: np.asarray(table.seconds + _fixed_sources(builder, name, table)))
        memory = builder.once(("memory", name), lambda: table.saved_bytes[None, :].copy())
        builder.node(operator.id, costs, memory)


def _fixed_sources(builder: _Builder, name: str, table: OperatorTable) -> FloatArray:
    """Conversions of buffers and constants, which always rest replicated."""
    prepared = builder.prepared
    operator = prepared.graph.operator_of[name]
    whole: Layout = (REPLICATED,) * builder.conversions.mesh.num_axes
    total = np.zeros(len(table.strategies))
    for index, value in enumerate(operator.inputs):
        described = prepared.graph.values[value]
        if described.kind in ("buffer", "constant"):
            column = table.inputs[index]
            total += builder.conversions.prices(described, [whole], column.distinct, False).seconds[0, column.which]
    return total


def _readers(builder: _Builder, value: str) -> Iterable[tuple[Operator, int]]:
    """Readers of a value, those in like blocks once."""
    graph = builder.prepared.graph
    seen = set()
    for operator, index in graph.readers_of.get(value, ()):
        key = (builder.prepared.name(operator), index)
        if key not in seen:
            seen.add(key)
            yield graph.operator_of[operator], index


def _wanted(builder: _Builder, value: str) -> tuple[Layout, ...]:
    """All layouts that some strategy of some reader wants ``value`` in."""
    found: dict[Layout, None] = {}
    for operator, index in _readers(builder, value):
        found.update(dict.fromkeys(builder.tables[builder.prepared.name(operator.id)].inputs[index].distinct))
    return tuple(found)


def _add_sources(builder: _Builder) -> None:
    """Nodes of the model's inputs and parameters."""
    prepared, graph = builder.prepared, builder.prepared.graph
    whole: Layout = (REPLICATED,) * builder.conversions.mesh.num_axes
    for entry in graph.inputs:
        layouts = [layout for layout in _wanted(builder, entry.value) if PARTIAL not in layout and SUMMED_GRADIENT not in layout]
        column = LayoutColumn.of(list(dict.fromkeys([whole, *layouts])))
        builder.inputs[entry.value] = column
        builder.node(entry.value, np.zeros(len(column.distinct)), None)
    for parameter in graph.parameters:
        name = prepared.name(parameter.value)
        if name not in builder.parameters:
            builder.parameters[name] = parameter_table(
                graph.values[name],
                _wanted(builder, name),
                parameter.trainable and name in prepared.gradient,
                builder.conversions,
                builder.roles,
                builder.options.parallelism.zero,
                builder.options.optimizer,
                name in prepared.saved,
            )
        table = builder.parameters[name]
        memory = builder.once(("kept", name), lambda: table.kept_bytes[None, :].copy())
        builder.node(parameter.value, table.seconds, memory)


def _add_shared(builder: _Builder) -> None:
    """Nodes of sharing groups, each with the edge that prices its one conversion."""
    prepared, graph = builder.prepared, builder.prepared.graph
    members: dict[str, list[tuple[str, int]]] = {}
    for reader in prepared.groups:
        key = prepared.group_key(reader)
        if key is not None:
            members.setdefault(key, []).append(reader)
    for key, readers in members.items():
        value = graph.operator_of[readers[0][0]].inputs[readers[0][1]]
        if graph.values[value].kind in ("buffer", "constant"):
            continue
        name = f"{prepared.name(value)}{key.removeprefix(value)}"
        alike = {prepared.name(operator): index for operator, index in readers}
        if name not in builder.shared:
            found: dict[Layout, None] = {}
            for operator, index in alike.items():
                found.update(dict.fromkeys(builder.tables[operator].inputs[index].distinct))
            builder.shared[name] = LayoutColumn.of(list(found))
        column = builder.shared[name]
        builder.node(key, builder.once(("nothing", len(column.distinct)), lambda: np.zeros(len(column.distinct))), None)
        flows = any(prepared.flows(graph.operator_of[operator], index) for operator, index in alike.items())
        saves = any(_saves(prepared, operator, index) for operator, index in alike.items())
        _connect(builder, value, key, name, column, flows, saves)


def _saves(prepared: Prepared, operator: str, index: int) -> bool:
    """Whether an operator keeps a tensor input for its backward pass."""
    signature = prepared.signatures.get(operator)
    described = prepared.graph.operator_of[operator]
    if not any(value in prepared.gradient for value in described.outputs):
        return False
    return signature is None or index in signature.saved_inputs


def _source_column(builder: _Builder, value: str) -> tuple[str, LayoutColumn]:
    """The node that makes a value, and the layouts its choices give it."""
    prepared, graph = builder.prepared, builder.prepared.graph
    producer = graph.producer_of.get(value)
    if producer is not None:
        table = builder.tables[prepared.name(producer.id)]
        return producer.id, table.outputs[[v for v in producer.outputs if v].index(value)]
    if graph.values[value].kind == "parameter":
        return value, builder.parameters[prepared.name(value)].use
    return value, builder.inputs[value]


def _add_edge(builder: _Builder, operator: Operator, index: int) -> None:
    """The edge from a value, or from its sharing group, to one reader."""
    prepared = builder.prepared
    value = operator.inputs[index]
    name = prepared.name(operator.id)
    column = builder.tables[name].inputs[index]
    key = prepared.group_key((operator.id, index))
    if key is not None and key in builder.nodes:
        shared = builder.shared[f"{prepared.name(value)}{key.removeprefix(value)}"]
        costs = builder.once(("same", id(shared), name, index), lambda: _same(shared, column))
        builder.edges.append(Edge(builder.nodes[key], builder.nodes[operator.id], costs))
    elif prepared.graph.values[value].kind not in ("buffer", "constant"):
        saves = _saves(prepared, name, index)
        _connect(builder, value, operator.id, (name, index), column, prepared.flows(operator, index), saves)


def _same(source: LayoutColumn, target: LayoutColumn) -> FloatArray:
    """0 where both choose one layout, absent elsewhere."""
    equal = np.array([[one == other for other in target.distinct] for one in source.distinct])
    return np.where(equal, 0.0, np.inf)[np.ix_(source.which, target.which)]


def _connect(
    builder: _Builder, value: str, target: str, reader: Hashable, column: LayoutColumn, flows: bool, saves: bool
) -> None:
    """The edge that prices the conversion of ``value`` for the node ``target``."""
    node, source = _source_column(builder, value)
    key = (builder.prepared.name(value), reader, flows, saves)

    def arrays() -> tuple[FloatArray, FloatArray | None]:
        described = builder.prepared.graph.values[value]
        prices = builder.conversions.prices(described, source.distinct, column.distinct, flows)
        spread = np.ix_(source.which, column.which)
        made = np.ascontiguousarray(prices.made_bytes[spread])[None] if saves and prices.made_bytes.any() else None
        seconds = np.ascontiguousarray(prices.seconds[spread])
        if described.kind == "parameter" and flows:
            seconds[_sums_gradient(source, column)[spread]] = np.inf
        return seconds, made

    costs, memory = builder.once(key, arrays)
    builder.edges.append(Edge(builder.nodes[node], builder.nodes[target], costs, memory))


def _sums_gradient(source: LayoutColumn, target: LayoutColumn) -> np.ndarray:
    """Pairs in which a conversion would sum a parameter's gradient. That is the business of its storage, which does it once
    a step and for all parameters together, so such conversions are not offered."""
    return np.array(
        [
            [any(a == REPLICATED and b == SUMMED_GRADIENT for a, b in zip(one, other, strict=True)) for other in target.distinct]
            for one in source.distinct
        ]
    )


def _repeats(builder: _Builder) -> tuple[Repeat, ...]:
    """For each group of blocks its nodes, aligned: operators, parameters, and what is shared within the block."""
    found = []
    for group in builder.prepared.graph.block_groups:
        if len(group.blocks) > 1:
            instances = tuple(tuple(builder.nodes[name] for name in _block_nodes(builder, block)) for block in group.blocks)
            found.append(Repeat(instances, builder.options.max_variants))
    return tuple(found)


def _block_nodes(builder: _Builder, block: Block) -> list[str]:
    graph = builder.prepared.graph
    names = [*block.operators]
    outside = {value for value in block.parameters if _read_elsewhere(builder, value, block)}
    names += [value for value in block.parameters if value not in outside]
    made = {value for operator in block.operators for value in graph.operator_of[operator].outputs}
    shared: dict[str, None] = {}
    for operator in block.operators:
        for index, value in enumerate(graph.operator_of[operator].inputs):
            key = builder.prepared.group_key((operator, index))
            if key in builder.nodes and key is not None and (value in made or value in block.parameters):
                shared[key] = None
    return names + list(shared)


def _read_elsewhere(builder: _Builder, value: str, block: Block) -> bool:
    members = set(block.operators)
    return any(operator not in members for operator, _ in builder.prepared.graph.readers_of.get(value, ()))


def stage_plan(costed: Costed, choices: Sequence[int]) -> StagePlan:
    """What the solver chose, as a plan: like blocks with like choices are one variant."""
    prepared, graph = costed.prepared, costed.prepared.graph
    chosen = {name: choices[node] for name, node in costed.nodes.items()}
    variants: dict[str, tuple[int, ...]] = {}
    left_out: set[str] = set()
    for group in graph.block_groups:
        kinds: dict[tuple[int, ...], int] = {}
        numbers = []
        for block in group.blocks:
            key = tuple(chosen[name] for name in _plan_nodes(costed, block))
            if key in kinds:
                left_out.update(_plan_nodes(costed, block))
            numbers.append(kinds.setdefault(key, len(kinds)))
        variants[group.name] = tuple(numbers)
    whole: Layout = (REPLICATED,) * costed.mesh.num_axes
    sources = {value: column.distinct[chosen[value]] for value, column in costed.input_columns.items()}
    sources.update((item.value, whole) for item in (*graph.buffers, *graph.constants))
    operators, parameters, shared = {}, {}, {}
    for name, choice in chosen.items():
        if name in left_out or name in sources:
            continue
        if name in graph.operator_of:
            strategy = costed.operator_table(name).strategies[choice]
            operators[name] = OperatorPlan(strategy.label, strategy.inputs, _all_outputs(graph.operator_of[name], strategy.outputs, whole))
        elif name in graph.values:
            kept = costed.parameter_table(name).choices[choice]
            parameters[name] = ParameterPlan(kept.use, kept.storage, kept.zero)
        else:
            value, _, rest = name.partition("|")
            shared[name] = costed.shared_columns[f"{prepared.name(value)}|{rest}"].distinct[choice]
    return StagePlan(costed.mesh, operators, parameters, sources, shared, variants)


def _all_outputs(operator: Operator, layouts: tuple[Layout, ...], whole: Layout) -> tuple[Layout, ...]:
    """One layout per output, those that are no tensors included, so that positions agree with ``Operator.outputs``."""
    rest = iter(layouts)
    return tuple(next(rest) if value else whole for value in operator.outputs)


def _plan_nodes(costed: Costed, block: Block) -> list[str]:
    """Names of a block's nodes, aligned with those of its siblings."""
    graph = costed.prepared.graph
    names = [*block.operators, *block.parameters]
    made = {value for operator in block.operators for value in graph.operator_of[operator].outputs} | set(block.parameters)
    shared: dict[str, None] = {}
    for operator in block.operators:
        for index, value in enumerate(graph.operator_of[operator].inputs):
            key = costed.prepared.group_key((operator, index))
            if key is not None and value in made and key in costed.nodes:
                shared[key] = None
    return names + list(shared)
