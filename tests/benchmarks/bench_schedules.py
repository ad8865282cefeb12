"""Pipelines predicted and measured on two processes: ``python -m tests.benchmarks.bench_schedules [ranking|slowed]``.

``ranking``: plans that differ in schedule, cuts, micro-batches and recomputation are predicted in two ways, by the planner's
prices and by the simulator fed with what stages and messages take here, then measured: all in the same two processes over
gloo, a thread each, one plan after the other in every round, the second of two steps counting. Pairs predicted over 10%
apart should rank the same way.
``slowed``: rank 1 sleeps after every action for as long as the action took. The plan for two nodes of which one has half
the speed is measured against the even cut.

``--table docs/schedules.md`` writes both as a page, ``--layers`` and the like make a smaller model to try it out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from autopar.batching import at_batch
from autopar.codegen import generate
from autopar.graph import OpGraph
from autopar.options import Parallelism, PlanOptions
from autopar.planner import named_axes, plan_graph, rank_order
from autopar.plans import Plan, graphs_of
from autopar.search.evaluate import Evaluator
from autopar.search.space import Frame, Grid
from autopar.solver import solve
from autopar.tracing import trace
from cost_models import Cluster, CostModel, Hops, StageTimes, placement, simulate
from cost_models.hardware import Node
from tests.support.timed_pipelines import (
    DISTURBED,
    NUM_RANKS,
    ROUNDS,
    Size,
    add_sizes,
    make_model,
    measure,
    profiled,
    sent_bytes,
    size_of,
    slower,
)  # fmt: skip

APART = 1.1  # pairs predicted further apart than this must rank as they measure
SLOWED = 2.0  # the slowed rank takes so many times as long
ENOUGH = 1.2  # times by which the chosen cut should beat the even one
SPLIT = ("interleaved_zero_bubble", "zbv", "dualpipev")  # schedules that divide the backward

HEAD = """\
# Pipelines predicted and measured

Made by `python -m tests.benchmarks.bench_schedules --table docs/schedules.md` on a machine with two cores, in two processes
over gloo with a thread each. A step is forward, backward and AdamW of the whole batch, in float32; measured is the median
of {rounds} rounds, in each of which every plan runs two steps, one plan after the other; the second step counts, since what
is predicted is a step that follows its own like. Steps are run at moments without other work on the machine; one in which a
process waited for a core for more than {disturbed:.0%} of the time is run again.
{model}.

"""
RANKING = """\
## Ranking

*Prices*: what the planner predicts, from the catalogue's `CPU-core` and `Loopback`. *Profiled*: the same simulator with
what forward, backward and AdamW of each stage take in one process (seconds of its thread) at the plan's size of
micro-batch, and what a message takes between the two processes. Neither knows of the measured steps. *Blocks*: of each
stage, in the model's order. *Spread*: of the slowest and the fastest round, over the median.

"""
SLOW = """\
## A slowed rank

Rank 1 sleeps after every forward, backward and optimizer step for as long as it took. The planner is told of two nodes, the
second with half the FLOP/s and bandwidth, and that it is to be two pipeline ranks under 1F1B with eight micro-batches; it
chooses the cut and the order of the ranks. The even cut has that order too.

