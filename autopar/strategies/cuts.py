"""Where each dim may be cut: cuts wander through the graph along the letters that operators share.

A view that reads ``(n d)`` as ``n d`` teaches the linear layer before it to cut its output between heads; a ``split`` of a
fused q-k-v teaches it to cut each third on its own. Enters: operators with their signatures. Leaves: for each operator
and letter the cuts worth offering, and which of them split the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from networkx.utils import UnionFind

from autopar.graph import Operator
from autopar.layout import Cut
from autopar.strategies.rule import Part, Signature, Term, place_of, product

MAX_CUTS = 4  # of one dim: more do not occur in real models, and each multiplies the strategies


@dataclass(frozen=True)
class LetterCuts:
    """For one operator: the cuts of each letter, and those among them that split the batch.

    ``dominated``: cuts that split fewer of the model's contractions than another cut of the same parameter's dim does (a
    query projection cut inside its heads beside one cut between them), with the number of units of the other one.
    """

    cuts: Mapping[str, tuple[Cut, ...]]
    batch: frozenset[tuple[str, Cut]]
    dominated: Mapping[tuple[str, Cut], int] = field(default_factory=dict)


def part_range(signature: Signature, part: Part) -> tuple[int, int]:
    """Start and size of a part within the divided dim."""
    sizes = signature.parts[part.letter]
    return sum(sizes[: part.index]), sizes[part.index]


def to_tensor(signature: Signature, term: Term, letter: str, cut: Cut) -> tuple[int, Cut] | None:
    """The dim of ``term`` that is cut when ``letter`` is, and how; None when the term lacks the letter or cannot be."""
    if letter in signature.joint:
        return _joint_to_tensor(signature, term, letter, cut)
    place = place_of(term, letter, signature.sizes)
    if place is None:
        return None
    index, outer, inner = place
    dim = term[index]
    if isinstance(dim, Part):
        restricted = restrict(cut, *part_range(signature, dim))
        return None if restricted is None else (index, restricted)
    return index, cut.lifted(outer, inner)


def _joint_to_tensor(signature: Signature, term: Term, letter: str, cut: Cut) -> tuple[int, Cut] | None:
    """As :func:`to_tensor`, for the first dim that a joint letter stands for; one of another size, and all but the first of
    those that are apart, are cut plainly."""
    for position, member in enumerate(signature.joint[letter]):
        size = signature.sizes[member]
        if place_of(term, member, signature.sizes) is not None:
            alike = size == cut.size and not (position and letter in signature.apart)
            return to_tensor(signature, term, member, cut if alike else Cut.plain(size))
    return None


def fits_joint(signature: Signature, letter: str, cut: Cut) -> bool:
    """Whether a joint letter may be cut so: one piece a device, and plainly where its dims are of several sizes."""
    if letter in signature.apart:
        return True
    one_segment = len(cut.runs) == 1 and cut.runs[0][0] == 1
    alike = all(signature.sizes[member] == cut.size for member in signature.joint[letter])
    return one_segment and (alike or cut.is_plain)


def to_letter(signature: Signature, term: Term, index: int, cut: Cut) -> tuple[str, Cut] | None:
    """The letter, and its cut, that cuts dim ``index`` of ``term`` by ``cut``; None when no letter does."""
    dim = term[index]
    if isinstance(dim, Part):
        whole = widen(cut, signature.parts[dim.letter])
        return None if whole is None else (dim.letter, whole)
    for position, letter in enumerate(dim):
        if isinstance(letter, str):
            outer, inner = product(dim[:position], signature.sizes), product(dim[position + 1 :], signature.sizes)
            lowered = cut.lowered(outer, inner)
            if lowered is not None and lowered.size == signature.sizes[letter] and lowered.lifted(outer, inner) == cut:
                return letter, lowered
    return None


def restrict(cut: Cut, start: int, size: int) -> Cut | None:
    """The part of a cut from ``start`` on, or None when a segment reaches over the part's border."""
    runs = []
    position = 0
    for count, length, unit in cut.runs:
        first = max(0, -(-(start - position) // length))
        last = min(count, (start + size - position) // length)
        if last > first and position + first * length < start + size:
            runs.append((last - first, length, unit))
        position += count * length
    return Cut(tuple(runs)) if runs and sum(count * length for count, length, _ in runs) == size else None


def widen(cut: Cut, sizes: Sequence[int]) -> Cut | None:
    """The cut of a divided dim in which every part is cut into as many units as ``cut`` has."""
    if len(cut.runs) != 1 or cut.runs[0][0] != 1:
        return None
    units = cut.num_units
    if any(size % units for size in sizes):
        return None
    if len(set(sizes)) == 1:
        return Cut(((len(sizes), sizes[0], sizes[0] // units),))
    return Cut(tuple((1, size, size // units) for size in sizes))


class _Cuts:
    """The cuts known so far, by value and dim."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int], dict[Cut, None]] = {}
        self.batch: dict[tuple[str, int], Cut] = {}
        self.num_changes: Counter[str] = Counter()  # by value

    def add(self, value: str, dim: int, cut: Cut) -> None:
        cuts = self.known.setdefault((value, dim), {})
        if cut not in cuts and len(cuts) < MAX_CUTS and cut.num_units > 1:
            cuts[cut] = None
            self.num_changes[value] += 1

    def add_batch(self, value: str, dim: int, cut: Cut) -> None:
        if (value, dim) not in self.batch:
            self.batch[value, dim] = cut
            self.add(value, dim, cut)
            self.num_changes[value] += 1


def letter_cuts(
    operators: Sequence[Operator],
    signatures: Mapping[str, Signature],
    batch_dims: Iterable[tuple[str, int, int]],
    parameters: Iterable[str] = (),
) -> dict[str, LetterCuts]:
    """Cuts of every letter of every operator.

    ``batch_dims``: (value, dim, size) of the model's inputs. ``parameters``: values whose dims are looked at to find
    dominated cuts.
    """
    state = _Cuts()
    for value, dim, size in batch_dims:
        state.add_batch(value, dim, Cut.plain(size))
    ruled = [operator for operator in operators if operator.id in signatures]
    seen: dict[str, int] = {}  # changes of an operator's values that it has spread: without others it has nothing new to say
    for backwards in (False, True) * 4:
        for operator in reversed(ruled) if backwards else ruled:
            changes = sum(state.num_changes[value] for value in (*operator.inputs, *operator.outputs))
            if seen.get(operator.id) != changes:
                seen[operator.id] = changes
                _spread(operator, signatures[operator.id], state)
    found = {operator.id: _of_letters(operator, signatures[operator.id], state) for operator in ruled}
    dominated = _dominated(ruled, signatures, found, state, frozenset(parameters))
    return {name: replace(cuts, dominated=dominated.get(name, {})) for name, cuts in found.items()}


_Place = tuple[str, int | str, Cut]  # a value's dim or an operator's letter, with a cut


def _dominated(
    operators: Sequence[Operator],
    signatures: Mapping[str, Signature],
    letters: Mapping[str, LetterCuts],
    state: _Cuts,
    parameters: frozenset[str],
) -> dict[str, dict[tuple[str, Cut], int]]:
    """Cuts that reach fewer contractions than another cut of the same dim of a parameter.

    Cuts that follow from each other, through the letters that operators share, are one class; a class reaches the
    contractions and attention that have a letter in it.
    """
    classes: UnionFind[_Place] = UnionFind()
    heavy: dict[_Place, set[str]] = {}
    for operator in operators:
        signature = signatures[operator.id]
        for letter, cuts in letters[operator.id].cuts.items():
            for cut in cuts:
                here: _Place = (operator.id, letter, cut)
                if signature.kind in ("matmul", "attention"):
                    heavy.setdefault(here, set()).add(operator.id)
                for value, term in _terms(operator, signature):
                    place = to_tensor(signature, term, letter, cut)
                    if place:
                        classes.union(here, (value, *place))
    reach: dict[_Place, set[str]] = {}
    for letter_place, reached in heavy.items():
        reach.setdefault(classes[letter_place], set()).update(reached)
    beaten: dict[_Place, int] = {}
    for (value, dim), known in state.known.items():
        if value in parameters:
            _compare([(classes[value, dim, cut], cut.num_units) for cut in known], reach, beaten)
    found: dict[str, dict[tuple[str, Cut], int]] = {}
    for operator in operators:
        for letter, cuts_of in letters[operator.id].cuts.items():
            for cut in cuts_of:
                units = beaten.get(classes[operator.id, letter, cut])
                if units:
                    found.setdefault(operator.id, {})[letter, cut] = units
    return found


def _compare(places: Sequence[tuple[_Place, int]], reach: Mapping[_Place, set[str]], beaten: dict[_Place, int]) -> None:
    """Note each class of which another cut of the same dim reaches more."""
    for place, _ in places:
        better = [units for other, units in places if reach.get(other, set()) > reach.get(place, set())]
        if better:
            beaten[place] = max(*better, beaten.get(place, 0))


def _terms(operator: Operator, signature: Signature) -> list[tuple[str, Term]]:
    outputs = [value for value in operator.outputs if value]
    return list(zip((*operator.inputs, *outputs), (*signature.inputs, *signature.outputs), strict=True))


def _of_letters(operator: Operator, signature: Signature, state: _Cuts) -> LetterCuts:
    found: dict[str, dict[Cut, None]] = {letter: {} for letter in signature.splittable()}
    batch = set()
    for letter, cuts in found.items():
        if letter not in signature.parts:
            cuts[Cut.plain(signature.sizes[letter])] = None
    for value, term in _terms(operator, signature):
        for index in range(len(term)):
            for cut in state.known.get((value, index), ()):
                place = to_letter(signature, term, index, cut)
                for letter, own in _splitting(signature, *place) if place else ():
                    found[letter][own] = None
                    if state.batch.get((value, index)) == cut:
                        batch.add((letter, own))
    return LetterCuts({letter: tuple(cuts)[:MAX_CUTS] for letter, cuts in found.items()}, frozenset(batch))


def _splitting(signature: Signature, letter: str, cut: Cut) -> Iterable[tuple[str, Cut]]:
    """A letter with its cut, and the joint letters that may be cut so because it is; those that may be split at all."""
    allowed = signature.splittable()
    if letter in allowed:
        yield letter, cut
    for joint in signature.splitting(letter)[1:]:
        leads = joint not in signature.apart or letter == signature.joint[joint][0]
        if joint in allowed and leads and cut.size == signature.sizes[joint] and fits_joint(signature, joint, cut):
            yield joint, cut


def _spread(operator: Operator, signature: Signature, state: _Cuts) -> None:
    """Carry the cuts of each of an operator's tensors to its others, and the batch from its inputs to its outputs."""
    letters = _of_letters(operator, signature, state)
    terms = _terms(operator, signature)
    outputs = {value for value in operator.outputs if value}
    for letter, cuts in letters.cuts.items():
        for cut in cuts:
            for value, term in terms:
                place = to_tensor(signature, term, letter, cut)
                if place:
                    state.add(value, *place)
                    if (letter, cut) in letters.batch and value in outputs:
                        state.add_batch(value, *place)
