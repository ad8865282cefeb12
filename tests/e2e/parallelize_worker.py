"""One process of test_parallelize.py, started by torchrun: ``-m tests.e2e.parallelize_worker FOLDER JOB``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import autopar
from autopar.parallel import Parallel, parallelize
from autopar.runtime import saving
from tests.support import models

BATCH = 6
STEPS = 2
LEARNING_RATE = 1e-2
MAX_NORM = 0.5
LEVELS = {1: {}, 2: {"data": 2, "zero": 3}, 3: {"tensor": 3}, 4: {"data": 2, "tensor": 2, "zero": 1}}


def make_model(seed: int, layers: int = 2, on_meta: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    model, _ = models.gpt2(BATCH, layers)
    if on_meta:
        with torch.device("meta"):
            return type(model)(model.config).train()
    return model


def make_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 61, (BATCH, models.SEQUENCE), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def spread(model: nn.Module, num_ranks: int) -> Parallel:
    """The model on all ranks by the plan that this number of ranks has in these tests."""
    parallelism = autopar.Parallelism(pipeline=1, micro_batch_size=BATCH, **LEVELS[num_ranks])
    return parallelize(model, None, make_batch(), parallelism=parallelism, device="cpu")


def optimizer_of(parallel: Parallel, learning_rate: float = LEARNING_RATE) -> torch.optim.AdamW:
    return torch.optim.AdamW(parallel.parameters(), lr=learning_rate)


def train_step(parallel: Parallel, optimizer: torch.optim.Optimizer, local: bool) -> torch.Tensor:
    batch = make_batch()
    if local:
        size = BATCH // parallel.data_size
        start = parallel.data_rank * size
        batch = {name: tensor[start : start + size] for name, tensor in batch.items()}
    loss = parallel.step(**batch, local=local)
    parallel.clip_grad_norm_(MAX_NORM)
    optimizer.step()
    parallel.zero_grad()
    return loss


def states_of(parallel: Parallel, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Whole parameters, buffers and optimizer states by name, on every rank."""
    found = parallel.full_state_dict(all_ranks=True)
    for name, slot in parallel.engine.slots.items():
        for key, value in optimizer.state[slot.storage].items():
            whole = value if not value.dim() else saving.whole_tensor(slot, parallel.engine.mesh, value)
            found[f"{name}:{key}"] = whole.clone()
    return found


def errors_on_ranks(rank: int) -> list[list[str]]:
    """For each kind of failure, what every rank raised."""
    other = make_model(0, layers=3) if rank == 1 else make_model(0)
    model, batch = make_model(0), make_batch()
    attempts: list[dict[str, Any]] = [
        {"model": model, "cluster": autopar.Cluster.local(2)},
        {"model": model, "parallelism": autopar.Parallelism(data=7)},
        {"model": other},
        {"model": model, "plan": "no such plan.json"},
    ]
    found = []
    for attempt in attempts:
        try:
            parallelize(**attempt, example_inputs=batch, device="cpu")
            said = "nothing"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, said)
        found.append(everyone)
    return found


def first_job(folder: Path) -> dict[str, Any]:
    """Train, save, and what else is to be seen on four ranks."""
    rank = int(os.environ["RANK"])
    parallel = spread(make_model(seed=rank), 4)  # every rank has other values: those of rank 0 count
    initial = parallel.full_state_dict()
    optimizer = optimizer_of(parallel)
    losses = [train_step(parallel, optimizer, local=step % 2 == 1) for step in range(STEPS)]
    parallel.save(folder / "checkpoint", optimizer)
    output = parallel(**make_batch())
    dcp.save(parallel.state_dict(), checkpoint_id=folder / "by hand")
    restored = spread(make_model(seed=5), 4)
    dcp.load(restored.state_dict(), checkpoint_id=folder / "by hand")
    return {
        "initial": initial,
        "losses": losses,
        "states": states_of(parallel, optimizer),
        "by_hand": restored.full_state_dict(all_ranks=True),
        "output_type": type(output).__name__,
        "loss": output.loss,
        "logits": output.logits,
        "meta": spread(make_model(0, on_meta=True), 4).full_state_dict(all_ranks=True),
        "errors": errors_on_ranks(rank),
        "data": (parallel.data_rank, parallel.data_size),
        "source": parallel.source,
    }


def resume(folder: Path, num_ranks: int) -> dict[str, Any]:
    """Begin from a model on meta under another plan, load, and go on training."""
    parallel = spread(make_model(0, on_meta=True), num_ranks)
    meta = parallel.full_state_dict(all_ranks=True)
    optimizer = optimizer_of(parallel, learning_rate=1.0)
    parallel.load(folder / "checkpoint", optimizer)
    states = states_of(parallel, optimizer)
    loss = train_step(parallel, optimizer, local=False)
    return {
        "meta": meta,
        "states": states,
        "learning_rate": optimizer.param_groups[0]["lr"],
        "losses": [loss],
        "after": states_of(parallel, optimizer),
    }


def main() -> None:
    folder, job = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    num_ranks = int(job)
    result = first_job(folder) if num_ranks == 4 else resume(folder, num_ranks)
    torch.save(result, folder / f"result-{job}-{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
