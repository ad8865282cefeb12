"""checkpoint(): what is computed again, with which parameters, and as which micro-batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from autopar.runtime import Mesh, checkpoint, copy_to, reduce_from
from autopar.runtime.recompute import num_recomputed, running
from autopar.simulation import run_ranks
from tests.unit.runtime import chains, programs
from tests.unit.runtime.training import check_pieces, make_engine, train


def test_the_inside_runs_again_to_the_end() -> None:
    seen: list[float] = []

    def inside(x: Tensor) -> Tensor:
        y = x.sin()
        seen.append(1.0)
        z = y * 2
        seen.append(2.0)  # nothing after the sine is kept for backward
        return z

    x = torch.ones(3, requires_grad=True)
    before = num_recomputed()
    found = checkpoint(inside, x)
    assert seen == [1.0, 2.0] and num_recomputed() == before + 1
    found.sum().backward()
    assert seen == [1.0, 2.0] * 2
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())
    with torch.no_grad():
        checkpoint(inside, x)
    assert num_recomputed() == before + 1


def test_the_second_run_sees_the_first_ones_micro_batch() -> None:
    mesh = Mesh(data=1)
    seen = []

    def inside(x: Tensor) -> Tensor:
        seen.append((mesh.share, vars(mesh).get("batch")))
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    with running(mesh):
        mesh.share, vars(mesh)["batch"] = 0.75, 6
        found = checkpoint(inside, x)
        mesh.share, vars(mesh)["batch"] = 0.25, 2
        found.sum().backward()
        assert seen == [(0.75, 6), (0.75, 6)]
        assert (mesh.share, vars(mesh)["batch"]) == (0.25, 2)


def test_collectives_are_sent_again_by_simulated_ranks() -> None:
    def ranks(rank: int) -> None:
        mesh = Mesh(data=2)
        mesh.bind()
        mesh.keep_ledger(True)
        x = torch.full((3,), rank + 1.0, requires_grad=True)
        checkpoint(lambda y: reduce_from(copy_to(y, mesh.data).square(), mesh.data), x).sum().backward()
        assert mesh.ledger is not None
        assert [entry.kind for entry in mesh.ledger.entries] == ["all_reduce"] * 3
        assert x.grad is not None and torch.equal(x.grad, torch.full((3,), 6.0))

    run_ranks(2, ranks)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_blocks_of_the_language_model(zero: int) -> None:
    """Under ZeRO-3 every parameter of a block is gathered twice, and its copies are gone after the step."""
    torch.manual_seed(0)
    model = programs.Language()
    source = programs.language_program(zero).replace("x = block(x)", "x = checkpoint(block, x)")
    source = source.replace("import Input", "import checkpoint, Input")

    def ranks(rank: int) -> None:
        own = copy.deepcopy(model)
        engine = make_engine(source, own)
        train(engine, own, programs.language_batch, lambda p: torch.optim.AdamW(p, lr=0.01))
        assert not len(engine._gathers)
        engine.set_ledger(True)
        engine.step(**programs.language_batch(0))
        if zero == 3:
            assert engine.ledger is not None
            gathers = [entry for entry in engine.ledger.entries if (entry.kind, entry.axis) == ("all_gather", "data")]
            assert len(gathers) == 2 * (10 + 10) + 3  # of the tied table, the embedding's use keeps nothing

    run_ranks(4, ranks)


def test_recomputation_in_a_compiled_program() -> None:
    """One graph, in which torch itself decides what is computed again; several micro-batches run through it."""
    torch.manual_seed(0)
    model = programs.Language()
    source = programs.language_program(0, 1, 1).replace("x = block(x)", "x = checkpoint(block, x)")
    engine = make_engine(source.replace("import Input", "import checkpoint, Input"), model)
    engine.compile(backend="aot_eager", fullgraph=True)
    train(engine, copy.deepcopy(model), programs.language_batch, lambda p: torch.optim.AdamW(p, lr=0.01))
    chain = chains.Chain(1)
    engine = make_engine(chains.chain_program(1, "single", 3, 10, ranks=1, recompute=True), chain)
    engine.compile(backend="aot_eager", fullgraph=True)
    inputs = chains.chain_batch(0, 10)
    loss = chain(**inputs)[0]
    loss.backward()
    torch.testing.assert_close(engine.step(**inputs), loss.detach(), rtol=1e-12, atol=1e-12)
    for name, slot in engine.slots.items():
        check_pieces(slot, slot.storage.grad, chain.get_parameter(name).grad)
