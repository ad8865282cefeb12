"""One of four processes on two hosts (network namespaces): profiles a model and keeps the cluster that it found.

Run by ``test_two_levels`` under torchrun: ``two_level_worker FOLDER NAME``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.detection import gathered_cluster
from autopar.ranks import Ranks, join_group

WIDTH, LAYERS, BATCH = 512, 6, 1024


def model_and_batch() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Linear layers whose parameters are half as many bytes as what flows between them."""
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.layers(x).square().mean()
            return loss

    return Deep(), {"x": torch.ones(BATCH, WIDTH)}


def main(folder: Path, name: str) -> None:
    join_group("cpu")
    cluster = gathered_cluster(Ranks().gather, on_cpu=True)
    model, batch = model_and_batch()
    autopar.profile(model, cluster, batch, path=folder / f"{name}.json", budget_seconds=180.0)
    if dist.get_rank() == 0:
        cluster.save(folder / f"{name}_cluster.json")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
