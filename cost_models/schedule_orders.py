"""Pipeline schedules as orders: which rank runs which part of which micro-batch, after what.

Enters: the name of a schedule, numbers of ranks, stages and micro-batches. Leaves: stages by rank, the order of compute
actions of each rank as in the schedules of torch.distributed.pipelining (PyTorch 2.13, ``schedules.py``), what that
library refuses, and micro-batches in flight. No seconds here: those are in ``schedule.py``.

``gpipe``: Huang et al. 2019. ``1f1b``: PipeDream-Flush, Narayanan et al. 2021 (arXiv 2006.09503). ``interleaved_1f1b``:
Narayanan et al. 2021 (Megatron-LM, arXiv 2104.04473). ``interleaved_zero_bubble`` (ZB1P) and ``zbv``: Qi et al. 2023
(arXiv 2401.10241). ``dualpipev``: DeepSeek-V3 (arXiv 2412.19437) in its V shape. ``single``: one stage, the loop of
gradient accumulation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

Schedule = Literal["single", "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
Kind = Literal["F", "B", "I", "W"]

SCHEDULES: tuple[Schedule, ...] = (
    "single",
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
)

# One stage a rank; stage r on rank r and 2R-1-r as well; backward never split into its two parts.
_ONE_STAGE_A_RANK = ("single", "gpipe", "1f1b")
V_SHAPED = ("zbv", "dualpipev")
WHOLE_BACKWARD = ("single", "gpipe", "1f1b", "interleaved_1f1b")


class Action(NamedTuple):
    """A rank's work on one micro-batch.

    ``kind`` is F (forward), B (whole backward), I (backward for the input) or W (backward for the weights).
    """

    kind: Kind
    stage: int
    micro_batch: int


def placement(schedule: str, num_ranks: int, num_stages: int) -> tuple[tuple[int, ...], ...]:
    """Stages by rank: in a loop (stage k on rank k mod R), or as a V (rank r has r and 2R-1-r).

    Raises:
        ValueError: an unknown schedule, or a number of stages that it cannot place.

    Example:
        >>> placement("zbv", 2, 4)
        ((0, 3), (1, 2))
    """
    if problem := _placement_problem(schedule, num_ranks, num_stages):
        raise ValueError(problem)
    if schedule in V_SHAPED:
        return tuple((rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks))
    return tuple(tuple(range(rank, num_stages, num_ranks)) for rank in range(num_ranks))


def problem_with(schedule: str, num_ranks: int, num_stages: int, num_micro_batches: int) -> str | None:
    """Why torch.distributed.pipelining cannot run this combination, with what to change; None where it can.

    The restrictions are those of the constructors in ``schedules.py`` of PyTorch 2.13.

    Raises:
        ValueError: an unknown schedule.

    Example:
        >>> problem_with("1f1b", 4, 4, 2)
        '1f1b refuses fewer micro-batches than stages: 2 for 4 stages; give at least 4'
    """
    if problem := _placement_problem(schedule, num_ranks, num_stages):
        return problem
    if num_micro_batches < 1:
        return f"{schedule}: num_micro_batches is {num_micro_batches}; give 1 or more"
    if schedule in ("1f1b", "dualpipev") and num_micro_batches < num_stages:
        return (
            f"{schedule} refuses fewer micro-batches than stages: {num_micro_batches} for {num_stages} stages; "
            f"give at least {num_stages}"
        )
    if schedule.startswith("interleaved"):
        num_rounds = max(1, num_micro_batches // num_ranks)
        if num_micro_batches % num_rounds:
            return (
                f"{schedule} runs {num_micro_batches} micro-batches on {num_ranks} ranks in {num_rounds} rounds, "
                f"which do not divide them; give a multiple of {num_ranks} micro-batches"
            )
    return None


def _placement_problem(schedule: str, num_ranks: int, num_stages: int) -> str | None:
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; known are {', '.join(SCHEDULES)}")
    if num_ranks < 1 or num_stages < 1:
        return f"{schedule}: num_ranks is {num_ranks} and num_stages is {num_stages}; give 1 or more of each"
    if schedule == "single" and num_stages != 1:
        return f"single has one stage on one rank, got {num_stages} stages; take a pipeline schedule"
    if schedule in _ONE_STAGE_A_RANK and num_stages != num_ranks:
        return f"{schedule} has one stage a rank, got {num_stages} stages on {num_ranks} ranks; give as many of each"
    if schedule in V_SHAPED and num_stages != 2 * num_ranks:
        return (
            f"{schedule} has exactly two stages a rank, got {num_stages} stages on {num_ranks} ranks; "
            f"give {2 * num_ranks} stages"
        )
    if num_stages % num_ranks:
        return f"{schedule}: {num_stages} stages do not divide among {num_ranks} ranks; give a multiple of {num_ranks}"
    return None


def orders(schedule: str, num_ranks: int, num_stages: int, num_micro_batches: int) -> list[list[Action]]:
    """The compute actions of each rank, in the order in which it runs them.

    A forward and a backward that DualPipeV lists as overlapped follow one another, as torch's runtime runs them.

    Raises:
        ValueError: a combination that ``problem_with`` refuses.

    Example:
        >>> [action.kind + str(action.micro_batch) for action in orders("1f1b", 2, 2, 2)[0]]
        ['F0', 'F1', 'B0', 'B1']
    """
    if problem := problem_with(schedule, num_ranks, num_stages, num_micro_batches):
        raise ValueError(problem)
    ranks = range(num_ranks)
    if schedule == "gpipe":
        return [_one_f_one_b(rank, num_micro_batches, num_micro_batches) for rank in ranks]
    if schedule in _ONE_STAGE_A_RANK:
        return [_one_f_one_b(rank, num_micro_batches, num_stages - 1 - rank) for rank in ranks]
    if schedule == "zbv":
        return [_zbv(rank, num_ranks, num_micro_batches) for rank in ranks]
    if schedule == "dualpipev":
        return [_dualpipev(rank, num_ranks, num_micro_batches) for rank in ranks]
    split = schedule == "interleaved_zero_bubble"
    return [_interleaved(rank, num_ranks, num_stages // num_ranks, num_micro_batches, split) for rank in ranks]


def _one_f_one_b(stage: int, num_micro_batches: int, num_warmup: int) -> list[Action]:
    """Warm-up forwards, then forward and backward in turn, then the backwards left (GPipe: all forwards warm up)."""
    actions = [Action("F", stage, index) for index in range(num_warmup)]
    for index in range(num_micro_batches):
        if num_warmup + index < num_micro_batches:
            actions.append(Action("F", stage, num_warmup + index))
        actions.append(Action("B", stage, index))
    return actions


def _interleaved(rank: int, num_ranks: int, num_local: int, num_micro_batches: int, split: bool) -> list[Action]:
    """Rounds of micro-batches through each local stage in turn; with ``split``, W follows I ``rank`` backwards later."""
    round_size = num_micro_batches // max(1, num_micro_batches // num_ranks)
    total = num_local * num_micro_batches
    num_warmup = min((num_local - 1) * round_size + (1 if split else 2) * (num_ranks - 1 - rank), total)

    def action(kind: Kind, step: int) -> Action:
        local = (step // round_size) % num_local
        if kind != "F":
            local = num_local - 1 - local
        micro_batch = step // (round_size * num_local) * round_size + step % round_size
        return Action(kind, local * num_ranks + rank, micro_batch)

    actions = [action("F", step) for step in range(num_warmup)]
    for step in range(total):
        if num_warmup + step < total:
            actions.append(action("F", num_warmup + step))
        actions.append(action("I" if split else "B", step))
        if split and step >= rank:
            actions.append(action("W", step - rank))
    if split:
        actions += [action("W", step) for step in range(max(total - rank, 0), total)]
    return actions


class _Counted:
    """A list of actions that numbers the micro-batches of each kind and stage as they are added."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: dict[tuple[Kind, int], int] = {}
        self._weights: deque[tuple[int, int]] = deque()

    def add(self, stage: int, *kinds: Kind) -> None:
        """Adds an action of each of these kinds; each is of the stage's first micro-batch that has not had it."""
        for kind in kinds:
            counter: tuple[Kind, int] = ("I" if kind == "B" else kind, stage)
            index = self._next.get(counter, 0)
            self._next[counter] = index + 1
            self.actions.append(Action(kind, stage, index))
            if kind == "I":
                self._weights.append((stage, index))

    def add_oldest_weight(self) -> None:
        """Adds the W of the oldest I of any stage that still wants it."""
        if self._weights:
            self.actions.append(Action("W", *self._weights.popleft()))


