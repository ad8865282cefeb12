"""Which operators of a program stand in which block, what goes in and out of each block, and which blocks are alike.

Enters: the :class:`~autopar.codegen.conversions.Wiring` of a graph. Leaves: an :class:`Arrangement`. A *place* is a block's
number, or ``STAGE`` for what stands outside all blocks. Blocks of one *kind* become one class of the program: their
operators, plans, parameters and the layouts of all that enters and leaves agree.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autopar.codegen.conversions import Key, Wiring
from autopar.graph import Block, Buffer, Operator, Ref
from autopar.micro_batches import Term

STAGE = -1


@dataclass
class Body:
    """What one place holds: operators in order, group conversions by their first reader, what enters and leaves.

    ``sources`` are the parameters, buffers and constants that belong here; ``updates`` the buffers that get new values here.
    """

    operators: list[Operator] = field(default_factory=list)
    inputs: dict[Key, None] = field(default_factory=dict)
    outputs: dict[Key, None] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)
    updates: list[Buffer] = field(default_factory=list)


@dataclass(frozen=True)
class Call:
    """Consecutive blocks of one kind, called in a loop when there are several.

    ``chain`` says of each input whether it is an output of the block before (which one), or the same for all (None).
    ``again``: backward computes all of each block again.
    """

    blocks: tuple[int, ...]
    chain: tuple[int | None, ...]
    again: bool = False


Item = Operator | Key | Call  # in the stage: an operator, a group conversion, or blocks


class Arrangement:
    """The places of a program, or of one stage of it. ``bodies`` by place; ``kind_of`` a block's kind, numbered by first
    appearance; ``modes`` what backward computes again of each block (``recompute.MODES``). ``terms``: see ``Scope``;
    ``apart`` are parameters that are in no block, as another stage has them too.
    """

    def __init__(
        self, wiring: Wiring, terms: Mapping[str, Term] | None = None, apart: Container[str] = ()
    ) -> None:
        self.wiring = wiring
        self.graph = wiring.graph
        self.terms = terms or {}
        self._called: dict[str, Any] = {}
        self.apart = apart
        groups = [(group.name, block) for group in self.graph.block_groups for block in group.blocks]
        order, dissolved = _schedule(wiring, [block for _, block in groups])
        kept = [pair for index, pair in enumerate(groups) if index not in dissolved]
        self.blocks: list[Block] = [block for _, block in kept]
        self.groups: list[str] = [name for name, _ in kept]
        chosen = wiring.resolved.stage.recompute
        modes = {
            block.path: mode
            for group in self.graph.block_groups
            for block, mode in zip(group.blocks, chosen.get(group.name, ("none",) * len(group.blocks)), strict=True)
        }
        self.modes: list[str] = [modes[block.path] for block in self.blocks]
        self.place_of = {name: index for index, block in enumerate(self.blocks) for name in block.operators}
        self.bodies = {place: Body() for place in (STAGE, *range(len(self.blocks)))}
        for operator in order:
            self.bodies[self.place(operator.id)].operators.append(operator)
        self.conversion_place = {key: self._place_of_conversion(key) for key in wiring.shared}
        self.source_place = self._place_sources()
        self._place_updates()
        self._connect()
        self.kind_of, self.kinds = self._sort_into_kinds()
        self.items = self._items(order)

    def place(self, operator: str) -> int:
        """Where an operator stands."""
        return self.place_of.get(operator, STAGE)

    def made_at(self, key: Key) -> int:
        """Where a value, or a copy of it, is made."""
        if key in self.conversion_place:
            return self.conversion_place[key]
        producer = self.graph.producer_of.get(key[0])
        return self.place(producer.id) if producer else self.source_place.get(key[0], STAGE)

    def reads(self, place: int) -> Iterable[Key]:
        """What the operators and conversions of a place read, in order; a conversion stands before its first reader."""
        for operator in self.bodies[place].operators:
            for index in range(len(operator.inputs)):
                yield from self._read(place, self.wiring.reads[operator.id, index].key)

    def _read(self, place: int, key: Key) -> Iterable[Key]:
        if self.conversion_place.get(key) == place:
            yield (key[0], "")
        yield key

    def _place_of_conversion(self, key: Key) -> int:
        """In the block that makes the value if a reader is there, in the readers' block if they share one, else outside."""
        places = {self.place(operator) for operator, _ in self.wiring.shared[key].readers}
        producer = self.graph.producer_of.get(key[0])
        home = self.place(producer.id) if producer else STAGE
        if home in places:
            return home
        return places.pop() if len(places) == 1 else STAGE

    def _place_sources(self) -> dict[str, int]:
        """Parameters, buffers and constants: in the block that alone reads them (and has their name), else outside."""
        readers: dict[str, set[int]] = {}
        for place in self.bodies:
            for key in self.reads(place):
                readers.setdefault(key[0], set()).add(place)
        for value, conversion in ((key[0], place) for key, place in self.conversion_place.items()):
            readers.setdefault(value, set()).add(conversion)
        for value in [*(output.value for output in self.graph.outputs), *self.graph.sent]:
            readers.setdefault(value, set()).add(STAGE)
        for buffer in self.graph.buffers:
            if buffer.updated:
                producer = self.graph.producer_of.get(buffer.updated)
                readers.setdefault(buffer.value, set()).add(self.place(producer.id) if producer else STAGE)
        named: list[tuple[str, tuple[str, ...]]] = [(p.value, p.names) for p in self.graph.parameters]
        named += [(b.value, b.names) for b in self.graph.buffers]
        own = {block.path: index for index, block in enumerate(self.blocks)}
        found = {
            value: STAGE if value in self.apart else self._home(readers.get(value, set()), names, own)
            for value, names in named
        }
        for constant in self.graph.constants:
            places = readers.get(constant.value, set())
            found[constant.value] = places.pop() if len(places) == 1 else STAGE
        for value, place in found.items():
            if self.graph.values[value].kind != "constant" or value in readers:
                self.bodies[place].sources.append(value)
        return found

    def _home(self, places: set[int], names: Sequence[str], own: dict[str, int]) -> int:
        paths = [name.split(".") for name in names]
        around = [own.get(".".join(parts[:length])) for parts in paths for length in range(1, len(parts))]
        homes = {place for place in around if place is not None}
        if len(homes) != 1:
            return STAGE
        home = homes.pop()
        return home if places <= {home} else STAGE

    def _place_updates(self) -> None:
        for buffer in self.graph.buffers:
            if buffer.updated is None:
                continue
            self.bodies[self.source_place[buffer.value]].updates.append(buffer)

    def _connect(self) -> None:
        """Note what crosses the borders of blocks."""
        for place, body in self.bodies.items():
            wanted = list(self.reads(place))
            wanted += [(buffer.updated, "") for buffer in body.updates if buffer.updated]
            if place == STAGE:
                wanted += [(output.value, "") for output in self.graph.outputs]
                wanted += [(value, "") for value in self.graph.sent]
                wanted += [(self.graph.loss, "")] if self.graph.loss else []
            for key in wanted:
                home = self.made_at(key)
                if home != place:
                    if place != STAGE:
                        body.inputs.setdefault(key)
                    if home != STAGE:
                        self.bodies[home].outputs.setdefault(key)
        for body in self.bodies.values():
            copies: dict[str, list[Key]] = {}
            for key in sorted(body.outputs):
                copies.setdefault(key[0], []).append(key)
            order = [value for operator in body.operators for value in operator.outputs]
            body.outputs = dict.fromkeys(key for value in order for key in copies.get(value, ()))

    # -- which blocks are alike ------------------------------------------------------------------------------------

    def _sort_into_kinds(self) -> tuple[list[int], list[list[int]]]:
        numbers: dict[Any, int] = {}
        kind_of = []
        kinds: list[list[int]] = []
        for place in range(len(self.blocks)):
            kind = numbers.setdefault(self._description(place), len(numbers))
            kind_of.append(kind)
            if kind == len(kinds):
                kinds.append([])
            kinds[kind].append(place)
        return kind_of, kinds

    def _description(self, place: int) -> Any:
        """All that the text of a block's class depends on, in the block's own terms."""
        body, wiring, resolved = self.bodies[place], self.wiring, self.wiring.resolved
        path = self.blocks[place].path
        words: dict[str, Any] = {key[0]: None for key in body.inputs}
        for index, key in enumerate(body.inputs):
            words[key[0]] = ("input", index) if words[key[0]] is None else words[key[0]]
        words.update((value, ("own", self._own_name(value, path))) for value in body.sources)
        for at, operator in enumerate(body.operators):
            words.update((value, (at, output)) for output, value in enumerate(operator.outputs) if value)
        inputs = tuple((key[1], self._facts(key[0]), self._layout_of(key)) for key in body.inputs)
        called = []
        for operator in body.operators:
            plan = resolved.operator(operator.id)
            read = tuple(
                (wiring.reads[operator.id, index].key[1], words[value], wiring.flows(operator, index))
                for index, value in enumerate(operator.inputs)
            )
            module = operator.module.removeprefix(path)
            arguments = self._arguments(operator)
            results = tuple(self._facts(value) if value else None for value in operator.outputs)
            term = self.terms.get(operator.id)
            called.append((operator.target, arguments, read, plan.inputs, plan.outputs, module, results, term))
        outputs = tuple((words[key[0]], key[1]) for key in body.outputs)
        updates = tuple((self._own_name(b.value, path), words.get(b.updated or "")) for b in body.updates)
        sources = tuple(self._describe_source(value, path) for value in body.sources)
        methods = self.modes[place] == "selective"
        return (self.groups[place], inputs, tuple(called), outputs, updates, sources, methods)

    def _arguments(self, operator: Operator) -> Any:
        """How an operator is called, tensors left out: the same in like blocks."""
        name = self.graph.canonical.get(operator.id, operator.id)
        if name not in self._called:
            self._called[name] = _blank((operator.args, operator.kwargs))
        return self._called[name]

    def _facts(self, value: str) -> tuple[Any, ...]:
        described = self.graph.values[value]
        return (described.shape, described.dtype, described.requires_grad, value in self.wiring.gradient)

    def _layout_of(self, key: Key) -> Any:
        return self.wiring.shared[key].target if key in self.wiring.shared else self.wiring.layout(key[0])

    def _own_name(self, value: str, path: str) -> str:
        names = self.names_of.get(value, ())
        return next((name.removeprefix(path) for name in names if name.startswith(path + ".")), "")

    @cached_property
    def names_of(self) -> dict[str, tuple[str, ...]]:
        """Module paths of parameters and buffers by value."""
        found = {parameter.value: parameter.names for parameter in self.graph.parameters}
        return found | {buffer.value: buffer.names for buffer in self.graph.buffers}

    def _describe_source(self, value: str, path: str) -> Any:
        kind = self.graph.values[value].kind
        names = tuple(name.removeprefix(path) for name in self.names_of.get(value, ()))
        if kind == "parameter":
            plan = self.wiring.parameter(value)
            return (names, self._facts(value), self.graph.masters[value], plan)
        layout = self.wiring.layout(value) if value in self.wiring.resolved.stage.sources else None
        if kind == "buffer":
            buffer = next(b for b in self.graph.buffers if b.value == value)
            return (names, self._facts(value), layout, buffer.persistent)
        numbers = next(constant.numbers for constant in self.graph.constants if constant.value == value)
        return (numbers, self._facts(value), layout)

    # -- the stage's own order -------------------------------------------------------------------------------------

    def _items(self, order: Sequence[Operator]) -> list[Item]:
        """Operators, conversions and blocks of the stage in order, consecutive blocks of one kind put into loops."""
        items: list[Item] = []
        placed: set[Key] = set()
        called: set[int] = set()

        def convert(keys: Iterable[Key]) -> None:
            for key in keys:
                if self.conversion_place.get(key) == STAGE and key not in placed:
                    placed.add(key)
                    items.append(key)

        for operator in order:
            place = self.place(operator.id)
            if place == STAGE:
                convert(self.wiring.reads[operator.id, index].key for index in range(len(operator.inputs)))
                items.append(operator)
            elif place not in called:
                called.add(place)
                convert(self.bodies[place].inputs)
                self._append_call(items, place)
        return items

    def _append_call(self, items: list[Item], place: int) -> None:
        last = items[-1] if items else None
        again = self.modes[place] == "full"
        if isinstance(last, Call) and self.kind_of[last.blocks[-1]] == self.kind_of[place] and last.again == again:
            chain = self._chain(last.blocks[-1], place)
            if chain is not None and (len(last.blocks) == 1 or chain == last.chain):
                items[-1] = Call((*last.blocks, place), chain, again)
                return
        items.append(Call((place,), (None,) * len(self.bodies[place].inputs), again))

    def _chain(self, before: int, after: int) -> tuple[int | None, ...] | None:
        """How the inputs of a block follow from those and the results of the block before; None when they do not."""
        made = list(self.bodies[before].outputs)
        earlier = list(self.bodies[before].inputs)
        found: list[int | None] = []
        for key, same in zip(self.bodies[after].inputs, earlier, strict=True):
            if key in made:
                found.append(made.index(key))
            elif key == same:
                found.append(None)
            else:
                return None
        links = [link for link in found if link is not None]
        return tuple(found) if len(set(links)) == len(links) else None


