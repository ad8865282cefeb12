"""Losses: rows may be split, and the classes of cross-entropy too."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.graph import ITEM_BYTES, Operator, OpGraph, Ref
from autopar.strategies.rule import Dim, Exchange, RuleFunction, Signature, Term
from autopar.strategies.signatures import (
    is_floating,
    letters_in,
    names,
    number,
    place_in_inputs,
    shape,
    signature,
    written,
)

NONE, MEAN, SUM = 0, 1, 2  # the codes of ATen's ``reduction`` argument
COUNT_BYTES = 8
FUSED = "autopar.linear_cross_entropy.default"  # strategies/logits.py


@dataclass(frozen=True)
class ClassLoss:
    """What a loss of classes is given beside logits: the values of its labels and class weights, and its numbers."""

    labels: str
    weight: str | None
    reduction: int
    ignore_index: int
    label_smoothing: float


def class_loss(operator: Operator) -> ClassLoss:
    """Of a cross-entropy of logits or of what they are made of, or a loss of log-probabilities; labels are classes."""
    first = 3 if operator.target == FUSED else 1
    labels, weight = operator.argument(first, "target"), operator.argument(first + 1, "weight")
    assert isinstance(labels, Ref), "a loss has labels"
    return ClassLoss(
        labels.value,
        weight.value if isinstance(weight, Ref) else None,
        number(operator.argument(first + 2, "reduction", MEAN)),
        int(operator.argument(first + 3, "ignore_index", -100)),
        float(operator.argument(first + 4, "label_smoothing", 0.0)),
    )


def _cross_entropy(operator: Operator, graph: OpGraph) -> Signature | None:
    """logits (b v s..), labels (b s..). A mean over split rows exchanges the count of valid labels; split classes
    exchange the maximum, the sum of exponentials and the label's logit of every row.
    """
    terms = _class_terms(operator, graph)
    if terms is None:
        return None
    inputs, output, sizes, rows = terms
    logits = graph.values[operator.inputs[0]]
    item = max(4, ITEM_BYTES[logits.dtype])  # half precision is exchanged as float32
    return signature(
        operator, graph, inputs, [output], sizes, exchanges=loss_exchanges(operator, rows, sizes, logits.dtype),
        replicated_after=("v",),
        flops=4.0 * logits.num_elements, saves=range(1, len(inputs)), saves_extra_bytes=float(logits.num_bytes + item),
    )  # fmt: skip


def loss_exchanges(operator: Operator, rows: Term, sizes: dict[str, int], dtype: str) -> tuple[Exchange, ...]:
    """What a cross-entropy of logits of type ``dtype`` exchanges where rows are split, and classes, whose letter is ``v``."""
    loss = class_loss(operator)
    item = max(4, ITEM_BYTES[dtype])  # half precision is exchanged as float32
    count_bytes = ITEM_BYTES[dtype] if loss.weight else COUNT_BYTES
    exchanges = [
        Exchange(letter, "all_reduce", (), count_bytes) for letter in sorted(letters_in(rows)) if loss.reduction == MEAN
    ]
    per_row = tuple(letter for letter in sizes if letter in letters_in(rows))
    exchanges.append(Exchange("v", "all_reduce", per_row, item, count=4 if loss.label_smoothing else 3))
    return tuple(exchanges)


def _nll(operator: Operator, graph: OpGraph) -> Signature | None:
    """Log-probabilities (b v s..), labels (b s..): classes are whole; a mean needs the count of all valid labels."""
    terms = _class_terms(operator, graph)
    if terms is None:
        return None
    inputs, output, sizes, rows = terms
    whole = {"v"} | (letters_in(rows) if number(operator.argument(3, "reduction", MEAN)) == MEAN else set())
    return signature(operator, graph, inputs, [output], sizes, whole=whole, saves=range(len(inputs)))


def _class_terms(operator: Operator, graph: OpGraph) -> tuple[list[Term], Term, dict[str, int], Term] | None:
    """Terms of the inputs and of the result, sizes, the term of the labels; None for labels that are probabilities."""
    logits, labels = (shape(graph, value) for value in operator.inputs[:2])
    if is_floating(graph, operator.inputs[1]):
        return None
    sizes: dict[str, int] = {}
    rows = names("b", labels, sizes)
    classes = 1 if len(logits) > 1 else 0
    sizes["v"] = logits[classes]
    dims: list[Dim] = [*rows[:classes], ("v",), *rows[classes:]]
    inputs: list[Term] = [tuple(dims), tuple(rows)]
    if place_in_inputs(operator, 2, "weight") is not None:
        inputs.append(((logits[classes],),))  # class weights are wanted whole
    output = tuple(rows) if shape(graph, operator.outputs[0]) == labels else ()
    return inputs, output, sizes, tuple(rows)


def _elementwise_loss(operator: Operator, graph: OpGraph) -> Signature | None:
    """A loss of each element, then its sum or mean. Both tensors have one shape, or backward is not defined."""
    if shape(graph, operator.inputs[0]) != shape(graph, operator.inputs[1]):
        return None
    reduction = number(operator.argument(_reduction_position(operator), "reduction", MEAN))
    text = ", ".join(["b.."] * len(operator.inputs)) + (" -> b.." if reduction == NONE else " ->")
    flops = 3.0 * max(graph.values[value].num_elements for value in operator.inputs)
    if (
        "l1_loss.default" in operator.target and "smooth" not in operator.target
    ):  # the difference, then its absolute value
        extra = float(graph.values[operator.inputs[0]].num_bytes)
        return written(operator, graph, text, flops=flops, saves_extra_bytes=extra)
    return written(operator, graph, text, flops=flops, saves=range(len(operator.inputs)))


def _reduction_position(operator: Operator) -> int:
    name = operator.target.split(".")[1]
    return {"binary_cross_entropy": 3, "binary_cross_entropy_with_logits": 4}.get(name, 2)


def reduction_of(operator: Operator) -> int:
    """The code of an elementwise loss's reduction."""
    return number(operator.argument(_reduction_position(operator), "reduction", MEAN))


ELEMENTWISE_LOSSES = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "kl_div", "soft_margin_loss",
)  # fmt: skip

RULES: dict[str, RuleFunction] = {
    "aten.cross_entropy_loss.default": _cross_entropy,
    "aten.nll_loss_nd.default": _nll,
    "aten.nll_loss.default": _nll,
    "aten.nll_loss2d.default": _nll,
    **{f"aten.{name}.default": _elementwise_loss for name in ELEMENTWISE_LOSSES},
}
