"""The whole model on one mesh as a ``solver.Problem``.

One node per operator (its strategies), per input (the layout in which it is handed out), per parameter (use and storage)
and per sharing group (the layout its readers want); edges price conversions. Arrays are made once per repeated block and
referenced by every occurrence, so the work does not grow with depth. There is one row of memory, the bytes kept
throughout a step, and where parameters may rest on the host a second one, the bytes there, with its budget; what is held for
a moment is added by the planner.

Seconds are of a whole step: prices of one micro-batch times their number, and what is done once. A block that computes
again in backward (``recompute.py``) pays its forward pass twice and keeps only what enters its recomputed parts, for each
micro-batch in flight; one such block of a stage, the one whose turn it is, holds all of it again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from autopar.costing.conversions import Conversions, FloatArray
from autopar.costing.kept import KeptBytes
from autopar.costing.offload import with_host
from autopar.costing.operators import LayoutColumn, OperatorTable, Role, operator_table
from autopar.costing.parameters import ParameterTable, parameter_table
from autopar.costing.prepare import Prepared
from autopar.costing.setting import ALONE, Setting
from autopar.graph import ITEM_BYTES, Block, Operator
from autopar.layout import PARTIAL, REPLICATED, SUMMED_GRADIENT, Layout
from autopar.mesh import Mesh
from autopar.options import PlanOptions
from autopar.sharing import Reader
from autopar.solver import Edge, Problem, Repeat
from cost_models import CostModel

Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class Costed:
    """A model, or a stage of it, priced on one mesh in one setting.

    Nodes of ``problem`` are, in this order, ``operators``, ``inputs``, ``parameters`` and ``shared``; each of the four
    maps an id to its node. The tables are by canonical id.
    """

    mesh: Mesh
    roles: tuple[Role, ...]
    prepared: Prepared
    conversions: Conversions
    setting: Setting
    problem: Problem
    nodes: dict[str, int]
    operator_tables: dict[str, OperatorTable]
    input_columns: dict[str, LayoutColumn]
    parameter_tables: dict[str, ParameterTable]
    shared_columns: dict[str, LayoutColumn]
    edges_forward: tuple[FloatArray | None, ...] = ()  # seconds of the forward pass of one micro-batch, for each edge
    edges_made: tuple[FloatArray | None, ...] = ()  # bytes of the tensor that its conversion makes
    edges_again: tuple[bool, ...] = ()  # whether backward does the conversion again
    edges_reader: tuple[Reader | str, ...] = ()  # for whom: one reader, or a sharing group's key
    arrays: dict[Hashable, object] = field(default_factory=dict)  # by canonical key, for the same graph in other settings

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
    setting: Setting
    kept_by: KeptBytes
    nodes: dict[str, int] = field(default_factory=dict)
    costs: list[FloatArray] = field(default_factory=list)
    memory: list[FloatArray | None] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    forward: list[FloatArray | None] = field(default_factory=list)
    made: list[FloatArray | None] = field(default_factory=list)
    again: list[bool] = field(default_factory=list)
    readers: list[Reader | str] = field(default_factory=list)
    edges_of: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # by operator: its inputs, each with its edge
    kept: dict[Hashable, object] = field(default_factory=dict)
    tables: dict[str, OperatorTable] = field(default_factory=dict)
    inputs: dict[str, LayoutColumn] = field(default_factory=dict)
    parameters: dict[str, ParameterTable] = field(default_factory=dict)
    shared: dict[str, LayoutColumn] = field(default_factory=dict)
    host_bytes: float | None = None  # what a device has of its host's memory, where something may rest there

    def row(self, num_bytes: FloatArray, on_host: FloatArray | None = None) -> FloatArray:
        """Bytes by choice, or by pair of choices, as the rows of memory of the problem."""
        rows = [num_bytes] if self.host_bytes is None else [num_bytes, np.zeros_like(num_bytes) if on_host is None else on_host]
        found: FloatArray = np.array(rows, dtype=np.float64)
        return found

    def once(self, key: Hashable, make: Callable[..., Item], *arguments: object) -> Item:
        """``make(*arguments)`` the first time, the same object ever after."""
        if key not in self.kept:
            self.kept[key] = make(*arguments)
        return self.kept[key]  # type: ignore[return-value]

    def node(self, name: str, costs: FloatArray, memory: FloatArray | None) -> None:
        self.nodes[name] = len(self.costs)
        self.costs.append(costs)
        self.memory.append(memory)


def build(
    prepared: Prepared,
    mesh: Mesh,
    roles: Sequence[Role],
    cost_model: CostModel,
    options: PlanOptions,
    setting: Setting = ALONE,
    like: Costed | None = None,
) -> Costed:
    """Price every choice of every operator and parameter of a model on ``mesh``. The memory budget is left open.

    ``like``: the same graph priced on the same mesh in another setting, whose tables are used again, and its arrays too where
    the settings differ in what is recomputed alone.
    """
    conversions = like.conversions if like else Conversions(mesh, cost_model, setting.first_rank)
    builder = _Builder(prepared, conversions, tuple(roles), options, setting, KeptBytes(prepared, setting))
    if options.offload != "none":
        builder.host_bytes = conversions.cost_model.host_share(**conversions.where).memory_bytes
    if like is not None:
        builder.tables.update(like.operator_tables)
        if like.setting.num_micro_batches == setting.num_micro_batches:
            builder.parameters.update(like.parameter_tables)
        if replace(like.setting, recompute=setting.recompute) == setting:
            builder.kept = like.arrays
            builder.shared.update(like.shared_columns)
    _add_operators(builder)
    _add_sources(builder)
    _add_shared(builder)
    for operator in prepared.graph.operators:
        _add_edges(builder, operator)
    problem = Problem(
        tuple(builder.costs),
        tuple(builder.memory),
        tuple(builder.edges),
        np.array([np.inf] if builder.host_bytes is None else [np.inf, builder.host_bytes]),
        _repeats(builder),
        tuple(builder.nodes),
    )
    return Costed(
        mesh, tuple(roles), prepared, builder.conversions, setting, problem, builder.nodes,
        builder.tables, builder.inputs, builder.parameters, builder.shared, tuple(builder.forward),
        tuple(builder.made), tuple(builder.again), tuple(builder.readers), builder.kept,
    )  # fmt: skip


def _add_operators(builder: _Builder) -> None:
    prepared, twins = builder.prepared, builder.kept_by.twins
    for operator in prepared.graph.operators:
        if operator.id in twins:
            node = builder.nodes[twins[operator.id]]
            builder.node(operator.id, builder.costs[node], builder.memory[node])
            continue
        name = prepared.name(operator.id)
        if name not in builder.tables:
            builder.tables[name] = operator_table(
                prepared.graph.operator_of[name], prepared, builder.conversions, builder.roles,
                builder.options.parallelism.logits,
            )  # fmt: skip
        table = builder.tables[name]
        role = builder.kept_by.role(operator.id)
        sends = tuple(value for value in operator.outputs if value in builder.setting.boundary)
        key = ("cost", name, role.again, sends)
        costs = builder.once(key, _operator_seconds, builder, operator if sends else None, name, table, role.again)
        memory = builder.once(("memory", name, role), builder.kept_by.operator_bytes, operator, role, table)
        builder.node(operator.id, costs, builder.once(("row", name, role), builder.row, memory))


def _operator_seconds(
    builder: _Builder, sender: Operator | None, name: str, table: OperatorTable, again: bool
) -> FloatArray:
    """An operator's own seconds, and those of converting buffers and constants, which always rest replicated, and of what
    ``sender``, the operator where it sends to the next stage, sends. ``again``: the forward pass is done twice."""
    prepared = builder.prepared
    operator = prepared.graph.operator_of[name]
    whole: Layout = (REPLICATED,) * builder.conversions.mesh.num_axes
    total: FloatArray = table.seconds + table.forward_seconds if again else np.array(table.seconds)
    for index, value in enumerate(operator.inputs):
        described = prepared.graph.values[value]
        if described.kind in ("buffer", "constant"):
            column = table.inputs[index]
            once = builder.conversions.prices(described, [whole], column.distinct, False).seconds[0, column.which]
            total += once * (1 + again)
    outputs = [value for value in (sender or operator).outputs if value]
    for column, value in zip(table.outputs, outputs, strict=True):
        if sender is not None and value in builder.setting.boundary:
            target = [builder.setting.boundary[value]]
            flows = value in prepared.gradient
            prices = builder.conversions.prices(prepared.graph.values[value], column.distinct, target, flows)
            total += prices.seconds[column.which, 0]
    return builder.setting.num_micro_batches * total


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
        wanted = _wanted(builder, entry.value)
        layouts = [layout for layout in wanted if not {PARTIAL, SUMMED_GRADIENT} & set(layout)]
        column = LayoutColumn.of(list(dict.fromkeys([whole, *layouts])))
        builder.inputs[entry.value] = column
        builder.node(entry.value, np.zeros(len(column.distinct)), None)
    for value in graph.received:
        column = LayoutColumn.of([builder.setting.boundary.get(value, whole)])
        builder.inputs[value] = column
        described = graph.values[value]
        num_bytes = builder.conversions.local_elements(described.shape, column.distinct[0]) * ITEM_BYTES[described.dtype]
        builder.node(value, np.zeros(1), builder.row(np.array([float(num_bytes)]) * builder.setting.in_flight))
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
                builder.setting.num_micro_batches,
                graph.parameter_of[name].master,
                builder.options.parallelism.zero_size,
                # Other stages may be able to use what they hold too in fewer layouts.
                builder.options.precision == "autocast" and not graph.received and not graph.sent,
            )
            if builder.host_bytes is not None and parameter.trainable and name in prepared.gradient:
                builder.parameters[name] = with_host(
                    builder.parameters[name],
                    graph.values[name],
                    builder.conversions,
                    builder.options.optimizer,
                    graph.parameter_of[name].master,
                    builder.options.offload == "auto",
                )
        table = builder.parameters[name]
        row = builder.once(("kept", name), builder.row, table.kept_bytes, table.host_bytes)
        builder.node(parameter.value, table.seconds, row)


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
        builder.node(key, builder.once(("nothing", len(column.distinct)), np.zeros, len(column.distinct)), None)
        flows = any(prepared.flows(graph.operator_of[operator], index) for operator, index in alike.items())
        saves = any(_saves(prepared, operator, index) for operator, index in alike.items())
        _connect(builder, value, key, name, column, flows, saves, key)


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


def _add_edges(builder: _Builder, operator: Operator) -> None:
    """The edges from what an operator reads; those of its twin between other nodes, where it has one."""
    twin = builder.kept_by.twins.get(operator.id)
    if twin is None:
        for index in range(len(operator.inputs)):
            _add_edge(builder, operator, index)
        return
    for index, number in builder.edges_of.get(twin, ()):
        key = builder.prepared.group_key((operator.id, index))
        source = key if key is not None and key in builder.nodes else _maker(builder, operator.inputs[index])
        ends = builder.nodes[source], builder.nodes[operator.id]
        alike = builder.edges[number]
        builder.edges.append(Edge(*ends, alike.costs_seconds, alike.memory_bytes))
        builder.forward.append(builder.forward[number])
        builder.made.append(builder.made[number])
        builder.again.append(builder.again[number])
        builder.readers.append((operator.id, index))


def _maker(builder: _Builder, value: str) -> str:
    """The node that makes a value."""
    producer = builder.prepared.graph.producer_of.get(value)
    return value if producer is None else producer.id


def _add_edge(builder: _Builder, operator: Operator, index: int) -> None:
    """The edge from a value, or from its sharing group, to one reader."""
    number = len(builder.edges)
    prepared = builder.prepared
    value = operator.inputs[index]
    name = prepared.name(operator.id)
    column = builder.tables[name].inputs[index]
    key = prepared.group_key((operator.id, index))
    if key is not None and key in builder.nodes:
        group = f"{prepared.name(value)}{key.removeprefix(value)}"
        costs = builder.once(("same", group, name, index), _same, builder.shared[group], column)
        builder.edges.append(Edge(builder.nodes[key], builder.nodes[operator.id], costs))
        builder.forward.append(None)
        builder.made.append(None)
        builder.again.append(False)
        builder.readers.append((operator.id, index))
    elif prepared.graph.values[value].kind not in ("buffer", "constant"):
        saves = _saves(prepared, name, index)
        flows = prepared.flows(operator, index)
        _connect(builder, value, operator.id, (name, index), column, flows, saves, (operator.id, index))
    if len(builder.edges) > number:
        builder.edges_of.setdefault(operator.id, []).append((index, number))


def _same(source: LayoutColumn, target: LayoutColumn) -> FloatArray:
    """0 where both choose one layout, absent elsewhere."""
    place = {layout: column for column, layout in enumerate(target.distinct)}
    alike = np.array([place.get(layout, -1) for layout in source.distinct])
    equal = alike[:, None] == np.arange(len(target.distinct))
    return np.asarray(np.where(equal, 0.0, np.inf)[np.ix_(source.which, target.which)])


def _connect(
    builder: _Builder,
    value: str,
    target: str,
    reader: Hashable,
    column: LayoutColumn,
    flows: bool,
    saves: bool,
    made_for: Reader | str,
) -> None:
    """The edge that prices the conversion of ``value`` for the node ``target``."""
    node, source = _source_column(builder, value)
    role = builder.kept_by.edge(value, target)
    key = (builder.prepared.name(value), reader, flows, saves, role)

    def arrays() -> tuple[FloatArray, FloatArray | None, FloatArray, FloatArray | None]:
        described = builder.prepared.graph.values[value]
        prices = builder.conversions.prices(described, source.distinct, column.distinct, flows)
        spread = np.ix_(source.which, column.which)
        held = role.bytes_of(saves, prices)
        memory = builder.row(held[spread]) if held is not None and held.any() else None
        seconds = prices.seconds + prices.forward_seconds if role.again else prices.seconds
        costs = np.ascontiguousarray(seconds[spread]) * builder.setting.num_micro_batches
        if described.kind == "parameter" and flows:
            costs[_sums_gradient(source, column)[spread]] = np.inf
        all_made = prices.made_bytes[spread] if prices.made_bytes.any() else None
        return costs, memory, prices.forward_seconds[spread], all_made

    costs, memory, forward, made = builder.once(key, arrays)
    builder.made.append(made)
    builder.again.append(role.again)
    builder.readers.append(made_for)
    builder.edges.append(Edge(builder.nodes[node], builder.nodes[target], costs, memory))
    builder.forward.append(forward)


def _sums_gradient(source: LayoutColumn, target: LayoutColumn) -> np.ndarray:
    """Pairs in which a conversion would sum a parameter's gradient. That is the business of its storage, which does it once
    a step and for all parameters together, so such conversions are not offered."""
    whole = np.array([[state == REPLICATED for state in layout] for layout in source.distinct])
    summed = np.array([[state == SUMMED_GRADIENT for state in layout] for layout in target.distinct])
    return np.asarray((whole[:, None] & summed[None]).any(axis=-1))


def _repeats(builder: _Builder) -> tuple[Repeat, ...]:
    """For each group of blocks its nodes, aligned; a parameter that others read too is a hub, and none of a block's."""
    graph = builder.prepared.graph
    found = []
    for blocks in _alike(builder):
        instances = []
        for block in blocks:
            members = set(block.operators)
            hubs = {
                value for value in block.parameters if any(reader not in members for reader, _ in graph.readers_of[value])
            }
            names = block_nodes(builder.prepared, builder.nodes, block)
            instances.append(tuple(builder.nodes[name] for name in names if name not in hubs))
        if len(instances) > 1 and len({len(instance) for instance in instances}) == 1:
            found.append(Repeat(tuple(instances), builder.options.max_variants))
    return tuple(found)


def _alike(builder: _Builder) -> Iterator[list[Block]]:
    """The blocks of each group that cost and keep the same."""
    for group in builder.prepared.graph.block_groups:
        kinds: dict[Hashable, list[Block]] = {}
        for block in group.blocks:
            sends = any(
                value in builder.setting.boundary
                for operator in block.operators
                for value in builder.prepared.graph.operator_of[operator].outputs
            )
            kinds.setdefault((builder.kept_by.kind(block), sends), []).append(block)
        yield from kinds.values()


def block_nodes(prepared: Prepared, nodes: Mapping[str, int], block: Block) -> list[str]:
    """Names of a block's nodes, aligned with those of its siblings: operators, parameters, and what is shared inside."""
    graph = prepared.graph
    inside = {value for operator in block.operators for value in graph.operator_of[operator].outputs}
    inside.update(block.parameters)
    shared: dict[str, None] = {}
    for operator in block.operators:
        for index, value in enumerate(graph.operator_of[operator].inputs):
            key = prepared.group_key((operator, index)) if value in inside else None
            if key is not None and key in nodes:
                shared[key] = None
    return [*block.operators, *block.parameters, *shared]
