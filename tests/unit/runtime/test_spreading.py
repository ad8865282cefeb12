"""A whole tensor of one rank comes to the ranks that have a piece of it."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime import Engine, load_program
from autopar.runtime.spreading import Spreader
from autopar.simulation import run_ranks
from tests.unit.runtime import chains, programs
from tests.unit.runtime.training import check_pieces


@pytest.mark.parametrize("source", [0, 2])
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("kind", ["stages", "one stage"])
def test_every_rank_gets_its_piece(kind: str, zero: int, source: int) -> None:
    torch.manual_seed(0)
    model = chains.Chain(2) if kind == "stages" else programs.Mlp()
    text = programs.mlp_program(zero)
    if kind == "stages":
        text = chains.chain_program(2, "1f1b", 2, 4, data=2, zero=zero, rank_order=(3, 1, 0, 2))
    whole = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def ranks(rank: int) -> None:
        engine = Engine(load_program(text))
        spreader = Spreader(engine.holdings, engine.mesh)
        for name in engine.holdings.described:
            spreader.spread(name, whole[name] if rank == source else None, source)
        for name, slot in engine.slots.items():
            check_pieces(slot, slot.local, whole[name], tolerance=0.0)
        for name, buffer in engine.named_buffers():
            assert torch.equal(buffer, whole[name])

    run_ranks(4, ranks)
