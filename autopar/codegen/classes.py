"""The classes of a program: one for each kind of repeated block, and the stage that holds the rest."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from autopar.codegen import text
from autopar.codegen.arrange import STAGE, Arrangement, Call
from autopar.codegen.function import Attributes, Function
from autopar.codegen.inputs import input_names
from autopar.codegen.local_sizes import cuts_of
from autopar.codegen.naming import GLOBALS, attribute, identifier, unique
from autopar.codegen.scope import Scope
from autopar.codegen.statements import function_body, loss_key
from autopar.errors import InputError
from autopar.graph import Constant, Operator
from autopar.layout import REPLICATED, SUMMED_GRADIENT
from autopar.strategies.registry import signature_of

_INDENT = 8


class ClassWriter:
    """Writes the classes; ``local_names`` are afterwards all names of local variables."""

    def __init__(self, arrangement: Arrangement, scope: Scope, reserved: frozenset[str]) -> None:
        self.arrangement = arrangement
        self.graph = arrangement.graph
        self.wiring = arrangement.wiring
        self.mesh = self.wiring.resolved.stage.mesh
        self.scope = scope
        self.reserved = reserved
        self.local_names: set[str] = set()
        self._given_names: dict[int, list[str]] = {}
        self.class_names = self._class_names()

    def classes(self) -> list[str]:
        """The text of all classes, blocks first; the stage is written first, as it names what it hands to them."""
        head, main = self._stage_class()
        blocks: list[str] = []
        for kind, places in enumerate(self.arrangement.kinds):
            blocks += ["", "", *self._block_class(self.class_names[kind], places, self._given_names[kind])]
        return [*blocks, "", "", *head, *self._batch_line([*blocks, *main]), *main]

    # -- blocks ----------------------------------------------------------------------------------------------------

    def _class_names(self) -> list[str]:
        """The model's own class where an operator of the block names it, else the group's name; numbered if several."""
        found: list[str] = []
        for places in self.arrangement.kinds:
            block = self.arrangement.blocks[places[0]]
            own = [self.graph.operator_of[name] for name in block.operators]
            classes = [op.module_class.rsplit(".", 1)[-1] for op in own if op.module == block.path and op.module_class]
            words = re.findall(r"[A-Za-z0-9]+", self.arrangement.groups[places[0]].split("[")[0])
            name = "".join(word.capitalize() for word in words).removesuffix("Block") + "Block"
            found.append(identifier(classes[0]) if classes else name)
        taken: set[str] = {*GLOBALS, "Stage0", "Input", "Mesh", "Output", "Split"}
        names = []
        for name in found:
            base = f"{name}1" if found.count(name) > 1 else name
            number = 1
            while base in taken:
                number += 1
                base = f"{name}{number}"
            taken.add(base)
            names.append(base)
        return names

    def _block_class(self, name: str, places: Sequence[int], given: Sequence[str]) -> list[str]:
        place = places[0]
        path = self.arrangement.blocks[place].path
        attributes, lines = self._sources(place, path)
        body = function_body(self.arrangement, place)
        function = self._function(place, Attributes(attributes, {}))
        arguments = function.give_inputs(self._argument_names(place, given))
        main = function.lines()
        returned = ", ".join(function.expression(key) for key in body.returns)
        self.local_names |= function.used_names
        header = f"def forward({', '.join(['self', *arguments])}):"
        return [
            f"class {name}(nn.Module):",
            *text.line(f'"""{self._path_list(places)}"""', 4),
            "",
            "    def __init__(self, path):",
            "        super().__init__()",
            *lines,
            "",
            *text.line(header, 4, self._argument_layouts(function, arguments)),
            *main,
            *(text.line(f"return {returned}", _INDENT) if returned else [] if main else ["        pass"]),
        ]

    def _argument_names(self, place: int, given: Sequence[str]) -> list[str]:
        """``x`` for what one block hands to the next, the stage's names for the rest."""
        names: list[str] = []
        for key, name in zip(self.arrangement.bodies[place].inputs, given, strict=True):
            value = self.graph.values[key[0]]
            state = value.requires_grad and value.kind == "computed" and "x" not in names
            names.append("x" if state else identifier(name))
        return names

    def _argument_layouts(self, function: Function, arguments: Sequence[str]) -> str:
        found = []
        for key, name in zip(function.body.inputs, arguments, strict=True):
            shape = "x".join(str(size) for size in self.graph.values[key[0]].shape)
            found.append(f"{name} {shape or 'scalar'} {text.words(function.layouts[key])}")
        return "; ".join(found)

    def _path_list(self, places: Sequence[int]) -> str:
        paths = [self.arrangement.blocks[place].path for place in places]
        found: list[list[str]] = []
        for place, path in zip(places, paths, strict=True):
            if found and place - 1 in places and self.arrangement.groups[place] == self.arrangement.groups[place - 1]:
                found[-1].append(path)
            else:
                found.append([path])
        return ", ".join(run[0] if len(run) == 1 else f"{run[0]} ... {run[-1]}" for run in found)

    # -- the stage -------------------------------------------------------------------------------------------------

    def _stage_class(self) -> tuple[list[str], list[str]]:
        """The stage up to the first line of its forward, and the rest."""
        sources, lines = self._sources(STAGE, "")
        blocks: dict[int, str] = {}
        taken = {expression.removeprefix("self.").removesuffix("()") for expression in sources.values()}
        for item in self.arrangement.items:
            if isinstance(item, Call):
                name, code = self._block_attribute(item, taken)
                taken.add(name)
                blocks[item.blocks[0]] = f"self.{name}"
                lines += text.line(code, _INDENT)
        function = self._function(STAGE, Attributes(sources, blocks))
        arguments = function.give_inputs(input_names(self.graph))
        main = function.lines()
        self.local_names |= function.used_names
        self._given_names = function.given_names
        head = [
            "class Stage0(nn.Module):",
            *text.line(f'"""{self.graph.model}, all of it."""', 4),
            "",
            "    def __init__(self):",
            "        super().__init__()",
            *lines,
            "",
            *text.line(
                f"def forward({', '.join(['self', *arguments])}):", 4, self._argument_layouts(function, arguments)
            ),
        ]
        return head, [*main, *text.line(f"return {self._results(function)}", _INDENT)]

    def _batch_line(self, lines: Sequence[str]) -> list[str]:
        """The global batch of the step, where some size in the program follows it."""
        if self.scope.batch is None or not any(self.scope.batch in line for line in lines):
            return []
        for entry, name in zip(self.graph.inputs, input_names(self.graph), strict=True):
            if entry.batch_dim is not None:
                cuts = cuts_of(self.wiring.layout(entry.value), entry.batch_dim, self.scope)
                parts = math.prod(self.mesh.shape[axis] for axis, _ in cuts)
                times = f" * {parts}" if parts > 1 else ""
                return text.line(
                    f"{self.scope.batch} = {name}.shape[{entry.batch_dim}]{times}", _INDENT, "the global batch"
                )
        raise AssertionError("a size follows the batch, and no input has one")

    def _results(self, function: Function) -> str:
        entries = []
        loss = self.graph.loss
        if loss is not None:
            entries.append(f'"loss": {function.expression(loss_key(self.arrangement))}')
        for output in self.graph.outputs:
            if output.path == "loss" and loss is not None:
                continue
            key = loss_key(self.arrangement) if output.value == loss else (output.value, "")
            entries.append(f"{text.quoted(output.path)}: {function.expression(key)}")
        return f"{{{', '.join(entries)}}}"

    def _block_attribute(self, call: Call, taken: set[str]) -> tuple[str, str]:
        """Attribute and assignment of a block, or of the list that a loop runs over."""
        blocks = [self.arrangement.blocks[place] for place in call.blocks]
        group = self.arrangement.groups[call.blocks[0]]
        whole = sum(other == group for other in self.arrangement.groups) == len(blocks)
        kind = self.class_names[self.arrangement.kind_of[call.blocks[0]]]
        containers = dict.fromkeys(name.split("[")[0] for name in self.arrangement.groups)
        short = _shortened(list(containers), 1)[group.split("[")[0]]
        if len(blocks) == 1:
            name = attribute(_short(blocks[0].path), taken)
            return name, f"self.{name} = {kind}({text.quoted(blocks[0].path)})"
        prefix, numbers, suffix = _numbered([block.path for block in blocks])
        name = attribute(short if whole or numbers is None else f"{short}_{numbers[0]}_to_{numbers[-1]}", taken)
        if numbers is None:
            paths = text.tuple_text([text.quoted(block.path) for block in blocks])
            return name, f"self.{name} = nn.ModuleList({kind}(path) for path in {paths})"
        start = f"{numbers[0]}, " if numbers[0] else ""
        pattern = f'f"{prefix}{{i}}{suffix}"'
        return name, f"self.{name} = nn.ModuleList({kind}({pattern}) for i in range({start}{numbers[-1] + 1}))"

    # -- parameters, buffers, constants ----------------------------------------------------------------------------

    def _sources(self, place: int, path: str) -> tuple[dict[str, str], list[str]]:
        """Expressions of what belongs to a class, by value, and the lines that make them."""
        expressions: dict[str, str] = {}
        lines: list[str] = []
        taken: set[str] = set()
        parameters = {parameter.value: parameter for parameter in self.graph.parameters}
        buffers = {buffer.value: buffer for buffer in self.graph.buffers}
        constants = {constant.value: constant for constant in self.graph.constants}
        values = self.arrangement.bodies[place].sources
        shown = {value: self._own_path(value, path) for value in values if value not in constants}
        short = _shortened(list(shown.values())) if not path else {name: name for name in shown.values()}
        for value in values:
            if value in constants:
                name = unique("constant", taken)
                expressions[value] = f"self.{name}"
                lines += self._constant(name, constants[value])
            else:
                name = attribute(short[shown[value]], taken)
                expressions[value] = f"self.{name}()"
                names = [self._name_text(own, path) for own in self.arrangement.names_of[value]]
                own = self._name_text(f"{path}.{shown[value]}" if path else shown[value], path)
                names = [own, *(other for other in names if other != own)]
                slot = self._parameter(value, names, parameters[value].trainable) if value in parameters else None
                code = slot or self._buffer(value, names, buffers[value].persistent)
                lines += text.line(f"self.{name} = {code}", _INDENT)
            taken.add(name)
        return expressions, lines

    def _own_path(self, value: str, path: str) -> str:
        names = self.arrangement.names_of[value]
        prefix = f"{path}." if path else ""
        return next(name.removeprefix(prefix) for name in names if name.startswith(prefix))

    def _name_text(self, name: str, path: str) -> str:
        if path and name.startswith(f"{path}."):
            return f'f"{{path}}.{name.removeprefix(path + ".")}"'
        return text.quoted(name)

    def _parameter(self, value: str, names: Sequence[str], trainable: bool) -> str:
        plan = self.wiring.parameter(value)
        described = self.graph.values[value]
        use = text.words(plan.use)
        resting = tuple(REPLICATED if state == SUMMED_GRADIENT else state for state in plan.use)
        stored = tuple(REPLICATED if state == SUMMED_GRADIENT else state for state in plan.storage)
        parts = ["mesh", names[0], repr(described.shape), f"torch.{described.dtype}", f"use={text.quoted(use)}"]
        if stored != resting:
            parts += [f"store={text.quoted(text.words(stored))}", f"zero={plan.zero}"]
        if len(names) > 1:
            parts.append(f"aliases={text.tuple_text(list(names[1:]))}")
        if not trainable:
            parts.append("trainable=False")
        return f"{self.scope.runtime('parameter')}({', '.join(parts)})"

    def _buffer(self, value: str, names: Sequence[str], persistent: bool) -> str:
        described = self.graph.values[value]
        parts = ["mesh", names[0], repr(described.shape), f"torch.{described.dtype}"]
        if not persistent:
            parts.append("persistent=False")
        if len(names) > 1:
            parts.append(f"aliases={text.tuple_text(list(names[1:]))}")
        return f"{self.scope.runtime('buffer')}({', '.join(parts)})"

    def _constant(self, name: str, constant: Constant) -> list[str]:
        value = self.graph.values[constant.value]
        if len(constant.numbers) != value.num_elements:
            raise InputError(
                f"the model's code holds a tensor of {value.num_elements} numbers (shape {value.shape}), too many to be "
                "written into a program: make it a buffer with register_buffer"
            )
        kind = f"dtype=torch.{value.dtype}, device=mesh.device"
        made = _tensor_text(constant.numbers, value.shape, kind)
        return text.line(f'self.register_buffer("{name}", {made}, persistent=False)', _INDENT)

    # -- shared ----------------------------------------------------------------------------------------------------

    def _function(self, place: int, attributes: Attributes) -> Function:
        body = function_body(self.arrangement, place)
        saved = self._saved(self.arrangement.bodies[place].operators)
        return Function(self.arrangement, place, body, attributes, self.scope, saved, self.reserved)

    def _saved(self, operators: Sequence[Operator]) -> frozenset[str]:
        """Storages that these operators keep for backward."""
        found: set[str] = set()
        for operator in operators:
            outputs = [value for value in operator.outputs if value]
            if not any(value in self.wiring.gradient for value in outputs):
                continue
            rule = signature_of(operator, self.graph)
            inputs = range(len(operator.inputs)) if rule is None else rule.saved_inputs
            results = range(len(outputs)) if rule is None else rule.saved_outputs
            kept = [operator.inputs[index] for index in inputs] + [outputs[index] for index in results]
            found.update(self.graph.values[value].storage or value for value in kept)
        return frozenset(found)


