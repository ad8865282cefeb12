"""Programs on two real processes over gloo, and under torch.compile."""

from __future__ import annotations

import copy
import socket
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from autopar.runtime import Mesh, Split, all_gather, all_to_all, copy_to, reduce_from, scatter, steps
from tests.unit.runtime import programs
from tests.unit.runtime.training import make_engine, train

pytestmark = pytest.mark.e2e


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def spawn(function: Any, *args: Any, num_processes: int = 2) -> None:
    mp.spawn(_process, (free_port(), num_processes, function, args), nprocs=num_processes)


def _process(rank: int, port: int, world_size: int, function: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    try:
        function(*args)
    finally:
        dist.destroy_process_group()


def run_language(data: int, tensor: int, zero: int, compiled: bool) -> None:
    torch.manual_seed(0)
    model = programs.Language()
    engine = make_engine(programs.language_program(zero, data, tensor), model)
    if compiled:
        engine.compile(fullgraph=True, backend="aot_eager")
    train(engine, copy.deepcopy(model), programs.language_batch, lambda p: torch.optim.AdamW(p, lr=0.01))


def run_language_levels() -> None:
    for data, tensor, zero in [(2, 1, 0), (1, 2, 0), (2, 1, 1), (2, 1, 2), (2, 1, 3)]:
        run_language(data, tensor, zero, compiled=False)


def test_language_on_two_processes() -> None:
    spawn(run_language_levels)


def run_compiled() -> None:
    run_language(1, 2, 0, compiled=True)


def test_a_compiled_program() -> None:
    spawn(run_compiled)


def run_compiled_steps() -> None:
    mesh = Mesh(data=2)
    mesh.bind()
    axis = mesh.data
    uneven, segments = Split(7, (axis, None)), Split(8, (axis, "2x4/1"))
    whole = torch.arange(32.0, dtype=torch.float64).reshape(4, 8).sin()
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: reduce_from(copy_to(x, axis).sin(), axis),
        lambda x: all_gather(x, axis, 1).sin(),
        lambda x: steps.reduce_scatter(x.cos(), axis, 0),
        lambda x: all_to_all(x, axis, 0, 1) * 2,
        lambda x: scatter(steps.gather(x, axis, 0) * 2, axis, 1),
        lambda x: steps.pad_shard(steps.take_shard(x, axis, 1), axis, 0),
        lambda x: steps.keep_first(x, axis) + steps.keep_first_both(x, axis) + steps.keep_first_gradient(x, axis),
        lambda x: all_gather(scatter(x, axis, 1, segments), axis, 1, segments) + steps.all_reduce(x, axis),
        lambda x: all_gather(scatter(x[:, :7], axis, 1, uneven), axis, 1, uneven),
    ]

    def all_of_them(x: torch.Tensor) -> list[torch.Tensor]:
        return [function(x) for function in functions]

    results = []
    for run in (all_of_them, torch.compile(all_of_them, fullgraph=True, backend="aot_eager")):
        x = whole.clone().requires_grad_()
        found = run(x)
        sum(y.square().sum() for y in found).backward()
        assert x.grad is not None
        results.append([y.detach() for y in found] + [x.grad])
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(plain, compiled, rtol=1e-14, atol=1e-14)


def test_compiled_steps() -> None:
    spawn(run_compiled_steps)


def run_types() -> None:
    """Integers, booleans, complex numbers and low precision travel; inputs need not be contiguous."""
    mesh = Mesh(data=2)
    mesh.bind()
    for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.complex64):
        whole = torch.arange(20).view(5, 4).remainder(3).to(dtype).t()
        for dim in (0, 1):
            split = Split(whole.shape[dim], (mesh.data, None))
            other = Split(whole.shape[1 - dim], (mesh.data, None))
            piece = scatter(whole, mesh.data, dim, split)
            assert torch.equal(all_gather(piece, mesh.data, dim, split), whole), (dtype, dim)
            turned = all_to_all(piece, mesh.data, dim, 1 - dim, split, other)
            assert torch.equal(steps.gather(turned, mesh.data, 1 - dim, other), whole)
        total = reduce_from(whole, mesh.data)
        assert torch.equal(total, whole + whole), dtype


def test_types() -> None:
    spawn(run_types)
