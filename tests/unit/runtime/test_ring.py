"""Attention around a ring, and along heads after an all-to-all, against torch's on the whole sequence.

Small here; at a sequence of 8192 with

    pytest -m slow tests/unit/runtime/test_ring.py
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime import Axis, Mesh, ProgramError, Split, all_gather, all_to_all, ring, ring_attention
from autopar.simulation import run_ranks

HEADS, WIDTH = 8, 8
Form = Callable[[Tensor, Tensor, Tensor, Axis, Split, bool], Tensor]


def around(query: Tensor, key: Tensor, value: Tensor, axis: Axis, rows: Split, causal: bool) -> Tensor:
    return ring_attention(query, key, value, keys=rows, is_causal=causal)


def along_heads(query: Tensor, key: Tensor, value: Tensor, axis: Axis, rows: Split, causal: bool) -> Tensor:
    """As Ulysses does: heads whole in the sequence and back. Fewer key heads than ranks are gathered, and each rank takes
    those of its queries' groups: heads are cut inside the groups."""
    heads, kv_heads = query.shape[1], key.shape[1]
    grouped = kv_heads < axis.size
    of_heads = Split(
        heads, (axis, f"{kv_heads}x{heads // kv_heads}/1" if grouped else f"1x{heads}/{heads // kv_heads}")
    )
    query = all_to_all(query, axis, 2, 1, rows, of_heads)
    if grouped:
        key, value = (all_gather(x, axis, 2, rows) for x in (key, value))
    else:
        of_keys = Split(kv_heads, (axis, None))
        key, value = (all_to_all(x, axis, 2, 1, rows, of_keys) for x in (key, value))
    found = F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
    return all_to_all(found, axis, 1, 2, of_heads, rows)


