"""May a step run in several micro-batches, and what is then scaled so that the loss stays that of the whole batch.

Enters: the graph of a whole model. Leaves: reasons why its samples cannot be computed apart (:func:`coupling`), the operators
whose results are *terms*, sums over the micro-batches (:func:`terms`), and how outputs are put together (:func:`combined`).

Each value is *fixed* (the same in every micro-batch), *rows* (a micro-batch has its part along one factor of one dim),
*places* (``arange`` of the batch, which only picks the batch's own rows) or a *term*. What an operator makes of these
follows from its rule, as if its batch letter were split over devices:

* an output with the letter is rows again; one without it is a sum over the micro-batches;
* a mean over the letter is such a sum when multiplied by the micro-batch's share of the samples, a cross-entropy when
  divided by the number of valid labels of the whole batch;
* from a term, an operator that is linear in it (``Signature.linear``) makes a term; what is fixed beside it (a penalty on
  weights) is multiplied by the share, so that it counts once;
* a sum of what no parameter leads to (``mask.sum()``) that is used otherwise, as a divisor, is computed for the whole batch
  beforehand, like the number of labels.

All else couples. The graph is looked at with a batch that is a multiple of a large prime: a dim follows the batch where its
size is divisible by it, and no other size can be mistaken for the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from autopar.batching import at_batch, follows_batch
from autopar.graph import BatchLiteral, Operator, OpGraph
from autopar.strategies import creation, elementwise, pieces, registry, views
from autopar.strategies.loss import ELEMENTWISE_LOSSES, FUSED, MEAN, class_loss, reduction_of
from autopar.strategies.registry import signatures_of
from autopar.strategies.rule import Part, Signature, letters_of, place_of, product
from autopar.strategies.rule import Term as Dims
from autopar.strategies.signatures import is_floating, positive

PRIME = 1_000_003  # no model has a dim of this size
CROSS_ENTROPY = "aten.cross_entropy_loss.default"
CLASS_LOSSES = (CROSS_ENTROPY, "aten.nll_loss_nd.default", "aten.nll_loss.default", "aten.nll_loss2d.default", FUSED)
MEANS = ("aten.mean.default", "aten.mean.dim")
SUMS = ("aten.sum.default", "aten.sum.dim_IntList")

_LOSSES = tuple(f"aten.{name}.default" for name in ELEMENTWISE_LOSSES)
_ADDITIONS = tuple(f"aten.{name}.{kind}" for name in elementwise.SUMS for kind in ("Tensor", "Scalar"))
_PRODUCTS = tuple(f"aten.{name}.{kind}" for name in elementwise.PRODUCTS for kind in ("Tensor", "Scalar"))
_QUOTIENTS = tuple(f"aten.{name}.{kind}" for name in elementwise.QUOTIENTS for kind in ("Tensor", "Scalar"))
_CASTS = tuple(f"aten.{name}" for name in elementwise.CASTS)
_COPIES = tuple(f"aten.{name}.default" for name in ("alias", "clone", "contiguous", "detach", "positive"))
_SIZED = (  # creation of which a number that follows the batch is a size, but for what is filled in
    *(f"aten.{name}.default" for name in (*creation.CONSTANT, *creation.LIKE, *creation.NEW, "rand", "randn")),
    "aten.empty.memory_format",
)
_FILLS = {
    "aten.full.default": 1,
    "aten.new_full.default": 2,
    "aten.full_like.default": 1,
}  # argument: the number filled in

Combination = Literal["concatenate", "sum", "same"]


@dataclass(frozen=True)
class Term:
    """How an operator is computed on a micro-batch so that values summed over micro-batches are those of the whole batch.

    ``sum``: as it is. ``share``: the tensor inputs with the indices ``inputs``, or where there are none the result, are
    multiplied by the micro-batch's part of the samples. ``count``: a cross-entropy divides by the number ``count``, found
    before for the whole batch; any other operator's result is that number.
    """

    kind: Literal["share", "count", "sum"]
    inputs: tuple[int, ...] = ()
    count: str = ""


def coupling(graph: OpGraph) -> tuple[str, ...]:
    """Why the batch cannot be computed in several micro-batches, operator by operator; empty when it can."""
    return _analysis(graph).reasons


def terms(graph: OpGraph) -> Mapping[str, Term]:
    """The operators that are computed otherwise on a micro-batch, and those that sum over the batch, by id."""
    return _analysis(graph).terms


def combined(graph: OpGraph) -> Mapping[str, Combination]:
    """What each output value of the whole batch is of those of the micro-batches."""
    return _analysis(graph).combined


@dataclass(frozen=True)
class _State:
    """What a micro-batch has of a value: ``rows``: the batch is a factor of the dim ``dim``, behind a factor of ``outer``.

    ``reductions``: the operators that a term is summed by, where it may be computed beforehand.
    """

    kind: Literal["fixed", "rows", "places", "term"]
    dim: int = -1
    outer: int = 1
    reductions: frozenset[str] = frozenset()


_FIXED = _State("fixed")


@dataclass(frozen=True)
class _Result:
    reasons: tuple[str, ...]
    terms: Mapping[str, Term]
    combined: Mapping[str, Combination]


class _Couples(Exception):
    """An operator computes samples together; the message says how."""


def _analysis(graph: OpGraph) -> _Result:
    if "micro_batches" not in graph._cache:
        graph._cache["micro_batches"] = _analyse(graph)
    return cast(_Result, graph._cache["micro_batches"])


def _analyse(graph: OpGraph) -> _Result:
    if not follows_batch(graph):
        return _Result(("no input follows the batch, or only one batch size works",), {}, {})
    large = at_batch(graph, graph.batch_size * PRIME)
    rules = signatures_of(large)
    known = _known_beforehand(large, rules)
    beforehand: frozenset[str] = frozenset()
    while True:
        walk = _Walk(large, rules, known, beforehand)
        walk.run()
        if walk.wanted <= beforehand:
            return walk.result()
        beforehand |= walk.wanted


class _Walk:
    """One pass over the operators. ``known`` are values that may be computed beforehand; ``beforehand`` are sums for which that
    is done, ``wanted`` those for which it should be.
    """

    def __init__(
        self,
        graph: OpGraph,
        rules: Mapping[str, Signature | None],
        known: frozenset[str],
        beforehand: frozenset[str] = frozenset(),
    ) -> None:
        self.graph = graph
        self.batch = graph.batch_size
        self.rules = rules
        self.known = known
        self.beforehand = beforehand
        self.wanted: set[str] = set()
        self.reasons: list[str] = []
        self.terms: dict[str, Term] = {}
        self.late: set[str] = set()  # values that follow from scaled ones, which are not had beforehand
        self.states: dict[str, _State] = {}
        entries: Iterable[Any] = (*graph.inputs, *graph.parameters, *graph.buffers, *graph.constants)
        for value in (entry.value for entry in entries):
            dims = graph.values[value].batch_dims
            self.states[value] = _State("rows", dims[0]) if dims else _FIXED

    def run(self) -> None:
        for operator in _live(self.graph):
            outputs = [value for value in operator.outputs if value]
            try:
                found = self._step(operator)
            except _Couples as error:
                self._say(f"{operator.id} ({operator.target}, {operator.source or operator.module}) {error}")
                found = [self._guess(value) for value in outputs]
                self.late.update(outputs)
            self.states.update(zip(outputs, found, strict=True))
            scaled = self.terms.get(operator.id, Term("sum")).kind != "sum"
            if scaled or not self.late.isdisjoint(operator.inputs):
                self.late.update(outputs)
        self._check_ends()

    def result(self) -> _Result:
        words: dict[str, Combination] = {"rows": "concatenate", "term": "sum", "fixed": "same", "places": "same"}
        outputs = {output.value: words[self.states[output.value].kind] for output in self.graph.outputs}
        return _Result(tuple(self.reasons), self.terms, outputs)

    def _is_known(self, values: Iterable[str]) -> bool:
        """Whether values can be computed for all micro-batches before the first one."""
        return all(value in self.known and value not in self.late for value in values)

    def _say(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)

    def _guess(self, value: str) -> _State:
        """The state of a result that couples, so that what follows is looked at too."""
        dims = self._batch_dims(value)
        return _State("rows", dims[0]) if dims else _FIXED

    def _batch_dims(self, value: str) -> list[int]:
        return [dim for dim, size in enumerate(self.graph.values[value].shape) if size and size % PRIME == 0]

    def _check_ends(self) -> None:
        for buffer in self.graph.buffers:
            if buffer.updated:
                self._say(f"the buffer {buffer.name} is updated by every forward pass, not once a step")
        loss = self.graph.loss
        if loss is not None and self.states[loss].kind != "term" and not self.reasons:
            self._say("the loss is no sum or mean over the batch")
        for output in self.graph.outputs:
            state = self.states[output.value]
            if state.kind == "places" or state.outer > 1:
                self._say(f"the output {output.path} is not made of the samples' parts in their order")

    # -- one operator ----------------------------------------------------------------------------------------------

    def _step(self, operator: Operator) -> list[_State]:
        states = [self.states[value] for value in operator.inputs]
        if operator.id in self.beforehand:
            assert self._is_known(operator.inputs), f"{operator.id} is wanted beforehand and follows from what is not"
            self.terms[operator.id] = Term("count", count=self._count_name("divisor"))
            return [_FIXED for value in operator.outputs if value]
        divides = self._check_literals(operator)
        if operator.target.startswith("aten.arange."):
            return self._arange(operator)
        if operator.target == "aten.index.Tensor":
            states = self._indexed(operator, states)
        averaged = operator.target in CLASS_LOSSES and class_loss(operator).reduction == MEAN
        if averaged and any(state.kind != "fixed" for state in states):
            return self._class_loss(operator, states)
        if operator.target in creation.RULES:  # of other tensors only shape and dtype are read
            states = [_FIXED] * len(states)
        found = self._by_rule(operator, states)
        if divides:
            self.terms[operator.id] = Term("share", (0,))
        return found

    def _by_rule(self, operator: Operator, states: list[_State]) -> list[_State]:
        rule = self.rules[operator.id]
        outputs = [value for value in operator.outputs if value]
        if rule is None:
            if any(state.kind != "fixed" for state in states) or any(map(self._batch_dims, outputs)):
                raise _Couples("has no rule that says whether it computes samples apart (register_rule gives it one)")
            return [_FIXED] * len(outputs)
        place = self._letter(operator, rule, states)
        summed = [index for index, state in enumerate(states) if state.kind == "term"]
        found = [
            self._output(operator, rule, term, value, place) for term, value in zip(rule.outputs, outputs, strict=True)
        ]
        if summed:
            return self._linear(operator, rule, states, summed, place, found)
        if any(state.kind == "term" for state in found):
            self._note_sum(operator)
            early = operator.target in SUMS and self._is_known((*operator.inputs, *outputs))
            kept = frozenset({operator.id}) if early else frozenset()
            found = [_State("term", reductions=kept) if state.kind == "term" else state for state in found]
        if any(state.kind == "places" for state in states):
            found = [_State("places", state.dim, state.outer) if state.kind == "rows" else state for state in found]
            if not self._keeps_places(operator):
                raise _Couples("computes with the places of samples in the batch")
        return found

    def _letter(self, operator: Operator, rule: Signature, states: Sequence[_State]) -> tuple[str, int] | None:
        """The letter that has the batch, and the factor in it that stands before the batch; None without rows."""
        found: set[tuple[str, int]] = set()
        for state, term in zip(states, rule.inputs, strict=True):
            if state.kind not in ("rows", "places"):
                continue
            place = _letter_at(term[state.dim], state.outer, self.batch, rule.sizes)
            if place is None or place[0] in rule.whole or place[0] in rule.parts:
                raise _Couples("works along the batch")
            if any(exchange.letter == place[0] for exchange in rule.exchanges):
                raise _Couples("takes statistics of the whole batch")
            if place[0] not in rule.replicated_after:  # else only the tensor's shape or dtype is read
                found.add(place)
        if len(found) > 1:
            raise _Couples("combines samples with one another")
        return next(iter(found), None)

    def _output(
        self, operator: Operator, rule: Signature, term: Dims, value: str, place: tuple[str, int] | None
    ) -> _State:
        dims = self._batch_dims(value)
        if place is None:
            return self._spread(operator, rule, term, dims)
        at = place_of(term, place[0], rule.sizes)
        if dims != ([] if at is None else [at[0]]):
            raise _Couples("combines samples with one another")
        if at is not None:
            return _State("rows", at[0], at[1] * place[1])
        if not self._sums(operator, rule):
            raise _Couples("reduces over the batch to what is no sum over samples")
        return _State("term")

    def _spread(self, operator: Operator, rule: Signature, term: Dims, dims: Sequence[int]) -> _State:
        """The result of fixed tensors: where it has a batch, it must be the same for all samples."""
        if not dims:
            return _FIXED
        read = {letter for given in rule.inputs for letter in letters_of(given)} - rule.replicated_after
        at = _letter_at(term[dims[0]], 1, self.batch, rule.sizes)
        copied = at is not None and at[0] in read and operator.target not in creation.RULES
        if len(dims) > 1 or at is None or at[0] in rule.whole or copied:
            raise _Couples("makes something of the batch's size that is not the same for all samples")
        return _State("rows", dims[0])

    def _sums(self, operator: Operator, rule: Signature) -> bool:
        """Whether an output without the batch's letter is a sum over samples, wherever in the batch they stand."""
        if operator.target in (*SUMS, *MEANS, *_LOSSES, *CLASS_LOSSES) or operator.target not in registry.RULES:
            return True
        return rule.kind == "matmul" and not rule.additive

    def _note_sum(self, operator: Operator) -> None:
        mean = operator.target in MEANS or (operator.target in _LOSSES and reduction_of(operator) == MEAN)
        self.terms[operator.id] = Term("share" if mean else "sum")

    # -- what is made of terms -------------------------------------------------------------------------------------

    def _linear(
        self, operator: Operator, rule: Signature, states: Sequence[_State], summed: Sequence[int],
        place: tuple[str, int] | None, found: list[_State],
    ) -> list[_State]:  # fmt: skip
        group = next((group for group in self._linear_groups(operator, rule) if group.issuperset(summed)), None)
        if group is None or place is not None or any(state.kind != "fixed" for state in found):
            self._want_beforehand(states, summed)
            raise _Couples("makes of a sum over the batch what is no sum over micro-batches")
        beside = tuple(sorted(group - set(summed)))
        if not all(is_floating(self.graph, operator.inputs[index]) for index in beside):
            raise _Couples("adds to a sum over the batch an integer that would count in each micro-batch")
        if beside:
            self.terms[operator.id] = Term("share", beside)
        kept = [states[index].reductions for index in summed]
        known = all(kept) and self._is_known(operator.inputs) and not beside
        return [_State("term", reductions=frozenset().union(*kept) if known else frozenset())] * len(found)

    def _want_beforehand(self, states: Sequence[_State], summed: Sequence[int]) -> None:
        """Ask for the sums over the batch that may be computed beforehand."""
        for index in summed:
            self.wanted |= states[index].reductions

    def _linear_groups(self, operator: Operator, rule: Signature) -> Iterator[frozenset[int]]:
        """The rule's own, and those that it leaves out: of integers, and of adding zero."""
        yield from rule.linear
        source, target = operator.inputs[0], next(value for value in operator.outputs if value)
        numbers = (argument for argument in operator.args[1:2] if isinstance(argument, (int, float)))
        if operator.target in _ADDITIONS:
            if len(operator.inputs) == 2:
                yield frozenset((0, 1))
            elif all(number == 0 for number in numbers):  # sum() of a list begins with 0
                yield frozenset((0,))
        elif operator.target in _PRODUCTS:
            yield from (frozenset((index,)) for index in range(len(operator.inputs)))
        elif operator.target in _CASTS:
            integers = not is_floating(self.graph, source)
            if self.graph.values[target].dtype != "bool" and integers:
                yield frozenset((0,))
        elif operator.target in _QUOTIENTS and isinstance(operator.args[0], (int, float)) is False:
            yield frozenset((0,))

    # -- operators of their own kind -------------------------------------------------------------------------------

    def _class_loss(self, operator: Operator, states: list[_State]) -> list[_State]:
        """Cross-entropy or negative log-likelihood, averaged over valid labels."""
        rule = self.rules[operator.id]
        if rule is None:
            if operator.target == CROSS_ENTROPY and is_floating(self.graph, operator.inputs[1]):
                return self._probabilities(operator, states)
            raise _Couples("has no rule for labels of this kind")
        loss = class_loss(operator)
        given = [operator.inputs.index(value) for value in (loss.labels, loss.weight) if value is not None]
        at = given[0]
        logits, labels = states[0], states[at]
        row_letters = set(letters_of(rule.inputs[at]))
        places = {
            _letter_at(term[state.dim], state.outer, self.batch, rule.sizes)
            for state, term in ((logits, rule.inputs[0]), (labels, rule.inputs[at]))
            if state.kind == "rows"
        }
        place = next(iter(places), None)
        if "term" in (logits.kind, labels.kind) or "places" in (logits.kind, labels.kind) or len(places) != 1:
            raise _Couples("combines samples with one another")
        if place is None or place[0] not in row_letters:
            raise _Couples("takes the batch for classes")
        if any(state.kind != "fixed" for index, state in enumerate(states) if index not in (0, at)):
            raise _Couples("has class weights that depend on the batch")
        if not self._is_known(operator.inputs[index] for index in given):
            raise _Couples("divides by a number of labels that depends on parameters, buffers or random numbers")
        self.terms[operator.id] = Term("count", count=self._count_name("loss_count"))
        return [_State("term")]

    def _probabilities(self, operator: Operator, states: list[_State]) -> list[_State]:
        """Cross-entropy with probabilities for labels: a mean over all rows, without any that are ignored."""
        if any(state != states[0] for state in states[1:2]) or states[0].kind != "rows" or states[0].dim != 0:
            raise _Couples("combines samples with one another")
        if any(state.kind != "fixed" for state in states[2:]) or len(self.graph.values[operator.inputs[0]].shape) < 2:
            raise _Couples("combines samples with one another")
        self.terms[operator.id] = Term("share")
        return [_State("term")]

    def _arange(self, operator: Operator) -> list[_State]:
        value = operator.outputs[0]
        if not self._batch_dims(value):
            return [_FIXED]
        default = operator.target.endswith("default")
        start = 0 if default else operator.argument(0, "start")
        step = 1 if default or not operator.target.endswith("step") else operator.argument(2, "step", 1)
        if (start, step) != (0, 1) or self.graph.values[value].shape[0] != self.batch:
            raise _Couples("counts otherwise than by samples")
        return [_State("places", 0)]

    def _keeps_places(self, operator: Operator) -> bool:
        """Whether places of samples stay what they are: views, copies, casts between integers, and adding 0."""
        if operator.target in (*views.RULES, *_COPIES):
            return True
        if operator.target in _CASTS:
            return self.graph.values[operator.outputs[0]].dtype in ("int64", "int32")
        return operator.target in _ADDITIONS and operator.args[1] == 0

    def _indexed(self, operator: Operator, states: list[_State]) -> list[_State]:
        """``x[arange(batch), ids]`` takes of each sample's own: the states as if ``x`` were fixed, and the places rows."""
        given = operator.argument(1, "indices")
        at = [dim for dim, index in enumerate(given) if index is not None]
        picking = [index for index, state in enumerate(states) if state.kind == "places"]
        if not picking:
            return states
        source, shape = states[0], self.graph.values[operator.inputs[0]].shape
        own = source.kind == "rows" and source.dim in at and shape[source.dim] == self.batch
        if not own or picking != [1 + at.index(source.dim)]:
            raise _Couples("picks by the places of samples in the batch")
        place = states[picking[0]]
        return [_FIXED, *(_State("rows", place.dim, place.outer) if s is place else s for s in states[1:])]

    def _check_literals(self, operator: Operator) -> bool:
        """Whether the operator divides by the batch size. Other numbers that follow the batch may only be sizes."""
        if not any(_batch_literals((operator.args, operator.kwargs))):
            return False
        if operator.target in _QUOTIENTS and isinstance(operator.args[1], BatchLiteral):
            if self.states[operator.inputs[0]].kind == "places":
                raise _Couples("computes with the places of samples in the batch")
            return True
        fill = _FILLS.get(operator.target)
        filled = fill is not None and isinstance(operator.argument(fill, "fill_value"), BatchLiteral)
        counts = operator.target.startswith("aten.arange.") and any(map(self._batch_dims, operator.outputs))
        if filled or not (operator.target in (*views.RULES, *_SIZED) or counts or self._takes_all(operator)):
            raise _Couples("computes with the batch size")
        return False

    def _takes_all(self, operator: Operator) -> bool:
        """Whether a slice up to the batch size takes the whole batch."""
        if pieces.RULES.get(operator.target) is not pieces.RULES["aten.slice.Tensor"]:
            return False
        source = self.states[operator.inputs[0]]
        dim = positive(operator.argument(1, "dim", 0), len(self.graph.values[operator.inputs[0]].shape))
        shapes = [self.graph.values[value].shape for value in (operator.inputs[0], operator.outputs[0])]
        return source.kind == "rows" and source.dim == dim and shapes[0] == shapes[1]

    def _count_name(self, base: str) -> str:
        number = 1 + sum(term.count.rstrip("_0123456789") == base for term in self.terms.values())
        return base if number == 1 else f"{base}_{number}"


