"""Layouts as words in a program's text, and the steps between a parameter's rest and its use.

One word per mesh axis: ``S1`` or ``S1[3x768/64]`` (sharded), ``R`` (replicated), ``G`` (replicated, gradient a sum of terms),
``P`` (a sum of terms).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from autopar.runtime.errors import ProgramError
from autopar.runtime.mesh import Axis, Mesh
from autopar.runtime.split import Cut, Split, parse_cut
from autopar.runtime.steps import PAIRS, Move


@dataclass(frozen=True)
class Word:
    """State on one axis: ``kind`` is S, R, G or P; ``dim`` and ``cut`` (text, None for plain) belong to S."""

    kind: str
    dim: int = -1
    cut: str | None = None

    def __str__(self) -> str:
        return f"S{self.dim}" + (f"[{self.cut}]" if self.cut else "") if self.kind == "S" else self.kind


Words = tuple[Word, ...]

_PLAIN = re.compile(r"1x\d+/1")


def parse_words(text: str, mesh: Mesh, num_dims: int) -> Words:
    """The words of ``text``, one for each axis of the mesh."""
    words = []
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"S(\d+)(?:\[(.+)\])?", part)
        if match and int(match[1]) < num_dims:
            # A plain cut follows the size of its dim, so that other batch sizes work.
            cut = None if match[2] is None or _PLAIN.fullmatch(match[2]) else match[2]
            words.append(Word("S", int(match[1]), cut))
        elif part in ("R", "G", "P"):
            words.append(Word(part))
        else:
            raise ProgramError(f"not a layout of a tensor of {num_dims} dims: {text!r}")
    if len(words) != len(mesh.axes):
        raise ProgramError(f"the layout {text!r} has {len(words)} words, the mesh {mesh} has {len(mesh.axes)} axes")
    return tuple(words)


def split_of(words: Words, dim: int, size: int, mesh: Mesh) -> Split:
    """How the layout cuts one dim of ``size``."""
    return Split(
        size,
        *(
            (axis, word.cut)
            for axis, word in zip(mesh.axes, words, strict=True)
            if word.kind == "S" and word.dim == dim
        ),
    )


def sharded_dims(words: Words) -> tuple[int, ...]:
    """Dims that some axis cuts."""
    return tuple(sorted({word.dim for word in words if word.kind == "S"}))


def local_shape(shape: Sequence[int], words: Words, mesh: Mesh) -> tuple[int, ...]:
    """Shape of this rank's share."""
    sizes = list(shape)
    for dim in sharded_dims(words):
        sizes[dim] = split_of(words, dim, shape[dim], mesh).local
    return tuple(sizes)


def take_share(whole: Tensor, words: Words, mesh: Mesh) -> Tensor:
    """This rank's share of a whole tensor: a view where it is one rectangle."""
    for dim in sharded_dims(words):
        whole = split_of(words, dim, whole.shape[dim], mesh).take(whole, dim)
    return whole


@dataclass(frozen=True)
class Change:
    """One step on one axis, by its name in :data:`steps.PAIRS`, and where it acts."""

    name: str
    move: Move

    def forward(self, x: Tensor) -> Tensor:
        return PAIRS[self.name][0](x, self.move)

    def backward(self, gradient: Tensor) -> Tensor:
        return PAIRS[self.name][1](gradient, self.move)


# What shrinks comes first, what makes larger last: the order of autopar.reshard.
_ORDER = (
    "take_shard", "scatter", "reduce_scatter", "all_to_all", "keep_first_gradient", "copy_to", "reduce_from", "all_reduce",
    "gather", "all_gather", "keep_first", "keep_first_both", "pad_shard",
)  # fmt: skip

_NAMES = {
    "SR": "gather", "SG": "all_gather", "SP": "pad_shard", "RS": "scatter", "GS": "take_shard", "PS": "reduce_scatter",
    "RG": "copy_to", "PR": "reduce_from", "PG": "all_reduce", "RP": "keep_first", "GP": "keep_first_both",
    "GR": "keep_first_gradient",
}  # fmt: skip


