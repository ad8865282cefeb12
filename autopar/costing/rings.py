"""What attention around a ring takes on one device beside its tensors: pieces on their way, and sums in float32.

Enters: an attention operator and its strategies. Leaves: bytes for a moment, by strategy, of ``runtime.ring_attention``'s
backward pass, in which most is alive.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.costing.conversions import FloatArray
from autopar.graph import ITEM_BYTES, Operator, OpGraph
from autopar.strategies.choices import Strategy
from autopar.strategies.rule import Signature


def is_ring(signature: Signature | None, strategy: Strategy) -> bool:
    """Whether queries and keys are split together."""
    return (
        signature is not None
        and signature.kind == "attention"
        and not strategy.split.keys().isdisjoint(signature.joint)
    )


def ring_bytes(
    operator: Operator, graph: OpGraph, signature: Signature, found: Sequence[Strategy], local: Sequence[FloatArray]
) -> FloatArray:
    """``local``: bytes of query, key, value and result on the first device, by strategy.

    The query's gradient is summed up in float32 at least, those of keys and values too, one piece here and one on its way; of
    keys and values there are two pieces as well. Under a causal mask all but the gradients are there a second time, in the
    order after the trade, the result's gradient with them.
    """
    query, key, value, result = local
    item = ITEM_BYTES[graph.values[operator.inputs[0]].dtype]
    wide = max(4, item) / item
    held = wide * query + 2 * (1 + wide) * (key + value)
    if operator.argument(5, "is_causal", False):
        held = held + query + key + value + 2 * result
    return np.where([is_ring(signature, strategy) for strategy in found], held, 0.0)
