"""A random model as data: leaves, lines of Python, what is returned. From it the text of the model's class, and the model.

A recipe is what the drawer makes, what the shrinker cuts down, and what a failure is written down as.
"""

from __future__ import annotations

import linecache
import zlib
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

LeafKind = Literal["input", "parameter", "frozen", "tied", "buffer"]
HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn

from tests.random_programs.recipe import values

aten = torch.ops.aten
"""


@dataclass(frozen=True)
class Leaf:
    """A tensor that the model starts from. ``shape`` has -1 where the batch stands; ``low`` and ``high`` bound its values.

    A ``tied`` leaf is the parameter ``of`` under a second name.
    """

    name: str
    kind: LeafKind
    shape: tuple[int, ...] = ()
    dtype: str = "float64"
    low: float = -1.0
    high: float = 1.0
    of: str = ""

    def sized(self, batch: int) -> tuple[int, ...]:
        """The shape at a batch size."""
        return tuple(batch if size < 0 else size for size in self.shape)


@dataclass(frozen=True)
class Line:
    """A statement, or several that belong together: what it reads and the names that it makes."""

    text: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]


@dataclass(frozen=True)
class Body:
    """The leaves (each block has its own, buffers of the model aside) and lines of a repeated block, from ``x`` to ``made``."""

    leaves: tuple[Leaf, ...]
    lines: tuple[Line, ...]
    made: str
    count: int


@dataclass(frozen=True)
class Recipe:
    """A whole model: ``bodies`` are the repeated blocks by the name of their list; ``outputs`` are returned beside the loss,
    which is the sum of ``losses``, names of scalars."""

    seed: str
    batch: int
    leaves: tuple[Leaf, ...]
    lines: tuple[Line, ...]
    bodies: tuple[tuple[str, Body], ...]
    outputs: tuple[str, ...]
    losses: tuple[str, ...]

    @property
    def num_lines(self) -> int:
        return len(self.lines) + sum(len(body.lines) for _, body in self.bodies)


def values(name: str, shape: tuple[int, ...], low: float, high: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers that follow from the name: integers from ``low`` up to, not including, ``high``; else even in between."""
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if dtype in (torch.int64, torch.bool):
        return torch.randint(int(low), int(high), shape, generator=draw).to(dtype)
    return (torch.rand(shape, generator=draw, dtype=torch.float64) * (high - low) + low).to(dtype)


def value_of(leaf: Leaf, batch: int, prefix: str = "") -> Tensor:
    """A leaf's first value."""
    return values(prefix + leaf.name, leaf.sized(batch), leaf.low, leaf.high, getattr(torch, leaf.dtype))


def source(recipe: Recipe) -> str:
    """The text of the model: a class for each kind of block, and ``Model``."""
    given = [leaf.name for leaf in recipe.leaves if leaf.kind == "input"]
    parts = [HEAD]
    for name, body in recipe.bodies:
        start = [
            f"class {name.title()}(nn.Module):",
            "    def __init__(self, prefix):",
            "        super().__init__()",
        ]
        start += [f"        {text}" for leaf in body.leaves for text in _made(leaf, "prefix + ")]
        start += ["", "    def forward(self, x):", "        b = x.shape[0]"]
        start += [f"        {text}" for line in body.lines for text in line.text.splitlines()]
        parts.append("\n".join([*start, f"        return {body.made}", ""]))
    start = ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    start += [f"        {text}" for leaf in recipe.leaves for text in _made(leaf, "")]
    for name, body in recipe.bodies:
        start.append(
            f'        self.{name} = nn.ModuleList({name.title()}(f"{name}{{i}}.") for i in range({body.count}))'
        )
    start += ["", f"    def forward(self, {', '.join(given)}):", f"        b = {given[0]}.shape[0]"]
    start += [f"        {text}" for line in recipe.lines for text in line.text.splitlines()]
    returned = ", ".join([f'"loss": {" + ".join(recipe.losses)}', *(f'"{name}": {name}' for name in recipe.outputs)])
    parts.append("\n".join([*start, f"        return {{{returned}}}", ""]))
    return "\n\n".join(parts)


def _made(leaf: Leaf, prefix: str) -> list[str]:
    if leaf.kind == "input":
        return []
    if leaf.kind == "tied":
        return [f"self.{leaf.name} = self.{leaf.of}"]
    dtype = "" if leaf.dtype == "float64" else f", torch.{leaf.dtype}"
    made = f'values({prefix}"{leaf.name}", {leaf.shape}, {leaf.low}, {leaf.high}{dtype})'
    if leaf.kind == "buffer":
        return [f'self.register_buffer("{leaf.name}", {made})']
    return [f"self.{leaf.name} = nn.Parameter({made}{', requires_grad=False' if leaf.kind == 'frozen' else ''})"]


def build(recipe: Recipe) -> tuple[nn.Module, dict[str, Tensor], dict[str, int | None]]:
    """The model in training mode, its inputs, and the batch dim of each."""
    text = source(recipe)
    filename = f"<random program {recipe.seed}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    space: dict[str, Any] = {"__name__": "random_program"}
    exec(compile(text, filename, "exec"), space)
    inputs = {leaf.name: value_of(leaf, recipe.batch) for leaf in recipe.leaves if leaf.kind == "input"}
    dims = {
        leaf.name: leaf.shape.index(-1) if -1 in leaf.shape else None for leaf in recipe.leaves if leaf.kind == "input"
    }
    return space["Model"]().train(), inputs, dims


def without_dead(recipe: Recipe) -> Recipe:
    """The recipe without lines and leaves that lead to nothing that is returned. The first input stays."""
    wanted = {*recipe.outputs, *recipe.losses}
    lines: list[Line] = []
    for line in reversed(recipe.lines):
        if not wanted.isdisjoint(line.makes):
            lines.insert(0, line)
            wanted.update(line.reads)
    bodies = []
    for name, body in recipe.bodies:
        if name not in wanted:
            continue
        inner = {body.made}
        kept: list[Line] = []
        for line in reversed(body.lines):
            if not inner.isdisjoint(line.makes):
                kept.insert(0, line)
                inner.update(line.reads)
        bodies.append((name, replace(body, lines=tuple(kept), leaves=_read(body.leaves, inner))))
    first = next(leaf.name for leaf in recipe.leaves if leaf.kind == "input")
    return replace(recipe, lines=tuple(lines), bodies=tuple(bodies), leaves=_read(recipe.leaves, {*wanted, first}))


def _read(leaves: tuple[Leaf, ...], wanted: set[str]) -> tuple[Leaf, ...]:
    tied = {leaf.of for leaf in leaves if leaf.kind == "tied" and leaf.name in wanted}
    return tuple(leaf for leaf in leaves if leaf.name in wanted or leaf.name in tied)
