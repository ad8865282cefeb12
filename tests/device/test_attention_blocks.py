"""On a GPU: blocks of attention by torch's fused kernels, put together as a ring does, against the whole in float64.

Opt-in (``pytest -m device``).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from autopar.runtime.blocks import attend, attend_backward, finite
from autopar.runtime.ring import _add

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 4e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_make_the_whole(dtype: torch.dtype, tolerance: float, kv_heads: int, causal: bool) -> None:
    """The second half of the queries with the first half of the keys, all of it, and with their own."""
    torch.manual_seed(0)
    length, half = 256, 128
    query, gradient = (torch.randn(2, 8, half, 64, device="cuda", dtype=dtype) for _ in range(2))
    key, value = (torch.randn(2, kv_heads, length, 64, device="cuda", dtype=dtype) for _ in range(2))
    exact = [x.double().requires_grad_() for x in (query, key, value)]
    seen = torch.ones(half, length, device="cuda", dtype=torch.bool).tril(half) if causal else None
    wanted = F.scaled_dot_product_attention(*exact, attn_mask=seen, enable_gqa=True)
    wanted_gradients = torch.autograd.grad(wanted, exact, gradient.double())

    spans = [(slice(0, half), False), (slice(half, length), causal)]
    total, lse = torch.zeros(query.shape, device="cuda"), torch.full(query.shape[:3], -torch.inf, device="cuda")
    for columns, triangle in spans:
        _add(total, lse, *attend(query, key[:, :, columns], value[:, :, columns], None, triangle, 0.125))
    out, lse = total.to(dtype), finite(lse)
    for_query, for_key, for_value = torch.zeros_like(total), torch.zeros_like(key), torch.zeros_like(value)
    for columns, triangle in spans:
        pieces = key[:, :, columns], value[:, :, columns]
        gq, gk, gv, _ = attend_backward(gradient, query, *pieces, None, out, lse, triangle, 0.125)
        for_query += gq
        for_key[:, :, columns], for_value[:, :, columns] = gk, gv
    for found, right in zip((out, for_query, for_key, for_value), (wanted.detach(), *wanted_gradients), strict=True):
        assert float((found.double() - right).abs().max()) <= tolerance * float(right.abs().max())
