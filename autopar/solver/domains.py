"""Which choices are left of each node, before anything is optimised: arc consistency.

    a stays in D_i while every edge (i, j) offers some pair (a, b) with b in D_j          `consistent_domains`

Domains belong to roles (see `repetition.Structure`), so that the instances of a repeated block stay alike: a choice
is dropped only where all nodes of the role lose it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

import numpy as np

from autopar.solver.network import IntArray, network_of
from autopar.solver.problem import Problem
from autopar.solver.repetition import Structure, plain_structure

_Arc = tuple[int, int, int, bool]


class NothingLeft(Exception):
    """A node has no choice left; the message names it and says why."""


def choices_left(problem: Problem, nodes: Iterable[int]) -> dict[int, IntArray]:
    """Of some nodes the indices of the choices that arc consistency leaves; none where it leaves nothing anywhere."""
    wanted = list(nodes)
    structure = plain_structure(problem, network_of(problem))
    try:
        domains = consistent_domains(problem, structure)
    except NothingLeft:
        return {node: np.zeros(0, dtype=np.int64) for node in wanted}
    return {node: domains[structure.roles[node]] for node in wanted}


def consistent_domains(problem: Problem, structure: Structure) -> dict[int, IntArray]:
    """Per role the indices of the choices that are not absent; NothingLeft where there are none."""
    network, roles = structure.network, structure.roles
    left: dict[int, np.ndarray[tuple[int], np.dtype[np.bool_]]] = {}
    seen: set[tuple[int, int]] = set()
    for node, table in network.unary:
        role = roles[node]
        if (role, table) in seen:
            continue
        seen.add((role, table))
        offered = np.isfinite(network.tables[table].costs_seconds)
        left[role] = offered if role not in left else left[role] & offered
        if not left[role].any():
            raise NothingLeft(f"{problem.name(node)} offers no choice: all its costs are infinite")
    arcs, example = _arcs(structure)
    of_target: dict[int, list[_Arc]] = {}
    for arc in arcs:
        of_target.setdefault(arc[1], []).append(arc)
    queue = deque(arcs)
    waiting = set(arcs)
    while queue:
        arc = queue.popleft()
        waiting.discard(arc)
        role, other, table, flipped = arc
        costs = network.tables[table].costs_seconds
        offered = np.isfinite(costs.T if flipped else costs)
        kept = left[role] & offered[:, left[other]].any(axis=1)
        if not kept.any():
            ends = [problem.name(node) for node in example[arc]]
            raise NothingLeft(
                f"edge {ends[0]} -> {ends[1]} offers no pair of choices that the rest of the graph leaves to its nodes"
            )
        if (kept != left[role]).any():
            left[role] = kept
            for again in of_target.get(role, []):
                if again not in waiting:
                    waiting.add(again)
                    queue.append(again)
    return {role: np.flatnonzero(kept).astype(np.int64) for role, kept in left.items()}


def _arcs(structure: Structure) -> tuple[list[_Arc], dict[_Arc, tuple[int, int]]]:
    """(role, other role, table, flipped) for edges with absent pairs that every node of `role` has."""
    network, roles = structure.network, structure.roles
    partial = {number for number, table in enumerate(network.tables) if np.isinf(table.costs_seconds).any()}
    members = Counter(roles)
    ends: dict[_Arc, set[int]] = {}
    example: dict[_Arc, tuple[int, int]] = {}
    for source, target, table in network.edges:
        if table not in partial:
            continue
        for node, other, flipped in ((source, target, False), (target, source, True)):
            arc = roles[node], roles[other], table, flipped
            ends.setdefault(arc, set()).add(node)
            example.setdefault(arc, (source, target))
    return [arc for arc, nodes in ends.items() if len(nodes) == members[arc[0]]], example


def num_choices(structure: Structure, domains: dict[int, IntArray]) -> int:
    """Choices left, over all nodes."""
    return sum(domains[role].size for role in structure.roles)
