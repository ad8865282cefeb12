"""The lines that call a block, or consecutive blocks of one kind in a loop.

What each block leaves for the next one keeps one name (``x = block(x, mask)``); what every block leaves for a reader after
the loop is collected in a list. A block that backward computes again is called by the runtime's ``checkpoint``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from autopar.codegen import text
from autopar.codegen.arrange import Arrangement, Body
from autopar.codegen.conversions import Key
from autopar.codegen.scope import Scope
from autopar.codegen.statements import Run
from autopar.graph import OpGraph

_INDENT = 8


class Writer(Protocol):
    """What is needed of the function that is being written: its variables and their lives."""

    arrangement: Arrangement
    scope: Scope
    graph: OpGraph
    names: dict[Key, str]
    last_read: dict[Key, int]

    def block(self, place: int) -> str:
        """The attribute of a block, or of the list that it is the first of."""

    def expression(self, key: Key) -> str:
        """A copy as an operand."""

    def base_name(self, key: Key) -> str:
        """A name that fits a copy."""

    def new_name(self, base: str, taken: Iterable[str] = ()) -> str:
        """A name that is free."""

    def note_names(self, block: int, arguments: Sequence[str]) -> None:
        """Remember what a block is given under which names."""

    def collect(self, keys: Sequence[Key], base: str) -> str:
        """The name of a list that will hold copies."""

    def release(self, at: int, statement: Run) -> dict[Key, str]:
        """Take the names of what is read for the last time."""

    def free(self, dying: dict[Key, str]) -> list[str]:
        """Lines that free what is large."""


def run_lines(function: Writer, at: int, statement: Run) -> list[str]:
    """The call or loop of one statement."""
    bodies = [function.arrangement.bodies[block] for block in statement.call.blocks]
    if len(bodies) == 1:
        return _single(function, at, statement, bodies[0])
    return _loop(function, at, statement, bodies)


def _single(function: Writer, at: int, statement: Run, body: Body) -> list[str]:
    arguments = [function.expression(key) for key in body.inputs]
    function.note_names(statement.call.blocks[0], arguments)
    dying = function.release(at, statement)
    targets = []
    for key in body.outputs:
        if key not in function.last_read:
            targets.append("_")
            continue
        function.names[key] = function.new_name(_handed_on(function, key, dying))
        targets.append(function.names[key])
    left = f"{', '.join(targets)} = " if targets else ""
    call = _call(function, statement, function.block(statement.call.blocks[0]), arguments)
    return text.line(f"{left}{call}", _INDENT) + function.free(dying)


def _call(function: Writer, statement: Run, block: str, arguments: list[str]) -> str:
    if statement.call.again:
        return f"{function.scope.runtime('checkpoint')}({', '.join([block, *arguments])})"
    return f"{block}({', '.join(arguments)})"


def _handed_on(function: Writer, key: Key, dying: dict[Key, str]) -> str:
    """A name for a block's result: that of the input whose next state it is, if there is one."""
    value = function.graph.values[key[0]]
    for other, name in dying.items():
        before = function.graph.values[other[0]]
        if (before.shape, before.dtype) == (value.shape, value.dtype) and name not in function.names.values():
            return name
    return function.base_name(key)


def _loop(function: Writer, at: int, statement: Run, bodies: list[Body]) -> list[str]:
    chain = statement.call.chain
    variables, before = _chain_variables(function, at, statement, bodies[0])
    arguments = [
        function.expression(key) if link is None else variables[link]
        for key, link in zip(bodies[0].inputs, chain, strict=True)
    ]
    function.note_names(statement.call.blocks[0], arguments)
    outputs = [list(body.outputs) for body in bodies]
    dying = function.release(at, statement)
    wanted = set(statement.writes)
    taken = set(variables.values())
    targets, inside = [], []
    for index in range(len(outputs[0])):
        keys = [row[index] for row in outputs]
        collected = any(key in wanted for key in keys[:-1])
        if index in variables:
            target = variables[index]
        elif collected or keys[-1] in wanted:
            target = function.new_name(function.base_name(keys[-1]), taken)
            taken.add(target)
        else:
            target = "_"
        targets.append(target)
        if collected:
            name = function.collect(keys, f"{target}_of_each")
            before.append(f"{name} = []")
            inside.append(f"{name}.append({target})")
        if keys[-1] in wanted:
            function.names[keys[-1]] = target
    left = f"{', '.join(targets)} = " if targets else ""
    lines = [line for code in before for line in text.line(code, _INDENT)]
    lines += text.line(f"for block in {function.block(statement.call.blocks[0])}:", _INDENT)
    for code in (f"{left}{_call(function, statement, 'block', arguments)}", *inside):
        lines += text.line(code, _INDENT + 4)
    return lines + function.free(dying)


def _chain_variables(function: Writer, at: int, statement: Run, first: Body) -> tuple[dict[int, str], list[str]]:
    """The variable of each result that the next block reads, and lines that give it its first value."""
    variables: dict[int, str] = {}
    before: list[str] = []
    keys = list(first.inputs)
    for key, link in zip(keys, statement.call.chain, strict=True):
        if link is None:
            continue
        free = key in function.names and function.last_read[key] == at and keys.count(key) == 1
        if free:
            variables[link] = function.names[key]
            continue
        variables[link] = function.new_name(function.base_name(key), set(variables.values()))
        before.append(f"{variables[link]} = {function.expression(key)}")
    return variables, before
