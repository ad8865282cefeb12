"""What a frame may well take beyond its bound: it orders the search, and proves nothing."""

from __future__ import annotations

from functools import cached_property

from autopar.costing import prepare
from autopar.graph import OpGraph
from autopar.search.shorten import Short
from autopar.search.space import Frame
from cost_models import CostModel

ROOM_FOR_ACTIVATIONS = 0.6  # of a device's memory; what is expected to keep more is expected to recompute
RECOMPUTING = 4 / 3  # of the seconds, where every forward pass is done twice


class Expected:
    """Expectations of one model on one cluster."""

    def __init__(self, graph: OpGraph, short: Short, cost_model: CostModel, memory_margin: float) -> None:
        self._graph, self._short = graph, short
        self._num_devices = cost_model.cluster.num_devices
        self._available_bytes = cost_model.min_device_memory_bytes(memory_margin)

    def factor(self, frame: Frame) -> float:
        """By how much a frame may well exceed its bound: the bubble, and recomputation where activations do not fit."""
        bubble = 0.5 * (frame.grid.num_ranks - 1) / frame.num_micro_batches
        return (1 + bubble) * (RECOMPUTING if self.recomputes(frame) else 1.0)

    def recomputes(self, frame: Frame) -> bool:
        """Whether a frame's activations are more than there is likely to be room for."""
        ranks, count = frame.grid.num_ranks, frame.num_micro_batches
        flying = 1 if ranks == 1 else min(ranks, count)
        return self.share_of_memory / count * flying > ROOM_FOR_ACTIVATIONS

    @cached_property
    def share_of_memory(self) -> float:
        """What a forward pass of the whole batch keeps for backward, as a part of the memory of all devices together."""
        prepared = prepare(self._short.graph)
        saved = {
            name: sum(
                self._graph.values[value].num_bytes
                for value in self._short.graph.operator_of[name].outputs
                if value and prepared.name(value) in prepared.saved
            )
            for name in dict.fromkeys(self._short.stands_for.values())
        }
        num_bytes = float(sum(saved[name] for name in self._short.stands_for.values()))
        return num_bytes / self._num_devices / self._available_bytes