def _zbv(rank: int, num_ranks: int, num_micro_batches: int) -> list[Action]:
    """ZB-V (Qi et al. 2023, section 6). Made for at least 2R-1 micro-batches; those beyond the real ones are left out."""
    down, up = rank, 2 * num_ranks - 1 - rank
    num_made = max(2 * num_ranks - 1, num_micro_batches)
    made = _Counted()
    for _ in range(2 * (num_ranks - rank) - 1):
        made.add(down, "F")
    for _ in range(rank):
        made.add(up, "F")
        made.add(down, "F")
    for _ in range(num_ranks - rank):
        made.add(up, "F", "I", "W")
    num_down, num_up = 2 * num_ranks - 1 - rank, num_ranks  # forwards so far
    while num_up < num_down or num_down < num_made:
        if num_down < num_made:
            made.add(down, "F")
            num_down += 1
        made.add(down, "I", "W")
        made.add(up, "F", "I", "W")
        num_up += 1
    for _ in range(rank):
        made.add(down, "I")
        made.add(up, "I")
    for _ in range(num_ranks - rank):
        made.add(down, "I", "W")
    for _ in range(rank):
        made.add(up, "W")
    for _ in range(rank):
        made.add(down, "W")
    return [action for action in made.actions if action.micro_batch < num_micro_batches]


