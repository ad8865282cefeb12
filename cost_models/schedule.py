"""Seconds of one training step under a pipeline schedule: simulated, with its timeline, and bounded from below.

Enters: seconds of each stage and hop, the name of a schedule. Leaves: ``Simulation``, or seconds alone.

A rank has a compute stream, which runs its actions in the order of ``orders``, and a communication stream, which sends
results in the order in which they are made. With ``end`` of an action, ``sent`` of its message and ``work`` its seconds::

    start(a) = max(end(action before a on its rank), sent(message that a needs), sends that its rank waits for)
    sent(m)  = max(end(action that made m), sent(message before m on its rank), receive posted) + hop

so a message overlaps the sender's later computing. Neighbouring stages on one rank need no message. What is waited for
follows ``torch/distributed/pipelining/schedules.py`` of PyTorch 2.13, whose sends meet their receives:

* ``gpipe``, ``1f1b``: a receive is posted right before the action that needs it (``_step_microbatches``), hence after the
  action before: a message never overlaps the receiver's computing, and a stage's period under 1F1B is F + B + both hops.
  The first backward of GPipe waits for all forward sends; under 1F1B, between a forward and a backward the send is fused
  with the receive and both are waited for, and within warm-up and cool-down the send of two actions ago is.
* the others (``_PipelineScheduleRuntime``): a receive is posted as soon as the sender's action is listed, sends are waited
  for at the end of the step only: a message is assumed to wait for no receive.

The relations form a directed graph without cycles; its nodes are put in topological order once for each schedule and
size, and every simulation is one pass over them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import isfinite
from typing import Literal, NamedTuple

import numpy as np

from cost_models.schedule_orders import WHOLE_BACKWARD, Action, check_orders, orders, peaks_of, placement, problem_with

SpanKind = Literal["F", "B", "I", "W", "send", "once"]

_ROWS = {"F": 0, "B": 1, "I": 2, "W": 3}  # of the table of seconds; then sends of F, then sends of B and I
_SEND_ROWS = {"F": 4, "B": 5, "I": 5}


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one model stage (of each virtual stage its own) for a micro-batch of the usual size.

    Args:
        forward_seconds: the forward.
        backward_input_seconds: the backward's part that makes gradients of the stage's input.
        backward_weight_seconds: the backward's part that makes gradients of the weights; schedules that do not split the
            backward run both parts as one.
        once_seconds: what the stage does once a step (reduction of gradients, optimizer), when its rank has run its last
            action and its last send has ended; torch's own reduction may start a little earlier.
    """

    forward_seconds: float
    backward_input_seconds: float
    backward_weight_seconds: float
    once_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            _check_seconds(f"StageTimes.{name}", (seconds,))

    @property
    def whole_seconds(self) -> float:
        """Forward and backward of one micro-batch."""
        return self.forward_seconds + self.backward_input_seconds + self.backward_weight_seconds


