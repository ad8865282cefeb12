"""Pipeline schedules: torch's own orders, published closed forms, hand arithmetic, and the proved bound."""

import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from cost_models import (
    SCHEDULES,
    Action,
    Hops,
    StageTimes,
    in_flight,
    lower_bound_seconds,
    orders,
    placement,
    problem_with,
    simulate,
    step_seconds_only,
)

TORCH_CLASSES = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}
KINDS = {
    torch_schedules.FORWARD: "F",
    torch_schedules.FULL_BACKWARD: "B",
    torch_schedules.BACKWARD_INPUT: "I",
    torch_schedules.BACKWARD_WEIGHT: "W",
}
WHOLE_BACKWARD = ("single", "gpipe", "1f1b", "interleaved_1f1b")


class FakeStage(SimpleNamespace):
    """What the constructors and ``_step_microbatches`` read of a stage; remembers what it was told to run."""

    def __init__(self, stage, num_ranks, num_stages):
        super().__init__(
            stage_index=stage,
            num_stages=num_stages,
            group_size=num_ranks,
            group_rank=0,
            submod=torch.nn.Identity(),
            done=[],
            perform_reduce_grad=lambda scale: None,
        )
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
            setattr(self, name, lambda index: [])

    def forward_one_chunk(self, index, *args, **kwargs):
        self.done.append(Action("F", self.stage_index, index))

    def backward_one_chunk(self, index, *args, **kwargs):
        self.done.append(Action("B", self.stage_index, index))


