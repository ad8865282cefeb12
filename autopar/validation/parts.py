"""A short model priced under one forced layout, taken apart: embedding, block, head and loss.

Enters: the graph of a short model, a mesh of one pipeline rank, degrees. Leaves: :class:`Laid`, whose parts add up to a
model of any depth and to any division into stages. Seconds and bytes are those of ``autopar.costing`` for the strategies
that the solver takes when Megatron's layout is forced on it: contractions split along the batch on the data axis and along
their weights on the tensor axis, and between them activations whole, or split along the sequence where that is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np

from autopar.costing import Costed, Prepared, build
from autopar.costing.operators import HEAVY, Role
from autopar.costing.parameters import BUCKET_BYTES, ParameterChoice
from autopar.costing.setting import Setting
from autopar.errors import InfeasibleError
from autopar.fitting import GATHERED, unlimited
from autopar.graph import ITEM_BYTES, Block, Operator, OpGraph
from autopar.layout import Layout, Shard, State
from autopar.mesh import Mesh
from autopar.options import Parallelism, PlanOptions
from autopar.reshard import is_in_bucket, steps
from autopar.solver import Problem, solve
from cost_models import AxisCost, CollectiveKind, CostModel

LastAxis = Literal["forced", "free", "longest"]
RESIDUAL = ("aten.add.", "layer_norm", "rms_norm", "aten.embedding.")  # operators whose results are the residual stream
IMAGES = ("aten.conv", "aten.max_pool")  # and those that would need their neighbours' rows


@dataclass(frozen=True)
class Degrees:
    """What is forced on the devices of one pipeline rank. ``last_axis`` of the mesh: splits what its degree says; whatever the
    solver takes (``free``); or every parameter along its longest dim and all else as the solver takes it (``longest``)."""

    data: int
    tensor: int
    zero: int
    recompute: str
    sequence_parallel: bool
    last_axis: LastAxis = "forced"


@dataclass(frozen=True)
class Traffic:
    """What a part's parameters send over one mesh axis: the seconds of as many collectives as ``autopar`` would run, one for
    each parameter (all-reduces in buckets), and of one collective for all of them."""

    axis: int
    kind: CollectiveKind
    num_bytes: float
    seconds: float
    flat_seconds: float


@dataclass(frozen=True)
class Part:
    """One part of the model on one device, or several together.

    Seconds of a micro-batch's forward and backward pass (what is computed again counts in the latter): of products and
    attention (heavy), of all other operators (light), of collectives and copies between them (sent); ``product_seconds``:
    of a forward pass's products with weights. ``num_operators`` that launch something in a forward pass; what parameters
    cost on the device itself for every micro-batch and once a step; bytes of parameters as they rest, working copies,
    gradients and states; bytes kept for each micro-batch in flight, and of one micro-batch while it is computed again; bytes
    that the largest operator holds for a moment, and those of the parameters gathered around one; bytes of parameters as
    their readers use them, in the type in which they rest. What parameters send: gathered from where they rest, of these what
    backward reads too, and their gradients.
    """

    forward_heavy_seconds: float = 0.0
    forward_light_seconds: float = 0.0
    forward_sent_seconds: float = 0.0
    backward_heavy_seconds: float = 0.0
    backward_light_seconds: float = 0.0
    backward_sent_seconds: float = 0.0
    product_seconds: float = 0.0
    num_operators: float = 0.0
    each_seconds: float = 0.0
    once_seconds: float = 0.0
    parameter_bytes: float = 0.0
    copy_bytes: float = 0.0
    gradient_bytes: float = 0.0
    state_bytes: float = 0.0
    kept_bytes: float = 0.0
    again_bytes: float = 0.0
    moment_bytes: float = 0.0
    gathered_bytes: float = 0.0
    used_bytes: float = 0.0
    gathers: tuple[Traffic, ...] = ()
    gathers_again: tuple[Traffic, ...] = ()
    reductions: tuple[Traffic, ...] = ()


SENT = ("gathers", "gathers_again", "reductions")
LARGEST = ("moment_bytes", "gathered_bytes")  # amounts of which parts together have the largest
AMOUNTS = tuple(field.name for field in fields(Part) if field.name not in SENT)


@dataclass(frozen=True)
class Laid:
    """A model under forced degrees: its parts (of a model without equal blocks, all of it is the block), the part of parameters
    that both embedding and head have, what collectives cost, and the bytes of a value between two blocks."""

    embedding: Part
    block: Part
    head: Part
    loss: Part
    tied: Part
    axes: tuple[AxisCost, ...]
    boundary_bytes: float


def mesh_of(degrees: Degrees) -> tuple[Mesh, tuple[Role, ...]]:
    """Tensor ranks are neighbours, as in Megatron-LM."""
    sizes: list[tuple[int, Role]] = [(degrees.data, "data"), (degrees.tensor, "tensor")]
    axes = [(size, role) for size, role in sizes if size > 1] or [(1, "data")]
    names = roles = tuple(role for _, role in axes)
    if degrees.last_axis != "forced":
        roles = (*roles[:-1], "free")
    return Mesh(tuple(size for size, _ in axes), names), roles


def laid(
    prepared: Prepared,
    degrees: Degrees,
    cost_model: CostModel,
    optimizer: str = "adamw",
    num_micro_batches: int = 1,
) -> Laid:
    """The short model on the first devices of the cluster. ``num_micro_batches`` weighs what is done for each of them against
    what is done once a step, where the solver has a choice.

    Raises InfeasibleError where the degrees cannot be laid on the model: heads that the tensor ranks do not divide.
    """
    mesh, roles = mesh_of(degrees)
    forced = Parallelism(zero=degrees.zero, recompute=degrees.recompute)
    options = PlanOptions(parallelism=forced, optimizer=optimizer)
    blocks = [block.path for group in prepared.graph.block_groups for block in group.blocks]
    setting = Setting(num_micro_batches, recompute=dict.fromkeys(blocks, degrees.recompute), turn=False)
    costed = build(prepared, mesh, roles, cost_model, options, setting)
    problem = _as_laid_out(costed, degrees)
    choices = unlimited(replace(costed, problem=problem), np.inf, solve).assignment.choices
    if choices is None:
        raise InfeasibleError(
            f"tensor={degrees.tensor} cannot be laid on this model; its heads must be a multiple of it"
        )
    whole = build(prepared, mesh, roles, cost_model, options, replace(setting, recompute={}), costed)
    return _Taken(costed, whole, choices).laid()


def blocks_of(graph: OpGraph) -> Sequence[Block]:
    """The equal blocks that all of the model is made of, besides its ends; none where there are several kinds."""
    return graph.block_groups[0].blocks if len(graph.block_groups) == 1 else ()


def _as_laid_out(costed: Costed, degrees: Degrees) -> Problem:
    """The problem without choices that Megatron-LM does not make on tensor ranks: rows of the batch split, what norms,
    residual sums and embeddings make split along the hidden dim, and, unless it is asked for, the sequence split. On an axis
    that is not forced images are not split along their height and width, for which published solvers have no halos, and
    parameters only along their longest dim where that is said."""
    graph, costs = costed.prepared.graph, list(costed.problem.node_costs_seconds)
    made: dict[int, np.ndarray] = {}
    for axis, role in ((axis, role) for axis, role in enumerate(costed.roles) if role in ("tensor", "free")):
        for operator in graph.operators:
            node = costed.nodes[operator.id]
            key = id(costs[node])
            if key not in made:
                dims = _unusual_dims(operator, graph, role, degrees.sequence_parallel)
                longest = _longest_dims(operator, graph) if degrees.last_axis == "longest" and role == "free" else {}
                unusual = [
                    any(_splits(layout[axis], some) for layout, some in zip(strategy.outputs, dims, strict=True))
                    or any(not _splits(strategy.inputs[place][axis], {dim}) for place, dim in longest.items())
                    for strategy in costed.operator_table(operator.id).strategies
                ]
                made[key] = np.where(unusual, np.inf, costs[node])
            costs[node] = made[key]
    return replace(costed.problem, node_costs_seconds=tuple(costs))


def _unusual_dims(operator: Operator, graph: OpGraph, role: Role, sequence_parallel: bool) -> list[set[int]]:
    """Dims of each of an operator's results that are not split on an axis of this role."""
    shapes = [graph.values[value].shape for value in operator.outputs if value]
    if role == "free":
        return [{2, 3} if any(word in operator.target for word in IMAGES) else set() for _ in shapes]
    whole = any(word in operator.target for word in RESIDUAL)
    found = [set(range(len(shape))) if whole else {0, 1} if len(shape) == 3 else {0} for shape in shapes]
    return [
        dims - {1} if sequence_parallel and len(shape) == 3 else dims for dims, shape in zip(found, shapes, strict=True)
    ]


