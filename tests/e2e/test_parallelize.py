"""parallelize() under torchrun: training, checkpoints between plans and numbers of ranks, models on meta, failures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.initial import materialized
from tests.e2e import parallelize_worker as worker

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
Result = dict[str, Any]


def torchrun(folder: Path, num_ranks: int) -> list[Result]:
    """Run the worker on ``num_ranks`` processes; what each of them returned."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)),
        *("-m", "tests.e2e.parallelize_worker", str(folder), str(num_ranks)),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return [torch.load(folder / f"result-{num_ranks}-{rank}", weights_only=False) for rank in range(num_ranks)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallelize")


@pytest.fixture(scope="module")
def first(folder: Path) -> list[Result]:
    return torchrun(folder, 4)


@pytest.fixture(scope="module")
def resumed(folder: Path, first: list[Result]) -> dict[int, Result]:
    """Results of rank 0 of the runs that loaded the checkpoint, by number of ranks."""
    found = {num_ranks: torchrun(folder, num_ranks)[0] for num_ranks in (3, 2)}
    return found | {1: worker.resume(folder, 1)}


def plain_training(first: list[Result], steps: int) -> tuple[list[torch.Tensor], torch.nn.Module]:
    """The same training in one process."""
    model = worker.make_model(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=worker.LEARNING_RATE)
    losses = []
    for _ in range(steps):
        loss = model(**worker.make_batch()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), worker.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, model


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_values_are_those_of_rank_0(first: list[Result]) -> None:
    assert_same(first[0]["initial"], worker.make_model(seed=0).state_dict())
    assert first[1]["initial"] == {}


def test_trains_as_one_process_does(first: list[Result]) -> None:
    losses, model = plain_training(first, worker.STEPS)
    for result in first:
        torch.testing.assert_close(result["losses"], losses)
    trained = first[0]["states"]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-5)
    loaded = worker.make_model(seed=1)
    loaded.load_state_dict({name: value for name, value in trained.items() if ":" not in name}, strict=True)


def test_call_returns_the_models_own_output(first: list[Result]) -> None:
    model = worker.make_model(seed=1)
    model.load_state_dict({name: value for name, value in first[0]["states"].items() if ":" not in name})
    expected = model(**worker.make_batch())
    for result in first:
        assert result["output_type"] == type(expected).__name__
        torch.testing.assert_close(result["loss"], expected.loss.detach())
        torch.testing.assert_close(result["logits"], expected.logits.detach(), rtol=1e-4, atol=1e-5)


def test_data_shares(first: list[Result]) -> None:
    shares = {result["data"] for result in first}
    size = first[0]["data"][1]
    assert shares == {(number, size) for number in range(size)}


def test_every_rank_writes_the_same_program(first: list[Result]) -> None:
    assert len({result["source"] for result in first}) == 1


def test_state_dict_goes_through_dcp(first: list[Result]) -> None:
    saved = {name: value for name, value in first[0]["states"].items() if ":" not in name}
    for result in first:
        assert_same(result["by_hand"], saved)


@pytest.mark.parametrize("num_ranks", [3, 2, 1])
def test_checkpoint_is_exact_under_another_plan(
    first: list[Result], resumed: dict[int, Result], num_ranks: int
) -> None:
    assert_same(resumed[num_ranks]["states"], first[0]["states"])
    assert resumed[num_ranks]["learning_rate"] == worker.LEARNING_RATE


@pytest.mark.parametrize("num_ranks", [3, 2, 1])
def test_training_goes_on(first: list[Result], resumed: dict[int, Result], num_ranks: int) -> None:
    losses, model = plain_training(first, worker.STEPS + 1)
    torch.testing.assert_close(resumed[num_ranks]["losses"], losses[-1:], rtol=1e-4, atol=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(resumed[num_ranks]["after"][name], value, rtol=1e-3, atol=1e-4)


def test_meta_model_gets_the_same_values_under_any_plan(first: list[Result], resumed: dict[int, Result]) -> None:
    expected = materialized(worker.make_model(0, on_meta=True), seed=0).state_dict()
    for result in (first[0], first[3], *resumed.values()):
        assert_same(result["meta"], expected)
    spread = expected["transformer.h.1.mlp.c_proj.weight"].std()
    torch.testing.assert_close(spread.item(), 0.02 / (2 * 2) ** 0.5, rtol=0.1, atol=0.0)


def test_failures_are_raised_on_every_rank(first: list[Result]) -> None:
    devices, degrees, models, files = first[0]["errors"]
    assert all("InputError: the cluster has 2 devices and there are 4 processes" in said for said in devices)
    assert len(set(degrees)) == 1 and "InputError: data=7" in degrees[0]
    assert all("InputError: rank 1 traced another model" in said for said in models)
    assert len(set(files)) == 1 and "PlanFileError: plan file no such plan.json cannot be read" in files[0]
