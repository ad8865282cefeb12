"""A layer of attention with its projections: the smallest model whose sequence can be split."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """``x [batch, length, width]`` plus attention of ``heads`` queries to ``kv_heads`` keys and values, of the same shape."""

    def __init__(self, width: int, heads: int, kv_heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.causal = heads, kv_heads, causal
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key, self.value = (nn.Linear(width, width // heads * kv_heads) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (count, -1)).transpose(1, 2)
            for layer, count in ((self.query, self.heads), (self.key, self.kv_heads), (self.value, self.kv_heads))
        )
        grouped = self.heads != self.kv_heads
        found = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal, enable_gqa=grouped)
        return x + self.out(found.transpose(1, 2).flatten(2))


def squares(outputs: Tensor, inputs: object) -> Tensor:
    """A loss."""
    return outputs.float().square().mean() if outputs.dtype == torch.bfloat16 else outputs.square().mean()
