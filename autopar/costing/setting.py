"""How a stage is run: what its prices and its memory depend on beside the model, the mesh and the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.layout import Layout


@dataclass(frozen=True)
class Setting:
    """One stage's part in a step.

    ``num_micro_batches``: how often it runs forward and backward in a step; ``in_flight``: of how many micro-batches it
    keeps activations at the same time; ``recompute``: the mode of blocks by path (``recompute.MODES``; ``none`` where left
    out); ``boundary``: the layouts of what it receives and sends; ``turn``: whether the block that holds most while it is
    computed again is charged with it; ``first_rank``: where in the cluster its devices begin.
    """

    num_micro_batches: int = 1
    in_flight: int = 1
    recompute: Mapping[str, str] = field(default_factory=dict)
    boundary: Mapping[str, Layout] = field(default_factory=dict)
    turn: bool = True
    first_rank: int = 0

    def __post_init__(self) -> None:
        assert self.num_micro_batches >= 1 and 1 <= self.in_flight <= self.num_micro_batches, "micro-batches in flight"


ALONE = Setting()  # one stage, one micro-batch, nothing recomputed