"""


@dataclass(frozen=True)
class Case:
    """A plan: schedule, eighths of the blocks in each stage, micro-batches, what every block computes again."""

    schedule: str
    shares: tuple[int, ...]
    num_micro_batches: int = 8
    recompute: str = "none"

    def __str__(self) -> str:
        again = "" if self.recompute == "none" else f", recompute {self.recompute}"
        return f"{self.schedule} {self.blocks} x{self.num_micro_batches}{again}"

    @property
    def blocks(self) -> str:
        return "+".join(map(str, self.shares))

    @property
    def profile(self) -> Case:
        """The case under the schedule in which its stages are profiled: one of its kind that keeps few micro-batches."""
        whole = "1f1b" if len(self.shares) == NUM_RANKS else "interleaved_1f1b"
        return replace(self, schedule="interleaved_zero_bubble" if self.schedule in SPLIT else whole)


CASES = (
    Case("gpipe", (4, 4)),
    Case("gpipe", (4, 4), 2),
    Case("1f1b", (4, 4)),
    Case("1f1b", (4, 4), 2),
    Case("1f1b", (4, 4), 16),
    Case("1f1b", (5, 3)),
    Case("1f1b", (2, 6)),
    Case("1f1b", (7, 1)),
    Case("1f1b", (4, 4), recompute="full"),
    Case("interleaved_1f1b", (2, 2, 2, 2)),
    Case("interleaved_zero_bubble", (4, 4)),
    Case("zbv", (2, 2, 2, 2)),
    Case("zbv", (1, 3, 3, 1)),
    Case("dualpipev", (2, 2, 2, 2)),
)


# -- models and plans --------------------------------------------------------------------------------------------------


def cuts_of(graph: OpGraph, shares: Sequence[int]) -> tuple[str, ...]:
    """The first operators of all stages but the first, when stages have these shares of the blocks."""
    (group,) = graph.block_groups
    ends = [len(group.blocks) * done // sum(shares) for done in itertools.accumulate(shares)]
    return tuple(group.blocks[end].operators[0] for end in ends[:-1])


def planned(graph: OpGraph, case: Case, cuts: Sequence[str], cluster: Cluster, order: tuple[int, ...]) -> tuple[Plan, float]:
    """The best plan of a case with its predicted step."""
    frame = Frame(Grid(NUM_RANKS, (1,), ("free",), order), case.num_micro_batches, case.schedule, len(cuts) + 1)
    options = PlanOptions(parallelism=Parallelism(recompute=case.recompute))
    evaluator = Evaluator(CostModel(cluster), options, solve)
    sized = at_batch(graph, graph.batch_size // case.num_micro_batches)
    best = evaluator.evaluate(frame, sized, cuts, evaluator.styles(frame)[0])
    assert best.fits, f"{case} does not fit"
    plan = Plan(
        model=graph.model,
        num_devices=NUM_RANKS,
        graph_fingerprint=graph.fingerprint,
        cluster_fingerprint=cluster.fingerprint(),
        options=options.to_json(),
        stages=tuple(stage.plan for stage in named_axes(best.stages)),
        schedule=case.schedule,
        num_micro_batches=case.num_micro_batches,
        cuts=tuple(cuts),
        batch_size=graph.batch_size,
        rank_order=rank_order(frame),
    )
    return plan, best.step_seconds


def simulated(case: Case, times: Sequence[StageTimes], num_bytes: Sequence[int], hops: Mapping[int, float]) -> float:
    """The step with profiled stages and messages."""
    seconds = tuple(hops[size] for size in num_bytes)
    found = simulate(case.schedule, times, Hops(seconds, seconds), NUM_RANKS, case.num_micro_batches)
    return found.step_seconds


# -- ranking -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A plan's seconds: predicted by prices, by profiled stages, and measured (the median, and all rounds)."""

    case: Case
    prices: float
    profiled: float
    measured: float
    rounds: tuple[float, ...] = ()


@dataclass(frozen=True)
class Ranking:
    """Rows, and in what circumstances they were measured."""

    rows: tuple[Row, ...]
    noise: str


def rank(size: Size, cases: Sequence[Case], minutes: float) -> Ranking:
    """Predict and measure all cases."""
    torch.set_num_threads(1)
    model, batch = make_model(size)
    graph = trace(model, batch).graph
    cluster = Cluster.local(NUM_RANKS)
    planned_all = [planned(graph, case, cuts_of(graph, case.shares), cluster, (0, 1)) for case in cases]
    plans = [plan for plan, _ in planned_all]
    found = measure(plans, graph, size, minutes)  # first: seconds of a thread, below, may be taken when others work too
    profiles: dict[Case, list[StageTimes]] = {}
    for case, plan in zip(cases, plans, strict=True):
        if case.profile not in profiles:
            other, _ = planned(graph, case.profile, plan.cuts, cluster, (0, 1))
            profiles[case.profile] = profiled(generate(other, graph), model, batch)
            print(f"profiled {case.profile}", file=sys.stderr, flush=True)
    rows = [
        Row(case, price, simulated(case, profiles[case.profile], sent_bytes(plan, graph), found.hops), median, tuple(all_))
        for case, (plan, price), median, all_ in zip(cases, planned_all, found.medians, found.seconds, strict=True)
    ]
    return Ranking(tuple(rows), found.noise)


