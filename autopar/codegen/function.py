"""The text of one forward function: variables are named, reused and freed, chains of views become one line.

Enters: a :class:`~autopar.codegen.statements.FunctionBody`. Leaves: lines of Python.

A local variable keeps its tensor until the function returns. What autograd keeps anyway may stay; a large tensor that it does
not keep loses its name after its last use, by a new value under the same name or by ``del``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.codegen import text
from autopar.codegen.arrange import STAGE, Arrangement
from autopar.codegen.calls import call
from autopar.codegen.changes import change_lines
from autopar.codegen.conversions import Key
from autopar.codegen.local_sizes import cuts_of
from autopar.codegen.loops import run_lines
from autopar.codegen.methods import method_lines, method_name
from autopar.codegen.naming import (
    GLOBALS,
    IN_PLACE_OF,
    ValueNames,
    identifier,
    is_elementwise,
    is_view,
    kind_name,
    module_names,
    unique,
)
from autopar.codegen.scope import Scope
from autopar.codegen.statements import Again, Change, Compute, Fetch, FunctionBody, Run, Statement, Update
from autopar.graph import ITEM_BYTES, Operator
from autopar.layout import Layout, local_shape

_INDENT = 8
_INLINE_LENGTH = 96  # of a joined expression: the rest of a line is for the variable and the indentation
_SOME_NAME, _INNER_NAME = "some_name", "_inner_"  # stand for operands while it is decided what fits on a line
STATE_KINDS = ("computed", "received")  # of what is handed on from operator to operator
_FREED_FRACTION = 1 / 16  # of the function's largest tensor: what is smaller is not worth a line


@dataclass(frozen=True)
class Attributes:
    """How a function speaks of its module: expressions of its sources by value, of its blocks by the first of a call."""

    sources: dict[str, str]
    blocks: dict[int, str]


@dataclass
class Function:
    """Writes one function. ``saved`` are the storages that autograd keeps for backward; ``known`` the layouts of copies
    that are made elsewhere. ``methods`` are afterwards the lines of further methods that it calls."""

    arrangement: Arrangement
    place: int
    body: FunctionBody
    attributes: Attributes
    scope: Scope
    saved: frozenset[str]
    reserved: frozenset[str] = frozenset()
    known: Mapping[Key, Layout] = field(default_factory=dict)
    methods: dict[str, list[str]] = field(default_factory=dict)
    names: dict[Key, str] = field(default_factory=dict)
    used_names: set[str] = field(default_factory=set)
    collected: dict[Key, str] = field(default_factory=dict)
    lists: dict[str, int] = field(default_factory=dict)
    given_names: dict[int, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph = self.arrangement.graph
        self.wiring = self.arrangement.wiring
        self.mesh = self.wiring.resolved.stage.mesh
        self.path = "" if self.place == STAGE else self.arrangement.blocks[self.place].path
        self.value_names = ValueNames(self.graph)
        computed = [s.operator for s in self.body.statements if isinstance(s, Compute)]
        self.modules = module_names(computed, self.path)
        self.inlined = self._choose_inlined()
        self.statements = [
            s for s in self.body.statements if not (isinstance(s, Compute) and s.writes[0] in self.inlined)
        ]
        self.last_read = self._last_reads()
        self.layouts = self._layouts()
        self.arguments: list[str] = []
        self.states = self._states()
        sizes = [self._bytes(key) for s in self.statements for key in s.writes if key[0]]
        self._least_freed = max(sizes, default=0) * _FREED_FRACTION

    def block(self, place: int) -> str:
        """The attribute of a block, or of the list that it is the first of."""
        return self.attributes.blocks[place]

    # -- before writing --------------------------------------------------------------------------------------------

    def _choose_inlined(self) -> dict[Key, Compute]:
        """Operators whose only reader takes them up in its own line."""
        readers: dict[Key, list[Statement]] = {}
        for statement in self.body.statements:
            for key in statement.reads:
                readers.setdefault(key, []).append(statement)
        found: dict[Key, Compute] = {}
        lengths: dict[Key, int] = {}
        before: dict[Key, Compute] = {}
        previous: Statement | None = None
        for statement in self.body.statements:
            for key in statement.reads:
                made = before.get(key)
                if made is None or key in self.body.returns or readers[key] != [statement]:
                    continue
                if isinstance(statement, Update) and made is previous:
                    found[key] = made
                elif isinstance(statement, Compute) and _reads_well(made, statement, made is previous):
                    found.update({key: made} if self._joins(made, statement, lengths) else {})
            if isinstance(statement, Compute) and len(statement.writes) == 1 and not _returns_list(statement.operator):
                before[statement.writes[0]] = statement
            if statement.writes and statement.writes[0] not in found:
                previous = statement
        return found

    def _joins(self, made: Compute, statement: Compute, lengths: dict[Key, int]) -> bool:
        """Whether the two fit on one line, ``made`` once and as something that may be called on."""
        places = [at for at, key in enumerate(statement.reads) if key == made.writes[0]]
        inner = self._call(made.operator, [_SOME_NAME] * len(made.reads))
        names = [_INNER_NAME if at in places else _SOME_NAME for at in range(len(statement.reads))]
        outer = self._call(statement.operator, names)
        if outer.count(_INNER_NAME) != 1 or len(places) != 1:
            return False
        if not text.is_primary(inner) and not is_elementwise(statement.operator):
            return False
        length = lengths.get(made.writes[0], len(inner)) + max(len(outer), lengths.get(statement.writes[0], 0))
        if length > _INLINE_LENGTH:
            return False
        lengths[statement.writes[0]] = length
        return True

    def _leaves(self, statement: Statement) -> list[Key]:
        """What a statement reads by name, through the operators written into it."""
        found: list[Key] = []
        for key in statement.reads:
            found.extend(self._leaves(self.inlined[key]) if key in self.inlined else [key])
        return found

    def _last_reads(self) -> dict[Key, int]:
        found: dict[Key, int] = {}
        for at, statement in enumerate(self.statements):
            found.update(dict.fromkeys(self._leaves(statement), at))
        found.update(dict.fromkeys(self.body.returns, len(self.statements)))
        return found

    def _layouts(self) -> dict[Key, Layout]:
        found: dict[Key, Layout] = dict(self.known)
        for statement in self.body.statements:
            inside = statement.body.statements if isinstance(statement, Again) else (statement,)
            for change in (inner for inner in inside if isinstance(inner, Change)):
                found[change.reads[0]], found[change.writes[0]] = change.source, change.target
            for key in (*statement.reads, *statement.writes):
                if key[0] and key not in found:
                    found[key] = self.layout(key)
        return {**{key: self.layout(key) for key in self.body.inputs}, **found}

    def layout(self, key: Key) -> Layout:
        """The layout of a copy that is made elsewhere or by an operator."""
        return self.wiring.shared[key].target if key in self.wiring.shared else self.wiring.layout(key[0])

    def _states(self) -> frozenset[Key]:
        """What blocks hand from one to the next."""
        found: set[Key] = set()
        for statement in self.body.statements:
            for block in statement.call.blocks if isinstance(statement, Run) else ():
                keys = self.arrangement.bodies[block].inputs
                values = ((key, self.graph.values[key[0]]) for key in keys)
                found.update([key for key, value in values if value.requires_grad and value.kind in STATE_KINDS][:1])
        return frozenset(found)

    def _bytes(self, key: Key) -> int:
        value = self.graph.values[key[0]]
        return math.prod(local_shape(value.shape, self.layouts[key], self.mesh.shape)) * ITEM_BYTES[value.dtype]

    # -- names -----------------------------------------------------------------------------------------------------

    def new_name(self, base: str, taken: Iterable[str] = ()) -> str:
        """``base``, or with a number behind it where that is in use."""
        name = unique(base, {*self.names.values(), *self.reserved, *GLOBALS, *self.lists, *taken})
        self.used_names.add(name)
        return name

    def base_name(self, key: Key) -> str:
        """A name for a copy that comes from nothing that could hand on its own."""
        value = self.graph.values[key[0]]
        if key in self.states:
            return "x"
        if value.kind == "input":
            path = next(entry.path for entry in self.graph.inputs if entry.value == value.id)
            return identifier(path)
        if value.id in self.attributes.sources:
            return _attribute(self.attributes.sources[value.id])
        if value.kind == "received":
            return "x"
        if value.kind != "computed":
            names = self.arrangement.names_of.get(value.id)
            return identifier("_".join(names[0].split(".")[-2:])) if names else "constant"
        producer = self.graph.producer_of[value.id]
        named = self.value_names.base(value.id, self.modules, self.path)
        return named or kind_name(producer, producer.outputs.index(value.id))

    def give_inputs(self, preferred: Sequence[str] | None = None) -> list[str]:
        """Name the function's arguments; ``preferred`` names come first."""
        for at, key in enumerate(self.body.inputs):
            self.names[key] = self.new_name(preferred[at] if preferred else self.base_name(key))
            self.arguments.append(self.names[key])
        return self.arguments

    def collect(self, keys: Sequence[Key], base: str) -> str:
        """The name of a list that will hold these copies, in order."""
        name = self.new_name(base)
        self.lists[name] = len(keys)
        self.collected.update((key, f"{name}[{at}]") for at, key in enumerate(keys))
        return name

    def note_names(self, block: int, arguments: Sequence[str]) -> None:
        """Remember what the first block of a kind is given under which names."""
        names = [_attribute(argument) for argument in arguments]
        self.given_names.setdefault(self.arrangement.kind_of[block], names)

    def release(self, at: int, statement: Statement) -> dict[Key, str]:
        """Take the names of what is read for the last time; they may be given again at once."""
        return {
            key: self.names.pop(key)
            for key in dict.fromkeys(self._leaves(statement))
            if key in self.names and self.last_read[key] == at
        }

    def _name_result(self, statement: Compute, index: int, dying: dict[Key, str]) -> str:
        key = statement.writes[index]
        if not key[0] or key not in self.last_read:
            return "_"
        operator = statement.operator
        base = "x" if key in self.states else self.value_names.base(key[0], self.modules, self.path)
        if base is None and len(statement.writes) == 1:
            base = self._inherited(statement, dying) or self._name_inside(statement)
        return self.new_name(base or kind_name(operator, index))

    def _name_inside(self, statement: Compute) -> str | None:
        """The name of the value that a chain of views and arithmetic begins with."""
        while _goes_on(statement.operator):
            inside = [key for key in statement.reads if key in self.inlined]
            if not inside:
                return None
            base = self.value_names.base(inside[0][0], self.modules, self.path)
            statement = self.inlined[inside[0]]
            if base or not _goes_on(statement.operator):
                return base or kind_name(statement.operator)
        return None

    def _inherited(self, statement: Compute, dying: dict[Key, str]) -> str | None:
        """The name of a dying input that the result is the next state of: what is viewed, or added to."""
        shape = self.graph.values[statement.operator.outputs[0]].shape
        candidates = [key for key in self._carried(statement) if key in dying]
        given = [key for key in candidates if dying[key] in self.arguments]
        for key in given + candidates:
            value = self.graph.values[key[0]]
            if value.kind in STATE_KINDS and (is_view(statement.operator) or value.shape == shape):
                return dying[key]
        return None

    def _carried(self, statement: Compute) -> list[Key]:
        """What a statement reads through views and arithmetic only."""
        found: list[Key] = []
        for key in statement.reads if _goes_on(statement.operator) else ():
            found.extend(self._carried(self.inlined[key]) if key in self.inlined else [key])
        return found

    # -- writing ---------------------------------------------------------------------------------------------------

    def lines(self) -> list[str]:
        """The statements as text, without the line of ``def`` and the ``return``."""
        found: list[str] = []
        writers: dict[type[Statement], Callable[[int, Statement], list[str]]] = {
            Compute: self._compute, Change: self._change, Fetch: self._fetch, Update: self._update, Run: self._run,
            Again: self._again,
        }  # fmt: skip
        for at, statement in enumerate(self.statements):
            found += writers[type(statement)](at, statement)
        return found

    def expression(self, key: Key) -> str:
        """A copy as an operand."""
        if key in self.collected:
            return self.collected[key]
        if key in self.names:
            return self.names[key]
        if key in self.inlined:
            made = self.inlined[key]
            return self._call(made.operator, [self.expression(read) for read in made.reads])
        return self.attributes.sources[key[0]]

    def _call(self, operator: Operator, inputs: Sequence[str]) -> str:
        plan = self.wiring.resolved.operator(operator.id)
        outputs = [layout for value, layout in zip(operator.outputs, plan.outputs, strict=True) if value]
        written = call(operator, inputs, plan.inputs, outputs, self.graph, self.mesh, self.scope)
        for name, length in self.lists.items():
            every = ", ".join(f"{name}[{at}]" for at in range(length))
            written = written.replace(f"[{every}]", name).replace(f"({every})", name)
        return written

    def _compute(self, at: int, statement: Statement) -> list[str]:
        assert isinstance(statement, Compute)
        expression = self._call(statement.operator, [self.expression(key) for key in statement.reads])
        comment = self._layout_comment(statement)
        dying = self.release(at, statement)
        targets = []
        for index, key in enumerate(statement.writes):
            name = self._name_result(statement, index, dying)
            targets.append(name)
            if name != "_":
                self.names[key] = name
        left = targets[0] if len(targets) == 1 else ", ".join(targets)
        if left == expression:
            return self.free(dying)
        if len(targets) == 1 and _returns_list(statement.operator):
            left = f"({left},)"
        return text.line(f"{left} = {expression}", _INDENT, comment) + self.free(dying)

    def _layout_comment(self, statement: Compute) -> str:
        """The result's layout where it is not that of what is read."""
        keys = [key for key in statement.writes if key in self.layouts]
        if not keys:
            return ""
        layout = self.layouts[keys[0]]
        read = [self.layouts[key] for key in self._leaves(statement) if self.graph.values[key[0]].kind in STATE_KINDS]
        plain = layout == self.wiring.whole and not read
        return "" if plain or layout in read else text.words(layout)

    def _change(self, at: int, statement: Statement) -> list[str]:
        assert isinstance(statement, Change)
        read, write = statement.reads[0], statement.writes[0]
        source = self.expression(read)
        dying = self.release(at, statement)
        kind = self.graph.values[read[0]].kind
        base = dying.get(read) or self.names.get(read) or self.base_name(read)
        if write not in self.last_read:
            return []
        name = self.new_name(base if kind not in STATE_KINDS or base else "h")
        self.names[write] = name
        value = self.graph.values[read[0]]
        return change_lines(statement, source, name, value, self.mesh, self.scope, _INDENT) + self.free(dying)

    def _fetch(self, at: int, statement: Statement) -> list[str]:
        key = statement.writes[0]
        source = self.attributes.sources[key[0]]
        name = self.new_name(_attribute(source))
        self.names[key] = name
        return text.line(f"{name} = {source}", _INDENT)

    def _update(self, at: int, statement: Statement) -> list[str]:
        assert isinstance(statement, Update)
        buffer = self.attributes.sources[statement.buffer.value].removesuffix("()")
        lines = text.line(f"{buffer}.update({self.expression(statement.reads[0])})", _INDENT)
        return lines + self.free(self.release(at, statement))

    def _run(self, at: int, statement: Statement) -> list[str]:
        assert isinstance(statement, Run)
        return run_lines(self, at, statement)

    def _again(self, at: int, statement: Statement) -> list[str]:
        """The call of a method that backward computes again; its arguments have the names that they have here."""
        assert isinstance(statement, Again)
        inner = Function(
            self.arrangement, self.place, statement.body, self.attributes, self.scope, self.saved, self.reserved,
            {key: self.layouts[key] for key in statement.reads},
        )  # fmt: skip
        arguments = [self.expression(key) for key in statement.reads]
        inner.give_inputs(arguments)
        lines = inner.lines()
        results = [inner.expression(key) for key in statement.writes]
        name = method_name(statement.body, results, [*self.methods, *map(_attribute, self.attributes.sources.values())])
        self.methods[name] = method_lines(name, inner, lines, results)
        self.used_names |= inner.used_names
        dying = self.release(at, statement)
        targets = []
        for key, result in zip(statement.writes, results, strict=True):
            self.names[key] = self.new_name(result)
            targets.append(self.names[key])
        call = f"{self.scope.runtime('checkpoint')}({', '.join([f'self.{name}', *arguments])})"
        return text.line(f"{', '.join(targets)} = {call}", _INDENT) + self.free(dying)

    def batch_line(self, lines: Sequence[str]) -> list[str]:
        """The number of samples that are computed at once, where some size in ``lines`` follows it."""
        if self.scope.batch is None or not any(self.scope.batch in line for line in lines):
            return []
        words = "the global batch" if self.scope.num_micro_batches == 1 else "samples of this micro-batch, on all devices"
        inputs = {entry.value: entry.batch_dim for entry in self.graph.inputs}
        given = list(zip(self.body.inputs, self.arguments, strict=True))
        for key, name in sorted(given, key=lambda pair: pair[0][0] not in inputs):
            value = self.graph.values[key[0]]
            dims = value.batch_dims if value.id not in inputs else (inputs[value.id],)
            for dim in (dim for dim in dims if dim is not None):
                cuts = cuts_of(self.layouts[key], dim, self.scope)
                parts = math.prod(self.mesh.shape[axis] for axis, _ in cuts)
                times = f" * {parts}" if parts > 1 else ""
                each = max(1, value.shape[dim] // self.scope.batch_size)
                times += f" // {each}" if each > 1 else ""
                return text.line(f"{self.scope.batch} = {name}.shape[{dim}]{times}", _INDENT, words)
        assert self.place != STAGE, "a size follows the batch, and no input has one"
        return []

    def argument_layouts(self) -> str:
        """The comment beside ``def``: shape and layout of each argument."""
        found = []
        for key, name in zip(self.body.inputs, self.arguments, strict=True):
            shape = "x".join(str(size) for size in self.graph.values[key[0]].shape)
            found.append(f"{name} {shape or 'scalar'} {text.words(self.layouts[key])}")
        return "; ".join(found)

    def free(self, dying: dict[Key, str]) -> list[str]:
        """``del`` for what is large, not kept for backward, and not under a name given anew."""
        taken = set(self.names.values())
        names = [
            name
            for key, name in dying.items()
            if name not in taken
            and self._bytes(key) >= max(1, self._least_freed)
            and (self.graph.values[key[0]].storage or key[0]) not in self.saved
        ]
        return text.line(f"del {', '.join(dict.fromkeys(names))}", _INDENT) if names else []


def _attribute(expression: str) -> str:
    """``self.weight()`` -> ``weight``."""
    return identifier(expression.removeprefix("self.").removesuffix("()"))


def _goes_on(operator: Operator) -> bool:
    """Whether an operator's result is the next state of an input rather than something of its own."""
    return is_view(operator) or operator.target.split(".")[1] in IN_PLACE_OF


def _reads_well(made: Compute, statement: Compute, is_next: bool) -> bool:
    """Whether ``made`` may stand inside ``statement``: a view anywhere, the rest only where it does not move."""
    if is_view(made.operator):
        return True
    views = is_view(statement.operator)
    return is_next and (views or (is_elementwise(made.operator) and is_elementwise(statement.operator)))


def _returns_list(operator: Operator) -> bool:
    """Whether an operator returns a list even when there is one tensor in it."""
    kind = operator.target.split(".")[1]
    return any(word in kind for word in ("split", "chunk", "unbind", "meshgrid", "broadcast_tensors"))
