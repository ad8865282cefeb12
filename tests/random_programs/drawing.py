"""Draws a recipe: lines are proposed by the families, run at once at two batch sizes, and kept where they work.

Running while drawing tells shapes, which dims follow the batch, and the range of every value, so that a proposal knows
what it may use, and nothing has to be said twice about an operator.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.random_programs.recipe import Leaf, LeafKind, Line, value_of

MAX_ELEMENTS = 6000
MAX_DIMS = 5
LARGEST = 1e3  # of any value
SIZES = (2, 3, 4, 5, 6, 7)


class Unfit(Exception):
    """A proposal that cannot be made of what there is."""


@dataclass
class Draw:
    """The model so far. ``text`` of lines names values directly and leaves as ``self.name``."""

    random: random.Random
    batch: int
    leaves: list[Leaf] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    inputs: bool = True  # whether it may have more of them
    number: int = 0
    read: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.here, self.other = (self._space(batch) for batch in (self.batch, self.batch * 3))

    def _space(self, batch: int) -> dict[str, Any]:
        return {"torch": torch, "F": F, "aten": torch.ops.aten, "b": batch, "self": SimpleNamespace()}

    # -- what there is -------------------------------------------------------------------------------------------

    def names(self, wanted: Callable[[Tensor], bool]) -> list[str]:
        """Values that are so."""
        found = [name for name, value in self.here.items() if isinstance(value, Tensor)]
        return [name for name in found if wanted(self.here[name])]

    def pick(self, wanted: Callable[[Tensor], bool] = lambda x: x.dtype == torch.float64) -> str:
        """A value that is so: rather a late one, and one that nothing reads yet."""
        found = self.names(wanted)
        if not found:
            raise Unfit
        weights = [(4 if name not in self.read else 1) * (1 + index) for index, name in enumerate(found)]
        return self.random.choices(found, weights)[0]

    def float(self, low: int = 1, high: int = MAX_DIMS) -> str:
        """A float value with so many dims."""
        return self.pick(lambda x: x.dtype == torch.float64 and low <= x.dim() <= high)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.value(name).shape)

    def value(self, name: str, other: bool = False) -> Tensor:
        space = self.other if other else self.here
        return getattr(space["self"], name[5:]) if name.startswith("self.") else space[name]

    def _both(self, name: str) -> tuple[Tensor, Tensor]:
        return self.value(name).detach(), self.value(name, True).detach()

    def follows(self, name: str) -> list[bool]:
        """Of each dim, whether it follows the batch."""
        return [a != b for a, b in zip(self.shape(name), self.value(name, True).shape, strict=True)]

    def fixed(self, name: str, dim: int) -> bool:
        return not self.follows(name)[dim]

    def fixed_dims(self, name: str, least: int = 1) -> list[int]:
        """Dims that do not follow the batch, of at least a size."""
        sizes = self.shape(name)
        found = [dim for dim, follows in enumerate(self.follows(name)) if not follows and sizes[dim] >= least]
        if not found:
            raise Unfit
        return found

    def size(self, name: str, dim: int) -> str:
        """The text of a size: a number, or a multiple of ``b``."""
        return self.size_text(self.shape(name)[dim], self.value(name, True).shape[dim])

    def size_text(self, here: int, other: int) -> str:
        if here == other:
            return str(here)
        times, rest = divmod(other - here, self.batch * 2)
        offset = here - times * self.batch
        if rest:
            raise Unfit
        text = "b" if times == 1 else f"b * {times}"
        return text if not offset else f"{text} {'+' if offset > 0 else '-'} {abs(offset)}"

    def sizes(self, name: str) -> list[str]:
        return [self.size(name, dim) for dim in range(len(self.shape(name)))]

    # -- what is added -------------------------------------------------------------------------------------------

    def leaf(
        self, kind: LeafKind, shape: Sequence[int], low: float, high: float, dtype: str = "float64", of: str = ""
    ) -> str:
        """A new leaf, as it is written in lines."""
        if kind == "input" and not self.inputs:
            raise Unfit
        self.number += 1
        letter = {"input": "x", "buffer": "state"}.get(kind, "p")
        leaf = Leaf(f"{letter}{self.number}", kind, tuple(shape), dtype, low, high, of)
        self.add(leaf)
        return leaf.name if kind == "input" else f"self.{leaf.name}"

    def add(self, leaf: Leaf) -> None:
        """Give a leaf its values."""
        self.leaves.append(leaf)
        for space, batch in ((self.here, self.batch), (self.other, self.batch * 3)):
            value = getattr(space["self"], leaf.of) if leaf.of else value_of(leaf, batch)
            if leaf.kind == "parameter":
                value = value.requires_grad_()
            if leaf.kind == "input":
                space[leaf.name] = value
            else:
                setattr(space["self"], leaf.name, value)

    def parameter(self, shape: Sequence[int], low: float = -0.7, high: float = 0.7) -> str:
        """A parameter of this shape: a new one, one used before, a tied, a frozen one, or a buffer."""
        if -1 in shape or any(size < 1 for size in shape):
            raise Unfit
        like = [
            leaf for leaf in self.leaves
            if leaf.kind == "parameter" and leaf.shape == tuple(shape) and (leaf.low, leaf.high) == (low, high)
        ]  # fmt: skip
        chance = self.random.random()
        if like and chance < 0.5:
            other = self.random.choice(like)
            return f"self.{other.name}" if chance < 0.25 else self.leaf("tied", shape, low, high, of=other.name)
        kind: LeafKind = "frozen" if chance > 0.95 else "buffer" if chance > 0.92 else "parameter"
        return self.leaf(kind, shape, low, high)

    def line(self, text: str, count: int = 1) -> list[str]:
        """Add a line; ``{0}``, ``{1}`` ... in it are the names that it makes. Raises Unfit where it does not run."""
        makes = [f"v{self.number + 1 + index}" for index in range(count)]
        self.number += count
        written = text
        for index, name in enumerate(makes):
            written = written.replace(f"{{{index}}}", name)
        try:
            for space in (self.here, self.other):
                exec(written, {}, space)
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
            self._drop(makes)
            raise Unfit(str(error)) from None
        for name in makes:
            if not self._is_fit(name):
                self._drop(makes)
                raise Unfit(f"{name} is unfit")
        reads = self._reads(written, makes)
        self.read.update(reads)
        self.lines.append(Line(written, reads, tuple(makes)))
        return makes

    def one(self, text: str) -> str:
        return self.line(f"{{0}} = {text}")[0]

    def within(self, name: str, low: float, high: float) -> str:
        """The value, or where it leaves the range one made of it that does not."""
        if all(low <= float(x.min()) and float(x.max()) <= high for x in self._both(name)):
            return name
        half, middle = (high - low) / 2, (high + low) / 2
        squeezed = self.random.choice(("torch.tanh({})", "torch.sin({})", "F.softsign({})")).format(name)
        return self.one(f"{squeezed} * {half * 0.95:.4g} + {middle:.4g}")

    def apart(self, name: str) -> str:
        """The value in a range that keeps what follows from it of ordinary size."""
        return self.within(name, -3.0, 3.0)

    def indices(self, shape: Sequence[int], below: int) -> str:
        """Integers in ``[0, below)``: an input, or a buffer where the shape does not follow the batch."""
        found = self.names(
            lambda x: x.dtype == torch.int64 and x.dim() > 0 and int(x.min()) >= 0 and int(x.max()) < below
        )
        alike = [
            n for n in found if tuple(-1 if f else s for s, f in zip(self.shape(n), self.follows(n))) == tuple(shape)
        ]
        if alike and self.random.random() < 0.5:
            return self.random.choice(alike)
        return self.leaf("input" if -1 in shape else "buffer", shape, 0, below, "int64")

    def boolean(self, name: str) -> str:
        """A mask that broadcasts with a value."""
        return self.one(f"{name} > {self.random.choice((-0.2, 0.1, 0.3))}")

    def signs(self, name: str) -> tuple[int, ...]:
        """A shape with -1 where the batch stands; Unfit where a dim follows the batch otherwise."""
        found = []
        for size, follows in zip(self.shape(name), self.follows(name), strict=True):
            if follows and size != self.batch:
                raise Unfit
            found.append(-1 if follows else size)
        if found.count(-1) > 1:
            raise Unfit
        return tuple(found)

    def suffix(self, name: str) -> list[int]:
        """A shape that broadcasts against a value: its last few dims, some of them 1; dims that follow the batch are 1."""
        sizes, follows = self.shape(name), self.follows(name)
        count = self.random.randint(0 if len(sizes) > 1 else 1, len(sizes)) if sizes else 0
        own = list(zip(sizes, follows, strict=True))[len(sizes) - count :]
        return [1 if f or self.random.random() < 0.2 else size for size, f in own]

    def _is_fit(self, name: str) -> bool:
        for space in (self.here, self.other):
            value = space.get(name)
            if not isinstance(value, Tensor) or value.numel() == 0 or value.dim() > MAX_DIMS:
                return False
            if value.numel() > MAX_ELEMENTS * (3 if space is self.other else 1):
                return False
            if value.dtype.is_floating_point or value.dtype.is_complex:
                size = value.detach().abs().max()
                if not bool(torch.isfinite(size)) or float(size) > LARGEST:
                    return False
        return self.here[name].dim() == self.other[name].dim()

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            self.here.pop(name, None), self.other.pop(name, None)

    def _reads(self, text: str, makes: Sequence[str]) -> tuple[str, ...]:
        words = set("".join(letter if letter.isalnum() or letter in "_." else " " for letter in text).split())
        words = {word.split(".")[1] if word.startswith("self.") else word.split(".")[0] for word in words}
        leaves = {leaf.name for leaf in self.leaves}
        known = set(self.names(lambda x: True)) | leaves
        return tuple(sorted(word for word in words if word in known and word not in makes))

    def propose(self, proposal: Callable[[Draw], object]) -> bool:
        """Whether a proposal could be made; where not, what it added is taken back."""
        before = len(self.lines), len(self.leaves)
        try:
            proposal(self)
        except Unfit:
            for line in self.lines[before[0] :]:
                self._drop(line.makes)
            for leaf in self.leaves[before[1] :]:
                self._drop([leaf.name])
            del self.lines[before[0] :], self.leaves[before[1] :]
            return False
        return True
