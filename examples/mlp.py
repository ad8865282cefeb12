"""A plain MLP whose loss is given from outside.

python examples/mlp.py                                     plans for 4 processes and prints the report
torchrun --nproc-per-node 4 examples/mlp.py                trains in parallel
autopar plan examples/mlp.py:model --cluster 1x8:A100-80GB
"""

import os
from itertools import pairwise

import torch
from torch import nn

import autopar
from autopar.report import text

BATCH, FEATURES, CLASSES = 64, 512, 10


def build() -> nn.Module:
    torch.manual_seed(0)
    sizes = [FEATURES, 1024, 1024, CLASSES]
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def make_batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.rand(BATCH, FEATURES, generator=generator)
    target = torch.randint(CLASSES, (BATCH,), generator=generator)
    x[torch.arange(BATCH), target] += 5  # something that can be learned
    return {"input": x, "target": target}


def loss_fn(outputs: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, inputs["target"])


def model():
    return build(), make_batch(0), loss_fn


if __name__ == "__main__":
    cluster = autopar.Cluster.local(int(os.environ.get("WORLD_SIZE", "4")))
    if "RANK" not in os.environ:
        print(text(autopar.plan(build(), cluster, make_batch(0), loss_fn=loss_fn).report()))
    else:
        parallel = autopar.parallelize(build(), cluster, make_batch(0), loss_fn=loss_fn)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
        for step in range(10):
            loss = parallel.step(**make_batch(step))
            optimizer.step()
            optimizer.zero_grad()
            if os.environ["RANK"] == "0":
                print(f"step {step} loss {loss.item():.4f}")
        torch.distributed.destroy_process_group()
