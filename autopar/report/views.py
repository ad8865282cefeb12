"""What the report reads of each stage: its graph, plan, prices and choices, by the stage's own names.

Enters: the plan, the model's graph, what the search found. Leaves: one :class:`View` a stage. Stages that are alike are
solved once, in the names of one of them; a view translates, so that nothing after it has to know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.codegen.conversions import Wiring
from autopar.codegen.stages import Part, rank_of_stage
from autopar.costing.candidate import Candidate
from autopar.costing.kept import KeptBytes
from autopar.costing.operators import OperatorTable
from autopar.costing.parameters import ParameterTable
from autopar.costing.problem import Costed
from autopar.graph import OpGraph
from autopar.mesh import Mesh
from autopar.plans import Plan, Resolved, StagePlan
from autopar.search.joint import Found
from autopar.strategies.rule import Signature
from cost_models import StageTimes


@dataclass(frozen=True, eq=False)
class View:
    """One stage. ``like`` is the first stage that was solved with it; ``names`` leads from its own ids to the costed ones."""

    index: int
    rank: int
    first_device: int
    like: int
    wiring: Wiring
    candidate: Candidate
    times: StageTimes
    names: Mapping[str, str]

    @property
    def resolved(self) -> Resolved:
        return self.wiring.resolved

    @property
    def plan(self) -> StagePlan:
        return self.resolved.stage

    @property
    def graph(self) -> OpGraph:
        return self.resolved.graph

    @property
    def mesh(self) -> Mesh:
        return self.plan.mesh

    @property
    def costed(self) -> Costed:
        return self.candidate.costed

    @property
    def num_micro_batches(self) -> int:
        return self.costed.setting.num_micro_batches

    @cached_property
    def choices(self) -> tuple[int, ...]:
        """The solver's choices."""
        assert self.candidate.assignment.choices is not None, "only a plan that was found is explained"
        return self.candidate.assignment.choices

    def node(self, item: str) -> int:
        """The node of an operator or parameter."""
        return self.costed.nodes[self.names.get(item, item)]

    def choice(self, item: str) -> int:
        return self.choices[self.node(item)]

    def canonical(self, operator: str) -> str:
        """The operator that stands for it in prices."""
        return self.costed.prepared.name(self.names.get(operator, operator))

    def seconds(self, item: str) -> float:
        """What a node costs in a step."""
        return float(self.costed.problem.node_costs_seconds[self.node(item)][self.choice(item)])

    def kept_bytes(self, item: str) -> float:
        """What a node keeps, of all micro-batches in flight."""
        memory = self.costed.problem.node_memory_bytes[self.node(item)]
        return 0.0 if memory is None else float(memory[0, self.choice(item)])

    def operator_table(self, operator: str) -> OperatorTable:
        return self.costed.operator_table(self.names.get(operator, operator))

    def parameter_table(self, value: str) -> ParameterTable:
        return self.costed.parameter_table(self.names.get(value, value))

    def signature(self, operator: str) -> Signature | None:
        """The rule of an operator; None where it has none."""
        return self.costed.prepared.signatures.get(self.canonical(operator))

    def has_gradient(self, value: str) -> bool:
        return self.names.get(value, value) in self.costed.prepared.gradient

    @cached_property
    def keeping(self) -> KeptBytes:
        """Which operators are computed again, and what is kept of each; by the costed names."""
        return KeptBytes(self.costed.prepared, self.costed.setting)

    @cached_property
    def incoming_seconds(self) -> list[float]:
        """Seconds of the conversions into each node of the problem, in a step."""
        problem = self.costed.problem
        found = [0.0] * problem.num_nodes
        for edge in problem.edges:
            found[edge.target] += float(edge.costs_seconds[self.choices[edge.source], self.choices[edge.target]])
        return found


def views(plan: Plan, parts: Sequence[Part], found: Found) -> tuple[View, ...]:
    """The stages of the best plan."""
    best = found.best
    assert best is not None, "only a plan that was found is explained"
    size = plan.stages[0].mesh.num_devices
    first: dict[tuple[int, int], int] = {}
    made = []
    for part, solved in zip(parts, best.stages, strict=True):
        candidate, index = solved.candidate, part.number
        rank = rank_of_stage(plan, index)
        begin = plan.rank_order[rank * size] if plan.rank_order else rank * size
        like = first.setdefault((id(candidate.costed), id(candidate.assignment)), index)
        names = _names(part.graph, candidate.costed.prepared.graph)
        made.append(View(index, rank, begin, like, part.wiring, candidate, solved.times, names))
    return tuple(made)


def _names(graph: OpGraph, costed: OpGraph) -> dict[str, str]:
    """From a stage's ids to those of the stage that it was solved with."""
    names: dict[str, str] = {}
    for ours, theirs in zip(graph.operators, costed.operators, strict=True):
        names[ours.id] = theirs.id
        names.update(zip((*ours.inputs, *ours.outputs), (*theirs.inputs, *theirs.outputs), strict=True))
    return names
