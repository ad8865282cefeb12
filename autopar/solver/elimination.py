"""Bucket (min-plus variable) elimination: exact, and fast where the graph is nearly a tree.

    V(y) = min_x [ sum of the tables that contain x ]            `_Graph.eliminate`, order `_Graph.greedy`
    x*   = argmin_x [...] at the y* found before                 `Program.decode`
    min-marginal of x = a: least total of all with x = a         `Program.marginals`

A block (see `repetition`) is eliminated once per pattern onto its ports and the result is put in place of each
occurrence. The chain of frontiers is then eliminated either from its ends (a vector through L matrices) or by halves
(a min-plus power, by repeated squaring: equal ops are computed once), whichever is less work.

Where a table would be too large, variables are *split*: each place that reads such a variable gets its own copy,
whose costs sum to the variable's. The result is then a lower bound, and the copies' choices show where it is loose.
References: Dechter, Bucket elimination (1999) and mini-buckets; PaSE (2020) for the use on strategies of operators.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.factors import Recorder, backward, best_choice, forward
from autopar.solver.network import IntArray, Table
from autopar.solver.problem import FloatArray
from autopar.solver.repetition import Pattern, Structure

Domains = Mapping[int, IntArray]


@dataclass(frozen=True)
class Step:
    """Variable `variable` was eliminated by op `op`, which also reads the variables `scope`."""

    variable: int
    op: int
    scope: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Template:
    """A pattern after elimination: what is left over its ports, and how its interior follows from them."""

    num_interior: int
    steps: tuple[Step, ...]
    factors: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Copies:
    """`count` places of split variable `variable` whose own costs are base table `base`."""

    variable: int
    base: int
    count: int


@dataclass(eq=False)
class _Graph:
    """Tables over variables, while variables are eliminated."""

    recorder: Recorder
    sizes: dict[int, int]
    factors: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    of_variable: dict[int, dict[int, None]] = field(default_factory=dict)
    scalars: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    added: int = 0

    def add(self, table: int, scope: tuple[int, ...]) -> None:
        if not scope:
            self.scalars.append(table)
            return
        self.factors[self.added] = (table, scope)
        for variable in scope:
            self.of_variable.setdefault(variable, {})[self.added] = None
        self.added += 1

    def place(self, table: int, scope: tuple[int, ...]) -> None:
        """Add a table that lacks the dims of variables with one choice."""
        self.add(table, tuple(variable for variable in scope if self.sizes[variable] > 1))

    def neighbours(self, variable: int) -> set[int]:
        found = {other for number in self.of_variable.get(variable, ()) for other in self.factors[number][1]}
        found.discard(variable)
        return found

    def eliminate(self, variable: int) -> None:
        numbers = sorted(
            self.of_variable.pop(variable),
            key=lambda number: (self.factors[number][0], self.factors[number][1].index(variable), number),
        )
        local = {variable: 0}
        inputs = []
        for number in numbers:
            table, scope = self.factors.pop(number)
            inputs.append((table, tuple(local.setdefault(other, len(local)) for other in scope)))
            for other in scope:
                if other != variable:
                    del self.of_variable[other][number]
        scope = tuple(local)[1:]
        op = self.recorder.record(tuple(inputs), len(local))
        self.steps.append(Step(variable, op, scope))
        self.add(self.recorder.ops[op].result, scope)

    def greedy(self, variables: Iterable[int]) -> None:
        """Eliminate these, each time the one whose resulting table is smallest (ties: the lowest number)."""
        waiting = set(variables)

        def entries(variable: int) -> int:
            return math.prod(self.sizes[other] for other in self.neighbours(variable))

        known = {variable: entries(variable) for variable in waiting}
        heap = [(size, variable) for variable, size in known.items()]
        heapq.heapify(heap)
        while heap:
            size, variable = heapq.heappop(heap)
            if variable not in waiting or known[variable] != size:
                continue
            waiting.discard(variable)
            near = self.neighbours(variable)
            self.eliminate(variable)
            for other in sorted(near & waiting):
                size = entries(other)
                if size != known[other]:
                    known[other] = size
                    heapq.heappush(heap, (size, other))

    def copy(self) -> _Graph:
        of_variable = {variable: dict(numbers) for variable, numbers in self.of_variable.items()}
        return _Graph(
            self.recorder.copy(),
            self.sizes,
            dict(self.factors),
            of_variable,
            list(self.scalars),
            list(self.steps),
            self.added,
        )


@dataclass(frozen=True, eq=False)
class Decoded:
    """Choices per node (original indices). `votes[v]`: what each place of a split variable v would choose."""

    choices: IntArray
    votes: dict[int, list[int]]


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled elimination of one Structure with given domains; evaluate it under many weights."""

    structure: Structure
    domains: Domains
    recorder: Recorder
    templates: tuple[_Template, ...]
    placed: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    steps: tuple[Step, ...]
    scalars: tuple[int, ...]
    copies: tuple[Copies, ...]
    origins: dict[int, int]
    unary: dict[int, int]
    first: IntArray

    @property
    def work(self) -> int:
        """Numbers touched in one evaluation."""
        return sum(op.work for op in self.recorder.ops)

    def domain(self, node: int) -> IntArray:
        """The choices of a node that are left, as indices into the problem's."""
        return self.domains[self.structure.roles[node]]

    def variables_of_ops(self) -> dict[int, tuple[int, ...]]:
        """Per op the nodes outside blocks that it reads, copies left out."""
        num_nodes = len(self.structure.network.sizes)
        result: dict[int, tuple[int, ...]] = {}
        for step in self.steps:
            result.setdefault(step.op, tuple(v for v in (step.variable, *step.scope) if v < num_nodes))
        met = set[int]()
        for number, interior, ports in self.placed:
            if number in met:
                continue
            met.add(number)
            own = {step.variable for step in self.templates[number].steps}
            for step in self.templates[number].steps:
                result.setdefault(step.op, tuple(ports[v - len(interior)] for v in step.scope if v not in own))
        return result

    def evaluate(self, weights: FloatArray, shares: Mapping[int, FloatArray] | None = None) -> list[FloatArray]:
        """All tables under the weights; `shares` are the costs of copies, by base number (zero if left out)."""
        return forward(self.recorder, weights, dict(shares or {}))

    def value(self, values: list[FloatArray]) -> float:
        """The minimum (exact, or with split variables a lower bound); infinite if nothing is allowed."""
        return float(sum(float(values[number]) for number in self.scalars))

    def decode(self, values: list[FloatArray]) -> Decoded:
        """The choices that attain `value`."""
        ops = self.recorder.ops
        chosen: dict[int, int] = {}
        choices = self.first.copy()
        votes: dict[int, list[int]] = {}
        for step in reversed(self.steps):
            others = tuple(chosen[other] for other in step.scope)
            chosen[step.variable] = best_choice(ops[step.op], values, others)
        for variable, index in chosen.items():
            origin = self.origins.get(variable, variable)
            original = int(self.domain(origin)[index])
            if variable == origin:
                choices[variable] = original
            if any(copies.variable == origin for copies in self.copies):
                votes.setdefault(origin, []).append(original)
        self._decode_blocks(values, chosen, choices, votes)
        return Decoded(choices, votes)

    def _decode_blocks(
        self, values: list[FloatArray], chosen: dict[int, int], choices: IntArray, votes: dict[int, list[int]]
    ) -> None:
        known: dict[tuple[int, tuple[int, ...]], tuple[IntArray, tuple[tuple[int, int], ...]]] = {}
        for number, interior, ports in self.placed:
            template = self.templates[number]
            key = number, tuple(chosen.get(port, 0) for port in ports)
            if key not in known:
                local = {len(interior) + position: value for position, value in enumerate(key[1])}
                for step in reversed(template.steps):
                    others = tuple(local[other] for other in step.scope)
                    local[step.variable] = best_choice(self.recorder.ops[step.op], values, others)
                inner = [int(self.domain(node)[local.get(position, 0)]) for position, node in enumerate(interior)]
                split = [(position, port) for position, port in enumerate(ports) if self._is_split(port)]
                ballots = tuple((p, int(self.domain(port)[local[len(interior) + p]])) for p, port in split)
                known[key] = np.array(inner, dtype=np.int64), ballots
            inner_choices, ballots = known[key]
            choices[list(interior)] = inner_choices
            for position, vote in ballots:
                votes.setdefault(ports[position], []).append(vote)

    def _is_split(self, variable: int) -> bool:
        return any(copies.variable == variable for copies in self.copies)

    def marginals(self, values: list[FloatArray]) -> tuple[dict[int, FloatArray], dict[int, FloatArray]]:
        """Least `value` with each choice that is left: per role (over all its nodes), and per base of `copies`."""
        bases = backward(self.recorder, values, self.scalars)
        roles = {role: bases[number] for role, number in self.unary.items() if number in bases}
        return roles, {copies.base: bases[copies.base] for copies in self.copies if copies.base in bases}


