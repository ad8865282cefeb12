"""Which tensors a stage keeps between forward and backward, recomputation considered.

Enters: a :class:`Prepared` graph and a :class:`Setting`. Leaves: for every operator and edge a *role*, a small value that
says what of it is kept, so that like operators share their arrays.

A *run* is a set of operators that are computed again in backward together: a whole block under ``full``, the runs of
``recompute.runs`` under ``selective``. A tensor is kept for each micro-batch in flight when an operator outside of any run
saves it, or when it enters a run. What is saved inside a run is held for one micro-batch and one run at a time; the run
that holds most is charged with it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.costing.conversions import ConversionPrices, FloatArray
from autopar.costing.operators import OperatorTable
from autopar.costing.prepare import Prepared
from autopar.costing.setting import Setting
from autopar.graph import Block, Operator
from autopar.recompute import runs

Run = tuple[str, int]  # a block's path, and which of its runs

NEVER, ONCE, ALWAYS = 0, 1, 2  # not kept; held for one micro-batch at a time; kept for each micro-batch in flight


@dataclass(frozen=True)
class OperatorRole:
    """``again``: computed twice. ``outputs``: how long each tensor result is kept; ``extra``: how long the statistics are."""

    again: bool
    outputs: tuple[int, ...]
    extra: int


@dataclass(frozen=True)
class EdgeRole:
    """``again``: the conversion is done twice. ``kept``: how long what it makes is kept where its reader saves it; with
    ``enters`` it is kept whether the reader saves it or not, if it communicates."""

    again: bool
    kept: int
    in_flight: int
    enters: bool = False

    def bytes_of(self, saves: bool, prices: ConversionPrices) -> FloatArray | None:
        """Bytes kept, by pair of layouts."""
        if self.enters:
            return np.where(prices.forward_seconds > 0, prices.made_bytes, 0.0) * self.in_flight
        factor = (0, 1, self.in_flight)[self.kept]
        return prices.made_bytes * factor if saves and factor else None


class KeptBytes:
    """Answers for one stage in one setting."""

    def __init__(self, prepared: Prepared, setting: Setting) -> None:
        self.prepared, self.setting = prepared, setting
        self.run_of: dict[str, Run] = {}
        self._roles: dict[str, OperatorRole] = {}
        self._modes: dict[str, str] = {}
        for group in prepared.graph.block_groups:
            for block in group.blocks:
                mode = setting.recompute.get(block.path, "none")
                self._modes[block.path] = mode
                members: Sequence[Sequence[str]] = (block.operators,) if mode == "full" else ()
                if mode == "selective":
                    members = [names for names in runs(prepared.graph, block) if self._keeps(names)]
                for index, names in enumerate(members):
                    self.run_of.update(dict.fromkeys(names, (block.path, index)))

    def _keeps(self, names: Sequence[str]) -> bool:
        """Whether autograd would keep something that a run makes; else nothing is gained by computing it again."""
        made: set[str] = set()
        kept: set[str] = set()
        for name in names:
            operator = self.prepared.graph.operator_of[name]
            outputs = [value for value in operator.outputs if value]
            made.update(map(self._storage, outputs))
            if self.prepared.gradient.isdisjoint(outputs):
                continue
            signature = self.prepared.signatures.get(self.prepared.name(name))
            if signature is None or signature.saved_extra_bytes:
                return True
            kept.update(self._storage(operator.inputs[index]) for index in signature.saved_inputs)
            kept.update(self._storage(outputs[index]) for index in signature.saved_outputs)
        return not made.isdisjoint(kept)

    def is_full(self, run: Run) -> bool:
        """Whether a run is a whole block."""
        return self._modes[run[0]] == "full"

    def kind(self, block: Block) -> Hashable:
        """Blocks of one kind cost and keep the same."""
        if not self.run_of:
            return None
        return self._modes[block.path], tuple(self.role(operator) for operator in block.operators)

    def role(self, operator: str) -> OperatorRole:
        """What is kept of an operator's results."""
        operator = self.twins.get(operator, operator)
        if operator not in self._roles:
            self._roles[operator] = self._role(operator)
        return self._roles[operator]

    def _role(self, operator: str) -> OperatorRole:
        described = self.prepared.graph.operator_of[operator]
        run = self.run_of.get(operator)
        outputs = [value for value in described.outputs if value]
        inside = ALWAYS if run is None else ONCE if run == self._largest else NEVER
        found = []
        for value in outputs:
            if self._storage(value) != value:
                found.append(NEVER)
            elif (value in self._kept) if self.run_of else (self.prepared.name(value) in self.prepared.saved):
                found.append(ALWAYS)
            else:
                found.append(inside if inside != ALWAYS and self.prepared.name(value) in self.prepared.saved else NEVER)
        return OperatorRole(run is not None, tuple(found), inside)

    def edge(self, value: str, target: str) -> EdgeRole:
        """What is kept of a value's conversion for an operator, or for a sharing group."""
        in_flight = self.setting.in_flight
        run = self.run_of.get(target) or self._run_of_group(value, target)
        if run is None:
            return EdgeRole(False, ALWAYS, in_flight)
        if not self.is_full(run):  # a run is split where something is sent: that is done once, and kept
            return EdgeRole(False, NEVER, in_flight, enters=True)
        inside = run == self._run_of_value(value)
        return EdgeRole(True, ONCE if inside and run == self._largest else NEVER, in_flight)

    @cached_property
    def twins(self) -> Mapping[str, str]:
        """Operators of which, and of whose inputs, the same is kept as of another, which stands for them. Both are in blocks
        between others of their group, and each of the three recomputes alike."""
        first: dict[Hashable, Block] = {}
        found: dict[str, str] = {}
        for path, between in self.prepared.between.items():
            mode = self._modes[path]
            if {self._modes[between.before.path], self._modes[between.behind.path]} != {mode} or path == self._turn:
                continue
            block = first.setdefault((between.group, mode, between.flows), between.block)
            if block is not between.block:
                found.update(zip(between.block.operators, block.operators, strict=True))
        return found

    def operator_bytes(self, operator: Operator, role: OperatorRole, table: OperatorTable) -> FloatArray:
        """Bytes by choice that an operator's results and statistics add to what is kept."""
        factors = (0, 1, self.setting.in_flight)
        differentiated = any(value in self.prepared.gradient for value in operator.outputs)
        total = table.extra_bytes * factors[role.extra] if differentiated else np.zeros(len(table.strategies))
        for num_bytes, kept in zip(table.output_bytes, role.outputs, strict=True):
            if kept:
                total = total + num_bytes * factors[kept]
        return total

    def _storage(self, value: str) -> str:
        return self.prepared.graph.values[value].storage or value

    def _run_of_value(self, value: str) -> Run | None:
        producer = self.prepared.graph.producer_of.get(value)
        return self.run_of.get(producer.id) if producer else None

    def _run_of_group(self, value: str, key: str) -> Run | None:
        """The run of a sharing group: that of its readers where they are in one."""
        if key in self.prepared.graph.operator_of:
            return None
        readers = self._readers_by_group.get(key, ())
        found = {self.run_of.get(reader) for reader in readers}
        return found.pop() if len(found) == 1 else None

    @cached_property
    def _readers_by_group(self) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {}
        for reader in self.prepared.groups:
            key = self.prepared.group_key(reader)
            if key is not None:
                found.setdefault(key, []).append(reader[0])
        return found

    @cached_property
    def _kept(self) -> frozenset[str]:
        """Storages that are kept for each micro-batch in flight."""
        graph, prepared = self.prepared.graph, self.prepared
        kept = {self._storage(value) for value in graph.sent}
        for operator in graph.operators:
            run = self.run_of.get(operator.id)
            differentiated = any(value in prepared.gradient for value in operator.outputs)
            signature = prepared.signatures.get(prepared.name(operator.id))
            outputs = [value for value in operator.outputs if value]
            for index, value in enumerate(operator.inputs):
                storage = self._storage(value)
                if run is not None:
                    if self._run_of_value(storage) != run:
                        kept.add(storage)
                elif differentiated and (signature is None or index in signature.saved_inputs):
                    kept.add(storage)
            if run is None and differentiated:
                results = range(len(outputs)) if signature is None else signature.saved_outputs
                kept.update(self._storage(outputs[index]) for index in results)
        return frozenset(kept)

    @property
    def _turn(self) -> str:
        """The path of the block in which the largest run is."""
        return self._largest[0] if self._largest else ""

    @cached_property
    def _largest(self) -> Run | None:
        """The run whose results are most bytes on one device; of equal ones the first."""
        if not self.setting.turn:
            return None
        sizes: dict[Run, int] = {}
        for operator, run in self.run_of.items():
            values = [self.prepared.graph.values[v] for v in self.prepared.graph.operator_of[operator].outputs if v]
            sizes[run] = sizes.get(run, 0) + sum(value.num_bytes for value in values)
        return max(sizes, key=lambda run: sizes[run], default=None)
