"""All legal strategies of an operator on a mesh: which letter each axis splits, and the layouts that follow.

Enters: a :class:`~autopar.strategies.rule.Signature` and the cuts of its letters. Leaves: :class:`Strategy` values, one
per combination of choices on the axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autopar.layout import PARTIAL, REPLICATED, SUMMED_GRADIENT, Cut, Layout, Shard, State
from autopar.strategies.cuts import LetterCuts, to_tensor
from autopar.strategies.rule import Halo, Signature

CHUNKS = "chunks"  # a form: by chunks of rows, and once more in backward


@dataclass(frozen=True)
class AxisChoice:
    """What one axis does to an operator.

    ``label`` is for people: the letter, ``R`` (all replicated), ``G`` (replicated, gradients partial) or ``P`` (partial
    values pass through). ``inputs`` and ``outputs`` give each tensor's state on the axis. ``alone``: letters
    that no other axis may split then. ``beside``: the letter that a joint one stands for and that other axes may split too;
    ``work``: then the cut by which the work is shared out.
    """

    label: str
    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    letter: str | None = None
    cut: Cut | None = None
    splits_batch: bool = False
    alone: tuple[str, ...] = ()
    beside: str | None = None
    work: Cut | None = None

    @property
    def counts_as(self) -> str | None:
        """The letter of which this axis makes more pieces."""
        return self.beside or self.letter


@dataclass(frozen=True)
class Strategy:
    """One legal choice for an operator on all axes of the mesh, with the layouts of its tensors.

    ``split`` gives each split letter its cut and into how many pieces all axes together cut it. ``form``: how it is computed
    where there are several ways, :data:`CHUNKS` or, in the usual one, empty.
    """

    axes: tuple[AxisChoice, ...]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    split: Mapping[str, tuple[Cut, int]]
    form: str = ""

    @property
    def label(self) -> str:
        return " ".join(choice.label for choice in self.axes)


def axis_choices(
    signature: Signature | None,
    letters: LetterCuts | None,
    has_gradient: tuple[Sequence[bool], Sequence[bool]],
    axis_size: int,
) -> tuple[AxisChoice, ...]:
    """Every choice on one axis of ``axis_size`` devices. Without a signature (no rule) everything is replicated.

    ``has_gradient`` says of each input and each output whether a gradient flows through it. A cut that reaches less of
    the model than another cut of the same dim is left out where the other has enough units for the axis.
    """
    inputs, outputs = has_gradient
    if signature is None or letters is None:
        return (AxisChoice("R", (REPLICATED,) * len(inputs), (REPLICATED,) * len(outputs)),)
    found = [AxisChoice("R", (REPLICATED,) * len(inputs), (REPLICATED,) * len(outputs))]
    for letter in signature.splittable():
        for cut in letters.cuts.get(letter, ()):
            if letters.dominated.get((letter, cut), 0) < axis_size:
                choice = _split(signature, letter, cut, (letter, cut) in letters.batch, axis_size)
                found.extend([choice] if choice else [])
    found.extend(_pass_partial(signature, group) for group in signature.linear)
    if any(outputs):
        found.append(AxisChoice("G", (SUMMED_GRADIENT,) * len(inputs), (SUMMED_GRADIENT,) * len(outputs)))
    unique: dict[tuple[tuple[State, ...], tuple[State, ...]], AxisChoice] = {}
    for choice in found:
        states = (_settled(choice.inputs, inputs, any(outputs)), _settled(choice.outputs, outputs, True))
        kept = replace(choice, inputs=states[0], outputs=states[1])
        pieces = (_normalized(states[0], axis_size), _normalized(states[1], axis_size))
        earlier = unique.get(pieces)
        if earlier is None or _rank(kept) > _rank(earlier):
            unique[pieces] = kept
    return tuple(unique.values())


def _rank(choice: AxisChoice) -> tuple[bool, int]:
    """Of two choices with the same pieces the one that is known to split the batch, or has fewer, larger units, stays:
    it also fits the other tensors when a further axis cuts its pieces."""
    units = -choice.cut.num_units if choice.cut else 0
    return choice.splits_batch, units


def _normalized(states: Sequence[State], parts: int) -> tuple[State, ...]:
    """States with the simplest cuts that give the same pieces."""
    return tuple(_normalized_shard(s, parts) if isinstance(s, Shard) else s for s in states)


@lru_cache(maxsize=1 << 14)
def _normalized_shard(state: Shard, parts: int) -> Shard:
    return Shard(state.dim, state.cut.normalized(parts))


def _settled(states: Sequence[State], gradient: Sequence[bool], differentiated: bool) -> tuple[State, ...]:
    """States with the gradient's part left out where there is no gradient."""
    return tuple(
        REPLICATED if state == SUMMED_GRADIENT and not (flows and differentiated) else state
        for state, flows in zip(states, gradient, strict=True)
    )