class _Compiler:
    """One use: turns a structure into a Program."""

    def __init__(
        self, structure: Structure, domains: Domains, split_blocks: frozenset[int], split_edges: frozenset[int]
    ) -> None:
        self.structure, self.domains = structure, domains
        self.split_blocks, self.split_edges = split_blocks, split_edges
        self.recorder = Recorder()
        numbers: dict[bytes, int] = {}
        self.marks = {role: numbers.setdefault(domain.tobytes(), len(numbers)) for role, domain in domains.items()}
        self.unary: dict[int, int] = {}
        self.copies: dict[tuple[int, int], int] = {}
        self.origins: dict[int, int] = {}

    def base(self, table: int, roles: tuple[int, ...]) -> int:
        """The base table restricted to the domains of these roles, without dims of one choice.

        A table of a single node is kept per role, so that min-marginals can be read per role.
        """
        key = (table, roles) if len(roles) == 1 else (table, -1, *(self.marks[role] for role in roles))
        number = self.recorder.known_base(key)
        if number is None:
            restricted = self.structure.network.tables[table].restricted(tuple(self.domains[role] for role in roles))
            number = self.recorder.base(key, restricted.squeezed())
        if len(roles) == 1:
            self.unary.setdefault(roles[0], number)
        return number

    def copy(self, variable: int, place: int, size: int) -> int:
        """The base table with the own costs of a copy of a split variable at one kind of place."""
        number = self.recorder.base(("copy", variable, place), Table(np.zeros(size), None))
        self.copies[variable, number] = self.copies.get((variable, number), 0) + 1
        return number

    def template(self, pattern: Pattern, split: tuple[tuple[int, int], ...], place: int) -> _Template:
        """A pattern eliminated onto its ports, except those (local, variable) that are split."""
        sizes = {local: self.domains[role].size for local, role in enumerate(pattern.roles)}
        graph = _Graph(self.recorder, sizes)
        for local, table in pattern.unary:
            graph.place(self.base(table, (pattern.roles[local],)), (local,))
        for source, target, table in pattern.edges:
            graph.place(self.base(table, (pattern.roles[source], pattern.roles[target])), (source, target))
        for local, variable in split:
            graph.add(self.copy(variable, place, sizes[local]), (local,))
        inner = (*range(pattern.num_interior), *(local for local, _ in split))
        graph.greedy(local for local in inner if local in graph.of_variable)
        factors = [*graph.factors.values(), *((scalar, ()) for scalar in graph.scalars)]
        return _Template(pattern.num_interior, tuple(graph.steps), tuple(factors))

    def compile(self) -> Program:
        structure = self.structure
        sizes = {node: self.domains[structure.roles[node]].size for node in structure.rest_nodes}
        graph = _Graph(self.recorder, sizes)
        templates: dict[tuple[int, tuple[tuple[int, int], ...]], tuple[int, _Template]] = {}
        placed = []
        self._rest(graph)
        for block in structure.blocks:
            pattern = structure.patterns[block.pattern]
            split = tuple(
                (pattern.num_interior + position, port)
                for position, port in enumerate(block.ports)
                if port in self.split_blocks and graph.sizes[port] > 1
            )
            key = block.pattern, split
            if key not in templates:
                templates[key] = len(templates), self.template(pattern, split, len(templates))
            else:
                for _, variable in split:
                    self.copy(variable, templates[key][0], 0)
            number, template = templates[key]
            for table, scope in template.factors:
                graph.add(table, tuple(block.ports[local - pattern.num_interior] for local in scope))
            placed.append((number, block.interior, block.ports))
        graph = _cheaper(graph, structure)
        copies = tuple(Copies(variable, number, count) for (variable, number), count in self.copies.items())
        return Program(
            structure,
            self.domains,
            graph.recorder,
            tuple(template for _, template in templates.values()),
            tuple(placed),
            tuple(graph.steps),
            tuple(graph.scalars),
            copies,
            self.origins,
            self.unary,
            np.array([self.domains[role][0] for role in structure.roles], dtype=np.int64),
        )

    def _rest(self, graph: _Graph) -> None:
        """Tables outside the blocks; an edge of a variable in `split_edges`, its first one aside, reads a copy."""
        structure = self.structure
        network, roles = structure.network, structure.roles
        rest = set(structure.rest_nodes)
        for node, table in network.unary:
            if node in rest:
                graph.place(self.base(table, (roles[node],)), (node,))
        for node in sorted(self.split_blocks | self.split_edges):
            graph.add(self.copy(node, -1, graph.sizes[node]), (node,))
        met = set[int]()
        for index in structure.rest_edges:
            source, target, table = network.edges[index]
            scope = []
            for node in (source, target):
                variable = node
                if node in self.split_edges and node in met:
                    variable = len(network.sizes) + len(self.origins)
                    self.origins[variable] = node
                    graph.sizes[variable] = graph.sizes[node]
                    graph.add(self.copy(node, variable, graph.sizes[node]), (variable,))
                met.add(node)
                scope.append(variable)
            graph.place(self.base(table, (roles[source], roles[target])), tuple(scope))


