"""The attributes of a class: its parameters and buffers as slots of the runtime, constants written out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autopar.codegen import text
from autopar.codegen.arrange import Arrangement
from autopar.codegen.naming import attribute, unique
from autopar.codegen.paths import shortened
from autopar.codegen.scope import Scope
from autopar.errors import InputError
from autopar.graph import Constant
from autopar.layout import REPLICATED, SUMMED_GRADIENT

_INDENT = 8


class SourceWriter:
    """Writes the lines of ``__init__`` that make what belongs to a class."""

    def __init__(self, arrangement: Arrangement, scope: Scope) -> None:
        self.arrangement, self.scope = arrangement, scope
        self.graph, self.wiring = arrangement.graph, arrangement.wiring

    def write(self, place: int, path: str) -> tuple[dict[str, str], list[str]]:
        """Expressions of what belongs to a class, by value, and the lines that make them."""
        expressions: dict[str, str] = {}
        lines: list[str] = []
        taken: set[str] = set()
        parameters = {parameter.value: parameter for parameter in self.graph.parameters}
        buffers = {buffer.value: buffer for buffer in self.graph.buffers}
        constants = {constant.value: constant for constant in self.graph.constants}
        values = self.arrangement.bodies[place].sources
        shown = {value: self._own_path(value, path) for value in values if value not in constants}
        short = shortened(list(shown.values())) if not path else {name: name for name in shown.values()}
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
        master = self.graph.masters[value]
        parts = ["mesh", names[0], repr(described.shape), f"torch.{master}", f"use={text.quoted(use)}"]
        if stored != resting:
            parts += [f"store={text.quoted(text.words(stored))}", f"zero={plan.zero}"]
        if plan.offload:
            parts.append("offload=True")
        if len(names) > 1:
            parts.append(f"aliases={text.tuple_text(list(names[1:]))}")
        if self.graph.parameter_of[value].master:
            parts.append(f"compute=torch.{described.dtype}")
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
        made = tensor_text(constant.numbers, value.shape, kind)
        return text.line(f'self.register_buffer("{name}", {made}, persistent=False)', _INDENT)


def tensor_text(numbers: Sequence[Any], shape: tuple[int, ...], kind: str) -> str:
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
