"""Attention with dropout inside, as the operators that it is made of: the fused kernel draws numbers of its own, which differ
from rank to rank; the dropout of the probabilities alone draws those of its elements' places.

    softmax(scale q k^T + mask), dropped out, times v
"""

from __future__ import annotations

import math
from typing import Any

from autopar.graph import Ref, TorchName
from autopar.tracing.autocast import Lowering

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
DEFAULTS = (None, None, None, None, 0.0, False, None, False)


def dropped_attention(lowering: Lowering, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Records ``scaled_dot_product_attention(*args, **kwargs)`` in its parts; the id of the result."""
    given = {**dict(zip(NAMES, DEFAULTS, strict=True)), **dict(zip(NAMES, args, strict=False)), **kwargs}
    fakes = lowering.fakes
    query, key, value = (given[name].value for name in NAMES[:3])

    def made(target: str, *arguments: Any) -> str:
        return lowering.emit(f"aten.{target}", arguments, {})[0]

    groups = fakes[query].shape[-3] // fakes[key].shape[-3] if given["enable_gqa"] else 1
    if groups > 1:
        key, value = (made("repeat_interleave.self_int", Ref(x), groups, fakes[x].dim() - 3) for x in (key, value))
    scale = given["scale"] if given["scale"] is not None else 1 / math.sqrt(fakes[query].shape[-1])
    scaled = made("mul.Tensor", Ref(query), scale)
    scores = made("matmul.default", Ref(scaled), Ref(made("transpose.int", Ref(key), -2, -1)))
    if given["is_causal"]:
        shape = tuple(int(size) for size in fakes[scores].shape[-2:])
        ones = lowering.emit("aten.ones.default", (shape,), {"dtype": TorchName("torch.bool")})[0]
        scores = _masked(made, scores, made("tril.default", Ref(ones)))
    mask = given["attn_mask"]
    if mask is not None and fakes[mask.value].dtype.is_floating_point:
        scores = made("add.Tensor", Ref(scores), mask)
    elif mask is not None:
        scores = _masked(made, scores, mask.value)
    probabilities = made("softmax.int", Ref(scores), -1)
    kept = made("dropout.default", Ref(probabilities), given["dropout_p"], True)
    return made("matmul.default", Ref(kept), Ref(value))


def _masked(made: Any, scores: str, mask: str) -> str:
    """Minus infinity where the mask says no."""
    return str(made("masked_fill.Scalar", Ref(scores), Ref(made("logical_not.default", Ref(mask))), -math.inf))