def tensors(length: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key, value and the gradient of the result."""
    generator = torch.Generator().manual_seed(length + kv_heads)
    shapes = [(1, HEADS, length, WIDTH), *[(1, kv_heads, length, WIDTH)] * 2, (1, HEADS, length, WIDTH)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@lru_cache(maxsize=4)
def whole(length: int, causal: bool, kv_heads: int) -> tuple[Tensor, ...]:
    """What one device computes: the result, and the gradients of query, key and value."""
    *given, gradient = tensors(length, kv_heads)
    inputs = [x.requires_grad_() for x in given]
    result = F.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=True)
    return result.detach(), *torch.autograd.grad(result, inputs, gradient)


def compare(form: Form, size: int, length: int, causal: bool, kv_heads: int) -> float:
    """The largest error of the result and the gradients, by the largest value of each."""
    *given, gradient = tensors(length, kv_heads)

    def run(rank: int) -> list[Tensor]:
        mesh = Mesh(context=size)
        mesh.bind()
        rows = Split(length, (mesh["context"], None))
        local = [rows.take(x, 2).clone().requires_grad_() for x in given]
        found = form(*local, mesh["context"], rows, causal)
        return [found.detach(), *torch.autograd.grad(found, local, rows.take(gradient, 2).clone())]

    pieces = run_ranks(size, run, timeout_seconds=600)
    joined = [torch.cat(parts, 2) for parts in zip(*pieces, strict=True)]
    pairs = zip(joined, whole(length, causal, kv_heads), strict=True)
    return max(float((found - right).abs().max() / right.abs().max()) for found, right in pairs)


@pytest.mark.parametrize(("size", "length"), [(2, 9), (3, 16), (4, 10), (5, 6)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_ring_equals_the_whole(size: int, length: int, causal: bool, kv_heads: int) -> None:
    assert compare(around, size, length, causal, kv_heads) <= 1e-13


@pytest.mark.parametrize(("size", "causal", "kv_heads"), [(2, True, 2), (3, True, 2), (4, False, 1)])
def test_heads_equal_the_whole(size: int, causal: bool, kv_heads: int) -> None:
    assert compare(along_heads, size, 13, causal, kv_heads) <= 1e-13


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("form", [around, along_heads])
def test_long_sequence(form: Form, size: int, causal: bool, kv_heads: int) -> None:
    error = compare(form, size, 8192, causal, kv_heads)

    assert error <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_types(dtype: torch.dtype, causal: bool) -> None:
    """Blocks are put together in float32 at least: no further from the truth than one call of torch's."""
    length, size = 24, 3
    *given, gradient = tensors(length, 2, dtype)
    exact = F.scaled_dot_product_attention(*(x.double() for x in given), is_causal=causal, enable_gqa=True)

    def run(rank: int) -> Tensor:
        mesh = Mesh(context=size)
        mesh.bind()
        rows = Split(length, (mesh["context"], None))
        local = [rows.take(x, 2).clone().requires_grad_() for x in given]
        found = ring_attention(*local, keys=rows, is_causal=causal)
        assert found.dtype == dtype
        assert all(x.dtype == dtype for x in torch.autograd.grad(found, local, rows.take(gradient, 2).clone()))
        return found.detach()

    found = torch.cat(run_ranks(size, run), 2)
    assert float((found - exact).abs().max()) <= 4 * torch.finfo(dtype).eps * float(exact.abs().max())


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_causal_work_is_balanced(size: int) -> None:
    """Every rank has the same number of scores to compute, in every round but that with its own keys."""
    half = 6
    mesh = Mesh(context=size)
    shares = []
    for place in range(size):
        mesh.axes[0]._place = place
        way = ring._Way(mesh.axes[0], (2 * half,) * size, True, 1.0)
        rounds = []
        for step in range(size):
            work = list(way.work(way.owner(step)))
            spans = [
                len(range(2 * half)[rows]) * len(range(2 * half)[columns]) / (2 if causal else 1)
                for rows, columns, causal in work
            ]
            rounds.append(sum(spans))
        shares.append(rounds)
    assert shares == [[2 * half * half] * size] * size
    assert math.isclose(sum(map(sum, shares)), (2 * half * size) ** 2 / 2), "half of all scores"


def test_next_keys_are_under_way_while_these_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward and backward: messages for the next round are posted before the round's attention is computed."""
    seen: list[tuple[int, str]] = []
    place = {}

    def noting(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def noted(*arguments: object, **options: object) -> object:
            seen.append((place[threading.get_ident()], name))
            return function(*arguments, **options)

        return noted

    monkeypatch.setattr(ring, "attend", noting("attend", ring.attend))
    monkeypatch.setattr(ring, "attend_backward", noting("attend backward", ring.attend_backward))
    monkeypatch.setattr(ring, "_to_next", noting("send", ring._to_next))

    def run(rank: int) -> None:
        place[threading.get_ident()] = rank
        mesh = Mesh(context=3)
        mesh.bind()
        x = torch.randn(1, 2, 4, 4, requires_grad=True)
        ring_attention(x, x, x, keys=Split(12, (mesh["context"], None))).sum().backward()

    run_ranks(3, run)
    mine = [name for rank, name in seen if rank == 0]
    assert mine[:5] == ["send", "attend", "send", "attend", "attend"]
    assert mine[5:] == ["send", "attend backward", "send", "send", "attend backward", "send", "attend backward", "send"]


@pytest.mark.parametrize(("shape", "causal", "mask"), [((1, 2, 5, 4), False, False), ((1, 2, 4, 4), True, True)])
def test_what_does_not_fit_is_refused(shape: tuple[int, ...], causal: bool, mask: bool) -> None:
    def run(rank: int) -> None:
        mesh = Mesh(context=2)
        mesh.bind()
        x = torch.randn(shape)
        with pytest.raises(ProgramError, match=r"ring|no other mask"):
            ring_attention(
                x, x, x, torch.ones(4, 8) if mask else None, keys=Split(8, (mesh["context"], None)), is_causal=causal
            )

    run_ranks(2, run)


def test_one_run_of_keys_a_rank() -> None:
    def run(rank: int) -> None:
        mesh = Mesh(context=2)
        mesh.bind()
        x = torch.randn(1, 2, 4, 4)
        with pytest.raises(ProgramError, match="one run of keys"):
            ring_attention(x, x, x, keys=Split(8, (mesh["context"], "2x4/1")))

    run_ranks(2, run)


def test_masked_blocks_and_rows() -> None:
    """A block that a rank's queries do not see at all, and queries that see nothing."""
    length, size = 8, 2
    *given, gradient = tensors(length, HEADS)
    mask = torch.zeros(length, length, dtype=torch.bool)
    mask[:4, :4], mask[4:6, 2:] = True, True  # rows 6 and 7 see nothing
    inputs = [x.clone().requires_grad_() for x in given]
    wanted = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    wanted_gradients = torch.autograd.grad(wanted, inputs, gradient)

    def run(rank: int) -> list[Tensor]:
        mesh = Mesh(context=size)
        mesh.bind()
        rows = Split(length, (mesh["context"], None))
        local = [rows.take(x, 2).clone().requires_grad_() for x in given]
        found = ring_attention(*local, rows.take(mask, 0), keys=rows)
        return [found.detach(), *torch.autograd.grad(found, local, rows.take(gradient, 2).clone())]

    for parts, right in zip(zip(*run_ranks(size, run), strict=True), (wanted, *wanted_gradients), strict=True):
        torch.testing.assert_close(torch.cat(parts, 2), right.detach(), rtol=1e-12, atol=1e-12)
