"""The last linear layer and the cross-entropy of its result as one operator, ``autopar.linear_cross_entropy``.

    autopar.linear_cross_entropy(x [rows.., k], weight [v, k], bias [v] or None, labels [rows..], class weights [v] or None,
                                 reduction, ignore_index, label_smoothing, dtype) -> loss

``tracing/logits.py`` makes it where nothing else reads the logits. On a mesh axis it may split rows, as cross-entropy does, or
classes, as a vocabulary. It is computed in one of two forms: at once, which is the two operators one after the other, or by
chunks of rows: logits, often the largest tensors of a language model, then exist for one chunk at a time. The forward pass
keeps the logarithm of each row's sum of exponentials, and the backward pass computes the chunk's logits again (as
recomputation does, Chen et al., 2016; Liger Kernel, Hsu et al., 2024, computes gradients by such chunks).

``dtype`` is the type that logits are brought to before the loss, None for their own.
"""

from __future__ import annotations

import math

from autopar.graph import ITEM_BYTES, Operator, OpGraph, Ref, TorchName
from autopar.strategies.loss import FUSED, class_loss, loss_exchanges
from autopar.strategies.rule import Chunked, Dim, RuleFunction, Signature, Term
from autopar.strategies.signatures import letters_in, names, needs_gradient, shape, signature


def logits_dtype(operator: Operator, graph: OpGraph) -> str:
    """The type of the logits that the loss is of."""
    wanted = operator.args[8]
    return (
        wanted.name.removeprefix("torch.") if isinstance(wanted, TorchName) else graph.values[operator.inputs[0]].dtype
    )


def chunk_rows(num_rows: int, num_classes: int, width: int) -> int:
    """How many rows of ``width`` are a chunk: as many as have logits of about the size of all rows, as in Liger Kernel."""
    return max(1, math.ceil(num_rows / math.ceil(num_classes / width)))


def _linear_cross_entropy(operator: Operator, graph: OpGraph) -> Signature:
    """x (b.. k), weight (v k), bias (v), labels (b..), class weights -> a sum or a mean."""
    x, weight = (graph.values[value] for value in operator.inputs[:2])
    loss, dtype = class_loss(operator), logits_dtype(operator, graph)
    sizes: dict[str, int] = {}
    rows: list[Dim] = names("b", shape(graph, loss.labels), sizes)
    num_classes, width = weight.shape
    sizes["v"] = num_classes
    has_bias = isinstance(operator.args[2], Ref)
    inputs: list[Term] = [(*rows, (width,)), (("v",), (width,)), *([(("v",),)] if has_bias else []), tuple(rows)]
    labels = len(inputs) - 1
    if loss.weight is not None:
        inputs.append(((num_classes,),))
    num_rows = math.prod(shape(graph, loss.labels))
    for_x, for_weight = needs_gradient(operator, graph)[:2]
    product, elements = 2.0 * num_rows * num_classes * width, float(num_rows * num_classes)
    item, wide = ITEM_BYTES[dtype], "float32" if ITEM_BYTES[dtype] < 4 else dtype
    statistics = float(num_rows * ITEM_BYTES[wide]) + (num_classes * ITEM_BYTES[weight.dtype] if has_bias else 0)
    by_chunks = Chunked(
        rows=tuple(letter for letter in sizes if letter in letters_in(rows)),
        classes="v",
        width=width,
        dtype=x.dtype,
        result=dtype,
        wide=wide,
        products=for_x + for_weight,
        product_flops=product,
        each_flops=4.0 * elements,
        saved_extra_bytes=statistics + (0 if for_weight else x.num_bytes),
        sums_apart=ITEM_BYTES[wide] > ITEM_BYTES[weight.dtype],
        is_offered=for_x,
    )
    return signature(
        operator, graph, inputs, [()], sizes, kind="matmul", flops=product + 4.0 * elements,
        backward_flops=product * (for_x + for_weight) + 4.0 * elements, replicated_after=("v",), summed=(0,),
        exchanges=loss_exchanges(operator, tuple(rows), sizes, dtype), chunked=by_chunks,
        saves=[*([0] if for_weight else []), *([1] if for_x else []), *range(labels, len(inputs))],
        saves_extra_bytes=elements * item + item,
    )  # fmt: skip


RULES: dict[str, RuleFunction] = {FUSED: _linear_cross_entropy}
