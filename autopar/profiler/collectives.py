"""Collectives measured over sizes, after compute, for all groups that run them at the same time, and beside compute.

Enters: a :class:`GroupNeed`, on every rank. Leaves: points of a curve for each kind, the slowest rank's. The calls are the
runtime's steps, with the copies that they make, and bytes are counted as its ledger counts them. A collective that does not
end raises a ProfileError that names its ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.profiler.needs import GroupNeed
from autopar.profiler.timing import MEMORY_SHARE, Stopwatch, free_bytes, summary, undisturbed
from autopar.runtime import collectives
from autopar.runtime.mesh import Axis, Mesh
from autopar.runtime.steps import PAIRS, Move
from cost_models import Overlap, Point, ProfileError

ROUNDS = 15
FEW_ROUNDS = 4  # of what takes long
POINT_SECONDS = 0.4  # that one size may take, if it is not for fewer rounds than these
NOISY_SPREAD = 0.1  # of which there are more rounds, as long as there is time
ROW = 64  # elements for each rank in a row of what is exchanged
COMPUTED_BYTES = 2**23  # that are read and written between two collectives, unless a model is known
SHARED_BYTES = 2**20
OVERLAP_BYTES = 4 * 2**20
OVERLAP_SIDE = 256  # of the square matrices that are multiplied beside a collective
OVERLAP_SHARE = 0.7  # of the collective's own time that the multiplies take alone


class Group:
    """This rank's group among those of a need, as an axis that the runtime can send over. All ranks make it together."""

    def __init__(
        self, need: GroupNeed, device: torch.device, timeout_seconds: float, computed_bytes: int = COMPUTED_BYTES
    ) -> None:
        self.need, self.device, self.timeout_seconds = need, device, timeout_seconds
        self.ranks: tuple[int, ...] = ()
        self.group: dist.ProcessGroup | None = None
        # NCCL's own watchdog ends the process without a word for the user: it is to come second.
        limit = timedelta(seconds=timeout_seconds * (2 if device.type == "cuda" else 1))
        for ranks in need.groups:
            made = dist.new_group(list(ranks), timeout=limit)
            if dist.get_rank() in ranks:
                self.ranks, self.group = ranks, made
        # Groups that share links must begin at the same time, or one sends while the other rests.
        self.everyone = self.group
        if len(need.groups) > 1:
            members = sorted(rank for ranks in need.groups for rank in ranks)
            self.everyone = dist.new_group(members, timeout=limit)
        # GPUs find a collective in a queue; on CPUs threads that sleep are woken for it, and caches hold what was computed.
        self._computed = torch.zeros(computed_bytes // 4 if device.type == "cpu" else 0, device=device)
        self.axis = Axis(Mesh(), "measured", 0, len(need.groups[0]))
        if self.group is not None:
            self.axis._group_name = self.group.group_name
            self.axis._place = self.ranks.index(dist.get_rank())

    @property
    def takes_part(self) -> bool:
        return self.group is not None

    def compute(self) -> None:
        """What a program does between two collectives, as far as it matters to the next one."""
        self._computed.add_(1.0)

    def turns_together(self, num_bytes: int) -> bool:
        """Whether messages of several groups wait for each other before they go back: those that share a link long enough to
        matter; one that is back on its way would leave the link to the others."""
        return len(self.need.groups) > 1 and num_bytes >= SHARED_BYTES

    def close(self) -> None:
        """Let go of the process groups."""
        for group in {self.group, self.everyone} if self.group is not None else ():
            dist.destroy_process_group(group)

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Turn a collective that fails or does not end into an error that names it."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ProfileError(
                f"{what} between ranks {', '.join(map(str, self.ranks))} did not end within {self.timeout_seconds:g} s on rank "
                f"{dist.get_rank()} ({first}): see that these ranks run and reach each other, or give a longer time-out"
            ) from error

    def finish(self) -> None:
        """Wait until the device has done what it was given, for no longer than is allowed."""
        if self.device.type != "cuda":
            return
        event, end = torch.cuda.Event(), time.monotonic() + self.timeout_seconds
        event.record()
        while not event.query():
            if time.monotonic() > end:
                raise TimeoutError("the device is still at it")
            time.sleep(1e-4)

    def largest(self, value: float) -> float:
        """The largest value of all ranks that take part, those of other groups too; all of them go on together."""
        found = torch.tensor(
            [value], dtype=torch.float64 if self.device.type == "cpu" else torch.float32, device=self.device
        )
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.everyone)
        return float(found[0])


def measure_collective(group: Group, kind: str, num_bytes: int, num_sharing: int = 1) -> Point | None:
    """Seconds of a collective of ``num_bytes`` on the slowest rank of this group; None where this rank has no part in it, or
    where the memory for it is wanting on some rank."""
    if not group.takes_part:
        return None
    what = f"{kind} of {num_bytes} bytes"
    with group.watching(what):
        fits = 3 * num_bytes <= MEMORY_SHARE * free_bytes(group.device) / num_sharing
        if group.largest(0.0 if fits else 1.0):
            return None
        send = sender(group, kind, num_bytes)
        send()
        group.finish()
        once = group.largest(_timed(group, send))
        rounds = max(FEW_ROUNDS, min(ROUNDS, int(POINT_SECONDS / max(once, 1e-6))))
        start = time.monotonic()
        took = [_timed(group, send, group.compute) for _ in range(rounds)]
        while (
            group.largest(summary(took).spread) > NOISY_SPREAD
            and group.largest(time.monotonic() - start) < POINT_SECONDS
        ):
            took += [_timed(group, send, group.compute) for _ in range(rounds)]
        found = summary(took)
        seconds = group.largest(found.seconds)
        if kind == "send_recv":  # there and back
            seconds = max(seconds - _pause(group, num_bytes), seconds / 4) / 2
        return Point(num_bytes, seconds, group.largest(found.spread), found.count)


