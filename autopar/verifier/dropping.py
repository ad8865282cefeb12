"""The plain model with the program's random numbers: a mode under which its dropouts drop what those of the program drop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.errors import InputError
from autopar.graph import OpGraph
from autopar.randomness import dropouts
from autopar.runtime.draws import Draws
from autopar.runtime.random import whole_dropout


class SameDropout(TorchFunctionMode):
    """While active, the n-th dropout that is called draws the numbers of the graph's n-th in the first step."""

    def __init__(self, graph: OpGraph) -> None:
        super().__init__()
        self._sites = [graph.operator_of[name] for name in dropouts(graph)]
        self._batch_dims = {op.id: graph.values[op.inputs[0]].batch_dims for op in self._sites}
        self._num_called = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own: dict[Any, Callable[..., Tensor]] = {
            F.dropout: self._dropout,
            torch.dropout: self._dropout,
            F.scaled_dot_product_attention: self._attention,
        }
        return own.get(func, func)(*args, **(kwargs or {}))

    def check(self, graph: OpGraph) -> None:
        """Raise InputError unless each dropout of the graph was called once."""
        if self._num_called != len(self._sites):
            raise InputError(
                f"{graph.model} calls dropout {self._num_called} times, its trace has {len(self._sites)}: its numbers cannot "
                "be compared; set every dropout to 0, or use model.eval()"
            )

    def _dropout(self, *args: Any, **kwargs: Any) -> Tensor:
        """``F.dropout(input, p, training, inplace)`` and ``torch.dropout(input, p, train)``."""
        given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
        x: Tensor = given["input"]
        p, training = given.get("p", 0.5), given.get("train", given.get("training", True))
        if not training or p == 0:
            return x
        self._num_called += 1
        if self._num_called > len(self._sites):
            return F.dropout(x, p)
        site = self._sites[self._num_called - 1].id
        found = whole_dropout(x, p, site, Draws(), self._batch_dims[site])
        return x.copy_(found) if given.get("inplace") else found

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """With dropout in its parts, as the graph has it."""
        if not dropout_p:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )
        groups = query.shape[-3] // key.shape[-3] if enable_gqa else 1
        if groups > 1:
            key, value = (tensor.repeat_interleave(groups, -3) for tensor in (key, value))
        scores = query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale) @ key.transpose(-2, -1)
        if is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~seen, -math.inf)
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        return self._dropout(scores.softmax(-1), dropout_p) @ value
