"""Pipelines on four processes over gloo, one schedule of each family, through parallelize() under torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.initial import materialized
from tests.e2e import pipeline_worker as worker
from tests.e2e.parallelize_worker import LEARNING_RATE, MAX_NORM, STEPS

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
NUM_RANKS = 4
Results = list[dict[str, Any]]  # by rank, what each job returned


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("pipelines")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)),
        *("-m", "tests.e2e.pipeline_worker", str(folder)),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return [torch.load(folder / f"result-{rank}", weights_only=False) for rank in range(NUM_RANKS)]


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The same training in one process, a step longer."""
    model = worker.make_model(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    trained, states, output = [], [], None
    for step in range(STEPS + 1):
        if step == STEPS:
            output = model(**worker.make_batch(6)).logits.detach()
        loss = model(**worker.make_batch()).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        trained.append((loss.detach(), norm))
        states.append({name: value.detach().clone() for name, value in model.state_dict().items()})
    return {"trained": trained, "states": states, "output": output}


@pytest.mark.parametrize("job", worker.JOBS)
def test_trains_as_one_process_does(results: Results, plain: dict[str, Any], job: str) -> None:
    for result in results:
        torch.testing.assert_close(result[job]["trained"], plain["trained"][:STEPS], rtol=1e-4, atol=1e-5)
        assert result[job]["states"].keys() == plain["states"][STEPS - 1].keys()
        for name, value in plain["states"][STEPS - 1].items():
            torch.testing.assert_close(result[job]["states"][name], value, rtol=1e-3, atol=1e-4)
        # In float32 AdamW makes steps of what rounding leaves of gradients of zero.
        torch.testing.assert_close(result[job]["output"], plain["output"], rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("job", list(worker.JOBS)[1:])
def test_goes_on_from_a_checkpoint_of_another_schedule(results: Results, plain: dict[str, Any], job: str) -> None:
    before = list(worker.JOBS)[list(worker.JOBS).index(job) - 1]
    initial = materialized(worker.make_model(0, on_meta=True), seed=0).state_dict()
    for result in results:
        for name, value in initial.items():
            assert torch.equal(result[job]["meta"][name], value), name
        for name, value in result[before]["states"].items():
            assert torch.equal(result[job]["restored"][name], value), name
        torch.testing.assert_close(result[job]["gone_on"], plain["trained"][STEPS], rtol=1e-3, atol=1e-4)
        assert result[job]["learning_rate"] == LEARNING_RATE


def test_ranks_have_their_stages_only(results: Results) -> None:
    for job, (_, _, mesh, order) in worker.JOBS.items():
        order = order or tuple(range(NUM_RANKS))
        own = [set(results[rank][job]["own"]) for rank in order]
        for place in range(0, NUM_RANKS, mesh[0]):
            assert all(names == own[place] for names in own[place : place + mesh[0]]), job
        everything = set().union(*own)
        assert all(names < everything for names in own), job
        assert [results[rank][job]["data"] for rank in order] == [(at % mesh[0], mesh[0]) for at in range(NUM_RANKS)]
        assert [bool(result[job]["first_only"]) for result in results] == [True, False, False, False]
