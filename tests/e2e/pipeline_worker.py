"""One process of test_pipelines.py, started by torchrun: ``-m tests.e2e.pipeline_worker FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.parallel import Parallel, parallelize
from autopar.plans import Plan
from autopar.tracing import trace
from tests.e2e.parallelize_worker import MAX_NORM, STEPS, optimizer_of
from tests.support import models
from tests.support.pipelines import even_cuts, pipeline_plan

BATCH = 10
LAYERS = 4
MICRO_BATCHES = 4
# Name of the job: schedule, number of stages, mesh of each pipeline rank, order of ranks.
JOBS: dict[str, tuple[str, int, tuple[int, ...], tuple[int, ...]]] = {
    "gpipe": ("gpipe", 4, (1,), ()),
    "1f1b": ("1f1b", 2, (2,), (3, 1, 0, 2)),
    "interleaved": ("interleaved_1f1b", 4, (2,), ()),
    "zero_bubble": ("zbv", 4, (2,), ()),
}


def make_model(seed: int, on_meta: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    model, _ = models.gpt2(BATCH, LAYERS)
    if on_meta:
        with torch.device("meta"):
            return type(model)(model.config).train()
    return model


def make_batch(size: int = BATCH) -> dict[str, torch.Tensor]:
    """Ids, and as labels the same with some ignored: another number of them in every micro-batch."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 61, (size, models.SEQUENCE), generator=generator)
    ignored = torch.rand(size, models.SEQUENCE, generator=generator) < 0.4
    return {"input_ids": ids, "labels": ids.masked_fill(ignored, -100)}


def plan_of(job: str) -> Plan:
    """Micro-batches of 4, 2, 2 and 2 samples where two ranks share them, else of 3, 3, 2 and 2."""
    schedule, num_stages, mesh, order = JOBS[job]
    graph = trace(make_model(0), make_batch()).graph
    recompute = "full" if job == "1f1b" else "none"
    cuts = even_cuts(graph, num_stages)
    return pipeline_plan(graph, cuts, mesh, schedule, MICRO_BATCHES, recompute, unit=mesh[0], rank_order=order)


def train_step(parallel: Parallel, optimizer: torch.optim.Optimizer) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and the norm of all gradients."""
    loss = parallel.step(**make_batch())
    norm = parallel.clip_grad_norm_(MAX_NORM)
    optimizer.step()
    parallel.zero_grad()
    return loss, norm


def run(folder: Path, job: str) -> dict[str, Any]:
    """Train, save, evaluate; go on from what the job before has saved."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    names = list(JOBS)
    parallel = parallelize(make_model(seed=rank), None, make_batch(), plan=plan_of(job), device="cpu")
    optimizer = optimizer_of(parallel)
    trained = [train_step(parallel, optimizer) for _ in range(STEPS)]
    parallel.save(folder / job, optimizer)
    found: dict[str, Any] = {
        "trained": trained,
        "states": parallel.full_state_dict(all_ranks=True),
        "first_only": len(parallel.full_state_dict()),
        "output": parallel(**make_batch(6)).logits,
        "data": (parallel.data_rank, parallel.data_size),
        "own": [name for name, _ in parallel.named_parameters()],
    }
    before = names[names.index(job) - 1] if job != names[0] else None
    if before is not None:
        restored = parallelize(make_model(0, on_meta=True), None, make_batch(), plan=plan_of(job), device="cpu")
        found["meta"] = restored.full_state_dict(all_ranks=True)
        optimizer = optimizer_of(restored, learning_rate=1.0)
        restored.load(folder / before, optimizer)
        found["restored"] = restored.full_state_dict(all_ranks=True)
        found["gone_on"] = train_step(restored, optimizer)
        found["learning_rate"] = optimizer.param_groups[0]["lr"]
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    results = {job: run(folder, job) for job in JOBS}
    torch.save(results, folder / f"result-{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
