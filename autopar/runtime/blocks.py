"""Attention of some queries to some keys, with what it takes to put blocks together: the logarithm of each query's sum of
exponentials.

torch's fused kernels return it too and are used where they apply: on the CPU, and on a GPU in half precision without a mask.
Elsewhere (a mask on a GPU or with a gradient of its own, values of another width than keys) the scores are computed, a part
of the rows at a time. Statistics are in float32 at least.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_MOST_SCORES = 1 << 24  # numbers held for a moment where no fused kernel applies
_LARGEST_FLASH_HEAD = 256  # of FlashAttention's kernels on a GPU (Dao, 2023), which want multiples of 8

_aten = torch.ops.aten


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that statistics and sums are kept in."""
    return torch.promote_types(dtype, torch.float32)


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """``query [b, h g, q, d], key [b, h, k, d], value [b, h, k, e] -> [b, h g, q, e]`` and log-sum-exp ``[b, h g, q]``.

    ``bias``: added to the scores, broadcast to ``[b, h g, q, k]``. A query that sees no key gives zeros and ``-inf``.
    ``causal``: query i sees keys up to i.
    """
    bias = _widened(bias, query, key)
    if not _is_fused(query, value, bias):
        return _plain(query, key, value, bias, causal, scale)
    query, key, value = (_straight(x) for x in (query, key, value))
    if query.is_cuda:
        out, lse = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[:2]
        return out, lse
    added = None if bias is None else _straight(bias.to(query.dtype))
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=added, scale=scale
    )
    if bias is not None:  # the kernel says 0 of a query that sees nothing
        lse = lse.masked_fill((bias == -torch.inf).all(-1), -torch.inf)
    return out, lse


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    wants_bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and, if wanted, of the bias as it is broadcast ``[b, h g, q, k]``.

    ``out`` and ``lse`` are those of the queries with all their keys, of which ``key`` may be a part: the probabilities of
    this block follow from them (Liu et al., 2024, appendix B). Of a query that sees no key ``lse`` is to be finite.
    """
    bias = _widened(bias, query, key)
    if not _is_fused(query, value, bias, wants_bias):
        return _plain_backward(gradient, query, key, value, bias, out, lse, causal, scale, wants_bias)
    gradient, query, key, value, out = (_straight(x) for x in (gradient, query, key, value, out))
    lse = lse.contiguous()
    if query.is_cuda:
        # No lengths of sequences packed in one batch, and a state of dropout that is not used.
        state = torch.empty(2, dtype=torch.uint64, device=query.device)
        found = _aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, out, lse, None, None, query.shape[2], key.shape[2], 0.0, causal, state, state,
            scale=scale,
        )  # fmt: skip
    else:
        added = None if bias is None else _straight(bias.to(query.dtype))
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, lse, 0.0, causal, attn_mask=added, scale=scale
        )
    return (*found, None)


def _widened(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(*query.shape[:3], key.shape[2])


def _is_fused(query: Tensor, value: Tensor, bias: Tensor | None, wants_bias: bool = False) -> bool:
    if wants_bias or query.shape[-1] != value.shape[-1] or query.dtype.is_complex:
        return False
    if query.device.type == "cpu":
        return True
    half = query.dtype in (torch.float16, torch.bfloat16)
    width = query.shape[-1]
    fits = width <= _LARGEST_FLASH_HEAD and width % 8 == 0
    return query.device.type == "cuda" and half and bias is None and fits


def _straight(x: Tensor) -> Tensor:
    """Kernels read the last dim without gaps."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows(query: Tensor, key: Tensor) -> Iterator[slice]:
    """The queries, so many at a time that their scores are no more than :data:`_MOST_SCORES`."""
    at_once = max(1, _MOST_SCORES // max(1, query.shape[0] * query.shape[1] * key.shape[2]))
    yield from (slice(first, first + at_once) for first in range(0, query.shape[2], at_once))


def _with_groups(x: Tensor, key: Tensor) -> Tensor:
    """``[b, h g, ...]`` as ``[b, h, g, ...]``."""
    grouped: Tensor = x.unflatten(1, (key.shape[1], -1))
    return grouped


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float, rows: slice) -> Tensor:
    """Scores ``[b, h, g, rows, k]`` in the wide type; -inf where a query does not see a key."""
    found = (_with_groups(query[:, :, rows], key) @ key.unsqueeze(2).mT).to(wide(query.dtype)) * scale
    if bias is not None:
        found = found + _with_groups(bias[:, :, rows], key)
    if causal:
        seen = (
            torch.arange(key.shape[2], device=key.device) <= torch.arange(query.shape[2], device=key.device)[rows, None]
        )
        found = found.masked_fill(~seen, -torch.inf)
    return found


def _plain(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    outs, sums = [], []
    for rows in _rows(query, key):
        scores = _scores(query, key, bias, causal, scale, rows)
        lse = scores.logsumexp(-1)
        probabilities = (scores - finite(lse).unsqueeze(-1)).exp()
        outs.append((probabilities.to(value.dtype) @ value.unsqueeze(2)).flatten(1, 2))
        sums.append(lse.flatten(1, 2))
    return torch.cat(outs, 2), torch.cat(sums, 2)


def _plain_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    for_key, for_value = torch.zeros_like(key, dtype=lse.dtype), torch.zeros_like(value, dtype=lse.dtype)
    for_query, for_bias = [], []
    for rows in _rows(query, key):
        q, o, along, sums = (_with_groups(x[:, :, rows], key) for x in (query, out, gradient, lse))
        q, along = q.to(lse.dtype), along.to(lse.dtype)
        scores = _scores(query, key, bias, causal, scale, rows)
        probabilities = (scores - sums.unsqueeze(-1)).exp()
        shared = (along * o).sum(-1, keepdim=True)
        for_scores = probabilities * (along @ value.unsqueeze(2).mT.to(lse.dtype) - shared)
        for_query.append((for_scores @ key.unsqueeze(2).to(lse.dtype) * scale).flatten(1, 2))
        for_key += (for_scores.mT @ q).sum(2) * scale
        for_value += (probabilities.mT @ along).sum(2)
        for_bias += [for_scores.flatten(1, 2)] if wants_bias else []
    return torch.cat(for_query, 2), for_key, for_value, torch.cat(for_bias, 2) if wants_bias else None


def finite(lse: Tensor) -> Tensor:
    """Logarithms with 0 for -inf, so that a difference to one is a number."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