def changes(source: Words, target: Words, shape: Sequence[int], mesh: Mesh) -> tuple[Change, ...]:
    """The steps from ``source`` to ``target`` of a tensor of global ``shape``, as ``autopar.reshard.steps`` takes them.

    A program's text has the steps of its activations written out; this is for what the engine moves: parameters between
    rest and use, and outputs that are wanted whole.
    """
    found: list[Change] = []
    current = source
    for _ in range(4 * len(source) + 1):
        if current == target:
            return tuple(found)
        index, name, wanted = _next(current, target, shape)
        after = (*current[:index], wanted, *current[index + 1 :])
        found.append(Change(name, _move(name, mesh.axes[index], current, after, shape, mesh)))
        current = after
    raise ProgramError(f"no way from layout {_text(source)} to {_text(target)}")


def _next(current: Words, target: Words, shape: Sequence[int]) -> tuple[int, str, Word]:
    """Axis, name and new word of the next step."""
    direct = []
    for index, (word, wanted) in enumerate(zip(current, target, strict=True)):
        after = (*current[:index], wanted, *current[index + 1 :])
        name = _name(word, wanted)
        if (
            name
            and _is_innermost(current, index, shape)
            and _is_innermost(after, index, shape)
            and _outer_cuts_done(current, target, index, shape)
        ):
            direct.append((_ORDER.index(name), -index, name, wanted))
    if direct:
        _, index, name, wanted = min(direct, key=lambda step: step[:2])
        return -index, name, wanted
    for index in reversed(range(len(current))):
        if current[index].kind == "S" and _in_the_way(current, target, index, shape):
            return index, "gather", Word("R")
    raise ProgramError(f"no way from layout {_text(current)} to {_text(target)}")


def _name(word: Word, wanted: Word) -> str:
    if word == wanted:
        return ""
    if word.kind == wanted.kind == "S":
        return "all_to_all" if word.dim != wanted.dim else ""
    return _NAMES[word.kind + wanted.kind]


def _is_innermost(words: Words, index: int, shape: Sequence[int]) -> bool:
    word = words[index]
    return word.kind != "S" or all(
        other.kind != "S" or other.dim != word.dim or _independent(word, other, shape) for other in words[index + 1 :]
    )


def _outer_cuts_done(current: Words, target: Words, index: int, shape: Sequence[int]) -> bool:
    wanted = target[index]
    return wanted.kind != "S" or not any(
        current[earlier] != target[earlier]
        and word.kind == "S"
        and word.dim == wanted.dim
        and not _independent(wanted, word, shape)
        for earlier in range(index)
        for word in (current[earlier], target[earlier])
    )


def _in_the_way(current: Words, target: Words, index: int, shape: Sequence[int]) -> bool:
    if not _is_innermost(current, index, shape):
        return False
    return current[index] != target[index] or any(
        current[earlier] != target[earlier] and word.kind == "S" and word.dim == current[index].dim
        for earlier in range(index)
        for word in (current[earlier], target[earlier])
    )


def _independent(first: Word, second: Word, shape: Sequence[int]) -> bool:
    """Whether two cuts of one dim cut different factors of it, so that neither depends on which came first."""
    one, other = (parse_cut(word.cut, shape[word.dim]) for word in (first, second))
    return _inside(one, other) or _inside(other, one)


def _inside(outer: Cut, inner: Cut) -> bool:
    lengths = {length for _, length, _ in inner}
    units = {unit for _, _, unit in outer}
    return len(lengths) == 1 and len(units) == 1 and next(iter(units)) % next(iter(lengths)) == 0


def _move(name: str, axis: Axis, before: Words, after: Words, shape: Sequence[int], mesh: Mesh) -> Move:
    """Where a step acts, from the layouts around it."""
    source, target = before[axis.index], after[axis.index]
    if name == "all_to_all":
        source_split = split_of(before, source.dim, shape[source.dim], mesh)
        return Move(axis, source.dim, source_split, target.dim, split_of(after, target.dim, shape[target.dim], mesh))
    if source.kind == "S":
        return Move(axis, source.dim, split_of(before, source.dim, shape[source.dim], mesh))
    if target.kind == "S":
        return Move(axis, target.dim, split_of(after, target.dim, shape[target.dim], mesh))
    return Move(axis)


def _text(words: Words) -> str:
    return ",".join(str(word) for word in words)