def torch_orders(schedule, num_ranks, num_stages, num_micro_batches):
    """Of the one-stage schedules what torch runs (``pipeline_order`` of its 1F1B numbers the last stage from 1)."""
    made = TORCH_CLASSES[schedule]
    if schedule in ("gpipe", "1f1b"):
        stages = [FakeStage(index, num_ranks, num_stages) for index in range(num_stages)]
        if num_stages != num_ranks:
            raise ValueError("one stage a rank")
        for stage in stages:
            runner = made(stage, num_micro_batches)
            runner._initialize_stage = lambda *args, **kwargs: None
            runner._step_microbatches()
        return [stage.done for stage in stages]
    stages = [FakeStage(index, num_ranks, num_stages) for index in range(num_stages // num_ranks)]
    listed = made(stages, num_micro_batches).pipeline_order
    return [
        [
            Action(KINDS[part.computation_type], part.stage_index, part.microbatch_index)
            for action in listed[rank]
            if action is not None
            for part in (action.sub_actions or (action,))
        ]
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize("schedule", TORCH_CLASSES)
def test_orders_and_refusals_are_those_of_torch(schedule):
    num_compared = 0
    for num_ranks in (1, 2, 3, 4, 5):
        for num_local in (1, 2, 3):
            for num_micro_batches in (1, 2, 3, 4, 5, 6, 8, 10, 12, 13):
                size = (num_ranks, num_ranks * num_local, num_micro_batches)
                problem = problem_with(schedule, *size)
                try:
                    expected = torch_orders(schedule, *size)
                except ValueError:
                    assert problem is not None, size
                    continue
                assert problem is None, size
                assert orders(schedule, *size) == expected, size
                num_compared += 1
    assert num_compared >= 20


def test_placement_is_a_loop_or_a_v():
    assert placement("interleaved_1f1b", 2, 6) == ((0, 2, 4), (1, 3, 5))
    assert placement("dualpipev", 3, 6) == ((0, 5), (1, 4), (2, 3))
    assert orders("single", 1, 1, 2) == [[Action(kind, 0, index) for index in (0, 1) for kind in "FB"]]


@pytest.mark.parametrize(
    ("schedule", "size", "fact"),
    [
        ("single", (1, 2, 4), "one stage on one rank, got 2"),
        ("gpipe", (2, 4, 4), "one stage a rank, got 4 stages on 2 ranks"),
        ("1f1b", (4, 4, 3), "3 for 4 stages"),
        ("dualpipev", (2, 4, 3), "3 for 4 stages"),
        ("zbv", (2, 6, 4), "exactly two stages a rank, got 6"),
        ("interleaved_1f1b", (2, 4, 5), "in 2 rounds"),
        ("interleaved_1f1b", (2, 5, 4), "5 stages do not divide"),
        ("gpipe", (2, 2, 0), "num_micro_batches is 0"),
        ("gpipe", (0, 0, 1), "num_ranks is 0"),
    ],
)
def test_a_combination_that_cannot_run_says_why(schedule, size, fact):
    problem = problem_with(schedule, *size)
    assert fact in problem and ("; give" in problem or "; take" in problem)
    with pytest.raises(ValueError, match=r"; (give|take) "):
        orders(schedule, *size)
    with pytest.raises(ValueError, match=r"; (give|take) "):
        lower_bound_seconds(schedule, size[0], size[2], [1.0] * size[1])


def test_values_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="unknown schedule 'zb'"):
        problem_with("zb", 1, 1, 1)
    with pytest.raises(ValueError, match=r"forward_seconds has -1.0"):
        StageTimes(-1.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="2 forward and 1 backward"):
        Hops((1.0, 1.0), (1.0,))
    stages = [StageTimes(1.0, 1.0, 1.0)] * 2
    with pytest.raises(ValueError, match="hops have 2 entries for 2 stages"):
        simulate("gpipe", stages, Hops((1.0, 1.0), (1.0, 1.0)), 2, 2)
    with pytest.raises(ValueError, match="fractions has 1 entries, expected 2"):
        simulate("gpipe", stages, None, 2, 2, [1.0])


def test_orders_that_cannot_run_are_refused():
    stages = [StageTimes(1.0, 1.0, 1.0)] * 2
    good = orders("gpipe", 2, 2, 1)
    with pytest.raises(ValueError, match="as 'BF'"):
        simulate("gpipe", stages, None, 2, 1, orders=[good[0][::-1], good[1]])
    with pytest.raises(ValueError, match="as ''"):
        simulate("gpipe", stages, None, 2, 1, orders=[good[0], []])
    late = [Action("F", 0, 1), Action("F", 0, 0), Action("B", 0, 0), Action("B", 0, 1)]
    early = [Action("F", 1, 0), Action("B", 1, 0), Action("F", 1, 1), Action("B", 1, 1)]
    assert simulate("interleaved_1f1b", stages, None, 2, 2, orders=[late, early]).step_seconds == 10.0
    with pytest.raises(ValueError, match="circle"):  # stage 1 receives 0 first, which stage 0 sends after 1
        simulate("gpipe", stages, None, 2, 2, orders=[late, early])
    circle = [[Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)]]
    circle.append([Action("F", 1, 1), Action("B", 1, 1), Action("F", 1, 0), Action("B", 1, 0)])
    with pytest.raises(ValueError, match="circle"):
        simulate("gpipe", stages, None, 2, 2, orders=circle)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(1, 3), (2, 2), (4, 8), (5, 7)])
def test_equal_stages_have_the_published_bubble(schedule, num_stages, num_micro_batches):
    """(B+S-1)(f+b) and (S-1)/(B+S-1): Huang et al. 2019, section 2.3; Narayanan et al. 2021 (PipeDream-Flush)."""
    run = simulate(schedule, [StageTimes(1.0, 1.5, 0.5)] * num_stages, None, num_stages, num_micro_batches)
    num_slots = num_micro_batches + num_stages - 1
    assert run.step_seconds == 3.0 * num_slots
    assert run.bubble_fraction == pytest.approx((num_stages - 1) / num_slots)
    assert run.busy_seconds == (3.0 * num_micro_batches,) * num_stages
    assert lower_bound_seconds(schedule, num_stages, num_micro_batches, [3.0] * num_stages) == 3.0 * num_slots


