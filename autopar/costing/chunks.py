"""What it takes to compute an operator by chunks of rows, beside computing it at once (``strategies/logits.py``).

Enters: the table of the usual form. Leaves: that of the other one, or both as one table: the search chooses between them as
between any two strategies, with what is computed twice as the price of the memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.costing.conversions import Conversions, FloatArray
from autopar.costing.tables import LayoutColumn, OperatorTable
from autopar.graph import ITEM_BYTES
from autopar.strategies.choices import CHUNKS, Strategy, piece_fraction
from autopar.strategies.logits import chunk_rows
from autopar.strategies.rule import Signature

# Times that a chunk's numbers are read or written to make statistics of them, and in backward the gradient
# (``runtime/loss.py``: the largest, less that and exponentials in place, their sum; exponentials, factors in place, a cast).
_PASSES = 6


def without_chunks(usual: OperatorTable) -> OperatorTable:
    """The two operators one after the other. In backward the gradients of the logits and of their logarithms are there
    together, and gone but for the former when the layer's own gradients are made: the more of the two is there beside what
    is kept. (Of a loss the timeline adds as much as is kept.)
    """
    logits, own = usual.extra_bytes, usual.transient_bytes - usual.extra_bytes
    most = np.maximum(2 * logits, own)
    return replace(usual, transient_bytes=most, beside_bytes=usual.beside_bytes + most - own - logits)


def by_chunks(usual: OperatorTable, signature: Signature, conversions: Conversions) -> OperatorTable:
    """The same strategies, by chunks."""
    chunked = signature.chunked
    assert chunked is not None, "a rule that knows chunks"
    item, wide = ITEM_BYTES[chunked.dtype], ITEM_BYTES[chunked.wide]
    rows, classes, largest = _pieces(signature, usual.strategies)
    whole, parts = (linear_loss_seconds(signature, usual.strategies, conversions, form) for form in ("", CHUNKS))
    ahead, back = (np.maximum(0.0, new - old) for new, old in zip(parts, whole, strict=True))
    own = usual.transient_bytes - usual.extra_bytes  # the gradients of what it reads
    beside = largest * classes * (wide + item) + classes * chunked.width * wide * chunked.sums_apart
    extra = chunked.saved_extra_bytes * rows / math.prod(signature.sizes[letter] for letter in chunked.rows)
    return replace(
        usual,
        strategies=tuple(replace(strategy, form=CHUNKS) for strategy in usual.strategies),
        seconds=usual.seconds + ahead + back,
        compute_seconds=usual.compute_seconds + ahead + back,
        forward_seconds=usual.forward_seconds + ahead,
        extra_bytes=extra,
        transient_bytes=own + beside,
        beside_bytes=beside,
    )


def linear_loss_seconds(
    signature: Signature, strategies: Sequence[Strategy], conversions: Conversions, form: str = ""
) -> tuple[FloatArray, FloatArray]:
    """Forward and backward, by strategy: of the products, which read the classes' parameters once a chunk, and of what is made
    of their results."""
    chunked = signature.chunked
    assert chunked is not None, "a rule that knows chunks"
    rows, classes, largest = _pieces(signature, strategies)
    in_chunks = form == CHUNKS
    numbers = np.ceil(rows / largest) if in_chunks else np.ones(len(rows))
    each = rows / numbers
    share = rows * classes / math.prod(signature.sizes[letter] for letter in (*chunked.rows, chunked.classes)) / numbers
    moved = ITEM_BYTES[chunked.dtype] * (chunked.width * (each + classes) + each * classes)
    item, result, wide = (ITEM_BYTES[dtype] for dtype in (chunked.dtype, chunked.result, chunked.wide))
    made = (_PASSES * wide if in_chunks else result) * each * classes  # whole, as a cross-entropy on its own is priced
    cast = (item + result) * each * classes * (chunked.dtype != chunked.result)

    def seconds(products: int, times: int) -> FloatArray:
        flops, model, where = products * chunked.product_flops * share, conversions.cost_model, conversions.where
        product = model.compute_seconds(flops, times * moved, chunked.dtype, "matmul", **where)
        made_of_it = (1 if in_chunks else times) * made + times * cast
        rest = model.compute_seconds(chunked.each_flops * share, made_of_it, chunked.wide, "elementwise", **where)
        return np.asarray(numbers * (product + rest))

    back = seconds(chunked.products + in_chunks, 2) if chunked.products else np.zeros(len(rows))
    return seconds(1, 1), back


def _pieces(signature: Signature, strategies: Sequence[Strategy]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Of the first device, by strategy: rows, classes, rows of a chunk."""
    chunked = signature.chunked
    assert chunked is not None, "a rule that knows chunks"
    local = [
        (_local(signature, strategy, chunked.rows), _local(signature, strategy, (chunked.classes,)))
        for strategy in strategies
    ]
    found = np.array([(*sizes, chunk_rows(*sizes, chunked.width)) for sizes in local], dtype=np.float64)
    return found[:, 0], found[:, 1], found[:, 2]


def _local(signature: Signature, strategy: Strategy, letters: tuple[str, ...]) -> int:
    """How many the first device has of what some letters together count."""
    sizes = (
        math.ceil(
            signature.sizes[letter] * (piece_fraction(*strategy.split[letter]) if letter in strategy.split else 1.0)
        )
        for letter in letters
    )
    return math.prod(sizes)


def together(one: OperatorTable, other: OperatorTable) -> OperatorTable:
    """Both tables' strategies, in this order."""

    def columns(some: tuple[LayoutColumn, ...]) -> tuple[LayoutColumn, ...]:
        return tuple(LayoutColumn(column.distinct, np.concatenate([column.which] * 2)) for column in some)

    def both(first: FloatArray, second: FloatArray) -> FloatArray:
        return np.concatenate([first, second])

    return OperatorTable(
        strategies=(*one.strategies, *other.strategies),
        inputs=columns(one.inputs),
        outputs=columns(one.outputs),
        seconds=both(one.seconds, other.seconds),
        compute_seconds=both(one.compute_seconds, other.compute_seconds),
        forward_seconds=both(one.forward_seconds, other.forward_seconds),
        weight_seconds=both(one.weight_seconds, other.weight_seconds),
        output_bytes=tuple(map(both, one.output_bytes, other.output_bytes)),
        extra_bytes=both(one.extra_bytes, other.extra_bytes),
        transient_bytes=both(one.transient_bytes, other.transient_bytes),
        flops=both(one.flops, other.flops),
        beside_bytes=both(one.beside_bytes, other.beside_bytes),
    )
