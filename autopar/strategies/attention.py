"""Scaled dot product attention: rows and heads may be split, and queries unless a causal mask depends on their place."""

from __future__ import annotations

import math

from autopar.graph import ITEM_BYTES, Operator, OpGraph
from autopar.strategies.rule import Dim, RuleFunction, Signature, Term
from autopar.strategies.signatures import names, place_in_inputs, shape, signature

BACKWARD_PRODUCTS = 2.5  # five matrix products to the forward's two (FlashAttention-2, section 3)


def _attention(operator: Operator, graph: OpGraph) -> Signature | None:
    """query (b.. h q d), key (b.. h k d), value (b.. h k e), mask broadcast to (b.. h q k) -> (b.. h q e).

    With grouped heads (``enable_gqa``) query heads are ``(h g)`` where key heads are ``h``: both factors may be split.
    """
    query, key, value = (shape(graph, operator.inputs[index]) for index in range(3))
    output = shape(graph, operator.outputs[0])
    sizes: dict[str, int] = {}
    leading = names("b", output[:-2], sizes)
    queries: Dim = ("q",)
    sizes["q"] = query[-2]
    heads: list[Dim] = list(leading)
    if operator.argument(7, "enable_gqa", False) and query[-3] != key[-3]:
        if value[-3] != key[-3]:
            return None
        sizes.pop(f"b{len(leading) - 1}")
        sizes["h"], sizes["g"] = key[-3], query[-3] // key[-3]
        leading[-1] = ("h", "g")
        heads[-1] = ("h",)
    inputs: list[Term] = [
        (*_broadcast(leading, query), queries, (query[-1],)),
        (*_broadcast(heads, key), (key[-2],), (key[-1],)),
        (*_broadcast(heads, value), (value[-2],), (value[-1],)),
    ]
    if place_in_inputs(operator, 3, "attn_mask") is not None:
        mask = shape(graph, operator.inputs[3])
        dims = [*leading, queries, (key[-2],)]
        aligned = dims[len(dims) - len(mask) :]
        inputs.append(tuple(dim if size > 1 else () for dim, size in zip(aligned, mask, strict=True)))
    flops = 2.0 * math.prod(output[:-2]) * query[-2] * key[-2] * (query[-1] + value[-1])
    saves, extra = _saved(operator, graph)
    return signature(
        operator, graph, inputs, [(*leading, queries, (value[-1],))], sizes,
        whole={"q"} if operator.argument(5, "is_causal", False) else (), linear=((2,),), kind="attention", flops=flops,
        backward_flops=flops * BACKWARD_PRODUCTS, saves=saves, saves_outputs=(0,) if 0 in saves else (),
        saves_extra_bytes=extra, random=bool(operator.argument(4, "dropout_p", 0.0)),
    )  # fmt: skip


def _saved(operator: Operator, graph: OpGraph) -> tuple[list[int], float]:
    """Inputs kept for backward, and bytes besides.

    The fused kernels keep their inputs, the result and the logarithm of each query's sum of exponentials. Where no fused
    kernel of the CPU applies (dropout, a mask with a gradient, not four dims) the scaled query and key and the
    probabilities are kept, three times with dropout.
    """
    query, key = (graph.values[operator.inputs[index]] for index in range(2))
    output = graph.values[operator.outputs[0]]
    item = max(4, ITEM_BYTES[query.dtype])
    masks = [graph.values[value] for value in operator.inputs[3:]]
    dropout = bool(operator.argument(4, "dropout_p", 0.0))
    if dropout or any(mask.requires_grad for mask in masks) or len(query.shape) != 4:
        probabilities = math.prod(output.shape[:-1]) * key.shape[-2] * item
        return [2], float(query.num_bytes + key.num_bytes + probabilities * (3 if dropout else 1))
    converted = sum(mask.num_elements * ITEM_BYTES[query.dtype] for mask in masks if mask.dtype == "bool")
    kept = [index for index in range(len(operator.inputs)) if graph.values[operator.inputs[index]].dtype != "bool"]
    return kept, float(math.prod(output.shape[:-1]) * item + converted)


def _broadcast(leading: list[Dim], given: tuple[int, ...]) -> list[Dim]:
    """The leading dims of one tensor: those of size 1 are broadcast."""
    own = leading[len(leading) - (len(given) - 2) :]
    return [dim if size > 1 else () for dim, size in zip(own, given[:-2], strict=True)]


RULES: dict[str, RuleFunction] = {"aten.scaled_dot_product_attention.default": _attention}
