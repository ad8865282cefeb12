"""Simulated ranks: many of them, again and again, and what happens when one fails or waits for nothing."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from autopar.runtime import Mesh, copy_to, reduce_from
from autopar.simulation import SimulationError, run_ranks


def test_results_come_by_rank_and_runs_can_be_repeated() -> None:
    for _ in range(3):
        assert run_ranks(3, lambda rank, offset: rank + offset, 10) == [10, 11, 12]
    assert run_ranks(1, lambda rank: dist.get_world_size()) == [1]
    assert not dist.is_initialized()


def test_64_ranks_with_backward() -> None:
    def ranks(rank: int) -> None:
        mesh = Mesh(data=4, pipe=2, tensor=8)
        mesh.bind()
        assert mesh.rank == rank
        x = torch.full((3,), float(rank), requires_grad=True)
        y = reduce_from(copy_to(x, mesh.tensor) * (mesh.tensor.place + 1), mesh.tensor)
        y.sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 36.0))  # type: ignore[arg-type]

    start = time.monotonic()
    run_ranks(64, ranks)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("when", ["at once", "before binding", "after"])
def test_the_first_failure_is_raised_and_the_others_end(when: str) -> None:
    def ranks(rank: int) -> None:
        if rank == 1 and when == "at once":
            raise ValueError("broken")
        mesh = Mesh(data=2, tensor=2)
        if rank == 1 and when == "before binding":
            raise ValueError("broken")
        mesh.bind()
        reduce_from(torch.ones(2), mesh.tensor)
        if rank == 1:
            raise ValueError("broken")
        reduce_from(torch.ones(2), mesh.data)
        reduce_from(torch.ones(2), mesh.tensor)

    start = time.monotonic()
    with pytest.raises(ValueError, match="broken") as caught:
        run_ranks(4, ranks)
    assert time.monotonic() - start < 10
    if hasattr(caught.value, "__notes__"):
        assert "simulated rank 1 of 4" in caught.value.__notes__[0]
    assert run_ranks(2, lambda rank: rank) == [0, 1]


def test_ranks_that_wait_for_nothing_are_named() -> None:
    def ranks(rank: int) -> None:
        mesh = Mesh(tensor=3)
        mesh.bind()
        if rank != 2:
            reduce_from(torch.ones(2), mesh.tensor)

    with pytest.raises(SimulationError, match=r"\[0, 1\] of 3"):
        run_ranks(3, ranks, timeout_seconds=1.0)
    assert run_ranks(2, lambda rank: rank) == [0, 1]


def test_threads_and_autograd_are_as_before() -> None:
    before = torch.get_num_threads(), torch.autograd.is_multithreading_enabled()
    run_ranks(2, lambda rank: None)
    assert before == (torch.get_num_threads(), torch.autograd.is_multithreading_enabled())
