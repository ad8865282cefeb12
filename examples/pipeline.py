"""Stages on devices of their own, micro-batches that follow each other through them, and activations computed again.

python examples/pipeline.py                                plans for 4 processes and prints the report
torchrun --nproc-per-node 4 examples/pipeline.py           trains in parallel
autopar plan examples/pipeline.py:model --cluster 4x8:A100-80GB
"""

import os

import torch
from torch import nn

import autopar
from autopar.report import text

BATCH, SEQUENCE, WIDTH, LAYERS = 16, 32, 64, 4
# What is left out is searched: where to cut, and how each stage uses its devices.
FORCED = autopar.Parallelism(pipeline=2, schedule="1f1b", micro_batch_size=4, recompute="selective")


class Net(nn.Module):
    """Tells how large each number is; nothing in it knows of stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, WIDTH)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, **options) for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, numbers: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.head(self.layers(self.embed(numbers))), sizes)


def make_batch(step: int) -> dict[str, torch.Tensor]:
    numbers = torch.randn(BATCH, SEQUENCE, 1, generator=torch.Generator().manual_seed(step))
    return {"numbers": numbers, "sizes": numbers.abs()}


def model():
    torch.manual_seed(0)
    return Net(), make_batch(0)


if __name__ == "__main__":
    cluster = autopar.Cluster.local(int(os.environ.get("WORLD_SIZE", "4")))
    net, batch = model()
    if "RANK" not in os.environ:
        print(text(autopar.plan(net, cluster, batch, parallelism=FORCED).report()))
    else:
        parallel = autopar.parallelize(net, cluster, batch, parallelism=FORCED)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=3e-4)
        for step in range(10):
            loss = parallel.step(**make_batch(step))  # all micro-batches, through all stages
            optimizer.step()
            optimizer.zero_grad()
            if os.environ["RANK"] == "0":
                print(f"step {step} loss {loss.item():.4f}")
        torch.distributed.destroy_process_group()