def wrong_pairs(rows: Sequence[Row], predictor: str) -> tuple[int, list[tuple[Row, Row]]]:
    """How many pairs are predicted over 10% apart, and those of them that measure the other way round, faster predicted
    first."""
    pairs = [sorted(pair, key=lambda row: _predicted(row, predictor)) for pair in itertools.combinations(rows, 2)]
    apart = [(a, b) for a, b in pairs if _predicted(b, predictor) > APART * _predicted(a, predictor)]
    return len(apart), [(a, b) for a, b in apart if a.measured >= b.measured]


def _predicted(row: Row, predictor: str) -> float:
    return float(getattr(row, predictor))


def correlation(rows: Sequence[Row], predictor: str) -> float:
    """Spearman's rank correlation of predicted and measured seconds."""
    both = [_predicted(row, predictor) for row in rows], [row.measured for row in rows]
    places = [np.argsort(np.argsort(values)) for values in both]
    return float(np.corrcoef(places[0], places[1])[0, 1])


def ranking_text(ranking: Ranking) -> str:
    """The plans, fastest first, and how the predictions rank them, in Markdown."""
    rows = sorted(ranking.rows, key=lambda row: row.measured)
    lines = list(_table(rows))
    lines.append("")
    for predictor in ("prices", "profiled"):
        number, wrong = wrong_pairs(rows, predictor)
        lines.append(
            f"{predictor.capitalize()}: of {len(rows) * (len(rows) - 1) // 2} pairs {number} are predicted over "
            f"{APART - 1:.0%} apart, {number - len(wrong)} of these measure the same way round; rank correlation "
            f"{correlation(rows, predictor):.3f}."
        )
        lines += ["", *(_wrong_line(a, b, predictor) for a, b in wrong), *([""] if wrong else [])]
    lines.append(ranking.noise)
    return "\n".join(lines) + "\n"


COLUMNS = (
    "schedule", "blocks", "micro-batches", "recompute", "prices, s", "profiled, s", "measured, s", "prices / measured",
    "profiled / measured", "spread",
)  # fmt: skip


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|" + "---|" * len(COLUMNS)
    for row in rows:
        case = row.case
        spread = (max(row.rounds) - min(row.rounds)) / row.measured
        yield (
            f"| {case.schedule} | {case.blocks} | {case.num_micro_batches} | {case.recompute} | {row.prices:.3f} "
            f"| {row.profiled:.3f} | {row.measured:.3f} | {row.prices / row.measured:.3f} "
            f"| {row.profiled / row.measured:.3f} | {spread:.0%} |"
        )


def _wrong_line(fast: Row, slow: Row, predictor: str) -> str:
    ratios = _predicted(slow, predictor) / _predicted(fast, predictor), slow.measured / fast.measured
    return f"* {fast.case} before {slow.case}: predicted {ratios[0]:.3f} x, measured {ratios[1]:.3f} x"


# -- a slowed rank -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlowedRank:
    """The chosen plan and the even one: blocks by device rank, predicted and measured seconds."""

    schedule: str
    num_micro_batches: int
    operators: tuple[tuple[str, ...], ...]
    predicted: tuple[float, float]
    measured: tuple[float, float]
    noise: str

    @property
    def gain(self) -> float:
        return self.measured[1] / self.measured[0]


def unlike_nodes(factor: float = SLOWED) -> Cluster:
    """Two nodes of one process each on this machine, the second ``factor`` times as slow."""
    node = Cluster.local(NUM_RANKS).nodes[0]
    nodes = Node(node.device, 1, node.link), Node(slower(node.device, factor), 1, node.link)
    return Cluster(nodes, node.link, "two processes, the second one slowed")


