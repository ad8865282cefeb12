"""The plans under which every entry is run, and the machines that they are for.

Tiny models are not worth splitting on a real machine. The search is given slow devices on quick links, so that it splits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.graph import OpGraph
from autopar.micro_batches import coupling
from autopar.options import Parallelism, PlanOptions
from cost_models import Cluster
from cost_models.parts import Device

MEMORY_BYTES = 8 * 2**30


@dataclass(frozen=True)
class Wanted:
    """A plan to be made: on how many devices, and what is forced."""

    num_devices: int
    parallelism: Parallelism = field(default_factory=Parallelism)
    mesh_shape: tuple[int, ...] | None = None

    @property
    def cluster(self) -> Cluster:
        """Devices of 1 GFLOP/s joined by NVLink."""
        device = Device("slow", "cpu", MEMORY_BYTES, 1e9, {"float32": 1e9}, launch_seconds=1e-7, source="made up")
        return Cluster.homogeneous(num_nodes=1, devices_per_node=self.num_devices, device=device)

    def options(self, graph: OpGraph) -> PlanOptions:
        """The options for a model; one whose samples depend on each other goes through its stages in one piece."""
        parallelism = self.parallelism
        if parallelism.pipeline and not coupling(graph) and graph.batch_size > 1:
            parallelism = Parallelism(
                pipeline=parallelism.pipeline, schedule="1f1b", micro_batch_size=(graph.batch_size + 1) // 2
            )
        return PlanOptions(parallelism=parallelism, mesh_shape=self.mesh_shape)


PLANS = {
    "searched (4)": Wanted(4, mesh_shape=(4,)),
    "searched (2,2)": Wanted(4, mesh_shape=(2, 2)),
    "tensor 2 x data 2": Wanted(4, Parallelism(data=2, tensor=2)),
    "zero-3": Wanted(2, Parallelism(data=2, zero=3)),
    "2 stages": Wanted(2, Parallelism(pipeline=2)),
}
TENSOR = "tensor 2 x data 2"
