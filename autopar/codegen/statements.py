"""What one forward function does, as a list of statements: operators, changes of layout, fetches, updates, calls of blocks.

Enters: an :class:`~autopar.codegen.arrange.Arrangement` and a place. Leaves: statements that say which copies of which
values they read and make; the text is :mod:`autopar.codegen.function`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.codegen.arrange import Arrangement, Call
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


@dataclass(frozen=True)
class FunctionBody:
    """The statements of one function, the copies it is given, and those it returns."""

    statements: tuple[Statement, ...]
    inputs: tuple[Key, ...]
    returns: tuple[Key, ...]


@dataclass(frozen=True)
class Again:
    """Statements that backward computes again: a method of their own, which is given ``reads`` and returns ``writes``."""

    body: FunctionBody
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]


Statement = Compute | Change | Fetch | Update | Run | Again


class StatementMaker:
    """Makes the statements of one place in order."""

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

    def handed_on(self) -> Iterator[Statement]:
        """The loss made whole, and what the next stage gets in the layout in which it is sent."""
        loss = self.arrangement.graph.loss
        reads = [(self.wiring.program_read(loss), loss_key(self.arrangement))] if loss is not None else []
        reads += [(self.wiring.sent_read(value), sent_key(self.arrangement, value)) for value in self.arrangement.graph.sent]
        for read, key in reads:
            if read.converts:
                yield Change((read.key,), (key,), read.source, read.target, key[0] in self.wiring.gradient)


def loss_key(arrangement: Arrangement) -> Key:
    """The copy of the loss that is the same on every device."""
    loss = arrangement.graph.loss
    assert loss is not None, "asked for the loss of a graph that has none"
    return (loss, "@whole") if arrangement.wiring.program_read(loss).converts else (loss, "")


def sent_key(arrangement: Arrangement, value: str) -> Key:
    """The copy of a value that the next stage gets."""
    return (value, "@sent") if arrangement.wiring.sent_read(value).converts else (value, "")