def slow_rank(size: Size, minutes: float) -> SlowedRank:
    """The chosen cut against the even one, with rank 1 slowed."""
    model, batch = make_model(size)
    graph = trace(model, batch).graph
    cluster = unlike_nodes()
    forced = Parallelism(pipeline=NUM_RANKS, schedule="1f1b", micro_batch_size=size.batch // 8)
    chosen = plan_graph(graph, cluster, PlanOptions(parallelism=forced))
    order = chosen.rank_order or tuple(range(NUM_RANKS))
    case = Case(chosen.schedule, (1,) * len(chosen.stages), chosen.num_micro_batches)
    even, even_seconds = planned(graph, case, cuts_of(graph, case.shares), cluster, order)
    predicted = float(chosen.report()["predicted"]["step_seconds"]), even_seconds
    found = measure([chosen, even], graph, size, minutes, SLOWED)
    medians = found.medians
    described = tuple(_described(plan, graph, order) for plan in (chosen, even))
    return SlowedRank(
        chosen.schedule, chosen.num_micro_batches, described, predicted, (medians[0], medians[1]), found.noise
    )


def _described(plan: Plan, graph: OpGraph, order: Sequence[int]) -> tuple[str, ...]:
    """What each device rank has."""
    (group,) = graph.block_groups
    total = len(group.blocks[0].operators)
    inside = {name for block in group.blocks for name in block.operators}
    graphs = graphs_of(plan, graph)
    found = {}
    for place, stages in enumerate(placement(plan.schedule, NUM_RANKS, len(graphs))):
        counts = [sum(operator.id in inside for operator in graphs[stage].operators) / total for stage in stages]
        each = [f"stage {stage}: {count:.3g} blocks" for stage, count in zip(stages, counts, strict=True)]
        found[order[place]] = ", ".join(each)
    return tuple(found[rank] for rank in range(NUM_RANKS))


def slowed_text(found: SlowedRank) -> str:
    """The two plans in Markdown."""
    lines = [
        f"Chosen: {found.schedule}, {found.num_micro_batches} micro-batches.",
        "",
        "| plan | rank 0 | rank 1, slowed | predicted, s | measured, s |",
        "|---|---|---|---|---|",
    ]
    columns = ("chosen", "even"), found.operators, found.predicted, found.measured
    for name, has, predicted, measured in zip(*columns, strict=True):
        lines.append(f"| {name} | {has[0]} | {has[1]} | {predicted:.3f} | {measured:.3f} |")
    gains = f"{found.gain:.2f} x (predicted {found.predicted[1] / found.predicted[0]:.2f} x, wanted {ENOUGH} x)"
    return "\n".join([*lines, "", f"The chosen cut beats the even one by {gains}. {found.noise}"]) + "\n"


# -- the command -------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("ranking", "slowed"), help="only this part")
    parser.add_argument("--table", type=Path, help="where the page is written, as Markdown")
    parser.add_argument("--json", type=Path, help="keeps the text of the parts, for a page of parts run one by one")
    parser.add_argument("--patience", type=float, default=15.0, help="minutes to wait, in each part, for undisturbed steps")
    add_sizes(parser)
    arguments = parser.parse_args()
    size = size_of(arguments)
    print(f"{size}; load before: {os.getloadavg()[0]:.2f}", flush=True)
    texts: dict[str, str] = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    if arguments.part != "slowed":
        texts["ranking"] = ranking_text(rank(size, CASES, arguments.patience))
        _keep(texts, "ranking", arguments.json)
    if arguments.part != "ranking":
        texts["slowed"] = slowed_text(slow_rank(size, arguments.patience))
        _keep(texts, "slowed", arguments.json)
    if arguments.table:
        head = HEAD.format(rounds=ROUNDS, model=size, disturbed=DISTURBED)
        parts = [f"{start}{texts[part]}" for part, start in (("ranking", RANKING), ("slowed", SLOW)) if part in texts]
        arguments.table.write_text(head + "\n".join(parts))


def _keep(texts: Mapping[str, str], part: str, path: Path | None) -> None:
    print(texts[part], flush=True)
    if path:
        path.write_text(json.dumps(texts))


if __name__ == "__main__":
    main()