def _letter_at(dim: Any, outer: int, batch: int, sizes: Mapping[str, int]) -> tuple[str, int] | None:
    """The letter of a dim that holds all of the batch, which stands behind a factor ``outer``; and how much of that it has."""
    if isinstance(dim, Part):
        return None
    for index, letter in enumerate(dim):
        before = product(dim[:index], sizes)
        if isinstance(letter, str) and outer % before == 0 and before * sizes[letter] % (outer * batch) == 0:
            return letter, outer // before
    return None


def _batch_literals(tree: Any) -> Iterator[BatchLiteral]:
    if isinstance(tree, BatchLiteral):
        yield tree
    elif isinstance(tree, tuple):
        for item in tree:
            yield from _batch_literals(item)


def _live(graph: OpGraph) -> tuple[Operator, ...]:
    """The operators that lead to the loss, an output or a buffer's new value."""
    wanted: set[str | None] = {output.value for output in graph.outputs}
    wanted |= {graph.loss, *(buffer.updated for buffer in graph.buffers)}
    kept = []
    for operator in reversed(graph.operators):
        if not wanted.isdisjoint(operator.outputs):
            kept.append(operator)
            wanted.update(operator.inputs)
    return tuple(reversed(kept))


def _known_beforehand(graph: OpGraph, rules: Mapping[str, Signature | None]) -> frozenset[str]:
    """Values that follow from inputs and constants alone, without random numbers."""
    known = {entry.value for entry in graph.inputs} | {constant.value for constant in graph.constants}
    for operator in graph.operators:
        rule = rules[operator.id]
        if rule is not None and not rule.random and known.issuperset(operator.inputs):
            known.update(value for value in operator.outputs if value)
    return frozenset(known)
