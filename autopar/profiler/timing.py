"""Timing: a clock that suits the device, medians and spread, memory that may be used.

Enters: something to run. Leaves: seconds. On CPUs with one thread the clock is the thread's own processor time, which other
work on the machine does not lengthen; with more threads it is wall-clock time. On GPUs time is taken by events.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

# Of an operator: rounds, of which each has as many calls as fill its time.
ROUNDS = 5
FEW_ROUNDS = 3
OTHERWISE_SECONDS = 0.01  # to make inputs, and for all ranks to hear of the result
ROUND_SECONDS = 0.03  # that a round takes, if few enough calls do
LONG_SECONDS = 0.3  # what takes longer needs no warming up: its first time counts, and is the only one
MEDIUM_SECONDS = 0.1  # of what takes longer there are fewer rounds

MEMORY_SHARE = 0.25  # of the free memory that one measurement may take


@dataclass(frozen=True)
class Timed:
    """The median of some rounds, half of the range of their middle half over it, and their number."""

    seconds: float
    spread: float
    count: int


def measuring_seconds(estimated_seconds: float) -> float:
    """About what it takes to measure an operator that takes so long."""
    if estimated_seconds > LONG_SECONDS:
        return estimated_seconds
    rounds = FEW_ROUNDS if estimated_seconds > MEDIUM_SECONDS else ROUNDS
    return OTHERWISE_SECONDS + estimated_seconds + rounds * max(estimated_seconds, ROUND_SECONDS)


def summary(rounds: Sequence[float]) -> Timed:
    """Of seconds of like rounds."""
    middle = statistics.median(rounds)
    if len(rounds) < 3 or middle <= 0:
        return Timed(middle, 0.0, len(rounds))
    low, _, high = statistics.quantiles(rounds, n=4, method="inclusive")
    return Timed(middle, (high - low) / 2 / middle, len(rounds))


def undisturbed(rounds: Sequence[float]) -> Timed:
    """Of seconds on the wall: of the faster half alone, as what else runs on the machine only ever makes a round longer."""
    faster = sorted(rounds)[: (len(rounds) + 1) // 2]
    return Timed(statistics.median(faster), summary(faster).spread, len(rounds))


class Stopwatch:
    """Seconds between calls of :meth:`lap` on one device."""

    def __init__(self, device: torch.device, wall: bool = False) -> None:
        self.device = device
        own = device.type == "cpu" and torch.get_num_threads() == 1 and not wall
        self._now: Callable[[], float] = time.thread_time if own else time.perf_counter
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def lap(self) -> None:
        """Mark a moment."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._marks.append(self._now())

    def laps(self) -> list[float]:
        """Seconds between all moments marked so far; the device has then finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            pairs = zip(self._events, self._events[1:], strict=False)
            return [first.elapsed_time(second) / 1e3 for first, second in pairs]
        return [second - first for first, second in zip(self._marks, self._marks[1:], strict=False)]


def free_bytes(device: torch.device) -> int:
    """Memory that could be allocated on the device now: on CPUs what the kernel calls available (Linux)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return 2**30