@dataclass(frozen=True)
class Hops:
    """Seconds of one message between neighbouring stages k and k+1; one entry for each k.

    Args:
        forward_seconds: activations, k to k+1.
        backward_seconds: gradients, k+1 to k.
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_seconds("Hops.forward_seconds", self.forward_seconds)
        _check_seconds("Hops.backward_seconds", self.backward_seconds)
        if len(self.forward_seconds) != len(self.backward_seconds):
            raise ValueError(
                f"Hops has {len(self.forward_seconds)} forward and {len(self.backward_seconds)} backward entries; "
                "give one of each for every pair of neighbouring stages"
            )


class Span(NamedTuple):
    """What a rank did from ``start_seconds`` to ``end_seconds``; ``micro_batch`` is -1 for ``once``."""

    kind: SpanKind
    stage: int
    micro_batch: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Simulation:
    """One step of a schedule.

    Args:
        step_seconds: until the last rank is done.
        busy_seconds: by rank, computing and ``once``.
        bubble_fraction: 1 - sum of busy seconds / (ranks x step).
        peak_in_flight: by stage, most micro-batches whose forward has run and whose backward has not; with a split
            backward the inputs are kept until W, so W ends it.
        peak_in_flight_of_rank: by rank, most such pairs of stage and micro-batch at one time.
        timeline: by rank, spans by start; sends are on the rank that sends.
    """

    step_seconds: float
    busy_seconds: tuple[float, ...]
    bubble_fraction: float
    peak_in_flight: tuple[int, ...]
    peak_in_flight_of_rank: tuple[int, ...]
    timeline: tuple[tuple[Span, ...], ...]


class _Graph(NamedTuple):
    """Nodes in topological order: actions and messages. A predecessor of -1 is the start of the step.

    ``first``, ``second``, ``third`` are predecessors; ``cells`` indexes the flat table of seconds (kind x stage),
    ``micro_batches`` the fractions; ``last_nodes`` are each rank's last action and message.
    """

    first: list[int]
    second: list[int]
    third: list[int]
    cells: np.ndarray[tuple[int], np.dtype[np.int64]]
    micro_batches: np.ndarray[tuple[int], np.dtype[np.int64]]
    ranks: list[int]
    last_nodes: list[tuple[int, int]]
    rank_orders: Sequence[Sequence[Action]]


def simulate(
    schedule: str,
    stages: Sequence[StageTimes],
    hops: Hops | None,
    num_ranks: int,
    num_micro_batches: int,
    fractions: Sequence[float] | None = None,
    *,
    orders: Sequence[Sequence[Action]] | None = None,
) -> Simulation:
    """One step of the schedule; the module's docstring says what overlaps.

    Args:
        schedule: a name of ``SCHEDULES``.
        stages: in the model's order.
        hops: messages between neighbouring stages; None where they cost nothing.
        num_ranks: ranks of the pipeline.
        num_micro_batches: in the step.
        fractions: size of each micro-batch against the usual; multiplies seconds of stages and hops. Default: 1 each.
        orders: by rank, other orders than the schedule's own; the schedule then says only how messages are waited for.

    Raises:
        ValueError: a combination that ``problem_with`` refuses, lengths that differ, or orders that cannot be run.

    Example:
        >>> stage = StageTimes(1.0, 1.0, 1.0)
        >>> simulate("gpipe", [stage] * 4, None, num_ranks=4, num_micro_batches=8).step_seconds
        33.0
    """
    graph = _prepared(schedule, len(stages), num_ranks, num_micro_batches, orders)
    work = _work(graph, stages, hops, num_micro_batches, fractions)
    ends = _ends(graph, work)
    held = _stage_ranks([{action.stage for action in actions} for actions in graph.rank_orders])
    once = _once_by_rank(stages, held, num_ranks)
    finish = [max(ends[node], ends[message]) for node, message in graph.last_nodes]
    step_seconds = max(end + seconds for end, seconds in zip(finish, once))
    timeline = _timeline(graph, ends, len(stages), num_ranks)
    for rank, end in enumerate(finish):
        for stage in (stage for stage, holder in enumerate(held) if holder == rank and stages[stage].once_seconds):
            timeline[rank].append(Span("once", stage, -1, end, end := end + stages[stage].once_seconds))
    busy = tuple(
        sum(span.end_seconds - span.start_seconds for span in spans if span.kind != "send") for spans in timeline
    )
    by_stage, by_rank = peaks_of(graph.rank_orders, len(stages))
    return Simulation(
        step_seconds,
        busy,
        1.0 - sum(busy) / (num_ranks * step_seconds) if step_seconds else 0.0,
        by_stage,
        by_rank,
        tuple(tuple(spans) for spans in timeline),
    )


def step_seconds_only(
    schedule: str,
    stages: Sequence[StageTimes],
    hops: Hops | None,
    num_ranks: int,
    num_micro_batches: int,
    fractions: Sequence[float] | None = None,
) -> float:
    """``simulate(...).step_seconds``, without the rest and faster; same arguments and errors."""
    _check_runnable(schedule, len(stages), num_ranks, num_micro_batches)
    graph = _graph_of(schedule, num_ranks, len(stages), num_micro_batches, True)
    ends = _ends(graph, _work(graph, stages, hops, num_micro_batches, fractions))
    held = _stage_ranks(placement(schedule, num_ranks, len(stages)))
    once = _once_by_rank(stages, held, num_ranks)
    return max(max(ends[node], ends[message]) + once[rank] for rank, (node, message) in enumerate(graph.last_nodes))


def lower_bound_seconds(
    schedule: str,
    num_ranks: int,
    num_micro_batches: int,
    stage_seconds: Sequence[float],
    *,
    once_seconds: Sequence[float] | None = None,
    fractions: Sequence[float] | None = None,
) -> float:
    """No simulated step is shorter, however T = ``stage_seconds`` divide into F, I and W, and whatever the hops.

    Proof. Hops and waiting for messages only delay, so the longest path L through the orders and the passing on of
    micro-batches is a bound; seconds along a path are linear in F, I, W, so L is convex in them.

    1. *Rank*: rank r computes for W_r, the sum of T over its stages and micro-batches, then does its ``once``. Where the
       backward is whole (single, gpipe, 1f1b, interleaved_1f1b), its first action is the forward of stage r of the first
       micro-batch, after the forwards of all stages s < r, and its last action the backward of stage r of the last
       micro-batch, before the backwards of stages r-1 to j and the ``once`` of rank j, for any j <= r. Stages j to r-1
       add F times the first fraction and B times the last, at least T times the smaller. So the step takes at least
       W_r + G_r, with G_0 = once_0 and G_r = max(once_r, G_(r-1) + smaller fraction x T_(r-1)). With a split backward all
       of T may be W, which nothing waits for: there it is W_r + once_r.
    2. *Symmetry*, whole backward: read backwards in time, with F for B and micro-batch B-1-i for i, the orders are
       the same orders. Replace fractions i and B-1-i by the smaller of the two, which only shortens; then
       L(F, B) = L(B, F), and by convexity L(T/2, T/2) <= (L(F, B) + L(B, F)) / 2 = L(F, B). Every path continues to the
       last action of rank 0, whose ``once`` follows. This is the best bound that T alone permits: F = B = T/2 attains it.
       For equal stages it is (B + S - 1) T.

    With equal fractions gpipe's L(T/2, T/2) is sum of T + (B - 1) max T, which saves the simulation.

    Args:
        schedule: a name of ``SCHEDULES``.
        num_ranks: ranks of the pipeline.
        num_micro_batches: in the step.
        stage_seconds: by stage, forward and whole backward of one micro-batch.
        once_seconds: by stage, as in ``StageTimes``. Default: 0 each.
        fractions: as in ``simulate``.

    Raises:
        ValueError: a combination that ``problem_with`` refuses, or lengths that differ.

    Example:
        >>> lower_bound_seconds("1f1b", 4, 8, [3.0] * 4)
        33.0
    """
    num_stages = len(stage_seconds)
    _check_runnable(schedule, num_stages, num_ranks, num_micro_batches)
    _check_seconds("stage_seconds", stage_seconds)
    once = [0.0] * num_stages if once_seconds is None else once_seconds
    _check_seconds("once_seconds", once, num_stages)
    sizes = _sizes(fractions, num_micro_batches)
    held = placement(schedule, num_ranks, num_stages)
    rank_once = [sum(once[stage] for stage in stages) for stages in held]
    rank_work = [sum(sizes) * sum(stage_seconds[stage] for stage in stages) for stages in held]
    if schedule not in WHOLE_BACKWARD:
        return float(max(work + after for work, after in zip(rank_work, rank_once)))
    passing = [min(sizes[0], sizes[-1]) * seconds for seconds in stage_seconds[: num_ranks - 1]]
    symmetric = _symmetric_seconds(schedule, num_ranks, stage_seconds, sizes) + rank_once[0]
    return float(max(symmetric, _rank_bound_seconds(rank_work, rank_once, passing)))


def _rank_bound_seconds(work: Sequence[float], once: Sequence[float], passing: Sequence[float]) -> float:
    """Largest W_r + G_r of step 1 of the proof of ``lower_bound_seconds``."""
    after = once[0]
    bound = work[0] + after
    for rank in range(1, len(work)):
        after = max(once[rank], after + passing[rank - 1])
        bound = max(bound, work[rank] + after)
    return bound


def _symmetric_seconds(schedule: str, num_ranks: int, stage_seconds: Sequence[float], sizes: Sequence[float]) -> float:
    """Longest path with F = B = T/2 and without messages; step 2 of the proof of ``lower_bound_seconds``."""
    if schedule == "gpipe" and len(set(sizes)) == 1:
        return sizes[0] * (sum(stage_seconds) + (len(sizes) - 1) * max(stage_seconds))
    graph = _graph_of(schedule, num_ranks, len(stage_seconds), len(sizes), False)
    halves = [StageTimes(seconds / 2, seconds / 2, 0.0) for seconds in stage_seconds]
    smaller = [min(size, mirrored) for size, mirrored in zip(sizes, reversed(sizes))]
    return max(_ends(graph, _work(graph, halves, None, len(sizes), smaller)))


def _check_seconds(name: str, values: Sequence[float], length: int | None = None) -> None:
    for value in values:
        if not (isfinite(value) and value >= 0):
            raise ValueError(f"{name} has {value}; give finite seconds, 0 or more")
    if length is not None and len(values) != length:
        raise ValueError(f"{name} has {len(values)} entries, expected {length}; give one for each")


def _check_runnable(schedule: str, num_stages: int, num_ranks: int, num_micro_batches: int) -> None:
    if problem := problem_with(schedule, num_ranks, num_stages, num_micro_batches):
        raise ValueError(problem)


def _sizes(fractions: Sequence[float] | None, num_micro_batches: int) -> list[float]:
    sizes = [1.0] * num_micro_batches if fractions is None else [float(fraction) for fraction in fractions]
    _check_seconds("fractions", sizes, num_micro_batches)
    return sizes


def _stage_ranks(stages_of_rank: Sequence[Iterable[int]]) -> list[int]:
    """The rank of each stage."""
    ranks = {stage: rank for rank, stages in enumerate(stages_of_rank) for stage in stages}
    return [ranks[stage] for stage in sorted(ranks)]


def _once_by_rank(stages: Sequence[StageTimes], held: Sequence[int], num_ranks: int) -> list[float]:
    once = [0.0] * num_ranks
    for stage, rank in zip(stages, held):
        once[rank] += stage.once_seconds
    return once


def _prepared(
    schedule: str,
    num_stages: int,
    num_ranks: int,
    num_micro_batches: int,
    rank_orders: Sequence[Sequence[Action]] | None,
) -> _Graph:
    if rank_orders is None:
        _check_runnable(schedule, num_stages, num_ranks, num_micro_batches)
        return _graph_of(schedule, num_ranks, num_stages, num_micro_batches, True)
    check_orders(rank_orders, num_stages, num_ranks, num_micro_batches)
    return _build(schedule, rank_orders, num_stages, True)


@lru_cache(maxsize=16)
def _graph_of(schedule: str, num_ranks: int, num_stages: int, num_micro_batches: int, with_messages: bool) -> _Graph:
    return _build(schedule, orders(schedule, num_ranks, num_stages, num_micro_batches), num_stages, with_messages)


def _build(schedule: str, rank_orders: Sequence[Sequence[Action]], num_stages: int, with_messages: bool) -> _Graph:
    """The graph of the module's docstring. Action n has number n, in order of rank and place, its message N + n."""
    actions = list(chain.from_iterable(rank_orders))
    total = len(actions)
    preds: list[tuple[int, int, int]] = [(-1, -1, -1)] * (2 * total)
    makers: dict[tuple[bool, int, int], int] = {
        (kind == "F", stage, index): number for number, (kind, stage, index) in enumerate(actions) if kind != "W"
    }
    starts = np.cumsum([0] + [len(order) for order in rank_orders]).tolist()
    ranks = [rank for rank, order in enumerate(rank_orders) for _ in order]
    needs = [-1] * total  # the action or message that an action needs
    users: dict[int, int] = {}  # of a maker's message: the action that needs it
    for number, (kind, stage, index) in enumerate(actions):
        neighbour = stage - 1 if kind == "F" else stage + 1
        if kind != "W" and 0 <= neighbour < num_stages:
            maker = makers[kind == "F", neighbour, index]
            remote = with_messages and ranks[maker] != ranks[number]
            needs[number] = total + maker if remote else maker
            if remote:
                users[maker] = number
    meets = with_messages and schedule in ("gpipe", "1f1b")
    messages_of_rank = [-1] * len(rank_orders)
    for rank, start in enumerate(starts[:-1]):
        message = -1
        for number in range(start, starts[rank + 1]):
            before = number - 1 if number > start else -1
            waits = -1
            if meets and before >= 0:
                waits = _waited_send(schedule, actions, users, number, start)
            preds[number] = (before, needs[number], total + waits if waits >= 0 else -1)
            if number in users:
                user = users[number]
                posted = user - 1 if meets and user > starts[ranks[user]] else -1
                preds[total + number] = (number, message, posted)
                message = total + number
        messages_of_rank[rank] = message
    last_nodes = [(end - 1, message) for end, message in zip(starts[1:], messages_of_rank)]
    return _sorted_graph(rank_orders, preds, list(users), ranks, last_nodes, num_stages)


