"""A dropless mixture of experts as one operator, ``autopar.experts`` (``tracing/experts.py`` says what it is made of).

On a mesh axis it may split

* ``t``, the tokens: every device has all experts, and applies them to tokens of its own;
* ``e``, the experts, with the same tokens everywhere: each device adds up what its experts say, a term of the sum;
* ``x``, tokens and experts together: each device has tokens and experts of its own, and tokens travel to their experts
  and back (GShard, Lepikhin et al., ICLR 2021, with as many rows as there are choices in place of a capacity): the counts,
  the rows there and the results back are three all-to-alls, and two more bring their gradients;
* ``f0, f1 ...``, the width inside the experts, between a linear layer and the next one: a sum over the devices.

How many tokens choose a device's experts depends on the data. What is priced is what is expected of a router that chooses
evenly: a device's part of the rows is its part of the experts, and it gets as many rows as it sends. The bytes that a device
sends of its own tokens are exact; seconds and bytes kept are those of even choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.graph import ITEM_BYTES, Operator, OpGraph, Ref, Slot, Value
from autopar.strategies import elementwise
from autopar.strategies.rule import Dim, Exchange, RuleFunction, Signature, Term
from autopar.strategies.signatures import needs_gradient, shape, signature

TARGET = "autopar.experts.default"
LINEAR, MATMUL, BIAS = "linear", "matmul", "bias"  # steps of the body that read a parameter
CHUNK, SLICE = "aten.chunk.default", "aten.slice.Tensor"
NUM_ROUTING = 3  # tensor inputs before the parameters: tokens, ids, weights

COUNT_BYTES = 8  # int64
INDEX_BYTES = 8
INDICES_KEPT = 2  # numbers kept for each row: its token, and which choice it is; with biases its expert too


@dataclass(frozen=True)
class Step:
    """One step of a body: ``results`` are the numbers of the row values that it makes, of these widths and types."""

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[int, ...]
    widths: tuple[int, ...]
    dtypes: tuple[str, ...]

    def rows(self) -> Iterator[int]:
        """The row values that it reads."""
        given = (*self.args, *(value for _, value in self.kwargs))
        yield from (item.index for item in given if isinstance(item, Slot) and item.kind == "row")

    @property
    def parameter(self) -> int | None:
        """The place of the parameter that it reads."""
        return next((item.index for item in self.args if isinstance(item, Slot) and item.kind == "parameter"), None)


def body_steps(operator: Operator) -> tuple[Step, ...]:
    """The steps of an operator's body, in order; row value 0 are the tokens."""
    found, count = [], 1
    for target, args, kwargs, results in operator.args[4]:
        numbers = tuple(range(count, count + len(results)))
        count += len(results)
        widths, dtypes = zip(*results, strict=True)
        names = tuple(dtype.name.removeprefix("torch.") for dtype in dtypes)
        found.append(Step(target, args, kwargs, numbers, widths, names))
    return tuple(found)


def rows_graph(operator: Operator, graph: OpGraph) -> OpGraph:
    """The steps that are ATen operators as a graph of their own, on all rows: row value ``n`` is ``rn``."""
    tokens = graph.values[operator.inputs[0]]
    count = math.prod(shape(graph, operator.inputs[1]))
    steps = body_steps(operator)
    flows = _with_gradient(steps, needs_gradient(operator, graph))
    values = {"r0": Value("r0", (count, tokens.shape[1]), tokens.dtype, 0 in flows, storage="r0")}
    operators = []
    for step in steps:
        names = tuple(f"r{number}" for number in step.results)
        is_view = step.target in (CHUNK, SLICE)
        for number, name, width, dtype in zip(step.results, names, step.widths, step.dtypes, strict=True):
            storage = values[f"r{next(step.rows())}"].storage if is_view else name
            values[name] = Value(name, (count, width), dtype, number in flows, storage=storage)
        if step.target not in (LINEAR, MATMUL, BIAS):
            args = tuple(_named(item) for item in step.args)
            kwargs = tuple((name, _named(item)) for name, item in step.kwargs)
            operators.append(Operator(names[0], step.target, args, kwargs, names))
    return OpGraph("experts", values, (), (), (), (), tuple(operators), (), None, 1)


