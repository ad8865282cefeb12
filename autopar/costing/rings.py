"""What attention takes on one device beside its tensors: blocks of scores; around a ring pieces on their way, and sums in
float32.

Enters: an attention operator and its strategies. Leaves: bytes for a moment, by strategy, of the backward pass, in which
most is alive.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.costing.conversions import FloatArray
from autopar.graph import ITEM_BYTES, Operator, OpGraph
from autopar.layout import local_shape
from autopar.strategies.choices import Strategy
from autopar.strategies.rule import Signature

# Blocks of queries, from how many queries on, and of keys, in torch's fused kernel of the CPU (FlashAttentionKernel.cpp,
# flash_attention_backward_kernel_impl).
_QUERY_BLOCKS = ((768, 256), (192, 64), (0, 32))
_KEY_BLOCK = 512


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


def block_bytes(
    operator: Operator, graph: OpGraph, signature: Signature, found: Sequence[Strategy], mesh_shape: tuple[int, ...]
) -> FloatArray:
    """Of the fused kernel's backward pass on the CPU: a block of probabilities and one of their gradients for each thread, of
    which a device of the catalogue has one; in half precision both in float32 too. The kernels of a GPU keep theirs on the
    chip. A causal ring has half of the keys, or of the queries, in a call. Where no fused kernel applies, all scores are
    tensors of their own.
    """
    if not signature.saved_outputs:
        return np.zeros(len(found))
    query, key = (graph.values[value] for value in operator.inputs[:2])
    item = ITEM_BYTES[query.dtype]
    each = item if item >= 4 else 4 + item
    causal = bool(operator.argument(5, "is_causal", False))

    def scores(rows: int, columns: int) -> int:
        block = next(size for least, size in _QUERY_BLOCKS if rows >= least)
        return min(rows, block) * min(columns, _KEY_BLOCK)

    def most(strategy: Strategy) -> float:
        rows, columns = (
            local_shape(value.shape, layout, mesh_shape)[-2]
            for value, layout in zip((query, key), strategy.inputs, strict=False)
        )
        halved = causal and is_ring(signature, strategy)
        calls = ((rows // 2, columns), (rows, columns // 2)) if halved else ((rows, columns),)
        return float(2 * each * max(scores(*call) for call in calls))

    return np.array([most(strategy) for strategy in found])