def _short(path: str) -> str:
    """The last parts of a path, from the last one that is a name."""
    parts = path.split(".")
    start = max((at for at, part in enumerate(parts) if not part.isdigit()), default=0)
    return ".".join(parts[start:])


def _shortened(paths: Sequence[str], least: int = 2) -> dict[str, str]:
    """The shortest endings, of so many parts at least, that tell paths apart."""
    found = {}
    for path in paths:
        parts = path.split(".")
        for length in range(min(least, len(parts)), len(parts) + 1):
            tail = parts[-length:]
            alone = sum(other.split(".")[-length:] == tail for other in paths) == 1
            if (alone and not tail[0].isdigit()) or length == len(parts):
                found[path] = ".".join(tail)
                break
    return found


def _numbered(paths: Sequence[str]) -> tuple[str, list[int] | None, str]:
    """``a.3.b``, ``a.4.b`` -> ``a.``, [3, 4], ``.b``; None for the numbers when the paths are not of that form."""
    rows = [path.split(".") for path in paths]
    differing = [at for at in range(len(rows[0])) if len({row[at] if at < len(row) else "" for row in rows}) > 1]
    if len(differing) == 1 and len({len(row) for row in rows}) == 1:
        at = differing[0]
        numbers = [int(row[at]) for row in rows if row[at].isdigit()]
        if numbers == list(range(numbers[0], numbers[0] + len(rows))) if numbers else False:
            before, after = ".".join(rows[0][:at]), ".".join(rows[0][at + 1 :])
            return (f"{before}." if before else ""), numbers, (f".{after}" if after else "")
    return "", None, ""


def _tensor_text(numbers: Sequence[Any], shape: tuple[int, ...], kind: str) -> str:
    """The shortest way to write a tensor."""
    written = [_number(number) for number in numbers]
    if len(written) > 1 and len(set(written)) == 1:
        return f"torch.full({shape!r}, {written[0]}, {kind})"
    whole = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
    if (
        len(shape) == 1
        and len(numbers) > 2
        and whole
        and list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))
    ):
        return f"torch.arange({numbers[0]}, {numbers[-1] + 1}, {kind})"
    return f"torch.tensor({_nested(written, shape)}, {kind})"


def _nested(written: Sequence[str], shape: tuple[int, ...]) -> str:
    if not shape:
        return written[0]
    size = math.prod(shape[1:])
    return f"[{', '.join(_nested(written[at * size : (at + 1) * size], shape[1:]) for at in range(shape[0]))}]"


def _number(number: Any) -> str:
    if isinstance(number, float) and not math.isfinite(number):
        return f'float("{number}")'
    return repr(number)
