"""What the calls of a program need around them: imports from the runtime, and how dims are cut unevenly."""

from __future__ import annotations

from collections.abc import Container, Mapping

from autopar.layout import Cut
from autopar.mesh import Mesh
from autopar.micro_batches import Term

AxisCuts = tuple[tuple[int, Cut | None], ...]  # axes that cut a dim, outermost first; None is the plain cut


class Scope:
    """Collects what the calls of one program use.

    ``batch_size`` is the planned global batch, or micro-batch where a step has several; ``batch`` an expression for that
    of the step that runs (``mesh.batch``): without it, sizes that follow the batch are written as numbers and
    ``fixed_batch`` says so.
    ``taken`` are names that constants must not have. ``terms``: operators that are scaled because a step has several
    micro-batches (``micro_batches.terms``), by id; ``forms``: those that are computed otherwise than usual, and how.
    """

    def __init__(
        self,
        mesh: Mesh,
        batch_size: int,
        batch: str | None = None,
        taken: Container[str] = (),
        num_micro_batches: int = 1,
        terms: Mapping[str, Term] | None = None,
        forms: Mapping[str, str] | None = None,
    ) -> None:
        self.mesh = mesh
        self.batch_size = batch_size
        self.batch = batch
        self.num_micro_batches = num_micro_batches
        self.terms = terms or {}
        self.forms = forms or {}
        self.fixed_batch = False
        self.uses_functional = False
        self.runtime_names: set[str] = set()
        self.block_path = ""  # of the block whose class is being written
        self.uses_path = False
        self.splits: dict[tuple[int, AxisCuts], str] = {}
        self.functions: dict[tuple[str, ...], str] = {}
        self._taken = taken

    def runtime(self, name: str) -> str:
        """A function of the runtime, imported by the program."""
        self.runtime_names.add(name)
        return name

    def functional(self, name: str) -> str:
        """A function of ``torch.nn.functional``."""
        self.uses_functional = True
        return f"F.{name}"

    def site(self, operator: str) -> str:
        """Where in the model an operator draws random numbers; in the class of a block it follows the block's path."""
        inside = operator.removeprefix(self.block_path)
        if self.block_path and inside != operator and inside[0] in ".:":  # h.1 is no part of h.10
            self.uses_path = True
            return f'f"{{self.path}}{inside}"'
        return f'"{operator}"'

    def axis(self, index: int) -> str:
        """An axis of the mesh."""
        return f"mesh.{self.mesh.names[index]}"

    def split(self, size: int, cuts: AxisCuts, name: str | None = None) -> str:
        """The name of the constant that says how a dim of ``size`` is cut. ``name`` is a wish for a new one."""
        key = (size, tuple((axis, None if cut is None or cut.is_plain else cut) for axis, cut in cuts))
        if key not in self.splits:
            self.splits[key] = self._unused(name or self._name_for(*key))
            self.runtime("Split")
        return self.splits[key]

    def function(self, name: str, lines: tuple[str, ...]) -> str:
        """The name of the function of the program that has these lines, its own name left open in the first as ``{}``."""
        if lines not in self.functions:
            self.functions[lines] = self._unused(name)
        return self.functions[lines]

    def batch_literal(self, value: int, cuts: AxisCuts = ()) -> str:
        """A size that is ``value`` at the planned batch and follows it, as cut here."""
        parts = 1
        for axis, _ in cuts:
            parts *= self.mesh.shape[axis]
        if any(cut is not None and not cut.is_plain for _, cut in cuts) or value % parts:
            self.fixed_batch = True
            return f"{self.split(value, cuts)}.local"
        if self.batch is None or value % self.batch_size:
            self.fixed_batch = True
            return str(value // parts)
        times = value // self.batch_size
        if times % parts == 0:
            return self.batch if times == parts else f"{self.batch} * {times // parts}"
        product = self.batch if times == 1 else f"{self.batch} * {times}"
        return f"{product} // {parts}"

    def constants(self) -> list[str]:
        """Lines that define the cuts, and then the functions, in the order of their first use."""
        lines = []
        for (size, cuts), name in self.splits.items():
            texts = [f'"{cut}"' if cut else "None" for _, cut in cuts]
            axes = ", ".join(f"({self.axis(axis)}, {text})" for (axis, _), text in zip(cuts, texts, strict=True))
            lines.append(f"{name} = Split({size}, {axes})")
        for (first, *rest), name in self.functions.items():
            lines += ["", "", first.format(name), *rest]
        return lines

    def _name_for(self, size: int, cuts: AxisCuts) -> str:
        """``tensor_25``: the dim of 25 over the axis tensor; with units ``tensor_1600_by_64``."""
        axes = "_".join(dict.fromkeys(self.mesh.names[axis] for axis, _ in cuts))
        units = {unit for _, cut in cuts if cut for _, _, unit in cut.runs}
        return f"{axes}_{size}" + (f"_by_{min(units)}" if units and min(units) > 1 else "")

    def _unused(self, name: str) -> str:
        used = {*self.splits.values(), *self.functions.values()}
        unique, number = name, 2
        while unique in used or unique in self._taken:
            unique, number = f"{name}_{number}", number + 1
        return unique
