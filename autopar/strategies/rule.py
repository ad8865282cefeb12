"""What a rule says: the dims of an operator's tensors as letters, and what may be done with each letter.

Terms are written as in einops, ``b.. k, n k, n -> b.. n`` for a linear layer: a *term* per tensor, a *dim* per
dimension. A dim is a product of letters, major first, ``(n d)``; an integer in it is a factor that is never split. ``b..``
stands for any number of leading dims. On a mesh axis a strategy splits one letter or none (see ``choices.py``):

* a term with the letter is sharded along that dim;
* an input without it is replicated and its gradient is partial, unless it is *additive* (a bias beside a split sum): then
  it is partial, so that it counts once;
* an output without it is a sum over the devices, unless the operator exchanges what it needs itself (*exchanges*): then
  it is the same on all of them (*replicated_after*).

Operators linear in some inputs together also pass partial values through (*linear*).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from autopar.errors import RuleError
from autopar.graph import Operator, OpGraph
from autopar.layout import Cut
from autopar.reshard import CollectiveKind


@dataclass(frozen=True)
class Part:
    """A dim that is one part of a larger one: what ``split`` returns and ``cat`` takes. ``index`` counts the parts."""

    letter: str
    index: int


Dim = tuple[str | int, ...] | Part
Term = tuple[Dim, ...]
Rounds = Literal["once", "others", "all"]
CostKind = Literal["matmul", "attention", "elementwise", "view", "free"]


@dataclass(frozen=True)
class Exchange:
    """A collective that an operator performs itself when ``letter`` is split: ``count`` times a tensor of ``letters``.

    ``backward`` says whether it belongs to the backward pass. ``item_bytes`` of one element sent. ``more_elements`` are
    sent along with the tensor (a count beside sums). ``rounds``: done once, or once for each of the ``others`` on the axis,
    or for ``all`` devices on it. ``halved``: a letter of which only half of what a device holds is sent, rounded down; where it
    ``returns``, of what the device as far from the other end holds.
    ``overlaps``: it is under way while the operator computes. ``alike``: a letter and how many of it side by side are the same,
    so that one of them is sent where none are apart.
    """

    letter: str
    kind: CollectiveKind
    letters: tuple[str, ...]
    item_bytes: int
    count: int = 1
    backward: bool = False
    more_elements: int = 0
    rounds: Rounds = "once"
    halved: str | None = None
    returns: bool = False
    overlaps: bool = False
    alike: tuple[str, int] | None = None

    def times(self, axis_size: int) -> int:
        """How many collectives there are on an axis of ``axis_size`` devices."""
        rounds = {"once": 1, "others": axis_size - 1, "all": axis_size}
        return self.count * rounds[self.rounds]


Edge = float | Literal["repeat"]


@dataclass(frozen=True)
class Halo:
    """What an operator needs of its neighbours' pieces of its first input when ``letter``, along dim ``dim``, is split.

    ``before`` elements from the end of the previous device's piece and ``after`` from the beginning of the next one's, sent
    from neighbour to neighbour; at the borders of the whole tensor they are ``edge``. ``item_bytes`` of one element.
    ``has_gradient``: backward sends the gradient of the halo back, and it is added. Halos of several letters are exchanged one
    after the other, each with what the earlier ones have added. Only one axis may split the letter, in plain pieces.
    """

    letter: str
    dim: int
    before: int
    after: int
    item_bytes: int
    has_gradient: bool
    edge: Edge = 0.0


def in_whole_groups(cut: Cut, parts: int, group: int) -> bool:
    """Whether each of ``parts`` pieces is made of whole groups of so many elements."""
    if len(cut.runs) != 1 or cut.runs[0][0] != 1:
        return False
    _, size, unit = cut.runs[0]
    return unit % group == 0 or (cut.divides(parts) and size // parts % group == 0)


@dataclass(frozen=True)
class Chunked:
    """A product and what is made of its result, which may be computed by chunks of ``rows``: what is ``classes`` wide is then
    never whole, and computed once more in backward.

    ``width``: elements of a row from which its classes follow, of type ``dtype``; ``result``: the type that these are brought
    to, ``wide`` that in which they are added up. The backward pass has so many ``products`` of ``product_flops`` each;
    ``each_flops`` are those of what is made of one, on whole tensors. ``saved_extra_bytes`` are kept for backward beside the
    saved inputs, on whole tensors. ``sums_apart``: gradients of the classes' parameters are summed up in another type than
    theirs. ``is_offered``: whether chunks are a choice.
    """

    rows: tuple[str, ...]
    classes: str
    width: int
    dtype: str
    result: str
    wide: str
    products: int
    product_flops: float
    each_flops: float
    saved_extra_bytes: float
    sums_apart: bool
    is_offered: bool


@dataclass(frozen=True)
class Signature:
    """One operator's rule, filled in with the sizes of its tensors.

    ``inputs`` and ``outputs`` have one term per tensor, in the order of ``Operator.inputs`` and ``Operator.outputs``.
    ``sizes`` maps letters to sizes; ``parts`` maps the letter of a divided dim to the sizes of its parts. ``whole`` are
    letters that must not be split. ``halos`` are exchanged with neighbours; ``spatial`` are letters of space, along which a
    window slides; ``experts`` are those of the experts of a mixture. ``flops`` is of the forward pass on whole tensors;
    ``backward_flops`` of the backward pass. ``saved_inputs`` and ``saved_outputs`` are what autograd keeps for backward, by
    position; ``saved_extra_bytes`` is what it keeps besides (softmax statistics and the like), on whole tensors.
    ``random`` operators draw numbers and are never split, unless the numbers are ``counted``: functions of the elements'
    places in the whole tensor. ``joint`` letters stand for several others that are cut together, alike and in one piece a
    device (queries and keys, around a ring): one axis at the most splits such a letter. Of joint letters that are ``apart``
    the first one may be split by other axes too, and the others are cut plainly (tokens, and the experts that they travel to);
    a device's work is its piece of the last one. ``summed`` inputs have a gradient that is a sum over the pieces of a letter
    that they lack even where the result is the same on all. ``chunked``: the operator may be computed by chunks of rows, too.
    """

    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    sizes: Mapping[str, int]
    parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    exchanges: tuple[Exchange, ...] = ()
    halos: tuple[Halo, ...] = ()
    spatial: frozenset[str] = frozenset()
    experts: frozenset[str] = frozenset()
    replicated_after: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    additive: frozenset[int] = frozenset()
    kind: CostKind = "elementwise"
    flops: float = 0.0
    backward_flops: float = 0.0
    saved_inputs: frozenset[int] = frozenset()
    saved_outputs: frozenset[int] = frozenset()
    saved_extra_bytes: float = 0.0
    random: bool = False
    counted: bool = False
    joint: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    apart: frozenset[str] = frozenset()
    summed: frozenset[int] = frozenset()
    chunked: Chunked | None = None

    def splittable(self) -> tuple[str, ...]:
        """Letters that a strategy may split, in order of appearance, outputs first."""
        return self._splittable

    @cached_property
    def _splittable(self) -> tuple[str, ...]:
        if self.random and not self.counted:
            return ()
        terms = [letters_of(term) for term in (*self.outputs, *self.inputs)]
        repeated = {letter for letters in terms for letter in letters if letters.count(letter) > 1}
        found = dict.fromkeys(itertools.chain(*terms, self.joint))
        return tuple(
            letter for letter in found if letter not in self.whole and self.sizes[letter] > 1 and letter not in repeated
        )

    def splitting(self, letter: str) -> tuple[str, ...]:
        """The letters whose split cuts the dims of ``letter``: itself, and joint ones that stand for it."""
        return (letter, *(name for name, members in self.joint.items() if letter in members))


RuleFunction = Callable[[Operator, OpGraph], Signature | None]


def letters_of(term: Term) -> list[str]:
    """All letters of a term, in order."""
    found: list[str] = []
    for dim in term:
        found.extend([dim.letter] if isinstance(dim, Part) else [letter for letter in dim if isinstance(letter, str)])
    return found


def place_of(term: Term, letter: str, sizes: Mapping[str, int]) -> tuple[int, int, int] | None:
    """Where a letter stands in a term: the dim, and the sizes of the factors before and after it in that dim."""
    for index, dim in enumerate(term):
        if isinstance(dim, Part):
            if dim.letter == letter:
                return index, 1, 1
        elif letter in dim:
            position = dim.index(letter)
            return index, product(dim[:position], sizes), product(dim[position + 1 :], sizes)
    return None


def product(factors: Sequence[str | int], sizes: Mapping[str, int]) -> int:
    """Size of a product of letters and numbers."""
    return math.prod(factor if isinstance(factor, int) else sizes[factor] for factor in factors)


_TOKEN = re.compile(r"\(([^)]*)\)|(\S+)")


def parse(text: str, shapes: Sequence[Sequence[int]]) -> tuple[tuple[Term, ...], tuple[Term, ...], dict[str, int]]:
    """Read ``"b.. k, n k -> b.. n"`` for tensors of the given shapes (inputs, then outputs): terms and sizes of letters.

    A dim of size 1 under a letter that is larger elsewhere is a broadcast: it loses the letter. In ``(n d)`` at most one
    letter may be new; its size follows from the others. Raises RuleError when the text does not fit the shapes.
    """
    if text.count("->") != 1:
        raise RuleError(f"a rule reads 'inputs -> outputs' with one arrow, got {text!r}")
    left, right = text.split("->")
    words = [_words(term) for term in left.split(",")] if left.strip() else []
    num_inputs = len(words)
    words += [_words(term) for term in right.split(",")]  # nothing after the arrow: a scalar
    if len(words) != len(shapes):
        raise RuleError(f"rule {text!r} has {len(words)} terms, the operator has {len(shapes)} tensors: {list(shapes)}")
    spread = _leading(text, words, shapes)
    expanded = [_expand(term, len(shape), text, spread) for term, shape in zip(words, shapes, strict=True)]
    sizes: dict[str, int] = {}
    for _ in range(2):  # a letter inside (n d) may get its size from a later term
        for term, shape in zip(expanded, shapes, strict=True):
            for dim, size in zip(term, shape, strict=True):
                _learn(dim, size, sizes)
    terms = tuple(
        tuple(_fitted(dim, size, sizes, text, shapes) for dim, size in zip(term, shape, strict=True))
        for term, shape in zip(expanded, shapes, strict=True)
    )
    return terms[:num_inputs], terms[num_inputs:], sizes


def _words(term: str) -> list[tuple[str | int, ...] | str]:
    """Dims of one term as written; ``b..`` stays a string."""
    found: list[tuple[str | int, ...] | str] = []
    for group, word in _TOKEN.findall(term):
        if word.endswith(".."):
            found.append(word)
        else:
            factors = group.split() if group or not word else [word]
            found.append(tuple(int(factor) if factor.isdigit() else factor for factor in factors if factor != "1"))
    return found


def _leading(text: str, words: Sequence[Sequence[object]], shapes: Sequence[Sequence[int]]) -> int:
    """How many dims ``b..`` stands for: the most that any term needs."""
    counts = [
        len(shape) - (len(term) - 1)
        for term, shape in zip(words, shapes, strict=True)
        if any(isinstance(word, str) for word in term)
    ]
    if counts and min(counts) < 0:
        raise RuleError(f"rule {text!r} names more dims than the operator's tensors have: {[tuple(s) for s in shapes]}")
    return max(counts, default=0)


def _expand(
    term: Sequence[tuple[str | int, ...] | str], num_dims: int, text: str, spread: int
) -> list[tuple[str | int, ...]]:
    """A term with ``b..`` written out as letters ``b0 b1 ...``, aligned at the right as broadcasting does."""
    found: list[tuple[str | int, ...]] = []
    for word in term:
        if isinstance(word, str):
            count = num_dims - (len(term) - 1)
            found.extend((f"{word[:-2]}{index}",) for index in range(spread - count, spread))
        else:
            found.append(word)
    if len(found) != num_dims:
        raise RuleError(f"rule {text!r} gives {len(found)} dims to a tensor that has {num_dims}")
    return found


def _learn(dim: tuple[str | int, ...], size: int, sizes: dict[str, int]) -> None:
    unknown = [letter for letter in dim if isinstance(letter, str) and letter not in sizes]
    if len(dim) == 1 and isinstance(dim[0], str):
        sizes[dim[0]] = max(size, sizes.get(dim[0], 1))
    elif len(unknown) == 1:
        known = math.prod(f if isinstance(f, int) else sizes[f] for f in dim if f != unknown[0])
        if known and size % known == 0:
            sizes[unknown[0]] = size // known


def _fitted(
    dim: tuple[str | int, ...], size: int, sizes: Mapping[str, int], text: str, shapes: Sequence[Sequence[int]]
) -> tuple[str | int, ...]:
    try:
        expected = product(dim, sizes)
    except KeyError as error:
        raise RuleError(f"rule {text!r}: the size of letter {error} does not follow from {list(shapes)}") from None
    if expected == size:
        return dim
    if size == 1:
        return ()
    raise RuleError(
        f"rule {text!r} does not fit: dim {dim} should have {expected} elements and has {size}; "
        f"the operator's tensors are {[tuple(shape) for shape in shapes]}"
    )


def shapes_of(operator: Operator, graph: OpGraph) -> list[tuple[int, ...]]:
    """Shapes of an operator's tensors, inputs first; outputs that are no tensors are left out."""
    ids = [*operator.inputs, *(value for value in operator.outputs if value)]
    return [graph.values[value].shape for value in ids]