@pytest.mark.parametrize(("num_ranks", "num_local", "num_rounds"), [(2, 2, 2), (4, 2, 2), (4, 4, 3), (3, 3, 1)])
def test_interleaving_divides_the_bubble(num_ranks, num_local, num_rounds):
    """Bubble (S-1)(f+b)/v with f and b of a whole rank: Narayanan et al. 2021 (Megatron-LM), section 2.2.2."""
    num_stages, num_micro_batches = num_ranks * num_local, num_ranks * num_rounds
    run = simulate("interleaved_1f1b", [StageTimes(1.0, 1.0, 1.0)] * num_stages, None, num_ranks, num_micro_batches)
    ideal = num_micro_batches * 3.0 * num_local
    assert run.step_seconds == ideal + (num_ranks - 1) * 3.0
    bound = lower_bound_seconds("interleaved_1f1b", num_ranks, num_micro_batches, [3.0] * num_stages)
    assert bound == run.step_seconds


@pytest.mark.parametrize(("forward", "backward", "weight"), [(1.0, 1.0, 1.0), (2.0, 2.5, 1.5), (1.0, 1.0, 0.5)])
@pytest.mark.parametrize("num_ranks", [2, 4, 5])
def test_zero_bubble_with_one_stage_a_rank_is_zb_h1(num_ranks, forward, backward, weight):
    """Bubble (S-1)(T_F + T_B - T_W): Qi et al. 2023, table 1."""
    stages, num_micro_batches = [StageTimes(forward, backward, weight)] * num_ranks, 3 * num_ranks
    run = simulate("interleaved_zero_bubble", stages, None, num_ranks, num_micro_batches)
    bubble = (num_ranks - 1) * (forward + backward - weight)
    assert run.step_seconds == pytest.approx(num_micro_batches * (forward + backward + weight) + bubble)
    assert max(run.peak_in_flight) == num_ranks  # no more than 1F1B


@pytest.mark.parametrize("num_micro_batches", [4, 6, 9])
def test_micro_batches_in_flight(num_micro_batches):
    """GPipe keeps all, 1F1B S - s (Narayanan et al. 2021, section 2.2.1)."""
    size = (4, 4, num_micro_batches)
    assert in_flight("gpipe", *size) == (num_micro_batches,) * 4
    assert in_flight("1f1b", *size) == (4, 3, 2, 1)
    assert in_flight("single", 1, 1, num_micro_batches) == (1,)
    for schedule in ("gpipe", "1f1b"):
        run = simulate(schedule, [StageTimes(1.0, 1.0, 1.0)] * 4, None, 4, num_micro_batches)
        assert run.peak_in_flight == run.peak_in_flight_of_rank == in_flight(schedule, *size)


def test_a_split_backward_keeps_a_micro_batch_until_its_weights():
    explicit = [[Action(kind, 0, index) for kind in "FIW" for index in range(3)]]
    run = simulate("zbv", [StageTimes(1.0, 1.0, 1.0)], None, 1, 3, orders=explicit)
    assert run.peak_in_flight == run.peak_in_flight_of_rank == (3,)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_zb_v_keeps_as_much_on_each_rank_as_1f1b_on_its_first(num_ranks):
    """Qi et al. 2023, section 6: activations of p micro-batches on every worker, that is 2p of its half stages."""
    stages = [StageTimes(1.0, 1.0, 1.0)] * (2 * num_ranks)
    run = simulate("zbv", stages, None, num_ranks, 4 * num_ranks)
    assert run.peak_in_flight_of_rank == (2 * num_ranks,) * num_ranks


def test_gpipe_by_hand():
    """Two stages, two micro-batches: F 2 and 3, B 4 and 5 (both parts), hop 1 forward and 2 backward, once 0.5 and 10.

    Stage 0: F0 0-2, F1 2-4. Message 0 2-3, stage 1: F0 3-6; only then is the receive of message 1 posted: 6-7, F1 7-10.
    Stage 1: B0 10-15, B1 15-20, once 20-30. Messages 15-17, and 21-23 as stage 0 posts its receive after B0 17-21.
    Stage 0: B1 23-27, once 27-27.5.
    """
    stages = [StageTimes(2.0, 3.0, 1.0, 0.5), StageTimes(3.0, 1.0, 4.0, 10.0)]
    run = simulate("gpipe", stages, Hops((1.0,), (2.0,)), 2, 2)
    assert [tuple(span) for span in run.timeline[0]] == [
        ("F", 0, 0, 0.0, 2.0),
        ("F", 0, 1, 2.0, 4.0),
        ("send", 0, 0, 2.0, 3.0),
        ("send", 0, 1, 6.0, 7.0),
        ("B", 0, 0, 17.0, 21.0),
        ("B", 0, 1, 23.0, 27.0),
        ("once", 0, -1, 27.0, 27.5),
    ]
    assert [(span.kind, span.start_seconds, span.end_seconds) for span in run.timeline[1]] == [
        ("F", 3.0, 6.0),
        ("F", 7.0, 10.0),
        ("B", 10.0, 15.0),
        ("B", 15.0, 20.0),
        ("send", 15.0, 17.0),
        ("send", 21.0, 23.0),
        ("once", 23.0, 33.0),
    ]
    assert run.step_seconds == 33.0
    assert run.busy_seconds == (12.5, 26.0)
    assert run.bubble_fraction == pytest.approx(1 - 38.5 / 66.0)


