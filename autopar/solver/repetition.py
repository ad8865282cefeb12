"""Repeated blocks: which nodes of a Problem occur again with the same tables in the same places.

What enters is a network and its Repeats, what leaves a `Structure`: the blocks, each an interior (eliminated once per
*pattern*) and its ports (the nodes outside that the interior touches), and the rest. The instances of a Repeat chain
through a *frontier*, the positions that neighbours read: a block between frontiers s and t with hubs h (a mask, a
rotary table: nodes outside that every instance reads) is one table B(s, t, h), and L of them in a row are

    B^L(s, t, h) = min over the frontiers between of B(s, s_1, h) + B(s_1, s_2, h) + ...

computed by `elimination.compile_program` as a min-plus power. An instance whose surroundings differ (the first, the
last) has a pattern of its own; it is not an error. What is promised by Repeat and untrue is: see `verify`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import InputError
from autopar.solver.network import IntArray, Network
from autopar.solver.problem import Problem


@dataclass(frozen=True)
class Pattern:
    """What a block looks like: tables between local nodes, first the interior's positions, then the ports."""

    num_interior: int
    roles: tuple[int, ...]
    unary: tuple[tuple[int, int], ...]
    edges: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Block:
    """One occurrence of a pattern (its number) at these nodes."""

    pattern: int
    interior: tuple[int, ...]
    ports: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Structure:
    """A network as blocks and a rest. `roles[node]` is the same for nodes at one position of a Repeat.

    `rest_nodes` and `rest_edges` (indices into the network's edges) are in no block; `chains` has, per Repeat, the
    frontier nodes of each instance in order.
    """

    network: Network
    roles: tuple[int, ...]
    patterns: tuple[Pattern, ...]
    blocks: tuple[Block, ...]
    rest_nodes: tuple[int, ...]
    rest_edges: tuple[int, ...]
    chains: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, eq=False)
class _Repeats:
    """Where each node is in the repeats, -1 where in none, and the edges, as arrays. ``instance`` counts over all repeats."""

    number: IntArray
    instance: IntArray
    position: IntArray
    ends: IntArray  # (source, target, table) of each edge
    first: tuple[int, ...]  # of each repeat its first instance's number
    unary: tuple[tuple[int, ...], ...]  # the tables of each node

    @classmethod
    def of(cls, problem: Problem, network: Network) -> _Repeats:
        number, instance, position = (np.full(len(network.sizes), -1, dtype=np.int64) for _ in range(3))
        first, count = [], 0
        for index, repeat in enumerate(problem.repeats):
            nodes = np.array(repeat.instances, dtype=np.int64)
            first.append(count)
            number[nodes] = index
            instance[nodes] = count + np.arange(nodes.shape[0])[:, None]
            position[nodes] = np.arange(nodes.shape[1])
            count += nodes.shape[0]
        unary: list[list[int]] = [[] for _ in network.sizes]
        for node, table in network.unary:
            unary[node].append(table)
        ends = np.array(network.edges, dtype=np.int64).reshape(-1, 3).T
        return cls(number, instance, position, ends, tuple(first), tuple(map(tuple, unary)))

    @property
    def inner(self) -> IntArray:
        """(instance, positions of source and target, table) of the edges inside instances, in that order."""
        source, target, table = self.ends
        inside = (self.instance[source] >= 0) & (self.instance[source] == self.instance[target])
        found = np.stack([self.instance[source], self.position[source], self.position[target], table])[:, inside]
        ordered: IntArray = found[:, np.lexsort(found[::-1])]
        return ordered


def verify(problem: Problem, repeats: _Repeats) -> None:
    """Raise InputError, naming the nodes, where instances of a Repeat differ in tables or in inner edges."""
    inner = repeats.inner
    kinds: dict[tuple[int, ...], int] = {}
    kind = np.array([kinds.setdefault(tables, len(kinds)) for tables in repeats.unary], dtype=np.int64)
    for start, repeat in zip(repeats.first, problem.repeats):
        nodes = np.array(repeat.instances, dtype=np.int64)
        for index, place in np.argwhere(kind[nodes] != kind[nodes[:1]]):
            raise InputError(
                f"{problem.name(int(nodes[index, place]))} is said to repeat {problem.name(int(nodes[0, place]))}, but their"
                " costs or memory differ; correct the arrays or leave the instance out of the Repeat"
            )
        begins = np.searchsorted(inner[0], start + np.arange(len(nodes) + 1))
        expected = inner[1:, begins[0] : begins[1]]
        for index, instance in enumerate(repeat.instances[1:], start=1):
            found = inner[1:, begins[index] : begins[index + 1]]
            if not np.array_equal(found, expected):
                wanted, given = ([tuple(edge) for edge in edges.T.tolist()] for edges in (expected, found))
                odd = next(iter(sorted(set(given) ^ set(wanted)) or given))
                names = [f"{problem.name(i[odd[0]])} -> {problem.name(i[odd[1]])}" for i in (repeat.instances[0], instance)]
                raise InputError(
                    f"the instance that has {names[1]} is said to repeat the one that has {names[0]}, but only one"
                    " has such an edge with these costs; correct the edges or leave the instance out of the Repeat"
                )