def _waited_send(schedule: str, actions: Sequence[Action], users: dict[int, int], number: int, start: int) -> int:
    """The action of the same rank whose message is waited for before this one under gpipe and 1f1b, or -1."""
    if actions[number].kind != actions[number - 1].kind:
        maker = number - 1
    elif schedule == "1f1b" and number - 2 >= start:
        maker = number - 2
    else:
        return -1
    return maker if maker in users else -1


def _sorted_graph(
    rank_orders: Sequence[Sequence[Action]],
    preds: list[tuple[int, int, int]],
    makers: Sequence[int],
    ranks: Sequence[int],
    last_nodes: Sequence[tuple[int, int]],
    num_stages: int,
) -> _Graph:
    """Kahn's topological order. Nodes 0 to N-1 are actions, N + n is the message of action n."""
    actions = list(chain.from_iterable(rank_orders))
    total = len(actions)
    nodes = [*range(total), *(total + maker for maker in makers)]
    followers: list[list[int]] = [[] for _ in range(2 * total)]
    missing = [0] * (2 * total)
    for node in nodes:
        for pred in preds[node]:
            if pred >= 0:
                followers[pred].append(node)
                missing[node] += 1
    ready = [node for node in nodes if not missing[node]]
    for node in ready:  # grows while it is read
        for follower in followers[node]:
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)
    if len(ready) != len(nodes):
        stuck = next(actions[node] for node in range(total) if missing[node])
        raise ValueError(
            f"orders wait for each other in a circle, {len(nodes) - len(ready)} actions and messages never start, "
            f"{stuck} among them; put the forward of each micro-batch before what waits for it on every rank"
        )
    places = [-1] * (2 * total + 1)  # the last one serves a predecessor of -1
    for place, node in enumerate(ready):
        places[node] = place
    made = [actions[node % total] for node in ready]
    rows = [(_ROWS if node < total else _SEND_ROWS)[action.kind] for node, action in zip(ready, made)]
    return _Graph(
        first=[places[preds[node][0]] for node in ready],
        second=[places[preds[node][1]] for node in ready],
        third=[places[preds[node][2]] for node in ready],
        cells=np.array(rows) * num_stages + np.array([action.stage for action in made]),
        micro_batches=np.array([action.micro_batch for action in made]),
        ranks=[ranks[node % total] for node in ready],
        last_nodes=[(places[action], places[message]) for action, message in last_nodes],
        rank_orders=rank_orders,
    )