def test_1f1b_by_hand():
    """Two stages, three micro-batches, all F and B 1 (B 0.5 + 0.5), hops 1: each exchange holds up both stages.

    Stage 0: F0 0-1, F1 1-2. Stage 1: F0 2-3, B0 3-4. Exchange of F1 and B0 4-5. Stage 0: B0 5-6; stage 1: F1 5-6, B1 6-7.
    Stage 0: F2 6-7. Exchange 7-8. Stage 0: B1 8-9; stage 1: F2 8-9, B2 9-10, message 10-11, stage 0: B2 11-12.
    """
    run = simulate("1f1b", [StageTimes(1.0, 0.5, 0.5)] * 2, Hops((1.0,), (1.0,)), 2, 3)
    starts = [[(span.kind, span.start_seconds) for span in spans if span.kind != "send"] for spans in run.timeline]
    assert starts[0] == [("F", 0.0), ("F", 1.0), ("B", 5.0), ("F", 6.0), ("B", 8.0), ("B", 11.0)]
    assert starts[1] == [("F", 2.0), ("B", 3.0), ("F", 5.0), ("B", 6.0), ("F", 8.0), ("B", 9.0)]
    assert run.step_seconds == 12.0


def test_messages_of_the_runtime_overlap_the_receiver_and_queue_on_the_sender():
    """Interleaved order with one stage a rank: F 1 each, hop 3: the messages of F0 and F1 end at 4 and 7."""
    run = simulate("interleaved_1f1b", [StageTimes(1.0, 1.0, 0.0)] * 2, Hops((3.0,), (3.0,)), 2, 2)
    sends = [(span.start_seconds, span.end_seconds) for span in run.timeline[0] if span.kind == "send"]
    assert sends == [(1.0, 4.0), (4.0, 7.0)]


def test_neighbours_on_one_rank_need_no_message():
    stages = [StageTimes(1.0, 1.0, 1.0)] * 4
    free, turn = Hops((0.0,) * 3, (0.0,) * 3), Hops((0.0, 9.0, 0.0), (0.0, 9.0, 0.0))
    assert simulate("zbv", stages, turn, 2, 4).step_seconds == simulate("zbv", stages, free, 2, 4).step_seconds


def test_unequal_micro_batches():
    """GPipe by hand, F = B = 1 on both stages, sizes 1 and 3: F0 0-1, F1 1-4; F0 1-2, F1 4-7, B0 7-8, B1 8-11; B1 11-14."""
    run = simulate("gpipe", [StageTimes(1.0, 1.0, 0.0)] * 2, None, 2, 2, [1.0, 3.0])
    assert run.step_seconds == 14.0
    assert run.busy_seconds == (8.0, 8.0)


@st.composite
def instances(draw):
    schedule = draw(st.sampled_from(SCHEDULES))
    num_ranks = 1 if schedule == "single" else draw(st.integers(1, 5))
    num_local = 2 if schedule in ("zbv", "dualpipev") else draw(st.integers(1, 3)) if "leaved" in schedule else 1
    num_micro_batches = draw(st.integers(1, 12))
    num_stages = num_ranks * num_local
    if problem_with(schedule, num_ranks, num_stages, num_micro_batches):
        num_micro_batches = num_stages * draw(st.integers(1, 2))
    seconds = st.one_of(st.just(0.0), st.just(1.0), st.floats(0.001, 10.0))
    stages = draw(st.lists(st.builds(StageTimes, *[seconds] * 4), min_size=num_stages, max_size=num_stages))
    hops = [tuple(draw(seconds) for _ in range(num_stages - 1)) for _ in range(2)]
    sizes = draw(st.none() | st.lists(seconds, min_size=num_micro_batches, max_size=num_micro_batches))
    return schedule, stages, Hops(*hops), num_ranks, num_micro_batches, sizes


