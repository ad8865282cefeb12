"""Scaled dot product attention: rows and heads may be split, queries unless a causal mask depends on their place, and queries
and keys together: then keys and values pass from device to device around a ring (Liu et al., "Ring Attention with Blockwise
Transformers", ICLR 2024)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autopar.graph import ITEM_BYTES, Operator, OpGraph
from autopar.strategies.rule import Dim, Exchange, RuleFunction, Signature, Term, letters_of
from autopar.strategies.signatures import names, place_in_inputs, shape, signature

RING = "s"  # the letter of queries and keys that are split together
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
    sizes["k"] = key[-2]
    inputs: list[Term] = [
        (*_broadcast(leading, query), queries, (query[-1],)),
        (*_broadcast(heads, key), ("k",), (key[-1],)),
        (*_broadcast(heads, value), ("k",), (value[-1],)),
    ]
    if place_in_inputs(operator, 3, "attn_mask") is not None:
        mask = shape(graph, operator.inputs[3])
        dims = [*leading, queries, (key[-2],)]
        aligned = dims[len(dims) - len(mask) :]
        inputs.append(tuple(dim if size > 1 else () for dim, size in zip(aligned, mask, strict=True)))
    causal = bool(operator.argument(5, "is_causal", False))
    outputs: list[Term] = [(*leading, queries, (value[-1],))]
    exchanges: tuple[Exchange, ...] = ()
    if _may_ring(query, key, value, causal):
        sizes[RING] = min(query[-2], key[-2])
        exchanges = _ring(inputs[:3], outputs[0], operator, graph, causal)
    flops = 2.0 * math.prod(output[:-2]) * query[-2] * key[-2] * (query[-1] + value[-1])
    saves, extra = _saved(operator, graph)
    return signature(
        operator, graph, inputs, outputs, sizes, whole={"q", "k"} if causal else {"k"}, exchanges=exchanges,
        joint={RING: ("q", "k")} if exchanges else {}, linear=((2,),), kind="attention", flops=flops,
        backward_flops=flops * BACKWARD_PRODUCTS, saves=saves, saves_outputs=(0,) if 0 in saves else (),
        saves_extra_bytes=extra, random=bool(operator.argument(4, "dropout_p", 0.0)),
    )  # fmt: skip


def _may_ring(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], causal: bool) -> bool:
    """Whether queries and keys may be split together: nothing is broadcast, and a causal mask is a square."""
    same_rows = query[:-3] == key[:-3] == value[:-3] and key[:-2] == value[:-2]
    return len(query) > 2 and same_rows and (not causal or query[-2] == key[-2])


def _ring(
    inputs: Sequence[Term], output: Term, operator: Operator, graph: OpGraph, causal: bool
) -> tuple[Exchange, ...]:
    """What ``runtime.ring_attention`` sends. Keys and values pass all other devices, in both passes; their gradients, in
    float32 at least, pass all and come home. Under a causal mask the device at place i and the one as far from the end trade
    half of their rows, so that all have as much to do."""
    item_bytes = ITEM_BYTES[graph.values[operator.inputs[0]].dtype]
    repeats = repeated_heads(operator, graph)
    heads = letters_of((inputs[1][-3],))
    alike = (heads[0], repeats) if repeats > 1 and len(heads) == 1 else None

    def sent(term: Term, **how: Any) -> Exchange:
        elements = [factor for dim in term if isinstance(dim, tuple) for factor in dim if isinstance(factor, int)]
        return Exchange(RING, "send_recv", tuple(letters_of(term)), math.prod(elements) * how.pop("item", item_bytes), **how)

    query, key, value = inputs
    found = []
    for term in (key, value):
        found += [sent(term, rounds="others", overlaps=True, alike=alike, backward=backward) for backward in (False, True)]
        found.append(sent(term, item=max(4, item_bytes), rounds="all", overlaps=True, alike=alike, backward=True))
    if causal:
        for term, letter, same in ((query, "q", None), (key, "k", alike), (value, "k", alike)):
            found += [sent(term, halved=letter, alike=same, backward=backward) for backward in (False, True)]
            found.append(sent(term, halved=letter, alike=same, backward=True, returns=True))  # the gradient
        found += [sent(output, halved="q", returns=True), *[sent(output, halved="q", backward=True)] * 2]
    return tuple(found)


def repeated_heads(operator: Operator, graph: OpGraph) -> int:
    """How many heads of keys and values side by side are the same: each was widened to as many, as for grouped queries."""
    return math.gcd(*(_repeats(value, graph) for value in operator.inputs[1:3]))


def _repeats(value: str, graph: OpGraph) -> int:
    """``[.., h, 1, k, d]`` expanded to ``[.., h, g, k, d]`` and read as ``[.., h g, k, d]``: g."""
    reading = graph.producer_of.get(value)
    if reading is None or reading.target.split(".")[1] not in ("reshape", "view", "_unsafe_view", "flatten"):
        return 1
    widened = graph.producer_of.get(reading.inputs[0])
    if widened is None or widened.target != "aten.expand.default":
        return 1
    before, after = (shape(graph, name) for name in (widened.inputs[0], reading.inputs[0]))
    one = len(before) == len(after) and before[-3] == 1 and before[:-3] + before[-2:] == after[:-3] + after[-2:]
    joined = shape(graph, value) == (*after[:-4], after[-4] * after[-3], *after[-2:]) if len(after) > 3 else False
    return after[-3] if one and joined else 1


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