def _dualpipev(rank: int, num_ranks: int, num_micro_batches: int) -> list[Action]:
    """DualPipeV, step by step as in github.com/deepseek-ai/DualPipe."""
    down, up = rank, 2 * num_ranks - 1 - rank
    num_after = num_ranks - rank - 1
    made = _Counted()
    for _ in range(2 * num_after):
        made.add(down, "F")
    for _ in range(rank + 1):
        made.add(down, "F")
        made.add(up, "F")
    for _ in range(num_after):
        made.add(up, "I")
        made.add_oldest_weight()
        made.add(up, "F")
    for _ in range(num_micro_batches - 2 * num_ranks + rank + 1):
        made.add(down, "F")
        made.add(up, "B")
        made.add(up, "F")
        made.add(down, "B")
    for _ in range(num_after):
        made.add(up, "B")
        made.add(up, "F")
        made.add(down, "B")
    last: Kind = "B"  # the second half of the remaining backwards is split: its weights fill the end
    for index in range(2 * (rank + 1)):
        if index == rank + 1:
            last = "I"
        made.add(down if index % 2 else up, last)
    for _ in range(num_after):
        made.add_oldest_weight()
        made.add(down, last)
    for _ in range(rank + 1):
        made.add_oldest_weight()
    return made.actions


def check_orders(
    rank_orders: Sequence[Sequence[Action]], num_stages: int, num_ranks: int, num_micro_batches: int
) -> None:
    """Every stage and micro-batch is on one rank, as F B or F I W in this order.

    Raises:
        ValueError: the first that is not.
    """
    if len(rank_orders) != num_ranks:
        raise ValueError(f"orders of {len(rank_orders)} ranks for {num_ranks} ranks; give one for each")
    seen: dict[tuple[int, int], str] = {}
    holders: dict[int, int] = {}
    for rank, actions in enumerate(rank_orders):
        for kind, stage, micro_batch in actions:
            seen[stage, micro_batch] = seen.get((stage, micro_batch), "") + kind
            if holders.setdefault(stage, rank) != rank:
                raise ValueError(f"orders have stage {stage} on ranks {holders[stage]} and {rank}; keep it on one")
    wanted = {(stage, index) for stage in range(num_stages) for index in range(num_micro_batches)}
    wrong = [key for key in sorted(wanted | set(seen)) if key not in wanted or seen.get(key) not in ("FB", "FIW")]
    if wrong:
        raise ValueError(
            f"orders run stage {wrong[0][0]}, micro-batch {wrong[0][1]} as {seen.get(wrong[0], '')!r}, for {num_stages} "
            f"stages and {num_micro_batches} micro-batches; give F B or F I W of each, in this order"
        )


def in_flight(schedule: str, num_ranks: int, num_stages: int, num_micro_batches: int) -> tuple[int, ...]:
    """Largest number of micro-batches whose activations each stage keeps at one time; from the order alone.

    With a split backward the inputs of a stage's operators live until its W, so a micro-batch counts until then.

    Example:
        >>> in_flight("1f1b", 4, 4, 8)
        (4, 3, 2, 1)
    """
    return peaks_of(orders(schedule, num_ranks, num_stages, num_micro_batches), num_stages)[0]


def peaks_of(rank_orders: Sequence[Sequence[Action]], num_stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Most micro-batches in flight of each stage, and of all stages of a rank together, from F until B or W."""
    alive, peaks, rank_peaks = [0] * num_stages, [0] * num_stages, []
    for actions in rank_orders:
        on_rank, peak = 0, 0
        for kind, stage, _ in actions:
            if kind == "F":
                on_rank += 1
                alive[stage] += 1
                peaks[stage] = max(peaks[stage], alive[stage])
                peak = max(peak, on_rank)
            elif kind != "I":
                on_rank -= 1
                alive[stage] -= 1
        rank_peaks.append(peak)
    return tuple(peaks), tuple(rank_peaks)