def _pause(group: Group, num_bytes: int) -> float:
    """What waiting for the other groups takes before a message goes back."""
    if not group.turns_together(num_bytes):
        return 0.0
    return group.largest(undisturbed([_timed(group, lambda: group.largest(0.0)) for _ in range(ROUNDS)]).seconds)


def _timed(group: Group, send: Callable[[], object], compute: Callable[[], object] = lambda: None) -> float:
    """Seconds of one collective that all groups begin together, or after the same compute."""
    group.largest(0.0)
    compute()
    watch = Stopwatch(group.device, wall=True)
    watch.lap()
    send()
    watch.lap()
    return watch.laps()[0]


def sender(group: Group, kind: str, num_bytes: int) -> Callable[[], object]:
    """One collective as a function, with what the program's step of this kind copies around it; ``send_recv`` goes there and
    back."""
    axis, count = group.axis, max(1, num_bytes // 4)
    each = max(1, count // axis.size)
    if kind == "all_reduce":
        return _step(group, "reduce_from", Move(axis), count)
    if kind == "all_gather":
        return _step(group, "all_gather", Move(axis, 0), each)
    if kind == "reduce_scatter":
        return _step(group, "reduce_scatter", Move(axis, 0), each * axis.size)
    if kind == "all_to_all":
        return _step(group, "all_to_all", Move(axis, 0, other_dim=1), max(1, each // ROW), axis.size * min(each, ROW))
    if kind == "broadcast":
        whole = _numbers(group, count)
        return lambda: collectives.broadcast_in_place(whole, axis, 0)
    if kind == "send_recv":
        return _there_and_back(group, _numbers(group, count))
    raise ValueError(f"unknown collective {kind!r}")


def _step(group: Group, name: str, move: Move, *shape: int) -> Callable[[], object]:
    """The value's part of a step of the runtime on a tensor of this shape."""
    forward, given = PAIRS[name][0], _numbers(group, *shape)
    return lambda: forward(given, move)


def _numbers(group: Group, *shape: int) -> Tensor:
    return torch.zeros(shape, device=group.device)


def _there_and_back(group: Group, message: Tensor) -> Callable[[], object]:
    """A message from the first rank to the second and one back, as pipeline stages send them."""
    here, there = group.axis.place, 1 - group.axis.place
    if group.axis.size != 2:
        raise ValueError(f"a message goes between two ranks, not {group.axis.size}")

    def send() -> None:
        for turn in (0, 1):
            if turn and group.turns_together(message.nbytes):
                group.largest(0.0)
            action = dist.isend if here == turn else dist.irecv
            operation = dist.P2POp(action, message, group.ranks[there], group.group)
            for work in dist.batch_isend_irecv([operation]):
                work.wait()

    return send


def measure_overlap(group: Group) -> Overlap | None:
    """How an all-reduce and matrix multiplies slow each other on the slowest rank; None where this rank has no part."""
    if not group.takes_part:
        return None
    with group.watching(f"all_reduce of {OVERLAP_BYTES} bytes beside compute"):
        whole = _numbers(group, OVERLAP_BYTES // 4)
        left = torch.rand(OVERLAP_SIDE, OVERLAP_SIDE, device=group.device)

        def multiply(times: int) -> None:
            for _ in range(times):
                left @ left

        def alone() -> object:
            return collectives.all_reduce(whole, group.axis)

        alone()
        multiply(3)
        sending = group.largest(_median(group, alone))
        one = _median(group, lambda: multiply(8)) / 8
        times = max(1, round(OVERLAP_SHARE * sending / one))
        computing, total = _beside(group, whole, lambda: multiply(times))
        slower = (group.largest(computing / (times * one)), group.largest(total / sending))
    return Overlap(*(max(1.0, factor) for factor in slower))


def _median(group: Group, action: Callable[[], object]) -> float:
    return undisturbed([_timed(group, action) for _ in range(ROUNDS)]).seconds


def _beside(group: Group, whole: Tensor, compute: Callable[[], None]) -> tuple[float, float]:
    """Median seconds of the compute, and until both are done, when a collective runs beside it."""
    rounds: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        group.largest(0.0)
        watch = Stopwatch(group.device, wall=True)
        watch.lap()
        pending = collectives.all_reduce(whole, group.axis, waits=False)
        compute()
        watch.lap()
        collectives.wait(pending)
        watch.lap()
        first, second = watch.laps()
        rounds.append((first, first + second))
    return undisturbed([first for first, _ in rounds]).seconds, undisturbed([both for _, both in rounds]).seconds


def slowest(points: Sequence[Point | None]) -> Point | None:
    """Of the points of all ranks the one that took longest."""
    found = [point for point in points if point is not None]
    return max(found, key=lambda point: point.seconds, default=None)
