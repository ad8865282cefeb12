"""What one forward function does, as a list of statements: operators, changes of layout, fetches, updates, calls of blocks.

Enters: an :class:`~autopar.codegen.arrange.Arrangement` and a place. Leaves: statements that say which copies of which
values they read and make; the text is :mod:`autopar.codegen.function`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.codegen.arrange import STAGE, Arrangement, Call
from autopar.codegen.conversions import Key
from autopar.graph import Buffer, Operator
from autopar.layout import Layout


@dataclass(frozen=True)
class Compute:
    """An operator's call. An output that is no tensor has the key ``("", "")``."""

    operator: Operator
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]


@dataclass(frozen=True)
class Change:
    """A copy of a value in another layout; ``flows``: whether a gradient comes back through it."""

    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    source: Layout
    target: Layout
    flows: bool


@dataclass(frozen=True)
class Fetch:
    """A parameter given a name, because several statements read it."""

    writes: tuple[Key, ...]
    reads: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Update:
    """A buffer's new value."""

    buffer: Buffer
    reads: tuple[Key, ...]
    writes: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Run:
    """A call of one block, or a loop over several. ``writes`` are all results of all of its blocks that are read later."""

    call: Call
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]


Statement = Compute | Change | Fetch | Update | Run


@dataclass(frozen=True)
class FunctionBody:
    """The statements of one forward function, the copies it is given, and those it returns."""

    statements: tuple[Statement, ...]
    inputs: tuple[Key, ...]
    returns: tuple[Key, ...]


def function_body(arrangement: Arrangement, place: int) -> FunctionBody:
    """The forward of a block, or of the stage."""
    maker = _Maker(arrangement, place)
    body = arrangement.bodies[place]
    found = list(maker.stage() if place == STAGE else maker.block())
    if place == STAGE:
        inputs: tuple[Key, ...] = tuple((entry.value, "") for entry in arrangement.graph.inputs)
        found += list(maker.last_updates())
        returns = _stage_returns(arrangement)
        found += list(maker.whole_loss())
    else:
        inputs, returns = tuple(body.inputs), tuple(body.outputs)
    return FunctionBody(
        tuple(_with_sources(arrangement, place, _without_unread(found, returns), returns)), inputs, returns
    )


def _stage_returns(arrangement: Arrangement) -> tuple[Key, ...]:
    """The loss first, then the outputs."""
    graph = arrangement.graph
    found: list[Key] = []
    if graph.loss is not None:
        found.append(loss_key(arrangement))
    found += [(output.value, "") for output in graph.outputs if output.value != graph.loss]
    return tuple(dict.fromkeys(found))


def loss_key(arrangement: Arrangement) -> Key:
    """The copy of the loss that is the same on every device."""
    loss = arrangement.graph.loss
    assert loss is not None, "asked for the loss of a graph that has none"
    return (loss, "@whole") if arrangement.wiring.program_read(loss).converts else (loss, "")