def bound_of(schedule, stages, num_ranks, num_micro_batches, sizes):
    once = [stage.once_seconds for stage in stages]
    whole = [stage.whole_seconds for stage in stages]
    return lower_bound_seconds(schedule, num_ranks, num_micro_batches, whole, once_seconds=once, fractions=sizes)


@settings(max_examples=250, deadline=None)
@given(instances())
def test_no_step_is_shorter_than_the_bound_and_what_runs_is_consistent(instance):
    schedule, stages, _, num_ranks, num_micro_batches, sizes = instance
    run = simulate(*instance)
    tolerance = 1e-9 * (1 + run.step_seconds)
    assert bound_of(schedule, stages, num_ranks, num_micro_batches, sizes) <= run.step_seconds + tolerance
    assert step_seconds_only(*instance) == run.step_seconds
    assert simulate(schedule, stages, None, num_ranks, num_micro_batches, sizes).step_seconds <= (
        run.step_seconds + tolerance
    )
    assert run.peak_in_flight == in_flight(schedule, num_ranks, len(stages), num_micro_batches)
    assert run.step_seconds == pytest.approx(max(span.end_seconds for spans in run.timeline for span in spans))
    for spans in run.timeline:
        for streams in ([s for s in spans if s.kind == "send"], [s for s in spans if s.kind != "send"]):
            ordered = sorted(streams, key=lambda span: (span.start_seconds, span.end_seconds))
            assert all(a.end_seconds <= b.start_seconds + tolerance for a, b in pairwise(ordered))


@settings(max_examples=60, deadline=None)
@given(instances())
def test_the_bound_is_attained_where_forward_and_backward_take_equally_long(instance):
    schedule, stages, _, num_ranks, num_micro_batches, _ = instance
    if schedule in WHOLE_BACKWARD:
        halves = [StageTimes(stage.whole_seconds / 2, stage.whole_seconds / 2, 0.0) for stage in stages]
        best = simulate(schedule, halves, None, num_ranks, num_micro_batches).step_seconds
        bound = bound_of(schedule, halves, num_ranks, num_micro_batches, None)
        assert bound == pytest.approx(best)


@pytest.mark.parametrize("schedule", WHOLE_BACKWARD)
def test_orders_are_their_own_mirror_image(schedule):
    """Step 2 of the bound's proof: read backwards, with F for B and the last micro-batch for the first."""
    for num_ranks in (1, 2, 3, 4):
        for num_local in (1, 2, 3):
            for num in (1, 2, 3, 4, 6, 8, 10):
                size = (num_ranks, num_ranks * num_local, num)
                if problem_with(schedule, *size) is None:
                    for actions in orders(schedule, *size):
                        mirrored = [
                            Action("B" if a.kind == "F" else "F", a.stage, num - 1 - a.micro_batch) for a in actions
                        ]
                        assert mirrored[::-1] == actions, size


def _fastest(num_stages: int, num_micro_batches: int) -> tuple[float, float]:
    """Step, and the least processor seconds of three simulations."""
    stages, seconds = [StageTimes(1.0, 1.0, 1.0)] * num_stages, []
    for _ in range(3):
        started = time.process_time()
        step = simulate("1f1b", stages, None, num_stages, num_micro_batches).step_seconds
        seconds.append(time.process_time() - started)
    return step, min(seconds)


def test_simulation_time_does_not_grow_as_the_square_of_actions():
    _, few = _fastest(32, 128)
    step, many = _fastest(64, 512)  # eight times the actions: 64 times the seconds if each were compared with each
    assert many < 40 * few
    assert step == (512 + 63) * 3.0