def _split(signature: Signature, letter: str, cut: Cut, splits_batch: bool, axis_size: int) -> AxisChoice | None:
    """The states when one axis splits ``letter``; None when some tensor cannot follow the cut, or a halo does not fit."""
    halos = [halo for halo in signature.halos if halo.letter == letter]
    if not all(_has_room(signature, halo, cut, axis_size) for halo in halos):
        return None
    inputs: list[State] = []
    outputs: list[State] = []
    reduced = all(_flat(term).isdisjoint(signature.joint.get(letter, (letter,))) for term in signature.outputs)
    for index, term in enumerate(signature.inputs):
        place = to_tensor(signature, term, letter, cut)
        if place:
            inputs.append(Shard(*place))
        elif letter in _flat(term):
            return None
        elif reduced and index in signature.additive:
            inputs.append(PARTIAL)
        elif reduced and letter in signature.replicated_after and index not in signature.summed:
            inputs.append(REPLICATED)  # every device computes the same from it
        else:
            inputs.append(SUMMED_GRADIENT)
    for term in signature.outputs:
        place = to_tensor(signature, term, letter, cut)
        if place:
            outputs.append(Shard(*place))
        elif letter in _flat(term):
            return None
        else:
            outputs.append(REPLICATED if letter in signature.replicated_after else PARTIAL)
    label = letter if cut.is_plain else f"{letter}[{cut}]"
    members = signature.joint.get(letter, ())
    alone = (letter, *members) if halos or members else ()
    choice = AxisChoice(label, tuple(inputs), tuple(outputs), letter, cut, splits_batch, alone)
    if letter not in signature.apart:
        return choice
    work = Cut.plain(signature.sizes[members[-1]])
    return replace(choice, alone=(letter, *members[1:]), beside=members[0], work=work)


def _has_room(signature: Signature, halo: Halo, cut: Cut, axis_size: int) -> bool:
    """Whether the pieces of a cut lie side by side and none is shorter than the halo."""
    if len(cut.runs) != 1 or cut.runs[0][0] != 1:
        return False
    place = to_tensor(signature, signature.inputs[0], halo.letter, cut)
    if place is None:
        return False
    _, _, unit = place[1].runs[0]
    return cut.num_units // axis_size * unit >= max(halo.before, halo.after)


def _flat(term: Sequence[object]) -> set[object]:
    found: set[object] = set()
    for dim in term:
        found.update(dim if isinstance(dim, tuple) else {getattr(dim, "letter", None)})
    return found


def _pass_partial(signature: Signature, group: frozenset[int]) -> AxisChoice:
    """Partial in, partial out: legal for the inputs in which the operator is linear together."""
    inputs = tuple(PARTIAL if index in group else SUMMED_GRADIENT for index in range(len(signature.inputs)))
    return AxisChoice("P", inputs, (PARTIAL,) * len(signature.outputs))


_Sides = tuple[tuple[State, ...], tuple[State, ...]]  # of inputs and outputs on one axis


