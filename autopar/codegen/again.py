"""The parts of a block that backward computes again: runs of its statements become functions of their own.

Enters: the statements of a block under ``selective``, and its runs of operators (``recompute.runs``). Leaves: the statements
with an ``Again`` in place of each run. What communicates in forward is in no run, so that nothing is sent twice: a run is
split there, in front of a change of layout as well as around an operator that exchanges something itself. A run of which
autograd would keep no more than what enters it stays as it is.

What the runs read is kept instead. A parameter that is gathered for its use (ZeRO-3) enters a run as an argument; others,
buffers and constants are read inside.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from autopar.codegen.arrange import Arrangement
from autopar.codegen.conversions import Key
from autopar.codegen.exchanges import exchanged
from autopar.codegen.statements import Again, Change, Compute, Fetch, FunctionBody, Statement
from autopar.graph import ITEM_BYTES, Operator
from autopar.recompute import runs
from autopar.reshard import traffic
from autopar.strategies.registry import signature_of


def with_runs(
    arrangement: Arrangement, place: int, found: Sequence[Statement], returns: Sequence[Key]
) -> list[Statement]:
    """The statements of a place, its runs gathered."""
    if place < 0 or arrangement.modes[place] != "selective":
        return list(found)
    return list(_Gatherer(arrangement, place, found, returns).statements())


class _Gatherer:
    def __init__(
        self, arrangement: Arrangement, place: int, found: Sequence[Statement], returns: Sequence[Key]
    ) -> None:
        self.arrangement, self.place, self.found, self.returns = arrangement, place, found, returns
        self.wiring, self.graph = arrangement.wiring, arrangement.graph
        self.sources = set(arrangement.bodies[place].sources)
        members = enumerate(runs(self.graph, arrangement.blocks[place]))
        self.run_of = {name: index for index, names in members for name in names}
        self.fetched: set[Key] = set()

    def statements(self) -> Iterator[Statement]:
        done = 0
        for tag, group in itertools.groupby(zip(self._tags(), self.found, strict=True), key=lambda pair: pair[0]):
            segment = [statement for _, statement in group]
            done += len(segment)
            later = {key for statement in self.found[done:] for key in statement.reads} | set(self.returns)
            made = segment if tag is None else list(self._gathered(segment, later))
            self.fetched |= {key for statement in made if isinstance(statement, Fetch) for key in statement.writes}
            yield from made

    def _tags(self) -> list[int | None]:
        """The run of each statement. What prepares an operator's inputs without sending goes with the operator."""
        tags: list[int | None] = []
        following: int | None = None
        for statement in reversed(self.found):
            if isinstance(statement, Compute):
                following = None if self._exchanges(statement.operator) else self.run_of.get(statement.operator.id)
            elif not isinstance(statement, Fetch) and not (isinstance(statement, Change) and not self._sends(statement)):
                following = None
            tags.append(following)
        return tags[::-1]

    def _exchanges(self, operator: Operator) -> bool:
        label = self.wiring.resolved.operator(operator.id).label
        term = self.arrangement.terms.get(operator.id)
        found = exchanged(
            signature_of(operator, self.graph), label, self.wiring.resolved.stage.mesh, bool(term and term.kind == "count")
        )
        return any(not backward for _, backward in found)

    def _sends(self, change: Change) -> bool:
        """Whether a change of layout communicates in forward."""
        value = self.graph.values[change.reads[0][0]]
        shape = self.wiring.resolved.stage.mesh.shape
        ahead, _ = traffic(change.source, change.target, value.shape, shape, ITEM_BYTES[value.dtype], False)
        return any(sent.num_bytes for sent in ahead)

    def _gathered(self, segment: list[Statement], later: set[Key]) -> Iterator[Statement]:
        """The segment as one ``Again``, after what must stand before it."""
        before = self._standing_before(segment, later)
        inside = [statement for statement in segment if statement not in before]
        if not self._keeps(inside):
            yield from segment
            return
        before += [Fetch((key,)) for key in self._whole_parameters(inside, before)]
        known = self.fetched | {key for statement in before for key in statement.writes}
        made = dict.fromkeys(key for statement in inside for key in statement.writes if key[0])
        reads = dict.fromkeys(key for statement in inside for key in statement.reads)
        given = tuple(key for key in reads if key not in made and (key in known or key[0] not in self.sources))
        results = tuple(key for key in made if key in later)
        yield from before
        yield Again(FunctionBody(tuple(inside), given, results), given, results)

    def _standing_before(self, segment: Sequence[Statement], later: set[Key]) -> list[Statement]:
        """Parameters and changes of layout that are read after the run too, and parameters gathered for their use."""
        found: list[Statement] = []
        made = {key for statement in segment if isinstance(statement, Compute) for key in statement.writes}
        for statement in segment:
            if isinstance(statement, Fetch):
                gathered = self._is_gathered(statement.writes[0])
                found += [statement] if gathered or statement.writes[0] in later else []
            elif isinstance(statement, Change):
                ready = made.isdisjoint(statement.reads) and all(
                    key not in other.writes or other in found
                    for other in segment
                    if other is not statement
                    for key in statement.reads
                )
                found += [statement] if ready and statement.writes[0] in later else []
        return found

    def _is_gathered(self, key: Key) -> bool:
        return self.graph.values[key[0]].kind == "parameter" and self.wiring.parameter(key[0]).zero == 3

    def _whole_parameters(self, inside: Iterable[Statement], before: Iterable[Statement]) -> list[Key]:
        """Parameters gathered for their use that are read without having a name yet."""
        named = self.fetched | {key for statement in before for key in statement.writes}
        reads = dict.fromkeys(key for statement in inside for key in statement.reads)
        return [k for k in reads if not k[1] and k[0] in self.sources and k not in named and self._is_gathered(k)]

    def _keeps(self, inside: Iterable[Statement]) -> bool:
        """Whether autograd would keep something that is made inside."""
        made: set[str] = set()
        kept: set[str] = set()
        for statement in inside:
            values = [key[0] for key in statement.writes if key[0]]
            if isinstance(statement, Compute):
                made.update(self.graph.values[value].storage or value for value in values)
                if not self.wiring.gradient.isdisjoint(values):
                    rule = signature_of(statement.operator, self.graph)
                    if rule is None or rule.saved_extra_bytes:
                        return True
                    inputs = [statement.operator.inputs[index] for index in rule.saved_inputs]
                    outputs = [values[index] for index in rule.saved_outputs]
                    kept.update(self.graph.values[value].storage or value for value in (*inputs, *outputs))
        return not made.isdisjoint(kept)
