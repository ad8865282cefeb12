"""Mixtures of experts, recognised by what is computed and made one operator: plan, program and verifier treat it as one.

A dropless mixture takes each token to the ``k`` experts that its router has chosen, applies an expert's layers to it, and
adds up the results by the router's weights. Traced, that is a score of operators on ``tokens x k`` rows, in one of two
orders: each token's choices side by side (a weight is picked for every row, ``bmm``), or sorted by expert (grouped matrix
products, after which the rows are put back). Where the rows are depends on the router's choices, so that these operators can
hardly be split; the mixture as a whole can, by tokens, by experts and inside each expert.

The pass goes through the operators once and notes a *fact* about each value it understands (this is a sorting order, these
are rows of tokens in that order). Where rows end up added by weights, the steps from the tokens to there are the body:

    autopar.experts(tokens [t, d], ids [t, k], weights [t, k], (parameters [e, ...], ...), body, dtype) -> [t, d']

``body`` is a tuple of steps ``(target, args, kwargs, ((width, dtype), ...))`` on row values, of which number 0 are the
tokens' rows: ``linear`` (weights ``[e, out, in]``), ``matmul`` (``[e, in, out]``), ``bias`` (``[e, width]``) and ATen
operators that treat all rows alike. ``dtype`` is the type in which weighted rows are added up, None for their own.

Enters: the lowered program. Leaves: the same, with a mixture's operators replaced; what else reads a part of it keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autopar.graph import Operator, Ref, Slot, TorchName, Value, refs
from autopar.strategies import elementwise
from autopar.strategies.experts import BIAS, LINEAR, MATMUL, TARGET
from autopar.tracing.expert_facts import (
    Chosen,
    Counts,
    Fact,
    Order,
    Picked,
    Rows,
    Tokens,
    Turned,
    Weighted,
    Weights,
    Zeros,
)
from autopar.tracing.lowered import Lowered

_TO_THE_END = 2**31  # no dim is longer
_GROUPED = ("_grouped_mm", "grouped_mm", "grouped_mm_fallback")
_DRAWING = ("dropout", "bernoulli", "rand", "nextafter")
_POINTWISE = frozenset(
    target
    for target in elementwise.RULES
    if not any(word in target for word in _DRAWING) and not target.startswith("aten.view_as")
)


def fold_experts(lowered: Lowered) -> None:
    """Replace each mixture of experts by one operator. What it was made of is left behind, for ``drop_dead``."""
    _Folding(lowered).run()


class _Folding:
    """One pass over the operators. ``facts`` by value, ``makers``: what computes each."""

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.facts: dict[str, Fact] = {}
        self.makers: dict[str, Operator] = {}
        self.names = {operator.id for operator in lowered.operators}

    def run(self) -> None:
        for place, operator in enumerate(self.lowered.operators):
            for value in operator.outputs:
                self.makers[value] = operator
            mixture = self._look(operator)
            if mixture is not None:
                self.lowered.operators[place] = mixture
                self.lowered.nests[mixture.id] = self.lowered.nests.pop(operator.id)

    def _look(self, operator: Operator) -> Operator | None:
        """Note what is known of an operator's results; the mixture that ends with it, if one does."""
        name = operator.target.split(".")[1]
        ends = {"sum": self._summed, "index_add": self._added}.get(name)
        if ends is not None:
            return ends(operator)
        look = _LOOKS.get(name)
        found = look(self, operator) if look is not None else None
        if found is None and operator.target in _POINTWISE:
            found = self._pointwise(operator)
        for value, fact in zip(operator.outputs, found if isinstance(found, tuple) else (found,), strict=False):
            if fact is not None:
                self.facts[value] = fact
        return None

    # -- what values are -----------------------------------------------------------------------------------------

    def value(self, item: Any) -> Value | None:
        return self.lowered.values[item.value] if isinstance(item, Ref) else None

    def fact(self, item: Any) -> Fact | None:
        return self.facts.get(item.value) if isinstance(item, Ref) else None

    def _reshaped(self, operator: Operator) -> Fact | None:
        source, result = self.value(operator.args[0]), self.lowered.values[operator.outputs[0]]
        assert source is not None, "a view is of a tensor"
        fact = self.facts.get(source.id)
        if isinstance(fact, Weighted) and not fact.is_sorted and not fact.is_spread:
            tokens, chosen = (self.lowered.values[name].shape for name in (fact.rows.tokens, fact.weights))
            spread = result.shape == (tokens[0], chosen[1], *source.shape[1:])
            return replace(fact, is_spread=True) if spread else None
        if isinstance(fact, Weights) and result.shape == (*source.shape[:1], 1):
            return replace(fact, is_column=True)
        flat = (source.shape[0] * source.shape[-1],)
        if len(source.shape) == 2 and "float" in source.dtype and result.shape == (*flat, 1):
            return Weights(source.id, is_column=True)
        if len(source.shape) != 2 or result.shape != flat:
            return None
        if source.dtype.startswith("int"):
            return Chosen(source.id)
        return Weights(source.id) if "float" in source.dtype else None

    def _sorted(self, operator: Operator) -> tuple[Fact | None, ...] | None:
        fact = self.fact(operator.args[0])
        if not isinstance(fact, Chosen) or fact.is_sorted or operator.argument(2, "descending", False) is True:
            return None
        return Chosen(fact.ids, True), Order(fact.ids)

    def _argsorted(self, operator: Operator) -> Fact | None:
        fact = self.fact(operator.args[0])
        if True in (*operator.args, *(given for name, given in operator.kwargs if name == "descending")):
            return None
        if isinstance(fact, Chosen) and not fact.is_sorted:
            return Order(fact.ids)
        return Order(fact.ids, True) if isinstance(fact, Order) and not fact.is_inverse else None

    def _divided(self, operator: Operator) -> Fact | None:
        """Of ``k`` rows side by side, which token they are of."""
        fact = self.fact(operator.args[0])
        floor = operator.target.startswith("aten.floor_divide") or dict(operator.kwargs).get("rounding_mode") == "floor"
        if not isinstance(fact, Order) or fact.is_inverse or not floor:
            return None
        return Tokens(fact.ids) if operator.args[1] == self.lowered.values[fact.ids].shape[1] else None

    def _indexed(self, operator: Operator) -> Fact | None:
        given = operator.args[1]
        if isinstance(given, tuple):
            return self._taken(operator.args[0], given[0]) if len(given) == 1 else None
        return self._taken(operator.args[0], operator.args[2]) if operator.args[1] == 0 else None  # index_select

    def _taken(self, source: Any, index: Any) -> Fact | None:
        """The rows of ``source`` at ``index``."""
        by, what, value = self.fact(index), self.fact(source), self.value(source)
        assert value is not None, "an index is of a tensor"
        if isinstance(by, Tokens) and len(value.shape) == 2 and value.shape[0] == self.lowered.values[by.ids].shape[0]:
            return Rows(value.id, by.ids, True)
        if isinstance(by, Chosen) and len(value.shape) in (2, 3):
            return Picked(value.id, by.ids, by.is_sorted)
        if not isinstance(by, Order):
            return None
        if isinstance(what, Chosen) and not by.is_inverse and (what.ids, what.is_sorted) == (by.ids, False):
            return Chosen(by.ids, True)
        if isinstance(what, Weights) and what.ids is None and not by.is_inverse:
            return replace(what, ids=by.ids)
        if isinstance(what, Weighted) and by.is_inverse and what.is_sorted and what.rows.ids == by.ids:
            return replace(what, is_sorted=False)
        return None

    def _inverse(self, operator: Operator) -> Fact | None:
        """``places[order] = arange``."""
        index = operator.args[1]
        by = self.fact(index[0]) if isinstance(index, tuple) and len(index) == 1 else None
        written = operator.args[2]
        maker = self.makers.get(written.value) if isinstance(written, Ref) else None
        counts = maker is not None and maker.target == "aten.arange.default"
        adds = operator.argument(3, "accumulate", False) is True
        return replace(by, is_inverse=True) if isinstance(by, Order) and counts and not adds else None

    def _repeated(self, operator: Operator) -> Fact | None:
        """Each token as often as it has experts."""
        value = self.value(operator.args[0])
        if value is None or len(value.shape) != 2 or operator.argument(2, "dim") != 0:
            return None
        return Rows(value.id, None, False)

    def _counted(self, operator: Operator) -> Fact | None:
        """``histc(ids, e, 0, e - 1)``, or ``one_hot(ids, e)`` of which the sum is wanted."""
        fact = self.fact(operator.args[0])
        if not isinstance(fact, Chosen):
            return None
        if operator.target.startswith("aten.one_hot"):
            return Counts(fact.ids, self.lowered.values[operator.outputs[0]].shape[1], is_spread=True)
        count, low, high = operator.argument(1, "bins", 100), operator.argument(2, "min", 0), operator.argument(3, "max", 0)
        return Counts(fact.ids, count) if (low, high) == (0, count - 1) else None

    def _accumulated(self, operator: Operator) -> Fact | None:
        fact = self.fact(operator.args[0])
        counts = isinstance(fact, Counts) and not fact.is_sum and not fact.is_spread
        return replace(fact, is_sum=True) if counts and isinstance(fact, Counts) else None

    def _transposed(self, operator: Operator) -> Fact | None:
        value = self.value(operator.args[0])
        if value is None or len(value.shape) != 3:
            return None
        dims = (-2, -1) if operator.target.startswith("aten.mT") else operator.args[1:3]
        if {dim % 3 for dim in dims} != {1, 2}:
            return None
        fact = self.facts.get(value.id)
        return replace(fact, is_turned=not fact.is_turned) if isinstance(fact, Picked) else Turned(value.id)

    def _zeros(self, operator: Operator) -> Fact | None:
        return Zeros()

    def _unsqueezed(self, operator: Operator) -> Fact | None:
        fact, dim = self.fact(operator.args[0]), operator.args[1]
        if isinstance(fact, Weights) and not fact.is_column and dim in (-1, 1):
            return replace(fact, is_column=True)
        if isinstance(fact, Rows) and fact.extra is None:
            return self._same_rows(operator.args[0].value, fact, dim % 3) if dim % 3 else None
        return None

    def _squeezed(self, operator: Operator) -> Fact | None:
        fact = self.fact(operator.args[0])
        if isinstance(fact, Rows) and fact.extra is not None and operator.argument(1, "dim") in (fact.extra, fact.extra - 3):
            return replace(fact, extra=None)
        return None

    def _same_rows(self, value: str, fact: Rows, extra: int | None) -> Rows:
        """The rows themselves with another shape."""
        return replace(fact, extra=extra, step=fact.step if fact.step is None else ("same", (Ref(value),), ()), output=0)

    # -- steps of the body ---------------------------------------------------------------------------------------

    def _grouped(self, operator: Operator) -> Fact | None:
        """Sorted rows times the weights of their experts; the counts say where each expert's end."""
        rows, offsets = self.fact(operator.args[0]), self.fact(operator.argument(2, "offs"))
        if any(operator.argument(place, name) is not None for place, name in ((3, "bias"), (4, "out_dtype"))):
            return None
        if not isinstance(rows, Rows) or not rows.is_sorted or not isinstance(offsets, Counts) or not offsets.is_sum:
            return None
        weights, turned = operator.args[1], self.fact(operator.args[1])
        if isinstance(turned, Turned):
            weights = Ref(turned.value)
        value = self.value(weights)
        if value is None or len(value.shape) != 3 or value.shape[0] != offsets.num_experts or rows.ids != offsets.ids:
            return None
        target = LINEAR if isinstance(turned, Turned) else MATMUL
        return replace(rows, step=(target, (operator.args[0], weights), ()), output=0)

    def _batched(self, operator: Operator) -> Fact | None:
        """Each row times the weights picked for it: ``bmm(weights, x[..., None])`` or ``bmm(x[:, None], weights)``."""
        facts = [self.fact(item) for item in operator.args[:2]]
        at = next((place for place, fact in enumerate(facts) if isinstance(fact, Rows)), None)
        if at is None:
            return None
        rows, picked = facts[at], facts[1 - at]
        if not isinstance(rows, Rows) or not isinstance(picked, Picked) or rows.extra != (1 if at == 0 else 2):
            return None
        if not self._together(rows, picked) or len(self.lowered.values[picked.value].shape) != 3:
            return None
        target = MATMUL if (at == 0) != picked.is_turned else LINEAR
        step = (target, (operator.args[at], Ref(picked.value)), ())
        return replace(rows, ids=picked.ids, step=step, output=0)

    def _together(self, rows: Rows, picked: Picked) -> bool:
        """Whether what was picked is in the rows' order, and for the experts of these tokens."""
        tokens, ids = (self.lowered.values[name].shape for name in (rows.tokens, picked.ids))
        return rows.is_sorted == picked.is_sorted and rows.ids in (None, picked.ids) and tokens[0] == ids[0]

    def _chunked(self, operator: Operator) -> tuple[Fact | None, ...] | None:
        """``chunk``, or a ``split`` into equal parts, of the rows' last dim."""
        fact, value = self.fact(operator.args[0]), self.value(operator.args[0])
        count = len(operator.outputs)
        if not isinstance(fact, Rows) or fact.extra is not None or value is None:
            return None
        widths = {self.lowered.values[output].shape[-1] for output in operator.outputs}
        if operator.argument(2, "dim", 0) not in (-1, 1) or widths != {value.shape[1] // count}:
            return None
        step = ("aten.chunk.default", (operator.args[0], count, -1), ())
        return tuple(replace(fact, step=step, output=output) for output in range(count))

    def _sliced(self, operator: Operator) -> Fact | None:
        """One of the equal parts that lie side by side in the rows' last dim, or that take turns in it."""
        fact, value = self.fact(operator.args[0]), self.value(operator.args[0])
        if not isinstance(fact, Rows) or fact.extra is not None or value is None:
            return None
        if operator.argument(1, "dim", 0) not in (-1, 1):
            return None
        start, end, step = (operator.argument(place, name, default) for place, name, default in _SLICE)
        width, start = value.shape[1], start or 0
        length = self.lowered.values[operator.outputs[0]].shape[1]
        reaches_end = end is None or end >= _TO_THE_END
        if step > 1 and start < step and reaches_end and width == step * length:
            return replace(fact, step=(operator.target, (operator.args[0], -1, start, None, step), ()), output=0)
        if step == 1 and length and width % length == 0 and start % length == 0:
            part = ("aten.chunk.default", (operator.args[0], width // length, -1), ())
            return replace(fact, step=part, output=start // length)
        return None

    def _pointwise(self, operator: Operator) -> Fact | None:
        """What treats all elements of all rows alike, a bias of each expert, or the router's weights."""
        found = [self.fact(ref) for ref in refs((operator.args, tuple(value for _, value in operator.kwargs)))]
        if operator.target.startswith("aten.to.") and len(found) == 1 and isinstance(found[0], (Chosen, Counts, Weighted)):
            cast = _type(self.lowered.values[operator.outputs[0]])
            return replace(found[0], dtype=cast) if isinstance(found[0], Weighted) else found[0]
        rows = [fact for fact in found if isinstance(fact, Rows)]
        if not rows or any(fact.extra is not None for fact in rows):
            return None
        weights = next((fact for fact in found if isinstance(fact, Weights)), None)
        if weights is not None:
            return self._weighted(operator, rows[0], weights) if len(found) == 2 else None
        picked = [fact for fact in found if isinstance(fact, Picked) and not fact.is_turned]
        if len(rows) + len(picked) != len(found) or len({(fact.tokens, fact.is_sorted) for fact in rows}) != 1:
            return None
        known = {fact.ids for fact in rows if fact.ids is not None} | {fact.ids for fact in picked}
        shapes = {self.lowered.values[ref.value].shape for ref in refs(operator.args)}
        if len(known) > 1 or len(shapes) != 1 or not all(self._together(rows[0], fact) for fact in picked):
            return None
        step = (operator.target, operator.args, operator.kwargs)
        return replace(rows[0], ids=next(iter(known), None), step=step, output=0)

    def _weighted(self, operator: Operator, rows: Rows, weights: Weights) -> Fact | None:
        """Rows times the router's weights."""
        if operator.target not in ("aten.mul.Tensor", "aten.multiply.Tensor") or not weights.is_column or rows.ids is None:
            return None
        shapes = [self.lowered.values[name].shape for name in (rows.ids, weights.weights)]
        if shapes[0] != shapes[1] or weights.ids != (rows.ids if rows.is_sorted else None):
            return None
        last = next(ref.value for ref in refs(operator.args) if isinstance(self.facts[ref.value], Rows))
        return Weighted(rows, last, weights.weights, rows.is_sorted)

    # -- where a mixture ends ------------------------------------------------------------------------------------

    def _summed(self, operator: Operator) -> Operator | None:
        """Of rows side by side, the sum over each token's experts."""
        fact = self.fact(operator.args[0])
        dims, keeps = operator.argument(1, "dim"), operator.argument(2, "keepdim", False)
        if isinstance(fact, Counts) and fact.is_spread and dims == (0,) and not keeps:
            self.facts[operator.outputs[0]] = replace(fact, is_spread=False)
        if not isinstance(fact, Weighted) or not fact.is_spread or dims not in ((1,), (-2,)) or keeps:
            return None
        return self._mixture(operator, fact) if dict(operator.kwargs).get("dtype") is None else None

    def _added(self, operator: Operator) -> Operator | None:
        """Of sorted rows, each added to its token's place among zeros."""
        zeros, by, fact = (self.fact(operator.args[place]) for place in (0, 2, 3))
        adds = isinstance(zeros, Zeros) and operator.args[1] == 0 and operator.argument(4, "alpha", 1) == 1
        if not adds or not isinstance(fact, Weighted) or not isinstance(by, Tokens) or not fact.is_sorted:
            return None
        same_shape = self.lowered.values[operator.outputs[0]].shape[0] == self.lowered.values[fact.rows.tokens].shape[0]
        return self._mixture(operator, fact) if by.ids == fact.rows.ids and same_shape else None

    def _mixture(self, operator: Operator, fact: Weighted) -> Operator | None:
        """The operator in whose place ``operator`` computes the sum of weighted rows."""
        assert fact.rows.ids is not None, "rows are weighted where their experts are known"
        body = _Body(self)
        last = body.row(fact.last, fact.rows)
        inside = [step for step in body.steps if step[0] in (LINEAR, MATMUL)]
        experts = {self.lowered.values[value].shape[0] for value in body.parameters}
        if not inside or len(experts) != 1 or last.index != body.num_rows - 1:
            return None
        tensors = (Ref(fact.rows.tokens), Ref(fact.rows.ids), Ref(fact.weights))
        parameters = tuple(Ref(value) for value in body.parameters)
        args = (*tensors, parameters, tuple(body.steps), fact.dtype)
        return replace(operator, id=self._name(operator.module), target=TARGET, args=args, kwargs=())

    def _name(self, module: str) -> str:
        """An id that depends on the module and on what came before it there alone."""
        name, count = f"{module}:experts", 0
        while name in self.names:
            count += 1
            name = f"{module}:experts_{count}"
        self.names.add(name)
        return name


class _Body:
    """The steps that lead from a mixture's tokens to its rows, in order, while they are gathered from the last one back."""

    def __init__(self, folding: _Folding) -> None:
        self.folding = folding
        self.steps: list[tuple[Any, ...]] = []
        self.parameters: dict[str, None] = {}
        self._first: dict[Any, int] = {}  # the number of a step's first result
        self.num_rows = 1

    def row(self, value: str, fact: Rows) -> Slot:
        """The place of some rows among the row values."""
        if fact.step is None:
            return Slot("row", 0)
        if fact.step[0] == "same":
            inside = fact.step[1][0].value
            return self.row(inside, self._rows(inside))
        if fact.step not in self._first:
            target, args, kwargs = fact.step
            parts = int(args[1]) if target == "aten.chunk.default" else 1
            given = tuple(self._argument(item) for item in args)
            named = tuple((name, self._argument(item)) for name, item in kwargs)
            described = self.folding.lowered.values[value]
            width = described.shape[1] if fact.extra is None else max(described.shape[1:])
            self.steps.append((target, given, named, ((width, _type(described)),) * parts))
            self._first[fact.step] = self.num_rows
            self.num_rows += parts
        return Slot("row", self._first[fact.step] + fact.output)

    def _rows(self, value: str) -> Rows:
        fact = self.folding.facts[value]
        assert isinstance(fact, Rows), "steps lead from rows to rows"
        return fact

    def _argument(self, item: Any) -> Any:
        """An argument with values replaced by places."""
        if not isinstance(item, Ref):
            return item
        fact = self.folding.facts.get(item.value)
        if isinstance(fact, Rows):
            return self.row(item.value, fact)
        if isinstance(fact, Picked):
            return self._bias(fact)
        return Slot("parameter", self._parameter(item.value))

    def _bias(self, picked: Picked) -> Slot:
        described = self.folding.lowered.values[picked.value]
        step = (BIAS, (Slot("parameter", self._parameter(picked.value)),), (), ((described.shape[1], _type(described)),))
        if step not in self._first:
            self.steps.append(step)
            self._first[step] = self.num_rows
            self.num_rows += 1
        return Slot("row", self._first[step])

    def _parameter(self, value: str) -> int:
        self.parameters.setdefault(value)
        return list(self.parameters).index(value)


def _type(value: Value) -> TorchName:
    return TorchName(f"torch.{value.dtype}")


_SLICE = ((2, "start", None), (3, "end", None), (4, "step", 1))

_Look = Callable[[_Folding, Operator], "Fact | Sequence[Fact | None] | None"]
_LOOKS: dict[str, _Look] = {
    **dict.fromkeys(("reshape", "view", "flatten", "_unsafe_view"), _Folding._reshaped),
    "sort": _Folding._sorted,
    "argsort": _Folding._argsorted,
    **dict.fromkeys(("floor_divide", "div"), _Folding._divided),
    **dict.fromkeys(("index", "index_select"), _Folding._indexed),
    "index_put": _Folding._inverse,
    "repeat_interleave": _Folding._repeated,
    **dict.fromkeys(("histc", "one_hot"), _Folding._counted),
    "cumsum": _Folding._accumulated,
    **dict.fromkeys(("transpose", "mT", "swapaxes"), _Folding._transposed),
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like"), _Folding._zeros),
    "unsqueeze": _Folding._unsqueezed,
    "squeeze": _Folding._squeezed,
    **dict.fromkeys(_GROUPED, _Folding._grouped),
    "bmm": _Folding._batched,
    **dict.fromkeys(("chunk", "split", "split_with_sizes"), _Folding._chunked),
    "slice": _Folding._sliced,
}
