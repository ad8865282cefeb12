"""Halos on simulated ranks: the whole image padded and cut, forward and backward, and what is sent for them."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime import Mesh, ProgramError, Split, halo
from autopar.simulation import run_ranks


def padded(x: torch.Tensor, dim: int, before: int, after: int, edge: float | str) -> torch.Tensor:
    """The whole tensor with what lies beyond its borders."""
    first, last = x.narrow(dim, 0, 1), x.narrow(dim, x.shape[dim] - 1, 1)
    counts = [[1] * x.dim() for _ in range(2)]
    counts[0][dim], counts[1][dim] = before, after
    ends = [end.repeat(count) for end, count in zip((first, last), counts, strict=True)]
    if edge != "repeat":
        ends = [torch.full_like(end, float(edge)) for end in ends]
    return torch.cat([ends[0], x, ends[1]], dim)


@pytest.mark.parametrize(
    ("num_ranks", "size", "before", "after", "edge"),
    [(2, 8, 1, 1, 0.0), (3, 10, 2, 1, 0.0), (3, 11, 0, 2, "repeat"), (4, 13, 3, 0, 1.5), (3, 9, 2, 2, "repeat")],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_halo_is_the_image_beside_the_piece(
    num_ranks: int, size: int, before: int, after: int, edge: float | str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.rand(2, size, 3, dtype=dtype, generator=generator)
    factor = torch.rand(2, size + before + after, 3, dtype=dtype, generator=generator)

    def run(rank: int) -> None:
        mesh = Mesh(space=num_ranks)
        mesh.bind()
        ((first, stop),) = Split(size, (mesh.space, None)).intervals()
        piece = whole[:, first:stop].clone().requires_grad_()
        local = halo(piece, 1, mesh.space, before, after, edge)
        window = slice(first, stop + before + after)
        torch.testing.assert_close(local, padded(whole, 1, before, after, edge)[:, window], rtol=0, atol=0)
        torch.autograd.backward(local, factor[:, window])
        x = whole.clone().requires_grad_()
        pieces = [Split(size, (mesh.seen_from(place).space, None)).intervals()[0] for place in range(num_ranks)]
        seen = padded(x, 1, before, after, edge)
        windows = [seen[:, start : end + before + after] for start, end in pieces]
        torch.autograd.backward(windows, [factor[:, start : end + before + after] for start, end in pieces])
        assert x.grad is not None and piece.grad is not None
        torch.testing.assert_close(piece.grad, x.grad[:, first:stop], rtol=0, atol=1e-14)

    run_ranks(num_ranks, run)


def test_messages_are_counted_where_they_are_sent() -> None:
    def run(rank: int) -> list[list[int]]:
        mesh = Mesh(space=3)
        mesh.bind()
        x = torch.ones(2, 4, 5, dtype=torch.float64, requires_grad=True)
        mesh.keep_ledger(True)
        assert mesh.ledger is not None
        made = halo(x, 1, mesh.space, 2, 1)
        ahead = [entry.num_bytes for entry in mesh.ledger.entries]
        made.sum().backward()
        return [ahead, [entry.num_bytes for entry in mesh.ledger.entries][len(ahead) :]]

    row = 2 * 5 * 8
    assert run_ranks(3, run) == [[[2 * row], [row]], [[row, 2 * row], [2 * row, row]], [[row], [2 * row]]]


def test_a_piece_shorter_than_the_halo_is_refused() -> None:
    def run(rank: int) -> None:
        mesh = Mesh(space=2)
        mesh.bind()
        with pytest.raises(
            ProgramError, match=r"has 2 elements on this rank, its neighbours want 3: split the dim over fewer"
        ):
            halo(torch.ones(1, 2), 1, mesh.space, 3, 0)

    run_ranks(2, run)
