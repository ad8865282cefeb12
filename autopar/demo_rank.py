"""One process of ``autopar demo``, started by torchrun: ``python -m autopar.demo_rank FOLDER STEPS``.

Trains the demo's model with FOLDER/plan.json; the first process writes losses and seconds to FOLDER/trained.json.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from autopar.demo import demo_batches, demo_model
from autopar.launching import own_rank
from autopar.parallel import parallelize
from autopar.plans import Plan
from autopar.training import train_parallel
from cost_models import Cluster


def main(folder: Path, num_steps: int) -> None:
    """Train, and write what happened."""
    rank = own_rank()
    assert rank is not None, "torchrun starts this module"
    torch.set_num_threads(1)
    batches = demo_batches(num_steps)
    cluster = Cluster.local(rank.world_size)
    parallel = parallelize(demo_model(), cluster, batches[0], plan=Plan.load(folder / "plan.json"))
    trained = train_parallel(parallel, batches)
    if rank.is_first:
        (folder / "trained.json").write_text(json.dumps(asdict(trained)))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