def _longest_dims(operator: Operator, graph: OpGraph) -> dict[int, int]:
    """Places among an operator's inputs of parameters with two dims or more, and the longest dim of each."""
    shapes = {place: graph.values[value].shape for place, value in enumerate(operator.inputs) if value in graph.parameter_of}
    return {place: max(range(len(shape)), key=shape.__getitem__) for place, shape in shapes.items() if len(shape) > 1}


def _splits(state: State, dims: set[int]) -> bool:
    return isinstance(state, Shard) and state.dim in dims


class _Taken:
    """Sums by part of what the solver chose. ``whole``: the same with nothing computed again."""

    def __init__(self, costed: Costed, whole: Costed, choices: Sequence[int]) -> None:
        self.costed, self.whole, self.choices = costed, whole, choices
        self.graph = costed.prepared.graph
        self.count = costed.setting.num_micro_batches
        self.part_of = self._part_of()
        self.names = list(costed.nodes)
        self.readers_of_group: dict[str, str] = {}
        for reader in costed.prepared.groups:
            key = costed.prepared.group_key(reader)
            if key is not None:
                self.readers_of_group.setdefault(key, reader[0])

    def laid(self) -> Laid:
        """A block is as the last one, which follows a block; what differs in the first is the embedding's."""
        blocks = blocks_of(self.graph)
        if not blocks:
            return Laid(Part(), self._part("block0"), Part(), Part(), Part(), tuple(self.costed.conversions.axes), 0.0)
        first, last = self._part("block0"), self._part(f"block{len(blocks) - 1}")
        cut = blocks[-1].operators[-1]
        boundary = self.costed.operator_table(cut).output_bytes[0][self.choices[self.costed.nodes[cut]]]
        shared = [p.value for p in self.graph.parameters if len(self._parts_reading(p.value)) > 1]
        embedding = self._part("embedding")
        different = together([(embedding, 1), (first, 1), (last, -1)])
        different = replace(different, **{name: getattr(embedding, name) for name in LARGEST})
        return Laid(
            different, last, self._part("head"), self._part("loss"), self._parameters(shared),
            tuple(self.costed.conversions.axes), float(boundary),
        )  # fmt: skip

    def _part_of(self) -> dict[str, str]:
        """The part of each operator: of a block, before all blocks, or after them. Without equal blocks, all is one."""
        found: dict[str, str] = {}
        if not blocks_of(self.graph):
            return dict.fromkeys(self.graph.operator_of, "block0")
        for index, block in enumerate(blocks_of(self.graph)):
            found.update(dict.fromkeys(block.operators, f"block{index}"))
        inside, after = frozenset(found), False
        for operator in self.graph.operators:
            after = after or operator.id in inside
            is_loss = after and ("cross_entropy" in operator.target or ".to.dtype" in operator.target)
            found.setdefault(operator.id, "loss" if is_loss else "head" if after else "embedding")
        return found

    def _parts_reading(self, value: str) -> list[str]:
        return list(dict.fromkeys(self.part_of[reader] for reader, _ in self.graph.readers_of.get(value, ())))

    def _home(self, node: int) -> str:
        """The part of an operator, or of the first reader of what is shared."""
        name = self.names[node]
        return self.part_of[self.readers_of_group.get(name, name)]

    def _part(self, part: str) -> Part:
        parameters = [p.value for p in self.graph.parameters if (self._parts_reading(p.value) or ["block0"])[0] == part]
        return together([(self._operators(part), 1), (self._conversions(part), 1), (self._parameters(parameters), 1)])

    def _operators(self, part: str) -> Part:
        seconds = {"light": [0.0, 0.0], "heavy": [0.0, 0.0]}  # forward and both passes
        kept = again = moment = product = 0.0
        launching = 0
        for operator in self.graph.operators:
            if self.part_of[operator.id] != part:
                continue
            node = self.costed.nodes[operator.id]
            choice, table = self.choices[node], self.costed.operator_table(operator.id)
            signature = self.costed.prepared.signatures.get(self.costed.prepared.name(operator.id))
            found = seconds["heavy" if signature is not None and signature.kind in HEAVY else "light"]
            found[0] += float(table.forward_seconds[choice])
            found[1] += float(self.costed.problem.node_costs_seconds[node][choice]) / self.count
            if (
                any(self.graph.values[value].kind == "parameter" for value in operator.inputs)
                and found is seconds["heavy"]
            ):
                product += float(table.forward_seconds[choice])
            kept += _bytes(self.costed.problem.node_memory_bytes[node], choice)
            again += _bytes(self.whole.problem.node_memory_bytes[node], choice)
            moment = max(moment, float(table.transient_bytes[choice]))
            launching += bool(table.seconds[choice] > 0)
        (light, both_light), (heavy, both_heavy) = seconds["light"], seconds["heavy"]
        return Part(
            heavy, light, 0.0, both_heavy - heavy, both_light - light, 0.0, product, launching, kept_bytes=kept,
            again_bytes=again - kept, moment_bytes=moment,
        )  # fmt: skip

    def _conversions(self, part: str) -> Part:
        forward = total = kept = again = 0.0
        edges = zip(self.costed.problem.edges, self.whole.problem.edges, self.costed.edges_forward, strict=True)
        for edge, plain, ahead in edges:
            if self._home(edge.target) != part:
                continue
            pair = self.choices[edge.source], self.choices[edge.target]
            forward += 0.0 if ahead is None else float(ahead[pair])
            total += float(edge.costs_seconds[pair]) / self.count
            kept += _bytes(edge.memory_bytes, *pair)
            again += _bytes(plain.memory_bytes, *pair)
        return Part(
            forward_sent_seconds=forward,
            backward_sent_seconds=total - forward,
            kept_bytes=kept,
            again_bytes=again - kept,
        )

    def _parameters(self, parameters: Iterable[str]) -> Part:
        found = together([(self._parameter(value), 1) for value in parameters])
        gathers, again, reductions = (self._joined(getattr(found, name)) for name in SENT)
        return replace(found, gathers=gathers, gathers_again=again, reductions=reductions)

    def _joined(self, traffic: Sequence[Traffic]) -> tuple[Traffic, ...]:
        """What goes over one axis in one kind of collective, as one entry."""
        found: dict[tuple[int, CollectiveKind], Traffic] = {}
        for one in traffic:
            so_far = found.get((one.axis, one.kind), replace(one, num_bytes=0.0, seconds=0.0))
            num_bytes = so_far.num_bytes + one.num_bytes
            flat = float(self.costed.conversions.axes[one.axis].seconds(one.kind, num_bytes))
            found[one.axis, one.kind] = Traffic(one.axis, one.kind, num_bytes, so_far.seconds + one.seconds, flat)
        return tuple(found.values())

    def _parameter(self, value: str) -> Part:
        table, choice = self.costed.parameter_table(value), self.choices[self.costed.nodes[value]]
        chosen = table.choices[choice]
        gathers, reductions = self._traffic(value, chosen)
        gathering, reducing = (sum(traffic.seconds for traffic in some) for some in (gathers, reductions))
        saved = self.costed.prepared.name(value) in self.costed.prepared.saved
        sent_each = (chosen.zero >= 2) * reducing + (chosen.zero == 3) * gathering * (1 + saved)
        sent_once = (chosen.zero < 2) * reducing + (chosen.zero < 3) * gathering
        once = float(table.once_seconds[choice])
        stored, copy, gradient, states = (float(part) for part in table.parts[:, choice])
        return Part(
            each_seconds=max(0.0, (float(table.seconds[choice]) - once) / self.count - sent_each),
            once_seconds=max(0.0, once - sent_once), parameter_bytes=stored, copy_bytes=copy, gradient_bytes=gradient,
            state_bytes=states, gathered_bytes=GATHERED * float(table.transient_bytes[choice]),
            used_bytes=self._used_bytes(value, chosen), gathers=gathers, gathers_again=gathers if saved else (),
            reductions=reductions,
        )  # fmt: skip

    def _used_bytes(self, value: str, chosen: ParameterChoice) -> float:
        described, master = self.graph.values[value], self.graph.parameter_of[value].master
        elements = self.costed.conversions.local_elements(described.shape, chosen.use)
        return float(elements) * ITEM_BYTES[master or described.dtype]

    def _traffic(self, value: str, chosen: ParameterChoice) -> tuple[tuple[Traffic, ...], tuple[Traffic, ...]]:
        """What one gather of a parameter, and one reduction of its gradient, sends."""
        conversions, described = self.costed.conversions, self.graph.values[value]
        item = ITEM_BYTES[described.dtype]
        wide = ITEM_BYTES[self.graph.parameter_of[value].master or described.dtype]
        gathers: list[Traffic] = []
        reductions: list[Traffic] = []
        current: Layout = chosen.storage
        way = steps(chosen.storage, chosen.use)
        shared = is_in_bucket(chosen.zero, way)  # with others, in a bucket
        for step in way:
            size, axis = conversions.mesh.shape[step.axis], conversions.axes[step.axis]
            elements = float(conversions.local_elements(described.shape, current))
            if step.name == "copy_to" and size > 1:
                reductions.append(_collective(axis, step.axis, "all_reduce", elements * wide, in_bucket=True))
            if step.name == "all_gather" and size > 1:
                gathers.append(_collective(axis, step.axis, "all_gather", elements * item * size, shared))
                reductions.append(_collective(axis, step.axis, "reduce_scatter", elements * wide * size, shared))
            current = (*current[: step.axis], step.target, *current[step.axis + 1 :])
        return tuple(gathers), tuple(reductions)