def strategies(per_axis: Sequence[Sequence[AxisChoice]], mesh_shape: Sequence[int]) -> tuple[Strategy, ...]:
    """Every combination of the axes' choices that can be carried out together, each set of layouts once.

    Axes that split one letter cut it alike, and there are units for all of their pieces; an axis of one device splits
    nothing, and what exchanges halos along a letter splits it alone.
    """
    found: dict[tuple[int, ...], Strategy] = {}
    numbers: dict[_Sides, int] = {}  # choices with equal pieces are one: comparing their numbers is quick
    pieced: dict[tuple[int, int], tuple[int, _Sides]] = {}
    for axes in itertools.product(*per_axis):
        split = _pieces(axes, mesh_shape)
        if split is None:
            continue
        if any(choice.beside for choice in axes):
            parts = [_num_parts(choice, axes, split) for choice in axes]
        else:
            parts = [split[choice.letter][1] if choice.letter else 1 for choice in axes]
        for choice, count in zip(axes, parts, strict=True):
            if (id(choice), count) not in pieced:
                both = _normalized(choice.inputs, count), _normalized(choice.outputs, count)
                pieced[id(choice), count] = numbers.setdefault(both, len(numbers)), both
        states = [pieced[id(choice), count] for choice, count in zip(axes, parts, strict=True)]
        key = tuple(number for number, _ in states)
        if key not in found:
            inputs, outputs = (tuple(zip(*side, strict=True)) for side in zip(*(both for _, both in states), strict=True))
            found[key] = Strategy(axes, inputs, outputs, split)
    return tuple(found.values())


def _pieces(axes: Sequence[AxisChoice], mesh_shape: Sequence[int]) -> dict[str, tuple[Cut, int]] | None:
    """Each split letter with its cut and number of pieces; None where the axes' choices do not go together.

    Every device gets something: operators on nothing fail, and means of nothing are no numbers.
    """
    found: dict[str, tuple[Cut, int]] = {}
    for one in axes:
        if one.alone and sum(choice.letter in one.alone for choice in axes) > 1:
            return None
    for choice, size in zip(axes, mesh_shape, strict=True):
        if choice.letter is None:
            continue
        assert choice.cut is not None
        cut, parts = found.get(choice.letter, (choice.cut, 1))
        if size == 1 or cut != choice.cut or cut.num_units < parts * size:
            return None
        if choice.work is not None and choice.work.num_units < size:
            return None
        found[choice.letter] = (cut, parts * size)
    for one in axes:
        if one.beside is not None and not _fits_beside(one, axes, found):
            return None
    return found


def _num_parts(choice: AxisChoice, axes: Sequence[AxisChoice], split: Mapping[str, tuple[Cut, int]]) -> int:
    """Into how many pieces all axes together cut what a choice cuts."""
    letters = {one.letter for one in axes if one.letter is not None and one.counts_as == choice.counts_as}
    return math.prod(split[letter][1] for letter in letters)


def _fits_beside(joint: AxisChoice, axes: Sequence[AxisChoice], split: Mapping[str, tuple[Cut, int]]) -> bool:
    """Whether other axes cut the first of the letters that a joint one stands for alike, and there are units for all."""
    alike = all(other.cut == joint.cut for other in axes if other.letter == joint.beside)
    assert joint.cut is not None
    return alike and joint.cut.num_units >= _num_parts(joint, axes, split)


def share(strategy: Strategy) -> float:
    """The part of an operator's work that falls to the first device: 1 when nothing is split."""
    works = {choice.letter: choice.work for choice in strategy.axes if choice.work is not None}
    return math.prod(
        piece_fraction(works.get(letter, cut), parts) for letter, (cut, parts) in strategy.split.items()
    )


@lru_cache(maxsize=1 << 14)
def piece_fraction(cut: Cut, parts: int) -> float:
    """Length of the largest piece as a fraction of the whole."""
    total = sum(count * size for count, size, _ in cut.runs)
    largest = sum(count * math.ceil(size // unit / parts) * unit for count, size, unit in cut.runs)
    return largest / total
