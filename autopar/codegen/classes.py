"""The classes of one stage of a program: one for each kind of repeated block, and the stage that holds the rest.

Enters: a stage's arrangement. Leaves: the text of its classes; the names of block classes come from outside, as stages
share those that they use alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.codegen import text
from autopar.codegen.arrange import STAGE, Call
from autopar.codegen.bodies import function_body
from autopar.codegen.function import STATE_KINDS, Attributes, Function
from autopar.codegen.naming import attribute, identifier
from autopar.codegen.paths import numbered, short, shortened
from autopar.codegen.scope import Scope
from autopar.codegen.sources import SourceWriter
from autopar.codegen.stages import Part
from autopar.codegen.statements import Again, Compute, Statement, loss_key, sent_key
from autopar.strategies.registry import signature_of

_INDENT = 8


@dataclass(frozen=True)
class BlockText:
    """The class of a kind of block but for its name and docstring: the name wished for, the blocks' paths, the lines."""

    wish: str
    paths: tuple[str, ...]
    lines: tuple[str, ...]


class StageWriter:
    """Writes one stage. ``names`` are those of the model's inputs and of what stages hand on, by value.

    ``blocks`` are the classes of its kinds of blocks; ``local_names`` all names of local variables.
    """

    def __init__(self, part: Part, scope: Scope, names: Mapping[str, str], reserved: frozenset[str]) -> None:
        self.part, self.scope, self.names, self.reserved = part, scope, names, reserved
        self.arrangement, self.graph, self.wiring = part.arrangement, part.graph, part.wiring
        self.sources = SourceWriter(part.arrangement, scope)
        self.local_names: set[str] = set()
        self._attributes: list[tuple[str, Call]] = []
        self._init, self._function, self._main = self._write_stage()  # first: it names what it hands to the blocks
        given = self._function.given_names
        self.blocks = [self._block(kind, places, given[kind]) for kind, places in enumerate(self.arrangement.kinds)]

    @property
    def class_name(self) -> str:
        return f"Stage{self.part.number}"

    # -- blocks ----------------------------------------------------------------------------------------------------

    def _wish(self, place: int) -> str:
        """The model's own class where an operator of the block names it, else the group's name."""
        block = self.arrangement.blocks[place]
        own = [self.graph.operator_of[name] for name in block.operators]
        classes = [op.module_class.rsplit(".", 1)[-1] for op in own if op.module == block.path and op.module_class]
        words = re.findall(r"[A-Za-z0-9]+", self.arrangement.groups[place].split("[")[0])
        name = "".join(word.capitalize() for word in words).removesuffix("Block") + "Block"
        return identifier(classes[0]) if classes else name

    def _block(self, kind: int, places: Sequence[int], given: Sequence[str]) -> BlockText:
        place = places[0]
        path = self.arrangement.blocks[place].path
        attributes, lines = self.sources.write(place, path)
        function = self._function_at(place, Attributes(attributes, {}))
        arguments = function.give_inputs(self._argument_names(place, given))
        self.scope.block_path, self.scope.uses_path = path, False
        main = function.lines()
        keeps_path = ["        self.path = path"] if self.scope.uses_path else []
        self.scope.block_path = ""
        returned = ", ".join(function.expression(key) for key in function.body.returns)
        self.local_names |= function.used_names
        again = any(self.arrangement.modes[place] == "full" for place in places)
        header = f"def forward({', '.join(['self', *arguments])}):"
        written = [
            "",
            "    def __init__(self, path):",
            "        super().__init__()",
            *keeps_path,
            *lines,
            "",
            *text.line(header, 4, function.argument_layouts()),
            *(function.batch_line(main) if again else []),
            *main,
            *(text.line(f"return {returned}", _INDENT) if returned else [] if main else ["        pass"]),
        ]
        for method in function.methods.values():
            written += ["", *method]
        return BlockText(self._wish(place), tuple(self.arrangement.blocks[p].path for p in places), tuple(written))

    def _argument_names(self, place: int, given: Sequence[str]) -> list[str]:
        """``x`` for what one block hands to the next, the stage's names for the rest."""
        names: list[str] = []
        for key, name in zip(self.arrangement.bodies[place].inputs, given, strict=True):
            value = self.graph.values[key[0]]
            state = value.requires_grad and value.kind in STATE_KINDS and "x" not in names
            names.append("x" if state else identifier(name))
        return names

    # -- the stage -------------------------------------------------------------------------------------------------

    def _write_stage(self) -> tuple[list[str], Function, list[str]]:
        """The lines of ``__init__`` but for the blocks, the function, and its lines."""
        sources, lines = self.sources.write(STAGE, "")
        blocks: dict[int, str] = {}
        taken = {expression.removeprefix("self.").removesuffix("()") for expression in sources.values()}
        for item in self.arrangement.items:
            if isinstance(item, Call):
                name = self._block_attribute(item, taken)
                taken.add(name)
                blocks[item.blocks[0]] = f"self.{name}"
                self._attributes.append((name, item))
        function = self._function_at(STAGE, Attributes(sources, blocks))
        function.give_inputs([self.names[key[0]] for key in function.body.inputs])
        main = function.lines()
        self.local_names |= function.used_names
        return lines, function, main

    def lines(self, class_names: Sequence[str]) -> list[str]:
        """The stage's class. ``class_names`` are those of its kinds of blocks."""
        blocks = []
        for name, call in self._attributes:
            code = self._block_code(name, call, class_names[self.arrangement.kind_of[call.blocks[0]]])
            blocks += text.line(code, _INDENT)
        header = f"def forward({', '.join(['self', *self._function.arguments])}):"
        everything = [*(line for block in self.blocks for line in block.lines), *self._main]
        return [
            f"class {self.class_name}(nn.Module):",
            *text.docstring(self.part.words, 4),
            "",
            "    def __init__(self):",
            "        super().__init__()",
            *self._init,
            *blocks,
            "",
            *text.line(header, 4, self._function.argument_layouts()),
            *self._function.batch_line(everything),
            *self._main,
            *text.line(f"return {self._results()}", _INDENT),
        ]

    def _results(self) -> str:
        sent = [self._function.expression(sent_key(self.arrangement, value)) for value in self.graph.sent]
        entries = []
        loss = self.graph.loss
        if loss is not None:
            entries.append(f'"loss": {self._function.expression(loss_key(self.arrangement))}')
        for output in self.graph.outputs:
            if output.path == "loss" and loss is not None:
                continue
            key = loss_key(self.arrangement) if output.value == loss else (output.value, "")
            entries.append(f"{text.quoted(output.path)}: {self._function.expression(key)}")
        outputs = f"{{{', '.join(entries)}}}"
        if not sent:
            return outputs
        return f"{text.tuple_text(sent)}, {outputs}" if entries else text.tuple_text(sent)

    def _block_attribute(self, call: Call, taken: set[str]) -> str:
        """The attribute of a block, or of the list that a loop runs over."""
        blocks = [self.arrangement.blocks[place] for place in call.blocks]
        group = self.arrangement.groups[call.blocks[0]]
        whole = sum(other == group for other in self.part.all_groups) == len(blocks)
        if len(blocks) == 1:
            return attribute(short(blocks[0].path), taken)
        containers = dict.fromkeys(name.split("[")[0] for name in self.part.all_groups)
        name = shortened(list(containers), 1)[group.split("[")[0]]
        _, numbers, _ = numbered([block.path for block in blocks])
        return attribute(name if whole or numbers is None else f"{name}_{numbers[0]}_to_{numbers[-1]}", taken)

    def _block_code(self, name: str, call: Call, kind: str) -> str:
        """The assignment that makes a block, or a list of blocks."""
        blocks = [self.arrangement.blocks[place] for place in call.blocks]
        if len(blocks) == 1:
            return f"self.{name} = {kind}({text.quoted(blocks[0].path)})"
        prefix, numbers, suffix = numbered([block.path for block in blocks])
        if numbers is None:
            paths = text.tuple_text([text.quoted(block.path) for block in blocks])
            return f"self.{name} = nn.ModuleList({kind}(path) for path in {paths})"
        start = f"{numbers[0]}, " if numbers[0] else ""
        pattern = f'f"{prefix}{{i}}{suffix}"'
        return f"self.{name} = nn.ModuleList({kind}({pattern}) for i in range({start}{numbers[-1] + 1}))"

    # -- shared ----------------------------------------------------------------------------------------------------

    def _function_at(self, place: int, attributes: Attributes) -> Function:
        body = function_body(self.arrangement, place)
        return Function(
            self.arrangement, place, body, attributes, self.scope, self._saved(body.statements), self.reserved
        )

    def _saved(self, statements: Sequence[Statement]) -> frozenset[str]:
        """Storages that these statements keep for backward; of what is computed again, what enters it."""
        found: set[str] = set()
        for statement in statements:
            if isinstance(statement, Again):
                found.update(self.graph.values[key[0]].storage or key[0] for key in statement.reads)
            if not isinstance(statement, Compute):
                continue
            outputs = [value for value in statement.operator.outputs if value]
            if not any(value in self.wiring.gradient for value in outputs):
                continue
            rule = signature_of(statement.operator, self.graph)
            inputs = range(len(statement.operator.inputs)) if rule is None else rule.saved_inputs
            results = range(len(outputs)) if rule is None else rule.saved_outputs
            kept = [statement.operator.inputs[index] for index in inputs] + [outputs[index] for index in results]
            found.update(self.graph.values[value].storage or value for value in kept)
        return frozenset(found)
