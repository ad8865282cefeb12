"""Elimination within bounds of work and storage: exact where it fits, else a lower bound and a good assignment.

    a variable v in too large a table: a copy v_p in each place p that reads it, costs theta_p(v_p)   `within_limits`
    sum_p theta_p = 0, so that the minimum with free copies is a lower bound for every theta          `Oracle.minimise`
    the copies vote on v; with v fixed elimination is exact, which gives an assignment                `Oracle.minimise`
    theta moves towards agreement of the copies' min-marginals, kept where the bound rises            `Oracle.tighten`

Hubs (a mask, rotary tables, an encoder's output) are the usual case: each would be a dim of every table of a block.
In a model whose blocks do alike their copies agree, and the bound is then the optimum.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from autopar.solver.elimination import Copies, Program, compile_program
from autopar.solver.factors import OP_OVERHEAD
from autopar.solver.network import IntArray
from autopar.solver.problem import FloatArray
from autopar.solver.repetition import Structure, without_blocks

# About 0.1 s of additions and comparisons per evaluation, more where there are many ops, and 512 MB of tables.
_MOST_WORK, _MOST_WORK_PER_OP = 100_000_000, 500_000
_MOST_ENTRIES = 1 << 26
_TIGHTENINGS = 2
_MOST_FIXED_PROGRAMS = 8
_NEAR = 1e-4  # of the bound: an assignment that is so near to it needs no second ballot


def _too_large(program: Program) -> bool:
    ops = program.recorder.ops
    entries = sum(op.num_entries for op in ops)
    return program.work > max(_MOST_WORK, _MOST_WORK_PER_OP * len(ops)) or entries > _MOST_ENTRIES


def within_limits(structure: Structure, domains: dict[int, IntArray]) -> Program:
    """An exact program if it is small enough, else one with as few variables split as a greedy choice finds."""
    blocks, edges = frozenset[int](), frozenset[int]()
    degrees = _degrees(structure)
    while True:
        program = compile_program(structure, domains, blocks, edges)
        if not _too_large(program):
            return program
        chosen = _to_split(program, degrees, edges)
        if not chosen:
            if not structure.blocks:
                return program
            structure, blocks, edges = without_blocks(structure), frozenset(), frozenset()
            degrees = _degrees(structure)
            continue
        in_blocks = {port for block in structure.blocks for port in block.ports}
        first = frozenset(node for node in chosen if node in in_blocks and node not in blocks)
        blocks, edges = blocks | first, edges | (chosen - first)


def _degrees(structure: Structure) -> Counter[int]:
    """In how many places each node outside the blocks is read."""
    degrees = Counter(port for block in structure.blocks for port in block.ports)
    for index in structure.rest_edges:
        degrees.update(structure.network.edges[index][:2])
    return degrees


def _to_split(program: Program, degrees: Counter[int], done: frozenset[int]) -> frozenset[int]:
    """Of the largest tables the variable that is read in most places."""
    ops = program.recorder.ops
    variables = program.variables_of_ops()
    largest = sorted(variables, key=lambda op: (-ops[op].work, op))
    chosen = set[int]()
    for op in largest[: 1 + len(largest) // 64]:
        candidates = [node for node in variables[op] if degrees[node] > 1 and node not in done]
        if candidates:
            chosen.add(max(candidates, key=lambda node: (degrees[node], program.domain(node).size, -node)))
    return frozenset(chosen)


def _ops(program: Program) -> int:
    return 1 + program.work // OP_OVERHEAD


class Oracle:
    """Minimises a structure under weights; remembers programs and the shares of copies between calls."""

    def __init__(
        self, structure: Structure, domains: dict[int, IntArray], program: Program | None = None
    ) -> None:
        """``program``: what :func:`within_limits` gives, where it is known."""
        self.domains = domains
        self.program = within_limits(structure, domains) if program is None else program
        self.structure = self.program.structure
        self.shares: dict[int, FloatArray] = {}
        self.fixed: dict[tuple[tuple[int, int], ...], Program] = {}
        self.num_ops = 0
        self.agreed = True  # whether the copies did when something was last minimised

    @property
    def ops_per_evaluation(self) -> int:
        """Work of one evaluation, in elimination ops of ordinary size."""
        return _ops(self.program)

    def _evaluate(self, program: Program, weights: FloatArray) -> list[FloatArray]:
        self.num_ops += _ops(program)
        return program.evaluate(weights, self.shares if program is self.program else None)

    def _marginals(self, values: list[FloatArray]) -> tuple[dict[int, FloatArray], dict[int, FloatArray]]:
        self.num_ops += 3 * _ops(self.program)
        return self.program.marginals(values)

    def minimise(self, weights: FloatArray) -> tuple[float, IntArray | None]:
        """A lower bound (the minimum itself if nothing is split) and an assignment; (infinity, None) if there is none."""
        bound, found = self._attempt(weights)
        return bound, None if found is None else found[1]

    def _attempt(self, weights: FloatArray) -> tuple[float, tuple[float, IntArray] | None]:
        """The bound with the present shares, and the best assignment by vote with its value."""
        values = self._evaluate(self.program, weights)
        bound = self.program.value(values)
        if not np.isfinite(bound):
            return bound, None
        decoded = self.program.decode(values)
        self.agreed = all(len(set(votes)) == 1 for votes in decoded.votes.values())
        if self.agreed:
            return bound, (bound, decoded.choices)
        best: tuple[float, IntArray] | None = None
        for votes in _ballots(decoded.votes):
            found = self._with_fixed(votes, weights)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
            if best is not None and best[0] - bound <= _NEAR * abs(bound):
                break
        return bound, best

    def _with_fixed(self, votes: tuple[tuple[int, int], ...], weights: FloatArray) -> tuple[float, IntArray] | None:
        """The minimum with some nodes fixed to choices."""
        program = self.fixed.get(votes)
        if program is None:
            roles = self.structure.roles
            only = {roles[node]: np.array([choice], dtype=np.int64) for node, choice in votes}
            program = within_limits(self.structure, {**self.domains, **only})
            if len(self.fixed) >= _MOST_FIXED_PROGRAMS:
                self.fixed.pop(next(iter(self.fixed)))
            self.fixed[votes] = program
        values = self._evaluate(program, weights)
        value = program.value(values)
        return (value, program.decode(values).choices) if np.isfinite(value) else None

    def marginals(self, weights: FloatArray) -> dict[int, FloatArray]:
        """Per role a lower bound of the total with each choice that is left."""
        roles, copies = self._marginals(self._evaluate(self.program, weights))
        for entry in self.program.copies:
            role = self.structure.roles[entry.variable]
            if entry.base in copies and role in roles:
                roles[role] = np.maximum(roles[role], copies[entry.base])
        return roles

    def tighten(self, weights: FloatArray, steps: int = _TIGHTENINGS) -> None:
        """Move the shares of the copies, as long as that raises the bound under these weights."""
        values = self._evaluate(self.program, weights)
        bound = self.program.value(values)
        step = 1.0
        for _ in range(steps):
            if not np.isfinite(bound):
                return
            _, marginals = self._marginals(values)
            before = self.shares
            self.shares = _moved(self.program.copies, marginals, before, step)
            values = self._evaluate(self.program, weights)
            raised = self.program.value(values)
            if raised <= bound + 1e-9 * abs(bound):
                if raised < bound:
                    self.shares = before
                if step < 0.3:
                    return
                values, step = self._evaluate(self.program, weights), step / 2
            bound = max(bound, raised)


def _ballots(votes: dict[int, list[int]]) -> list[tuple[tuple[int, int], ...]]:
    """What most copies choose, and what the variable itself (the first vote) does."""
    popular = tuple((node, Counter(cast).most_common(1)[0][0]) for node, cast in sorted(votes.items()))
    own = tuple((node, cast[0]) for node, cast in sorted(votes.items()))
    return [popular] if own == popular else [popular, own]


def _moved(
    copies: tuple[Copies, ...], marginals: dict[int, FloatArray], shares: dict[int, FloatArray], step: float
) -> dict[int, FloatArray]:
    """Shares moved towards equal regret of the copies of each variable; they still sum to zero."""
    moved = dict(shares)
    for variable in sorted({entry.variable for entry in copies}):
        own = [entry for entry in copies if entry.variable == variable]
        regrets = [marginals[entry.base] - marginals[entry.base].min() for entry in own]
        finite = np.isfinite(regrets).all(axis=0)
        count = sum(entry.count for entry in own)
        mean = (
            np.sum([entry.count * np.where(finite, regret, 0.0) for entry, regret in zip(own, regrets)], axis=0) / count
        )
        for entry, regret in zip(own, regrets):
            change = np.where(finite, mean - np.where(finite, regret, 0.0), 0.0)
            moved[entry.base] = shares.get(entry.base, np.zeros(change.size)) + step * change
    return moved
