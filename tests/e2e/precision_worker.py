"""One process of test_precision_processes.py, started by torchrun: ``-m tests.e2e.precision_worker FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.codegen import ledger
from autopar.codegen.ledger import totals
from autopar.parallel import Parallel, parallelize
from autopar.tracing import trace
from tests.support import models
from tests.support.precision import EPSILON, RATE

BATCH, MICRO_BATCH, STEPS = 8, 4, 3
POLICY = "bfloat16"


def make_model(seed: int = 0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    return models.gpt2(BATCH, layers=2)


def spread(zero: int, on_meta: bool = False) -> Parallel:
    model, batch = make_model()
    if on_meta:
        with torch.device("meta"):
            model = type(model)(model.config).train()
    parallelism = autopar.Parallelism(data=2, pipeline=1, zero=zero, micro_batch_size=MICRO_BATCH)
    options = autopar.PlanOptions(precision=POLICY, parallelism=parallelism)
    return parallelize(model, None, batch, options=options, device="cpu")


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    model, batch = make_model()
    parallel = spread(zero=1)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=RATE, eps=EPSILON)
    losses, norms = [], []
    sent: dict[tuple[str, str], int] = {}
    for step in range(STEPS):
        parallel.engine.set_ledger(step == 0)
        losses.append(parallel.step(**batch))
        sent = parallel.engine.ledger.totals() if parallel.engine.ledger is not None else sent
        parallel.engine.set_ledger(False)
        norms.append(parallel.clip_grad_norm_(1e6))  # the norm alone: nothing is that large
        optimizer.step()
        parallel.zero_grad()
    parallel.save(folder / "checkpoint", optimizer)
    loaded = spread(zero=3, on_meta=True)
    meta = loaded.full_state_dict(all_ranks=True)
    loaded.load(folder / "checkpoint", torch.optim.AdamW(loaded.parameters()))
    graph = trace(model, batch, precision=parallel.plan.precision).graph
    result = {
        "losses": losses,
        "norms": norms,
        "states": parallel.full_state_dict(all_ranks=True),
        "loaded": loaded.full_state_dict(all_ranks=True),
        "next": (parallel.step(**batch), loaded.step(**batch)),
        "meta_dtypes": {value.dtype for name, value in meta.items() if value.is_floating_point()},
        "sent": sent,
        "planned": totals(ledger(parallel.plan, graph)),
    }
    torch.save(result, folder / f"result-{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