def plain_structure(problem: Problem, network: Network) -> Structure:
    """Everything in the rest; nodes at one position of a Repeat still share their role."""
    roles = list(range(len(network.sizes)))
    for repeat in problem.repeats:
        for instance in repeat.instances:
            for node, first in zip(instance, repeat.instances[0]):
                roles[node] = first
    nodes, edges = tuple(range(len(network.sizes))), tuple(range(len(network.edges)))
    return Structure(network, tuple(roles), (), (), nodes, edges, ())


def without_blocks(structure: Structure) -> Structure:
    """The same network and roles, everything in the rest."""
    network = structure.network
    nodes, edges = tuple(range(len(network.sizes))), tuple(range(len(network.edges)))
    return Structure(network, structure.roles, (), (), nodes, edges, ())


def structure_of(problem: Problem, network: Network) -> Structure:
    """Split the network into blocks and a rest, after `verify`."""
    repeats = _Repeats.of(problem, network)
    verify(problem, repeats)
    plain = plain_structure(problem, network)
    frontiers = _frontiers(problem, network, repeats)
    owner = _owners(problem, repeats, frontiers)
    source, target = owner[repeats.ends[0]], owner[repeats.ends[1]]
    home = np.where(source >= 0, source, target)
    by_home = np.argsort(home, kind="stable")
    begins = np.searchsorted(home[by_home], np.arange(int(repeats.instance.max(initial=-1)) + 2))
    numbers: dict[Pattern, int] = {}
    blocks = []
    for number, repeat in enumerate(problem.repeats):
        positions = [p for p in range(len(repeat.instances[0])) if p not in frontiers[number]]
        for index, instance in enumerate(repeat.instances, start=repeats.first[number]):
            if not positions or owner[instance[positions[0]]] < 0:
                continue
            interior = tuple(instance[position] for position in positions)
            touching = [network.edges[edge] for edge in by_home[begins[index] : begins[index + 1]].tolist()]
            pattern, ports = _pattern(interior, touching, plain.roles, repeats.unary)
            blocks.append(Block(numbers.setdefault(pattern, len(numbers)), interior, ports))
    chains = tuple(
        tuple(tuple(instance[position] for position in sorted(frontiers[number])) for instance in repeat.instances)
        for number, repeat in enumerate(problem.repeats)
        if frontiers[number]
    )
    rest = tuple(np.flatnonzero(owner < 0).tolist())
    rest_edges = tuple(np.flatnonzero(home < 0).tolist())
    return Structure(network, plain.roles, tuple(numbers), tuple(blocks), rest, rest_edges, chains)


def _owners(problem: Problem, repeats: _Repeats, frontiers: list[set[int]]) -> IntArray:
    """The instance in whose interior each node is, -1 for none: instances whose interiors touch, or one alone, have none."""
    owner = repeats.instance.copy()
    alone = []
    for number, (repeat, start) in enumerate(zip(problem.repeats, repeats.first)):
        of_repeat = repeats.number == number
        owner[of_repeat & np.isin(repeats.position, list(frontiers[number]))] = -1
        if len(repeat.instances) == 1:
            alone.append(start)
    source, target = owner[repeats.ends[0]], owner[repeats.ends[1]]
    touching = (source >= 0) & (target >= 0) & (source != target)
    none = np.isin(owner, np.concatenate([source[touching], target[touching], np.array(alone, dtype=np.int64)]))
    found: IntArray = np.where(none, -1, owner)
    return found


def _frontiers(problem: Problem, network: Network, repeats: _Repeats) -> list[set[int]]:
    """Per Repeat the positions that join its instances: of the readers and the read, the side with fewer states."""
    source, target, _ = repeats.ends
    joins = (repeats.number[source] >= 0) & (repeats.number[source] == repeats.number[target])
    joins &= repeats.instance[source] != repeats.instance[target]
    source, target = source[joins], target[joins]
    ahead = repeats.instance[source] < repeats.instance[target]
    earlier, later = np.where(ahead, source, target), np.where(ahead, target, source)
    result = []
    for number, repeat in enumerate(problem.repeats):
        of_repeat = repeats.number[earlier] == number
        sides = [set(np.unique(repeats.position[side[of_repeat]]).tolist()) for side in (earlier, later)]
        states = [math.prod(network.sizes[repeat.instances[0][p]] for p in side) for side in sides]
        result.append(sides[0] if states[0] <= states[1] else sides[1])
    return result


def _pattern(
    interior: tuple[int, ...],
    edges: list[tuple[int, int, int]],
    roles: tuple[int, ...],
    unary: Sequence[Sequence[int]],
) -> tuple[Pattern, tuple[int, ...]]:
    """The pattern of a block and its ports, numbered as they are met in an order that all instances share."""
    local = {node: position for position, node in enumerate(interior)}
    outside = len(interior)
    ordered = sorted(edges, key=lambda edge: (local.get(edge[0], outside), local.get(edge[1], outside), edge[2]))
    for source, target, _ in ordered:
        for node in (source, target):
            local.setdefault(node, len(local))
    nodes = tuple(local)
    pattern = Pattern(
        outside,
        tuple(roles[node] for node in nodes),
        tuple((position, table) for position, node in enumerate(interior) for table in unary[node]),
        tuple((local[source], local[target], table) for source, target, table in ordered),
    )
    return pattern, nodes[outside:]