class _Maker:
    def __init__(self, arrangement: Arrangement, place: int) -> None:
        self.arrangement = arrangement
        self.wiring = arrangement.wiring
        self.place = place
        self.updates = list(arrangement.bodies[place].updates)
        self.changed: set[Key] = set()

    def block(self) -> Iterator[Statement]:
        for operator in self.arrangement.bodies[self.place].operators:
            yield from self.compute(operator)

    def stage(self) -> Iterator[Statement]:
        for item in self.arrangement.items:
            if isinstance(item, Operator):
                yield from self.compute(item)
            elif isinstance(item, Call):
                yield from self.run(item)
            else:
                yield from self.shared(item)

    def shared(self, key: Key) -> Iterator[Statement]:
        """The conversion for a group, where it is made here and was not yet."""
        if self.arrangement.conversion_place.get(key) == self.place and key not in self.changed:
            self.changed.add(key)
            found = self.wiring.shared[key]
            yield Change(((key[0], ""),), (key,), found.source, found.target, found.has_gradient)

    def compute(self, operator: Operator) -> Iterator[Statement]:
        reads = []
        for index, value in enumerate(operator.inputs):
            read = self.wiring.reads[operator.id, index]
            yield from self.shared(read.key)
            key = read.key
            if read.converts:
                key = (value, f"@{operator.id}.{index}")
                yield Change((read.key,), (key,), read.source, read.target, self.wiring.flows(operator, index))
            reads.append(key)
        writes = tuple((value, "") for value in operator.outputs)
        yield Compute(operator, tuple(reads), writes)
        yield from self.update(set(operator.outputs))

    def run(self, call: Call) -> Iterator[Statement]:
        bodies = [self.arrangement.bodies[block] for block in call.blocks]
        reads = dict.fromkeys(bodies[0].inputs)
        writes = tuple(key for body in bodies for key in body.outputs)
        yield Run(call, tuple(reads), writes)
        yield from self.update({value for value, copy in writes if not copy})

    def update(self, made: set[str]) -> Iterator[Statement]:
        for buffer in [buffer for buffer in self.updates if buffer.updated in made]:
            self.updates.remove(buffer)
            yield from self._update(buffer)

    def last_updates(self) -> Iterator[Statement]:
        """Buffers that get a value which is given, not computed."""
        for buffer in self.updates:
            yield from self._update(buffer)

    def _update(self, buffer: Buffer) -> Iterator[Statement]:
        assert buffer.updated is not None
        read = self.wiring.program_read(buffer.updated)
        key = read.key
        if read.converts:
            key = (buffer.updated, f"@{buffer.value}")
            yield Change((read.key,), (key,), read.source, read.target, False)
        yield Update(buffer, (key,))

    def whole_loss(self) -> Iterator[Statement]:
        loss = self.arrangement.graph.loss
        if loss is not None and self.wiring.program_read(loss).converts:
            read = self.wiring.program_read(loss)
            yield Change(
                (read.key,), (loss_key(self.arrangement),), read.source, read.target, loss in self.wiring.gradient
            )


def _without_unread(found: list[Statement], returns: tuple[Key, ...]) -> list[Statement]:
    """Calls of blocks keep only the results that are read outside the loop."""
    read = set(returns) | {key for statement in found for key in statement.reads}
    kept: list[Statement] = []
    for statement in found:
        if isinstance(statement, Run):
            statement = Run(statement.call, statement.reads, tuple(key for key in statement.writes if key in read))
        kept.append(statement)
    return kept


def _with_sources(
    arrangement: Arrangement, place: int, found: list[Statement], returns: tuple[Key, ...]
) -> Iterator[Statement]:
    """Parameters that several statements read get a name; buffers and constants that are wanted cut are cut once."""
    wiring, graph = arrangement.wiring, arrangement.graph
    own = {value: graph.values[value].kind for value in arrangement.bodies[place].sources}
    times = Counter(key[0] for statement in found for key in statement.reads if not key[1] and key[0] in own)
    times.update(value for value, copy in returns if value in own)
    loops = [statement for statement in found if isinstance(statement, Run) and len(statement.call.blocks) > 1]
    times.update(key[0] for statement in loops for key in statement.reads if key[0] in own)  # not once per round
    named = {value for value, count in times.items() if own[value] == "parameter" and count > 1}
    cut = {value for value in times if own[value] != "parameter" and wiring.layout(value) != wiring.whole}
    for statement in found:
        for key in statement.reads:
            if key[1] or key[0] not in own:
                continue
            if key[0] in named:
                named.remove(key[0])
                yield Fetch((key,))
            elif key[0] in cut:
                cut.remove(key[0])
                yield Change(((key[0], "@rest"),), (key,), wiring.whole, wiring.layout(key[0]), False)
        yield statement
    yield from (Fetch(((value, ""),)) for value in sorted(named))