def _cheaper(graph: _Graph, structure: Structure) -> _Graph:
    """The rest graph eliminated from its ends or by halves, whichever records less work."""
    ends, halves = graph.copy(), graph.copy()
    ends.greedy(tuple(graph.of_variable))
    order = [node for chain in structure.chains for node in _by_halves(chain) if node in graph.of_variable]
    if not order:
        return ends
    for node in order:
        halves.eliminate(node)
    halves.greedy(tuple(halves.of_variable))
    work = [sum(op.work for op in tried.recorder.ops) for tried in (ends, halves)]
    return ends if work[0] <= work[1] else halves


def _by_halves(chain: tuple[tuple[int, ...], ...]) -> list[int]:
    """Every second inner frontier, then every second of those left, and so on: products of equal matrices pair up."""
    left, order = list(chain[1:-1]), list[int]()
    while left:
        order += [node for frontier in left[::2] for node in frontier]
        left = left[1::2]
    return order


def compile_program(
    structure: Structure,
    domains: Domains,
    split_blocks: frozenset[int] = frozenset(),
    split_edges: frozenset[int] = frozenset(),
) -> Program:
    """Choose an order and record the ops. `domains[role]` are the choices left of each role (none empty).

    `split_blocks` get a copy in each block that reads them, `split_edges` a copy on each edge outside blocks.
    """
    return _Compiler(structure, domains, split_blocks, split_edges).compile()