def _with_gradient(steps: Sequence[Step], wanted: Sequence[bool]) -> frozenset[int]:
    """The row values through which a gradient flows. ``wanted``: of each tensor that the operator reads, whether it has one."""
    found = {0} if wanted[0] else set()
    for step in steps:
        own = step.parameter is not None and wanted[NUM_ROUTING + step.parameter]
        if own or not found.isdisjoint(step.rows()):
            found.update(number for number, dtype in zip(step.results, step.dtypes, strict=True) if "float" in dtype)
    return frozenset(found)


def _named(item: Any) -> Any:
    return Ref(f"r{item.index}") if isinstance(item, Slot) else item


@dataclass
class _Width:
    """What is known of the dim that a linear layer makes: ``outer`` parts lie side by side in it, or ``inner`` take turns.
    ``is_whole``: it may not be split."""

    letter: str
    size: int
    outer: int = 1
    inner: int = 1
    is_whole: bool = False

    def dim(self, is_part: bool) -> Dim:
        """Of all of it, or of one of its parts."""
        if self.is_whole:
            return (self.size // (self.outer * self.inner if is_part else 1),)
        if is_part:
            return (self.letter,)
        factors: list[str | int] = [self.letter]
        return (*([self.outer] if self.outer > 1 else []), *factors, *([self.inner] if self.inner > 1 else []))


@dataclass
class _Widths:
    """The last dims of the row values, and of the parameters, as letters.

    ``of_row``: of each row value, which layer's width it has and whether all of it or a part (None: the tokens' width).
    ``reads`` and ``makes``: of each parameter, the widths that it takes and gives.
    """

    found: list[_Width] = field(default_factory=list)
    of_row: dict[int, tuple[_Width, bool] | None] = field(default_factory=lambda: {0: None})
    reads: dict[int, tuple[_Width, bool] | None] = field(default_factory=dict)
    makes: dict[int, tuple[_Width, bool] | None] = field(default_factory=dict)


def _widths(steps: Sequence[Step]) -> _Widths:
    """Follow the widths through the body. A letter ends where the next linear layer sums over it."""
    known = _Widths()
    for step in steps:
        given = [known.of_row[row] for row in step.rows()]
        if step.target in (LINEAR, MATMUL):
            width = _Width(f"f{len(known.found)}", step.widths[0])
            known.found.append(width)
            assert step.parameter is not None
            for table, entry in ((known.reads, given[0]), (known.makes, (width, False))):
                if table.setdefault(step.parameter, entry) != entry:  # one weight in two places: nothing of it is split
                    _keep_whole([table[step.parameter], entry])
            known.of_row[step.results[0]] = (width, False)
        elif step.target == BIAS:
            known.of_row[step.results[0]] = None  # takes on the width of what it is added to
        elif step.target in (CHUNK, SLICE):
            part = _part(step, given[0])
            known.of_row.update(dict.fromkeys(step.results, part))
        else:
            known.of_row.update(dict.fromkeys(step.results, _shared(step, given, steps, known)))
    return known


def _part(step: Step, given: tuple[_Width, bool] | None) -> tuple[_Width, bool] | None:
    if given is None:
        return None
    width, is_part = given
    wanted = (int(step.args[1]), 1) if step.target == CHUNK else (1, int(step.args[4]))
    if is_part or (width.outer, width.inner) not in ((1, 1), wanted):
        width.is_whole = True
        return None
    width.outer, width.inner = wanted
    return width, True


def _shared(
    step: Step, given: Sequence[tuple[_Width, bool] | None], steps: Sequence[Step], known: _Widths
) -> tuple[_Width, bool] | None:
    """The width of what is computed element by element; a bias has that of the rows beside it."""
    biases = {number: other for other in steps if other.target == BIAS for number in other.results}
    real = [entry for row, entry in zip(step.rows(), given, strict=True) if row not in biases]
    if any(entry != real[0] for entry in real):
        _keep_whole(real)
        return None
    for row in step.rows():
        if row in biases:
            parameter = biases[row].parameter
            assert parameter is not None
            if known.makes.setdefault(parameter, real[0]) != real[0]:
                _keep_whole([known.makes[parameter], real[0]])
    return real[0]


def _keep_whole(entries: Sequence[tuple[_Width, bool] | None]) -> None:
    for entry in entries:
        if entry is not None:
            entry[0].is_whole = True


def _end_at_sums(steps: Sequence[Step], known: _Widths) -> set[int]:
    """Keep whole every width that is not summed over, or after whose sum more is done than adding biases; the parameters
    that are added to such a sum."""
    last = known.of_row[steps[-1].results[-1]]
    sums = {id(entry[0]): step for step in steps for entry in [_summed(step, known)] if entry is not None}
    added: set[int] = set()
    for width in known.found:
        step = sums.get(id(width))
        biases = None if step is None or (last is not None and last[0] is width) else _only_biases(steps, step)
        if biases is None:
            width.is_whole = True
        elif not width.is_whole:
            added |= biases
    return added


def _summed(step: Step, known: _Widths) -> tuple[_Width, bool] | None:
    return known.of_row[next(step.rows())] if step.target in (LINEAR, MATMUL) else None


def _only_biases(steps: Sequence[Step], summing: Step) -> set[int] | None:
    """The biases added to a layer's result; None where something else is done with it."""
    rows, biases = set(summing.results), set()
    parameters = {step.results[0]: step.parameter for step in steps if step.target == BIAS}
    for step in steps[steps.index(summing) + 1 :]:
        read = set(step.rows())
        if rows.isdisjoint(read):
            if step.target != BIAS:
                return None
            continue
        others = read - rows
        if step.target != "aten.add.Tensor" or step.kwargs or len(others) != 1 or not others <= set(parameters):
            return None
        parameter = parameters[others.pop()]
        assert parameter is not None
        biases.add(parameter)
        rows = set(step.results)
    return biases


def _experts(operator: Operator, graph: OpGraph) -> Signature:
    """tokens (t, d), ids (t, k), weights (t, k), parameters (e, ...) -> (t, d')."""
    tokens, ids = (graph.values[value] for value in operator.inputs[:2])
    output = graph.values[operator.outputs[0]]
    parameters = operator.inputs[NUM_ROUTING:]
    steps = body_steps(operator)
    known = _widths(steps)
    added = _end_at_sums(steps, known)
    sizes = {"t": tokens.shape[0], "e": shape(graph, parameters[0])[0]}
    joint = {"x": ("t", "e")} if min(sizes.values()) > 1 else {}
    sizes.update(dict.fromkeys(joint, tokens.shape[0]))
    for width in known.found:
        if not width.is_whole:
            sizes[width.letter] = width.size // (width.outer * width.inner)
    dims = {step.parameter: _dims(step, known, shape(graph, parameters[step.parameter]))
            for step in steps if step.parameter is not None}  # fmt: skip
    inputs: list[Term] = [(("t",), (tokens.shape[1],)), (("t",), (ids.shape[1],)), (("t",), (ids.shape[1],))]
    inputs += [(("e",), *dims[index]) for index in range(len(parameters))]
    flows = _with_gradient(steps, needs_gradient(operator, graph))
    flops = [_flops(step, graph, operator, flows) for step in steps]
    products = [step for step in steps if step.target in (LINEAR, MATMUL)]
    matrices = {step.parameter for step in products if not flows.isdisjoint(step.rows())}  # kept for the rows' gradients
    return signature(
        operator, graph, inputs, [(("t",), (output.shape[1],))], sizes, kind="matmul", joint=joint, apart=joint,
        experts=["e", *joint], exchanges=_exchanges(operator, graph, steps) if joint else (),
        additive=[NUM_ROUTING + index for index in added], flops=sum(ahead for ahead, _ in flops),
        backward_flops=sum(back for _, back in flops), saves_extra_bytes=_kept(operator, graph, steps),
        saves=[NUM_ROUTING + index for index in matrices if index is not None],
    )  # fmt: skip


def _dims(step: Step, known: _Widths, given: tuple[int, ...]) -> tuple[Dim, ...]:
    """A parameter's dims after the one of the experts."""
    assert step.parameter is not None
    made = known.makes.get(step.parameter)
    out: Dim = (given[-1 if step.target != LINEAR else 1],) if made is None else made[0].dim(made[1])
    if step.target == BIAS:
        return (out,)
    read = known.reads.get(step.parameter)
    summed: Dim = (given[2 if step.target == LINEAR else 1],) if read is None else read[0].dim(read[1])
    return (out, summed) if step.target == LINEAR else (summed, out)


def _flops(step: Step, graph: OpGraph, operator: Operator, flows: frozenset[int]) -> tuple[float, float]:
    """Operations of a step on all rows, forward and backward."""
    rows = math.prod(shape(graph, operator.inputs[1]))
    if step.target not in (LINEAR, MATMUL):
        each = float(rows * sum(step.widths)) if step.target not in (BIAS, CHUNK, SLICE) else 0.0
        return each, each if not flows.isdisjoint(step.results) else 0.0
    assert step.parameter is not None
    place = NUM_ROUTING + step.parameter
    product = 2.0 * rows * math.prod(shape(graph, operator.inputs[place])[1:])
    wanted = needs_gradient(operator, graph)[place]
    return product, product * (int(wanted) + int(not flows.isdisjoint(step.rows())))


def _exchanges(operator: Operator, graph: OpGraph, steps: Sequence[Step]) -> tuple[Exchange, ...]:
    """How many rows each expert gets, the rows, and their results; the gradients of the latter two."""
    tokens, ids = (graph.values[value] for value in operator.inputs[:2])
    num_chosen = ids.shape[1]
    there = num_chosen * tokens.shape[1] * ITEM_BYTES[tokens.dtype]
    back = num_chosen * steps[-1].widths[-1] * ITEM_BYTES[steps[-1].dtypes[-1]]
    num_experts = shape(graph, operator.inputs[NUM_ROUTING])[0]
    found = [
        Exchange("x", "all_to_all", (), num_experts * COUNT_BYTES),
        Exchange("x", "all_to_all", ("t",), there),
        Exchange("x", "all_to_all", ("t",), back),
    ]
    flows = _with_gradient(steps, needs_gradient(operator, graph))
    if steps[-1].results[-1] in flows:
        found.append(Exchange("x", "all_to_all", ("t",), back, backward=True))
    if 0 in flows:
        found.append(Exchange("x", "all_to_all", ("t",), there, backward=True))
    return tuple(found)


def _kept(operator: Operator, graph: OpGraph, steps: Sequence[Step]) -> float:
    """Bytes of rows that autograd keeps: what linear layers and the steps between them read, the weighted rows and their
    weights, and where the rows come from."""
    inside = rows_graph(operator, graph)
    values, wanted = inside.values, needs_gradient(operator, graph)
    kept: set[str] = set()
    for step in steps:
        if step.parameter is not None and step.target != BIAS and wanted[NUM_ROUTING + step.parameter]:
            kept.add(values[f"r{next(step.rows())}"].storage)
    for inner in inside.operators:
        found = elementwise.RULES[inner.target](inner, inside) if inner.target in elementwise.RULES else None
        if found is not None:
            kept.update(values[inner.inputs[index]].storage for index in found.saved_inputs)
            kept.update(values[inner.outputs[index]].storage for index in found.saved_outputs)
    count = math.prod(shape(graph, operator.inputs[1]))
    if wanted[2]:
        kept.add(values[f"r{steps[-1].results[-1]}"].storage)
    weights = count * ITEM_BYTES[graph.values[operator.inputs[2]].dtype]
    indices = INDICES_KEPT + any(step.target == BIAS for step in steps)
    return float(sum(values[name].num_bytes for name in kept) + weights + indices * count * INDEX_BYTES)


RULES: dict[str, RuleFunction] = {TARGET: _experts}
