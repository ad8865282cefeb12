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
from dataclasses import dataclass

from autopar.errors import InputError
from autopar.solver.network import Network
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


def verify(problem: Problem, network: Network) -> None:
    """Raise InputError, naming the nodes, where instances of a Repeat differ in tables or in inner edges."""
    unary: dict[int, list[int]] = {}
    for node, table in network.unary:
        unary.setdefault(node, []).append(table)
    place = _places(problem)
    inner: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for source, target, table in network.edges:
        at, to = place.get(source), place.get(target)
        if at and to and at[:2] == to[:2]:
            inner.setdefault(at[:2], []).append((at[2], to[2], table))
    for number, repeat in enumerate(problem.repeats):
        first = repeat.instances[0]
        expected = sorted(inner.get((number, 0), []))
        for index, instance in enumerate(repeat.instances[1:], start=1):
            for node, other in zip(first, instance):
                if unary[node] != unary[other]:
                    raise InputError(
                        f"{problem.name(other)} is said to repeat {problem.name(node)}, but their costs or memory"
                        " differ; correct the arrays or leave the instance out of the Repeat"
                    )
            found = sorted(inner.get((number, index), []))
            if found != expected:
                odd = next(iter(sorted(set(found) ^ set(expected)) or found))
                names = [f"{problem.name(i[odd[0]])} -> {problem.name(i[odd[1]])}" for i in (first, instance)]
                raise InputError(
                    f"the instance that has {names[1]} is said to repeat the one that has {names[0]}, but only one"
                    " has such an edge with these costs; correct the edges or leave the instance out of the Repeat"
                )


def _places(problem: Problem) -> dict[int, tuple[int, int, int]]:
    """node -> (repeat, instance, position)."""
    return {
        node: (number, index, position)
        for number, repeat in enumerate(problem.repeats)
        for index, instance in enumerate(repeat.instances)
        for position, node in enumerate(instance)
    }


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
    verify(problem, network)
    plain = plain_structure(problem, network)
    place = _places(problem)
    frontiers = _frontiers(problem, network, place)
    owner = {node: at[:2] for node, at in place.items() if at[2] not in frontiers[at[0]]}
    single = {(number, 0) for number, repeat in enumerate(problem.repeats) if len(repeat.instances) == 1}
    conflicts = single | {
        home
        for source, target, _ in network.edges
        if source in owner and target in owner and owner[source] != owner[target]
        for home in (owner[source], owner[target])
    }
    owner = {node: home for node, home in owner.items() if home not in conflicts}
    touching: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    rest_edges = []
    for index, edge in enumerate(network.edges):
        home = owner.get(edge[0], owner.get(edge[1]))
        if home is None:
            rest_edges.append(index)
        else:
            touching.setdefault(home, []).append(edge)
    numbers: dict[Pattern, int] = {}
    blocks = []
    unary: dict[int, list[int]] = {}
    for node, table in network.unary:
        unary.setdefault(node, []).append(table)
    for number, repeat in enumerate(problem.repeats):
        positions = [p for p in range(len(repeat.instances[0])) if p not in frontiers[number]]
        for index, instance in enumerate(repeat.instances):
            if (number, index) in conflicts or not positions:
                continue
            interior = tuple(instance[position] for position in positions)
            pattern, ports = _pattern(interior, touching.get((number, index), []), plain.roles, unary)
            blocks.append(Block(numbers.setdefault(pattern, len(numbers)), interior, ports))
    rest = tuple(node for node in range(len(network.sizes)) if node not in owner)
    chains = tuple(
        tuple(tuple(instance[position] for position in sorted(frontiers[number])) for instance in repeat.instances)
        for number, repeat in enumerate(problem.repeats)
        if frontiers[number]
    )
    return Structure(network, plain.roles, tuple(numbers), tuple(blocks), rest, tuple(rest_edges), chains)


def _frontiers(problem: Problem, network: Network, place: dict[int, tuple[int, int, int]]) -> list[set[int]]:
    """Per Repeat the positions that join its instances: of the readers and the read, the side with fewer states."""
    earlier: list[set[int]] = [set() for _ in problem.repeats]
    later: list[set[int]] = [set() for _ in problem.repeats]
    for source, target, _ in network.edges:
        at, to = place.get(source), place.get(target)
        if at is None or to is None or at[0] != to[0] or at[1] == to[1]:
            continue
        first, second = sorted((at, to))
        earlier[at[0]].add(first[2])
        later[at[0]].add(second[2])
    result = []
    for repeat, left, right in zip(problem.repeats, earlier, later):
        states = [math.prod(network.sizes[repeat.instances[0][p]] for p in side) for side in (left, right)]
        result.append(left if states[0] <= states[1] else right)
    return result


def _pattern(
    interior: tuple[int, ...],
    edges: list[tuple[int, int, int]],
    roles: tuple[int, ...],
    unary: dict[int, list[int]],
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