def _work(
    graph: _Graph,
    stages: Sequence[StageTimes],
    hops: Hops | None,
    num_micro_batches: int,
    fractions: Sequence[float] | None,
) -> list[float]:
    """Seconds of each node. The table's rows: F, B, I, W, message of a forward, message of a backward."""
    num_hops = len(stages) - 1
    if hops is None:
        hops = Hops((0.0,) * num_hops, (0.0,) * num_hops)
    if len(hops.forward_seconds) != num_hops:
        raise ValueError(f"hops have {len(hops.forward_seconds)} entries for {len(stages)} stages; give {num_hops}")
    table = np.array(
        [
            [stage.forward_seconds for stage in stages],
            [stage.backward_input_seconds + stage.backward_weight_seconds for stage in stages],
            [stage.backward_input_seconds for stage in stages],
            [stage.backward_weight_seconds for stage in stages],
            [*hops.forward_seconds, 0.0],
            [0.0, *hops.backward_seconds],
        ]
    )
    sizes = np.array(_sizes(fractions, num_micro_batches))
    work: list[float] = (table.ravel()[graph.cells] * sizes[graph.micro_batches]).tolist()
    return work


def _ends(graph: _Graph, work: Sequence[float]) -> list[float]:
    """When each node ends, and 0 at the end of the list for the predecessor -1."""
    ends = [0.0] * (len(work) + 1)
    nodes = zip(graph.first, graph.second, graph.third, work)
    for place, (first, second, third, seconds) in enumerate(nodes):
        start, other, another = ends[first], ends[second], ends[third]
        if other > start:
            start = other
        if another > start:
            start = another
        ends[place] = start + seconds
    return ends


def _timeline(graph: _Graph, ends: Sequence[float], num_stages: int, num_ranks: int) -> list[list[Span]]:
    kinds: tuple[SpanKind, ...] = ("F", "B", "I", "W", "send", "send")
    timeline: list[list[Span]] = [[] for _ in range(num_ranks)]
    cells, micro_batches = graph.cells.tolist(), graph.micro_batches.tolist()
    starts = (max(ends[a], ends[b], ends[c]) for a, b, c in zip(graph.first, graph.second, graph.third))
    for rank, cell, index, start, end in zip(graph.ranks, cells, micro_batches, starts, ends):
        timeline[rank].append(Span(kinds[cell // num_stages], cell % num_stages, index, start, end))
    for spans in timeline:
        spans.sort(key=lambda span: span.start_seconds)
    return timeline
