"""The rule of an operator that has none, found by running it on shards of an example.

Every way to cut the inputs along one axis is tried; where the pieces of the outputs make the whole again, and the
gradients too, the dims that were cut go together: they are one letter. What was found is written as a rule and proved as
any rule is (`proving`); a letter whose proof fails is left whole, so that nothing is said that was not seen to be right.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import RuleError
from autopar.graph import Operator, OpGraph, Ref
from autopar.prober.example import Example, by_name, example_of
from autopar.prober.proving import proved
from autopar.prober.shards import PARTIAL, SUMMED, WHOLE, State, observed, wrong
from autopar.strategies.registry import register_rule
from autopar.strategies.rule import Signature
from autopar.strategies.signatures import written

LEAST_SIZE = 3  # of a dim that is cut: every rank of three gets something
MOST_WAYS = 4096  # of cutting the inputs that are tried
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class ProbedRule:
    """A rule that was found, in the words of :func:`autopar.register_rule`, for calls like the example: with the same
    arguments beside the tensors, and tensors of as many dims, of which the same have one element."""

    target: str
    text: str
    linear: tuple[tuple[int, ...], ...]
    additive: tuple[int, ...]
    whole: tuple[str, ...]
    differentiable: bool
    alike: tuple[object, ...]

    @property
    def splits(self) -> tuple[str, ...]:
        """Letters that may be split."""
        letters = dict.fromkeys(letter for letter in self.text if letter.isalpha())
        return tuple(letter for letter in letters if letter not in self.whole)

    def register(self) -> None:
        """Let the planner use it from now on, beside others that were found for the operator."""
        known = _registered.setdefault(self.target, [])
        known[:] = [other for other in known if other.alike != self.alike] + [self]
        register_rule(self.target, _of_registered)

    def signature(self, operator: Operator, graph: OpGraph) -> Signature | None:
        """The rule filled in for a call; None where the call is not like the example."""
        if _likeness(operator, graph) != self.alike:
            return None
        return written(
            operator, graph, self.text, linear=self.linear, additive=self.additive, whole=self.whole,
            saves=range(len(operator.inputs)),
        )  # fmt: skip


_registered: dict[str, list[ProbedRule]] = {}  # by operator; one for each likeness


def _of_registered(operator: Operator, graph: OpGraph) -> Signature | None:
    """The rule that was found for a call like this one; without one it is computed replicated."""
    found = (rule.signature(operator, graph) for rule in _registered[operator.target])
    return next((signature for signature in found if signature is not None), None)


def _likeness(operator: Operator, graph: OpGraph) -> tuple[object, ...]:
    """What calls must have in common for a rule to hold for both."""
    values = [graph.values[value] for value in (*operator.inputs, *(value for value in operator.outputs if value))]
    ones = tuple(tuple(size == 1 for size in value.shape) for value in values)
    named = by_name(operator.target, operator.args, dict(operator.kwargs))
    return tuple((name, _literals(argument)) for name, argument in sorted(named.items())), ones


def _literals(tree: object) -> object:
    """Arguments with one mark in place of every tensor."""
    if isinstance(tree, (tuple, list)):
        return tuple(_literals(item) for item in tree)
    return "tensor" if isinstance(tree, Ref) else (type(tree).__name__, tree)


@dataclass(frozen=True)
class _Split:
    """One way to cut: what each input and output is on the axis."""

    inputs: tuple[State, ...]
    outputs: tuple[State, ...]

    @property
    def dims(self) -> list[tuple[int, int]]:
        """(tensor, dim) of all shards, inputs first."""
        states = (*self.inputs, *self.outputs)
        return [(index, state) for index, state in enumerate(states) if isinstance(state, int)]

    @property
    def additive(self) -> frozenset[int]:
        return frozenset(index for index, state in enumerate(self.inputs) if state == PARTIAL)


def probe_rule(target: str, *arguments: Any, register: bool = True, **keywords: Any) -> ProbedRule:
    """Find how an operator may be split, by running it on two and three shards of an example.

    ``arguments`` and ``keywords`` are the operator's, as in your model, but small; a dim can be split where it has at
    least three elements, and dims of different meaning should differ in size. The rule is proved forward and, where the
    operator is differentiable, backward, in float64 where it takes that, and registered unless ``register`` is false.

    Raises RuleError where nothing can be split, or the operator is unknown, random, or changes its arguments.

    >>> probe_rule("mylib::scaled_linear", torch.rand(4, 6), torch.rand(5, 6)).text
    'a b, c b -> a c'
    """
    example = example_of(target, arguments, keywords)
    found = _proved(example, _chosen(list(_splits(example))), _linear_groups(example))
    if not found.splits:
        raise RuleError(
            f"{example.target} cannot be split along any dim of the example, whose tensors are "
            f"{[tuple(t.shape) for t in example.tensors]}; it is computed replicated (dims of fewer than {LEAST_SIZE} "
            "elements are not tried)"
        )
    if register:
        found.register()
    return found


def _ways(example: Example) -> Iterator[tuple[State, ...]]:
    """Every way to cut the inputs along dims of one size, those that cut most tensors first."""
    dims: list[list[State]] = [
        [WHOLE, *(dim for dim, size in enumerate(tensor.shape) if size >= LEAST_SIZE)] for tensor in example.tensors
    ]
    ways = itertools.islice(itertools.product(*dims), MOST_WAYS)
    cutting = [way for way in ways if any(isinstance(state, int) for state in way)]
    for way in sorted(cutting, key=lambda way: sum(state == WHOLE for state in way)):
        sizes = {
            tensor.shape[state] for tensor, state in zip(example.tensors, way, strict=True) if isinstance(state, int)
        }
        if len(sizes) == 1:
            yield way


def _splits(example: Example) -> Iterator[_Split]:
    for way in _ways(example):
        for inputs in _with_terms(example, way):
            outputs = observed(example, inputs, 2)
            if outputs is None or all(state == WHOLE for state in outputs):
                continue
            if all(wrong(example, _summed(inputs), outputs, parts) is None for parts in (2, 3)):
                yield _Split(inputs, outputs)
                break


def _with_terms(example: Example, way: tuple[State, ...]) -> Iterator[tuple[State, ...]]:
    """The way itself, then with each group of the other inputs given as terms of a sum: what is added beside a split sum."""
    rest = [
        index
        for index, (tensor, state) in enumerate(zip(example.tensors, way, strict=True))
        if state == WHOLE and tensor.is_floating_point()
    ]
    for count in range(len(rest) + 1):
        for group in itertools.combinations(rest, count):
            yield tuple(PARTIAL if index in group else state for index, state in enumerate(way))


def _summed(inputs: Sequence[State]) -> tuple[State, ...]:
    """Inputs that are whole have their gradients as terms."""
    return tuple(SUMMED if state == WHOLE else state for state in inputs)


def _chosen(splits: Sequence[_Split]) -> list[_Split]:
    """Splits that can stand in one rule: each dim has one letter, and an input is added beside all split sums or none."""
    found: list[_Split] = []
    taken: set[tuple[int, int]] = set()
    for split in splits:
        sums = [other for other in found if PARTIAL in other.outputs]
        fits = PARTIAL not in split.outputs or all(other.additive == split.additive for other in sums)
        mixed = PARTIAL in split.outputs and any(isinstance(state, int) for state in split.outputs)
        if fits and not mixed and taken.isdisjoint(split.dims):
            found.append(split)
            taken.update(split.dims)
    return found


def _linear_groups(example: Example) -> tuple[tuple[int, ...], ...]:
    """Groups of inputs in which the operator is linear together: given terms, it gives terms."""
    floating = [index for index, tensor in enumerate(example.tensors) if tensor.is_floating_point()]
    found = []
    if any(not tensor.is_floating_point() for tensor in example.outputs):
        return ()
    for count in range(1, len(floating) + 1):
        for group in itertools.combinations(floating, count):
            inputs = tuple(PARTIAL if index in group else SUMMED for index in range(len(example.tensors)))
            outputs = (PARTIAL,) * len(example.outputs)
            if all(wrong(one, inputs, outputs, 2) is None for one in (example, example.shuffled(1))):
                found.append(group)
    return tuple(found)


def _proved(example: Example, splits: list[_Split], linear: tuple[tuple[int, ...], ...]) -> ProbedRule:
    """The rule of these splits, without those of which the proof fails."""
    kept: list[_Split] = []
    for split in splits:
        rule = _written(example, [*kept, split], ())
        try:
            proved(example, rule.text, (), rule.additive, rule.whole)
        except RuleError:
            continue
        kept.append(split)
    rule = _written(example, kept, linear)
    try:
        proved(example, rule.text, rule.linear, rule.additive, rule.whole)
    except RuleError:
        rule = _written(example, kept, ())
    return rule


def _written(example: Example, splits: Sequence[_Split], linear: tuple[tuple[int, ...], ...]) -> ProbedRule:
    """The rule's text: a letter for each split, and one that must stay whole for every other dim."""
    letter_of = {place: LETTERS[number] for number, split in enumerate(splits) for place in split.dims}
    unused = iter(LETTERS[len(splits) :])
    whole: list[str] = []
    terms = []
    for index, tensor in enumerate((*example.tensors, *example.outputs)):
        words = []
        for dim, size in enumerate(tensor.shape):
            letter = letter_of.get((index, dim))
            if letter is None and size != 1:
                letter = next(unused)
                whole.append(letter)
            words.append(letter or "1")
        terms.append(" ".join(words))
    cut = len(example.tensors)
    text = f"{', '.join(terms[:cut])} -> {', '.join(terms[cut:])}".rstrip()
    additive = tuple(sorted(frozenset().union(*(split.additive for split in splits))))
    differentiable = any(tensor.requires_grad for tensor in example.outputs)
    likeness = _likeness(*example.operator())
    return ProbedRule(example.target, text, linear, additive, tuple(whole), differentiable, likeness)
