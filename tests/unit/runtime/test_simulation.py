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


def test_messages_from_rank_to_rank() -> None:
    """torch's own send, recv, isend, irecv and batch_isend_irecv: in order, by tag, several at a time."""

    def ranks(rank: int) -> list[float]:
        after, before = (rank + 1) % 3, (rank - 1) % 3
        sent = [torch.full((2,), 10.0 * rank + number) for number in range(4)]
        found = [torch.zeros(2) for _ in sent]
        works = [dist.irecv(found[0], before), dist.irecv(found[1], before)]
        dist.isend(sent[0], after)
        dist.isend(sent[1], after)
        sent[0].fill_(-1.0)  # a message is what it was when it was sent
        works += dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, found[2], before, tag=7), dist.P2POp(dist.isend, sent[2], after, tag=7)]
        )
        for work in reversed(works):
            work.wait()
        if rank == 0:
            dist.send(sent[3], after)
        dist.recv(found[3], before)
        if rank != 0:
            dist.send(sent[3], after)
        return [float(message[1]) for message in found]

    found = run_ranks(3, ranks)
    assert found == [[10.0 * before + number for number in range(4)] for before in (2, 0, 1)]


def test_messages_in_groups_do_not_mix() -> None:
    def ranks(rank: int) -> float:
        mesh = Mesh(data=2, tensor=2)
        mesh.bind()
        found = []
        for axis in mesh.axes:
            message = torch.zeros(())
            work = dist.irecv(message, group=axis.group, group_src=1 - axis.place)
            dist.isend(torch.tensor(float(rank)), group=axis.group, group_dst=1 - axis.place)
            work.wait()
            found.append(float(message))
        return found[0] * 10 + found[1]

    assert run_ranks(4, ranks) == [21.0, 30.0, 3.0, 12.0]


def test_a_message_that_never_comes() -> None:
    def failing(rank: int) -> None:
        if rank == 1:
            raise ValueError("broken")
        dist.recv(torch.zeros(2), 1)

    with pytest.raises(ValueError, match="broken"):
        run_ranks(2, failing)

    def waiting(rank: int) -> None:
        if rank == 0:
            dist.recv(torch.zeros(2), 1)

    with pytest.raises(SimulationError, match=r"\[0\] of 2"):
        run_ranks(2, waiting, timeout_seconds=1.0)

    def differing(rank: int) -> None:
        if rank == 0:
            dist.recv(torch.zeros(2), 1)
        else:
            dist.send(torch.zeros(3), 0)

    with pytest.raises(SimulationError, match=r"a message of \(3,\).*received as \(2,\)"):
        run_ranks(2, differing)
