"""What an operator's choices are and cost: one entry per strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.costing.conversions import FloatArray
from autopar.layout import Layout, Layouts
from autopar.strategies.choices import Strategy


@dataclass(frozen=True)
class LayoutColumn:
    """The layouts that a list of choices gives a tensor: the distinct ones, and for each choice which of them."""

    distinct: Layouts
    which: np.ndarray

    @staticmethod
    def of(layouts: Sequence[Layout]) -> LayoutColumn:
        distinct = Layouts(dict.fromkeys(layouts))
        place = {layout: index for index, layout in enumerate(distinct)}
        return LayoutColumn(distinct, np.array([place[layout] for layout in layouts], dtype=np.intp))


@dataclass(frozen=True, eq=False)
class OperatorTable:
    """Strategies of an operator with their costs, for one micro-batch.

    ``seconds`` is forward and backward compute plus the collectives inside the operator; ``compute_seconds`` the first of
    these; ``forward_seconds`` the forward pass's part; ``output_bytes`` of each result on one device and ``extra_bytes`` of the
    statistics kept for backward; ``flops`` forward and
    backward on one device; ``beside_bytes`` of what attention's backward pass holds beside gradients.
    ``inputs`` and ``outputs`` are the columns of layouts.
    """

    strategies: tuple[Strategy, ...]
    inputs: tuple[LayoutColumn, ...]
    outputs: tuple[LayoutColumn, ...]
    seconds: FloatArray
    compute_seconds: FloatArray
    forward_seconds: FloatArray
    weight_seconds: FloatArray
    output_bytes: tuple[FloatArray, ...]
    extra_bytes: FloatArray
    transient_bytes: FloatArray
    flops: FloatArray
    beside_bytes: FloatArray
