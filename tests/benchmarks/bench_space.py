"""Planning of ResNet-50 with convolutions split over space too, as a multiple of planning without, in CPU seconds.

``python -m tests.benchmarks.bench_space [--batch 256] [--devices 8] [--size 224] [--times 2]``; alternately in one process, the
first of both warms up and is left out. With a batch that all devices can share, space is not offered; with a smaller one it is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
from transformers import ResNetConfig, ResNetForImageClassification

from autopar.graph import Operator, OpGraph
from autopar.planner import plan
from autopar.strategies import contraction, pooling
from autopar.strategies.spatial import SpaceDim, space_dims
from cost_models import Cluster

Rule = Callable[[Operator, OpGraph], tuple[SpaceDim, ...]]


def whole_dims(operator: Operator, graph: OpGraph) -> tuple[SpaceDim, ...]:
    """Spatial dims that are never split."""
    return tuple(replace(dim, splits=False) for dim in space_dims(operator, graph))


def planned_seconds(rule: Rule, batch: int, num_devices: int, size: int) -> tuple[float, str]:
    """CPU seconds of one plan under a rule for space, and its mesh."""
    contraction.space_dims = pooling.space_dims = rule  # type: ignore[attr-defined]
    with torch.device("meta"):
        model = ResNetForImageClassification(ResNetConfig(num_labels=1000))
        images, labels = torch.empty(batch, 3, size, size), torch.empty(batch, dtype=torch.long)
    cluster = Cluster.homogeneous(num_nodes=1, devices_per_node=num_devices, device="H100-SXM")
    start = time.process_time()
    made = plan(model, cluster, {"pixel_values": images, "labels": labels})
    return time.process_time() - start, str(made.stages[0].mesh)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", 256), ("devices", 8), ("size", 224), ("times", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    seconds: dict[str, list[float]] = {"whole": [], "split": []}
    for _ in range(given.times + 1):
        for name, rule in (("whole", whole_dims), ("split", space_dims)):
            took, mesh = planned_seconds(rule, given.batch, given.devices, given.size)
            seconds[name].append(took)
            print(f"space {name}: {took:.1f} s of CPU, {mesh}", flush=True)
    whole, split = (median(found[1:]) for found in (seconds["whole"], seconds["split"]))
    print(f"ratio {split / whole:.2f}")


if __name__ == "__main__":
    main()