def _collective(cost: AxisCost, axis: int, kind: CollectiveKind, num_bytes: float, in_bucket: bool) -> Traffic:
    """One collective, or its part of one of a bucket."""
    sent, share = (BUCKET_BYTES, num_bytes / BUCKET_BYTES) if in_bucket else (num_bytes, 1.0)
    seconds = float(cost.seconds(kind, sent)) * share
    return Traffic(axis, kind, num_bytes, seconds, seconds)


def _bytes(memory: np.ndarray | None, *choice: int) -> float:
    return 0.0 if memory is None else float(memory[0][choice])


def together(parts: Iterable[tuple[Part, float]]) -> Part:
    """Parts that many times each; what is held for a moment is that of the largest."""
    some = [(part, times) for part, times in parts]
    amounts = {name: sum(getattr(part, name) * times for part, times in some) for name in AMOUNTS}
    for name in LARGEST:
        amounts[name] = max((getattr(part, name) for part, times in some if times > 0), default=0.0)
    gathers, again, reductions = (
        tuple(_often(one, times) for part, times in some for one in getattr(part, name)) for name in SENT
    )
    return Part(**amounts, gathers=gathers, gathers_again=again, reductions=reductions)


def _often(traffic: Traffic, times: float) -> Traffic:
    amounts = (times * amount for amount in (traffic.num_bytes, traffic.seconds, traffic.flat_seconds))
    return Traffic(traffic.axis, traffic.kind, *amounts)
