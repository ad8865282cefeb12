"""Checkpoints and whole state dicts of programs of several stages, from any schedule and order of ranks to any other."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from autopar.runtime import Engine, saving
from autopar.runtime.pieces import Slot
from autopar.simulation import run_ranks
from tests.unit.runtime import chains
from tests.unit.runtime.training import make_engine

BATCH = 8
# Stages, schedule, micro-batches, batch, pipeline ranks, and the rest of chain_program's arguments.
PLANS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "tied on one rank": ((4, "zbv", 4, BATCH, 2), {}),
    "tied on two ranks": ((4, "gpipe", 4, BATCH, 4), {"rank_order": (2, 0, 3, 1)}),
    "shards": ((4, "interleaved_1f1b", 4, BATCH, 2), {"data": 2, "zero": 1}),
    "gathered": ((4, "dualpipev", 4, BATCH, 2), {"data": 2, "zero": 3}),
}


def size_of(plan: str) -> int:
    arguments, options = PLANS[plan]
    return int(arguments[-1] * options.get("data", 1))


def slots_of(engine: Engine) -> list[Slot]:
    return [*engine.slots.values(), *engine.buffer_slots.values()]


def whole_state(engine: Engine, all_ranks: bool = True) -> dict[str, Tensor]:
    holdings = engine.holdings
    owners = {name: holdings.owner(name) for name in holdings.described}
    return saving.full_state_dict(list(holdings.described.values()), engine.mesh, all_ranks=all_ranks, owners=owners)


def train_and_save(rank: int, folder: Path, plan: str, model: chains.Chain) -> dict[str, Tensor]:
    arguments, options = PLANS[plan]
    engine = make_engine(chains.chain_program(*arguments, **options), model)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01)
    engine.step(**chains.chain_batch(0, BATCH))
    optimizer.step()
    saving.save(folder, slots_of(engine), engine.mesh, optimizer)
    first = whole_state(engine, all_ranks=False)
    assert bool(first) == (rank == 0)
    return whole_state(engine)


def load_and_train(rank: int, folder: Path, plan: str) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    arguments, options = PLANS[plan]
    engine = make_engine(chains.chain_program(*arguments, **options), chains.Chain(4))
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1.0)
    saving.load(folder, slots_of(engine), engine.mesh, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.01
    loaded = whole_state(engine)
    loss = engine.step(**chains.chain_batch(1, BATCH))
    optimizer.step()
    return loaded, loss, whole_state(engine)


@pytest.mark.parametrize("source", PLANS)
def test_any_plan_to_any_other(tmp_path: Path, source: str) -> None:
    torch.manual_seed(0)
    model = chains.Chain(4)
    saved = run_ranks(size_of(source), train_and_save, tmp_path, source, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        model(**chains.chain_batch(step, BATCH))[0].backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()
    wanted = model.state_dict()
    assert all(state.keys() == wanted.keys() for state in saved)
    names = {name for group in json.loads(groups_of(tmp_path)) for name in group}
    assert names == set(dict(model.named_parameters()))
    for target in PLANS:
        for loaded, loss, state in run_ranks(size_of(target), load_and_train, tmp_path, target):
            assert all(torch.equal(loaded[name], value) for name, value in saved[0].items())
            assert loss.isfinite()
            for name, value in wanted.items():
                torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9)


def groups_of(folder: Path) -> str:
    """The names of the parameters of each of the optimizer's groups, as JSON."""
    content: dict[str, Any] = {saving.GROUPS: {}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(content, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return json.dumps([group["params"] for group in content[saving.GROUPS]["groups"]])
