"""Normalisations and softmax: the dims that statistics are taken over stay whole, unless they are exchanged."""

from __future__ import annotations

import math

from autopar.graph import ITEM_BYTES, Operator, OpGraph
from autopar.strategies.pieces import along
from autopar.strategies.rule import Dim, Exchange, RuleFunction, Signature, Term, letters_of
from autopar.strategies.signatures import (
    first_shape,
    letters_in,
    names,
    needs_gradient,
    number,
    place_in_inputs,
    positive,
    signature,
)


def statistic_bytes(operator: Operator, graph: OpGraph) -> int:
    """Bytes of one saved mean or deviation: float32 at least."""
    return max(4, ITEM_BYTES[graph.values[operator.inputs[0]].dtype])


def _layer_norm(operator: Operator, graph: OpGraph) -> Signature:
    """layer_norm and rms_norm: x (b.. normalised), weight and bias (normalised)."""
    given = first_shape(operator, graph)
    count = len(operator.argument(1, "normalized_shape"))
    sizes: dict[str, int] = {}
    dims = names("b", given[: len(given) - count], sizes)
    normalized: list[Dim] = [(size,) for size in given[len(given) - count :]]
    inputs: list[Term] = [(*dims, *normalized), *([tuple(normalized)] * (len(operator.inputs) - 1))]
    item = statistic_bytes(operator, graph)
    rows = math.prod(given[: len(given) - count])
    extra, saves = 2.0 * rows * item, range(len(inputs))
    if "rms" in operator.target:  # composed of smaller operators on the CPU: the normalised tensor is kept for the weight
        extra = float(item * math.prod(given)) if any(needs_gradient(operator, graph)[1:]) else 0.0
        if needs_gradient(operator, graph)[0]:
            extra += item * rows
        else:
            saves = range(0)
    return signature(operator, graph, inputs, [inputs[0]], sizes, saves=saves, saves_extra_bytes=extra)


def _group_norm(operator: Operator, graph: OpGraph) -> Signature:
    """x (b (g c) space): groups may be split, and space with its sums exchanged."""
    given = first_shape(operator, graph)
    groups = number(operator.argument(1, "num_groups"))
    sizes = {"b": given[0], "g": groups}
    space = names("s", given[2:], sizes)
    channels: Dim = ("g", given[1] // groups)
    inputs: list[Term] = [(("b",), channels, *space)]
    inputs += [(channels,)] * (len(operator.inputs) - 1)
    item = statistic_bytes(operator, graph)
    return signature(
        operator, graph, inputs, [inputs[0]], sizes, saves=range(min(2, len(inputs))),
        saves_extra_bytes=float(2 * given[0] * groups * item),
        exchanges=_statistics(
            sorted(letters_in(space)), ("b", "g"), item, needs_gradient(operator, graph)[0], counted=True
        ),
    )  # fmt: skip


def _batch_norm(operator: Operator, graph: OpGraph) -> Signature:
    """Statistics of all rows and pixels: splitting those exchanges sums in training; in evaluation nothing is shared.

    Outputs are the result and, in training, the new running mean and variance.
    """
    given = first_shape(operator, graph)
    sizes: dict[str, int] = {}
    dims = names("b", given, sizes)
    channels: Term = (dims[1],)
    inputs: list[Term] = [tuple(dims), *([channels] * (len(operator.inputs) - 1))]
    outputs: list[Term] = [tuple(dims), *([channels] * (sum(1 for value in operator.outputs if value) - 1))]
    rows = letters_in([dims[0], *dims[2:]])
    training = bool(operator.argument(5, "training"))
    saves = [0, *(index for index in range(1, len(inputs)) if index != 2)]
    if not training:
        return signature(operator, graph, inputs, outputs, sizes, saves=saves)
    item = statistic_bytes(operator, graph)
    extra = 2.0 * given[1] * item
    return signature(
        operator, graph, inputs, outputs, sizes, saves=saves, saves_extra_bytes=extra, replicated_after=rows,
        exchanges=_statistics(sorted(rows), tuple(letters_in(channels)), item, needs_gradient(operator, graph)[0]),
    )  # fmt: skip


def _statistics(
    rows: list[str], channels: tuple[str, ...], item_bytes: int, backward: bool, counted: bool = False
) -> tuple[Exchange, ...]:
    """Forward: sums with the number of rows unless it is known (``counted``), then squared deviations. Where the input has a
    gradient (``backward``): that one's two sums at once."""
    found: list[Exchange] = []
    for letter in rows:
        found.append(Exchange(letter, "all_reduce", channels, item_bytes, more_elements=0 if counted else 1))
        found.append(Exchange(letter, "all_reduce", channels, item_bytes))
        if backward:
            found.append(Exchange(letter, "all_reduce", channels, 2 * item_bytes, backward=True))
    return tuple(found)


def _instance_norm(operator: Operator, graph: OpGraph) -> Signature | None:
    """Batch norm of every row on its own, over space; with running statistics (means over rows) there is no rule."""
    if place_in_inputs(operator, 3, "running_mean") is not None:
        return None
    given = first_shape(operator, graph)
    sizes: dict[str, int] = {}
    dims, space = names("b", given[:2], sizes), names("s", given[2:], sizes)
    inputs: list[Term] = [(*dims, *space), *([(dims[1],)] * (len(operator.inputs) - 1))]
    item = statistic_bytes(operator, graph)
    return signature(
        operator, graph, inputs, [inputs[0]], sizes, saves=(0,), saves_extra_bytes=3.0 * given[0] * given[1] * item,
        exchanges=_statistics(
            sorted(letters_in(space)), tuple(letters_of(tuple(dims))), item, needs_gradient(operator, graph)[0], counted=True
        ),
    )  # fmt: skip


def _softmax(operator: Operator, graph: OpGraph) -> Signature:
    given = first_shape(operator, graph)
    place = positive(operator.argument(1, "dim"), len(given)) if given else 0
    return along(operator, graph, (place,) if given else (), saves_outputs=(0,))


RULES: dict[str, RuleFunction] = {
    "aten.layer_norm.default": _layer_norm,
    "aten.rms_norm.default": _layer_norm,
    "aten.group_norm.default": _group_norm,
    "aten.batch_norm.default": _batch_norm,
    "aten.instance_norm.default": _instance_norm,
    **{
        f"aten.{name}": _softmax
        for name in (
            "softmax.int", "log_softmax.int", "_softmax.default", "_log_softmax.default",
        )
    },
}  # fmt: skip
