"""Scaled dot product attention: rows and heads may be split, and queries unless a causal mask depends on their place."""

from __future__ import annotations

import math

from autopar.graph import Operator, OpGraph
from autopar.strategies.rule import Dim, RuleFunction, Signature, Term
from autopar.strategies.signatures import names, place_in_inputs, shape, signature

STATISTIC_BYTES = 4  # log-sum-exp per query, float32
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
    extra = float(math.prod(output[:-1]) * STATISTIC_BYTES)
    return signature(
        operator, graph, inputs, [(*leading, queries, (value[-1],))], sizes,
        whole={"q"} if operator.argument(5, "is_causal", False) else (), linear=((2,),), kind="attention", flops=flops,
        backward_flops=flops * BACKWARD_PRODUCTS, saves=range(len(inputs)), saves_outputs=(0,), saves_extra_bytes=extra,
        random=bool(operator.argument(4, "dropout_p", 0.0)),
    )  # fmt: skip


def _broadcast(leading: list[Dim], given: tuple[int, ...]) -> list[Dim]:
    """The leading dims of one tensor: those of size 1 are broadcast."""
    own = leading[len(leading) - (len(given) - 2) :]
    return [dim if size > 1 else () for dim, size in zip(own, given[:-2], strict=True)]


RULES: dict[str, RuleFunction] = {"aten.scaled_dot_product_attention.default": _attention}
