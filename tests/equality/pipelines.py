"""The grid of pipelines: models x pipeline ranks x schedules x meshes of a rank x recomputation, each equal to one device.

Plans are made stage by stage for the cuts given (``tests/support/pipelines.py``), so that every combination is seen, not
only what is fastest. Run whole with ``python -m tests.equality --pipelines``; a covering selection is run by pytest.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from autopar.options import Parallelism
from autopar.plans import Plan
from autopar.recompute import MODES
from autopar.staging import cut_points
from autopar.tracing import trace
from autopar.verifier import Verification, verify
from tests.support import models
from tests.support.pipelines import STAGES_A_RANK, pipeline_plan

Built = tuple[nn.Module, dict[str, torch.Tensor]]
LAYERS = 2

MODELS: dict[str, Callable[[int], Built]] = {
    "gpt2": lambda batch: models.gpt2(
        batch, LAYERS
    ),  # embedding and head are one parameter, in the first and the last stage
    "llama": lambda batch: models.llama(batch, LAYERS),
    "t5": lambda batch: models.t5(batch, LAYERS),  # what the encoder makes is relayed to every stage of the decoder
    "vit": lambda batch: models.vit(batch, LAYERS),
    "unet": models.unet,  # values skip many stages
}
REPEATING = ("gpt2", "llama", "t5", "vit")  # models with blocks, which recomputation is for
BATCHES = {2: (10, 4), 3: (6, 3), 4: (8, 4)}  # by pipeline ranks: samples, micro-batches (of 10 in 4: uneven ones)
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")
SPREADS: dict[str, tuple[tuple[int, ...], int]] = {  # the mesh of a pipeline rank (data, tensor), and the ZeRO level
    "alone": ((1,), 0),
    "data": ((2,), 0),
    "tensor": ((1, 2), 0),
    "zero-1": ((2,), 1),
    "zero-3": ((2,), 3),
}


@dataclass(frozen=True)
class PipelineCase:
    """One model in stages on ``num_ranks`` pipeline ranks."""

    model: str
    num_ranks: int
    schedule: str
    spread: str
    recompute: str

    def __str__(self) -> str:
        return f"{self.model} {self.num_ranks} ranks {self.schedule} {self.spread} {self.recompute}"

    @property
    def num_stages(self) -> int:
        """Two stages a rank where the schedule is for that, one otherwise; a zero-bubble schedule is seen with both."""
        if self.schedule == "interleaved_zero_bubble" and self.num_ranks > 2:
            return self.num_ranks
        return self.num_ranks * STAGES_A_RANK.get(self.schedule, 1)


def all_pipelines() -> Iterator[PipelineCase]:
    """The whole grid."""
    for model in MODELS:
        for num_ranks in BATCHES:
            for schedule in SCHEDULES:
                for spread in SPREADS:
                    for recompute in MODES if model in REPEATING else MODES[:1]:
                        if schedule != "zbv" or num_ranks == 2:
                            yield PipelineCase(model, num_ranks, schedule, spread, recompute)


def pipeline_selection() -> list[PipelineCase]:
    """A covering part: every model meets every spread, and all else occurs with every model that has it."""
    draw = random.Random(1)
    waiting = list(all_pipelines())
    draw.shuffle(waiting)
    met: set[tuple[Any, ...]] = set()
    chosen = []
    while True:
        best = max(waiting, key=lambda case: len(_meetings(case) - met))
        if not _meetings(best) - met:
            return chosen
        met |= _meetings(best)
        chosen.append(best)


def _meetings(case: PipelineCase) -> set[tuple[Any, ...]]:
    """What a case shows together."""
    return {
        (case.model, case.schedule if case.model != "unet" else ""),
        (case.model, case.recompute),
        (case.schedule, case.spread),
        (case.schedule, case.num_ranks),
        (case.spread, case.recompute),
    }


@cache
def built(model: str, batch: int) -> tuple[nn.Module, dict[str, torch.Tensor], Any]:
    """A model with its inputs and its graph."""
    torch.manual_seed(0)
    module, inputs = MODELS[model](batch)
    return module, inputs, trace(module, inputs).graph


def plan_of(case: PipelineCase) -> Plan:
    """Cuts spread evenly over the places where the model can be cut; each stage solved."""
    batch, num_micro_batches = BATCHES[case.num_ranks]
    _, _, graph = built(case.model, batch)
    places = [point.operator for point in cut_points(graph)]
    cuts = [places[len(places) * stage // case.num_stages] for stage in range(1, case.num_stages)]
    mesh, zero = SPREADS[case.spread]
    return pipeline_plan(
        graph, cuts, mesh, case.schedule, num_micro_batches, case.recompute, Parallelism(zero=zero),
        num_ranks=case.num_ranks,
    )  # fmt: skip


def run_pipeline(case: PipelineCase) -> tuple[Verification, Plan]:
    """Plan and verify one case, its collectives counted: the outcome and the plan."""
    made = plan_of(case)
    assert made.num_devices == case.num_ranks * math.prod(SPREADS[case.spread][0])
    module, inputs, _ = built(case.model, BATCHES[case.num_ranks][0])
    return verify(module, made, inputs, epsilon=1e-8, count_collectives=True), made
