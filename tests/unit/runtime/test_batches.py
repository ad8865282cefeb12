"""Shares of the batch, also where the program wants one input cut and another whole."""

from __future__ import annotations

import torch

from autopar.runtime import Input, Mesh
from autopar.runtime.batches import Batches
from autopar.simulation import run_ranks


def test_local_shares_are_joined_for_inputs_that_the_program_wants_whole() -> None:
    x, target = torch.randn(7, 3), torch.arange(7)

    def ranks(rank: int) -> None:
        mesh = Mesh(data=2, more=2)
        mesh.bind()
        inputs = (
            Input("target", (7,), torch.int64, "R,R", batch_dim=0),
            Input("x", (7, 3), torch.float32, "S0,S0", batch_dim=0),
        )
        batches = Batches(inputs, mesh, planned=7, multiple=None)
        assert (batches.data_rank, batches.data_size) == (rank, 4)
        start, stop = [0, 2, 4, 6, 7][rank : rank + 2]
        given = {"x": x[start:stop], "target": target[start:stop]}
        ((shares, batch, first),) = batches.micro_batches((), given, local=True)
        assert (batch, first) == (7, 0) and torch.equal(shares["x"], x[start:stop]) and torch.equal(shares["target"], target)
        ((shares, *_),) = batches.micro_batches((target, x), {}, local=False)
        assert torch.equal(shares["x"], x[start:stop]) and torch.equal(shares["target"], target)

    run_ranks(4, ranks)
