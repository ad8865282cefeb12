"""Local search on an assignment that fits: exchange one or two choices at a time.

    dc_i(a), dm_i(a) = change of cost and of memory when node i alone takes choice a          `_Moves`
    best pair: min dc_i(a) + dc_j(b) with dm_i(a) + dm_j(b) <= room left, i and j apart       `_best_pair`

A splice leaves a little room under the budget; a pair of exchanges, one that frees bytes and one that spends them,
fills it. With several memory rows only single exchanges are tried.
"""

from __future__ import annotations

import numpy as np

from autopar.solver.network import IntArray, Network
from autopar.solver.problem import FloatArray

# Pairs are looked for among the best partner of each move; that many candidates are verified exactly.
_CANDIDATES = 24


class _Moves:
    """Changes of all single exchanges around a current assignment, kept up to date."""

    def __init__(self, network: Network, choices: IntArray) -> None:
        self.network = network
        self.choices: IntArray = choices.copy()
        self.near: list[list[tuple[int, int, bool]]] = [[] for _ in network.sizes]
        for source, target, table in network.edges:
            self.near[source].append((target, table, False))
            self.near[target].append((source, table, True))
        self.unary: list[list[int]] = [[] for _ in network.sizes]
        for node, table in network.unary:
            self.unary[node].append(table)
        self.starts = np.concatenate([[0], np.cumsum(network.sizes)])
        self.nodes = np.repeat(np.arange(len(network.sizes)), network.sizes)
        self.known: dict[tuple[object, ...], FloatArray] = {}
        self.changes = np.concatenate([self._changes(node) for node in range(len(network.sizes))], axis=1)

    def _changes(self, node: int) -> FloatArray:
        """(1 + rows, choices) of one node, given its neighbours. The same in like blocks that choose alike."""
        near = tuple((table, reverse, int(self.choices[other])) for other, table, reverse in self.near[node])
        key = (int(self.choices[node]), tuple(self.unary[node]), near)
        if key not in self.known:
            self.known[key] = self._found(node)
        return self.known[key]

    def _found(self, node: int) -> FloatArray:
        tables = self.network.tables
        total = np.zeros((1 + self.network.num_rows, self.network.sizes[node]))
        for table in self.unary[node]:
            total[0] += tables[table].costs_seconds
            memory = tables[table].memory_bytes
            if memory is not None:
                total[1:] += memory
        for other, table, reverse in self.near[node]:
            taken = int(self.choices[other])
            costs, memory = tables[table].costs_seconds, tables[table].memory_bytes
            total[0] += costs[taken] if reverse else costs[:, taken]
            if memory is not None:
                total[1:] += memory[:, taken] if reverse else memory[:, :, taken]
        return total - total[:, self.choices[node]][:, None]

    def apply(self, move: int) -> None:
        """Make an exchange and refresh the moves around it."""
        node = int(self.nodes[move])
        self.choices[node] = move - self.starts[node]
        for other in sorted({node, *(other for other, _, _ in self.near[node])}):
            self.changes[:, self.starts[other] : self.starts[other + 1]] = self._changes(other)


def polish(network: Network, choices: IntArray, budgets_bytes: FloatArray, most_steps: int) -> IntArray:
    """An assignment that fits and costs at most what `choices` (which must fit) does."""
    moves = _Moves(network, choices)
    totals = network.totals(choices)
    for _ in range(most_steps):
        room = budgets_bytes - totals[1:]
        step = _best_single(moves.changes, room)
        if step is None and network.num_rows == 1:
            step = _best_pair(moves, totals, budgets_bytes)
        if step is None:
            break
        before: IntArray = moves.choices.copy()
        for move in step:
            moves.apply(move)
        after = network.totals(moves.choices)
        if not after[0] < totals[0] - 1e-12 * abs(totals[0]) or (after[1:] > budgets_bytes).any():
            return before
        totals = after
    return moves.choices


def _best_single(changes: FloatArray, room: FloatArray) -> tuple[int, ...] | None:
    costs = np.where((changes[1:] <= room[:, None]).all(axis=0), changes[0], np.inf)
    best = int(np.argmin(costs))
    return (best,) if costs[best] < 0.0 else None


def _best_pair(moves: _Moves, totals: FloatArray, budgets_bytes: FloatArray) -> tuple[int, ...] | None:
    """For each move the cheapest partner that fits: a prefix minimum over moves in order of bytes."""
    costs, used = moves.changes[0], moves.changes[1]
    room = float(budgets_bytes[0] - totals[1])
    order = np.argsort(used, kind="stable")
    ordered = costs[order]
    least = np.minimum.accumulate(ordered)
    at = np.maximum.accumulate(np.where(ordered == least, np.arange(order.size), 0))
    fitting = np.searchsorted(used[order], room - used, side="right") - 1
    partner = order[at[np.maximum(fitting, 0)]]
    gain = np.where(fitting >= 0, costs + costs[partner], np.inf)
    for first in np.argsort(gain, kind="stable")[:_CANDIDATES].tolist():
        second = int(partner[first])
        if not gain[first] < 0.0:
            return None
        nodes = int(moves.nodes[first]), int(moves.nodes[second])
        if nodes[0] == nodes[1]:
            continue
        tried = moves.choices.copy()
        for move, node in zip((first, second), nodes):
            tried[node] = move - moves.starts[node]
        after = moves.network.totals(tried)
        if after[0] < totals[0] - 1e-12 * abs(totals[0]) and (after[1:] <= budgets_bytes).all():
            return first, second
    return None
