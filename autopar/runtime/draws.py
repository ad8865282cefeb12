"""Which random numbers are drawn: what a mesh says of the micro-batch that runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Draws:
    """Which numbers a micro-batch draws: the ``seed`` and ``step`` of the training, its ``first`` sample in the step's batch,
    its ``samples``, and the ``planned`` ones for which a program gives shapes."""

    seed: int = 0
    step: int = 0
    first: int = 0
    samples: int = 1
    planned: int = 1
