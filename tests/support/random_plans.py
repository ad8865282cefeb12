"""Plans drawn at random from all that the rules allow: far from good, but every one must compute what the model does."""

from __future__ import annotations

import random
from collections.abc import Sequence

from autopar.costing import Prepared, prepare
from autopar.graph import Operator, OpGraph
from autopar.layout import PARTIAL, REPLICATED, SUMMED_GRADIENT, Cut, Layout, Shard, without_gradient
from autopar.mesh import Mesh
from autopar.plans import OperatorPlan, ParameterPlan, Plan, Resolved, StagePlan
from autopar.strategies.choices import Strategy, axis_choices, strategies


def random_plan(graph: OpGraph, mesh: Mesh, seed: int) -> Plan:
    """Random strategies, variants of blocks (up to two a group), layouts of inputs and parameters, ZeRO levels."""
    for attempt in range(100):
        stage = _Draw(graph, mesh, random.Random(f"{seed}/{attempt}")).stage()
        if stage is not None:
            return Plan(graph.model, mesh.num_devices, graph.fingerprint, "random", {}, (stage,), batch_size=graph.batch_size)
    raise AssertionError("no plan drawn: the members of a sharing group found no common layout")


class _Draw:
    def __init__(self, graph: OpGraph, mesh: Mesh, draw: random.Random) -> None:
        self.graph, self.mesh, self.draw = graph, mesh, draw
        self.prepared: Prepared = prepare(graph)
        self.whole: Layout = (REPLICATED,) * mesh.num_axes
        variants = {}
        for group in graph.block_groups:
            numbers: dict[int, int] = {}
            drawn = [draw.randrange(2) for _ in group.blocks]
            variants[group.name] = tuple(numbers.setdefault(number, len(numbers)) for number in drawn)
        self.variants = variants
        self.resolved = Resolved(StagePlan(mesh, {}, {}, {}, {}, variants), graph)
        self.shared: dict[str, Layout] = {}

    def stage(self) -> StagePlan | None:
        alike: dict[str, list[Operator]] = {}
        for operator in self.graph.operators:
            alike.setdefault(self.resolved.representative_operator(operator.id), []).append(operator)
        self.operators: dict[str, OperatorPlan] = {}
        for name, operators in alike.items():
            chosen = self.strategy(operators)
            if chosen is None:
                return None
            inputs = chosen.inputs if operators[0].inputs else ()
            made = iter(chosen.outputs if any(operators[0].outputs) else ())
            outputs = tuple(next(made) if value else self.whole for value in operators[0].outputs)
            self.operators[name] = OperatorPlan(chosen.label, inputs, outputs)
        parameters = {
            parameter.value: self.parameter(parameter.value)
            for parameter in self.graph.parameters
            if self.resolved.representative_value(parameter.value) == parameter.value
        }
        sources = {entry.value: self.whole for entry in (*self.graph.buffers, *self.graph.constants)}
        for entry in self.graph.inputs:
            sources[entry.value] = self.draw.choice(self.wanted(entry.value, (PARTIAL, SUMMED_GRADIENT)))
        return StagePlan(self.mesh, self.operators, parameters, sources, self.shared, self.variants)

    def strategy(self, operators: list[Operator]) -> Strategy | None:
        """A random strategy under which the operator, in all blocks alike, fits the groups that it is in."""
        operator = operators[0]
        name = self.prepared.name(operator.id)
        flows = (
            [self.prepared.flows(operator, index) for index in range(len(operator.inputs))],
            [value in self.prepared.gradient for value in operator.outputs if value],
        )
        signature, cuts = self.prepared.signatures.get(name), self.prepared.cuts.get(name)
        choices = axis_choices(signature, cuts, flows, self.mesh.num_devices)
        keys = [(self.group(op, index), index) for op in operators for index in range(len(op.inputs))]
        fitting = [
            strategy
            for strategy in strategies([choices] * self.mesh.num_axes, self.mesh.shape)
            if all(self.shared.get(key, strategy.inputs[index]) == strategy.inputs[index] for key, index in keys if key)
        ]
        if not fitting:
            return None
        chosen = self.draw.choice(fitting)
        self.shared.update((key, chosen.inputs[index]) for key, index in keys if key)
        return chosen

    def group(self, operator: Operator, index: int) -> str | None:
        value = operator.inputs[index]
        group = self.prepared.groups.get((operator.id, index))
        if group is None or self.graph.values[value].kind in ("buffer", "constant"):
            return None
        return f"{self.resolved.representative_value(value)}{group}"

    def wanted(self, value: str, without: Sequence[object]) -> list[Layout]:
        """The layouts that a value's readers want, and the replicated one."""
        readers = self.graph.readers_of.get(value, ())
        found = [self.operators[self.resolved.representative_operator(name)].inputs[index] for name, index in readers]
        return [layout for layout in found if not any(state in without for state in layout)] + [self.whole]

    def parameter(self, value: str) -> ParameterPlan:
        use = self.draw.choice(self.wanted(value, (PARTIAL,)))
        if value not in self.prepared.gradient:
            use = without_gradient(use)
        resting = tuple(REPLICATED if state == SUMMED_GRADIENT else state for state in use)
        shape = self.graph.values[value].shape
        summed = [axis for axis, state in enumerate(use) if state == SUMMED_GRADIENT]
        taken = {state.dim for state in use if isinstance(state, Shard)}
        free = [dim for dim, size in enumerate(shape) if dim not in taken and size >= self.mesh.num_devices]
        if not summed or not free or self.draw.random() < 0.3:
            return ParameterPlan(use, resting)
        shard = Shard(free[0], Cut.plain(shape[free[0]]))
        storage = tuple(shard if axis in summed else state for axis, state in enumerate(resting))
        return ParameterPlan(use, storage, self.draw.choice((1, 2, 3)))