def _blank(tree: Any) -> Any:
    """Arguments without the names of tensors; types are kept apart (1, 1.0 and True are equal to Python)."""
    if isinstance(tree, Ref):
        return Ref
    return tuple(_blank(item) for item in tree) if isinstance(tree, tuple) else (type(tree), tree)


def _schedule(wiring: Wiring, blocks: Sequence[Block]) -> tuple[list[Operator], set[int]]:
    """The live operators with each block in one run, and the numbers of blocks that allow no such order.

    Ready operators come in their own order, but blocks that follow one another directly stay together.
    """
    dissolved: set[int] = set()
    while True:
        order, stuck = _try_schedule(wiring, blocks, dissolved)
        if stuck is None:
            return order, dissolved
        dissolved.add(stuck)


def _try_schedule(wiring: Wiring, blocks: Sequence[Block], dissolved: set[int]) -> tuple[list[Operator], int | None]:
    home = {name: at for at, block in enumerate(blocks) if at not in dissolved for name in block.operators}
    units: dict[Any, list[Operator]] = {}
    for operator in wiring.live:
        units.setdefault(home.get(operator.id, operator.id), []).append(operator)
    number = {unit: at for at, unit in enumerate(units)}
    producer = {v: number[home.get(op.id, op.id)] for op in wiring.live for v in op.outputs if v}
    waiting: list[set[int]] = []
    followers: list[list[int]] = [[] for _ in units]
    for at, members in enumerate(units.values()):
        needed = {producer[value] for op in members for value in op.inputs if value in producer} - {at}
        waiting.append(needed)
        for other in needed:
            followers[other].append(at)
    names = list(units)
    ready = [at for at, needed in enumerate(waiting) if not needed]
    heapq.heapify(ready)
    order: list[Operator] = []
    done: set[int] = set()
    last: Any = None
    while ready:
        following = last + 1 if isinstance(last, int) else None
        at = number[following] if following in number and number[following] in ready else ready[0]
        ready.remove(at)
        heapq.heapify(ready)
        done.add(at)
        last = names[at]
        order.extend(units[names[at]])
        for other in followers[at]:
            waiting[other].discard(at)
            if not waiting[other]:
                heapq.heappush(ready, other)
    stuck = [name for at, name in enumerate(names) if at not in done and isinstance(name, int)]
    return order, stuck[0] if stuck else None
