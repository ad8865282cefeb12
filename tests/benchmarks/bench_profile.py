"""Predicted against measured steps on this machine: ``python -m tests.benchmarks.bench_profile [MODEL ...]``.

The machine is profiled for each model first (two processes, a thread each). Then plans that people would write, and the one
that autopar chooses, are predicted from the profile, and from the estimate alone, and measured: all in the same two
processes over gloo, one plan after the other in every round. Printed are each plan's seconds, the mean absolute percentage
error and Kendall's tau of the predictions, and how the chosen plan compares with the best of those that ran.

``--table docs/profile_accuracy.md`` writes the page; ``--profiles FOLDER`` keeps profiles for another time.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import autopar
from autopar.graph import OpGraph
from autopar.options import Parallelism, PlanOptions
from autopar.planner import plan_graph
from autopar.plans import Plan
from autopar.tracing import trace
from cost_models import Cluster, Profile
from tests.support.timed_plans import MODELS, NUM_RANKS, Measured, measure

HEAD = """\
# Steps predicted from a profile, and measured

Made by `python -m tests.benchmarks.bench_profile --table docs/profile_accuracy.md` on a machine with two cores, in two
processes over gloo with a thread each. A step is forward, backward and AdamW of the whole batch, in float32; measured is
the median of several rounds, in each of which every plan runs two steps, one plan after the other; the second step counts.
Steps are run at moments without other work on the machine as far as there are any. *Spread*: half of the range of the
middle half of the rounds, over the median. *From the profile*: predicted from operators, collectives and optimizer steps
that were measured before; no step of a plan was run for it. *Estimate alone*: from the catalogue's `CPU-core` and
`Loopback`, of the plan that is best under the same options then. Tau is of pairs of plans of one model.
"""

PATIENCE_MINUTES = 6.0  # for each model, to wait for moments without other work
ROUNDS = 5
BUDGET_SECONDS = 100.0
CHOSEN = "chosen"


@dataclass(frozen=True)
class Case:
    """A plan as people write it, in so many micro-batches."""

    name: str
    parallelism: Parallelism
    num_micro_batches: int = 1

    def options(self, batch_size: int) -> PlanOptions:
        size = batch_size // self.num_micro_batches
        return PlanOptions(parallelism=replace(self.parallelism, micro_batch_size=size))


CASES = (
    Case("data", Parallelism(pipeline=1, data=2, zero=0)),
    Case("data, 4 micro-batches", Parallelism(pipeline=1, data=2, zero=0), 4),
    Case("data, recomputing", Parallelism(pipeline=1, data=2, zero=0, recompute="full")),
    Case("ZeRO-1, 2 micro-batches", Parallelism(pipeline=1, data=2, zero=1), 2),
    Case("ZeRO-3", Parallelism(pipeline=1, data=2, zero=3)),
    Case("tensor", Parallelism(pipeline=1, tensor=2)),
    Case("tensor, 2 micro-batches", Parallelism(pipeline=1, tensor=2), 2),
    Case("1f1b, 2 micro-batches", Parallelism(pipeline=2, schedule="1f1b"), 2),
    Case("1f1b, 4 micro-batches", Parallelism(pipeline=2, schedule="1f1b"), 4),
    Case("gpipe, 8 micro-batches", Parallelism(pipeline=2, schedule="gpipe"), 8),
)


@dataclass(frozen=True)
class Row:
    """A plan's seconds: from the profile, from the estimate alone, and measured (the median, and its spread)."""

    model: str
    name: str
    profiled: float
    estimated: float
    measured: float
    spread: float

    @property
    def error(self) -> float:
        return self.profiled / self.measured - 1


def planned(graph: OpGraph, cluster: Cluster, options: PlanOptions, profile: Profile) -> tuple[Plan, float, float]:
    """A plan made with the profile, its predicted step, and what the estimate alone says of the plan of these options."""
    found = plan_graph(graph, cluster, options, profile=profile)
    estimated = plan_graph(graph, cluster, options)
    return found, *(float(plan.report()["predicted"]["step_seconds"]) for plan in (found, estimated))


def rows_of(name: str, profile: Profile, graph: OpGraph, rounds: int, minutes: float) -> tuple[list[Row], Measured]:
    """All cases of one model, and the plan that is chosen freely."""
    cluster = Cluster.local(NUM_RANKS, kind="cpu")
    cases = [(case.name, case.options(graph.batch_size)) for case in CASES] + [(CHOSEN, PlanOptions())]
    found = []
    for case, options in cases:
        found.append(planned(graph, cluster, options, profile))
        print(f"planned {case}", file=sys.stderr, flush=True)
    took = measure(name, [plan for plan, _, _ in found], graph, rounds, minutes)
    return [
        Row(name, case, profiled, estimated, median, spread)
        for (case, _), (_, profiled, estimated), median, spread in zip(
            cases, found, took.medians, took.spreads, strict=True
        )
    ], took


def mape(rows: Sequence[Row], predicted: str = "profiled") -> float:
    """The mean absolute percentage error, as a fraction."""
    return statistics.mean(abs(getattr(row, predicted) / row.measured - 1) for row in rows)


def tau(rows: Sequence[Row], predicted: str = "profiled") -> float:
    """Kendall's tau: of pairs of plans of one model, those that are ranked as measured less those that are not, over all."""
    score, pairs = 0.0, 0
    for one, other in itertools.combinations(rows, 2):
        if one.model == other.model:
            score += math.copysign(
                1.0, (getattr(one, predicted) - getattr(other, predicted)) * (one.measured - other.measured)
            )
            pairs += 1
    return score / pairs


def regret(rows: Sequence[Row]) -> tuple[float, float]:
    """How much longer the chosen plan takes than the best of those that ran, as a fraction, and the spread of both."""
    chosen = next(row for row in rows if row.name == CHOSEN)
    best = min(rows, key=lambda row: row.measured)
    return chosen.measured / best.measured - 1, chosen.spread + best.spread


def table(rows: Sequence[Row]) -> list[str]:
    """Rows of a Markdown table."""
    lines = ["| plan | measured | spread | from the profile | error | estimate alone |", "|---|---|---|---|---|---|"]
    return lines + [
        f"| {row.name} | {1e3 * row.measured:.1f} ms | {row.spread:.1%} | {1e3 * row.profiled:.1f} ms | {row.error:+.1%} | "
        f"{1e3 * row.estimated:.1f} ms |"
        for row in rows
    ]


def summary(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """What the acceptance asks for, in lines."""
    lines = [
        (
            f"{len(rows)} plans of {len(names)} models: mean absolute error {mape(rows):.1%} from the profile "
            f"({mape(rows, 'estimated'):.1%} from the estimate alone), Kendall's tau {tau(rows):.2f} "
            f"({tau(rows, 'estimated'):.2f})"
        )
    ]
    for name in names:
        mine = [row for row in rows if row.model == name]
        longer, spread = regret(mine)
        best = min(mine, key=lambda row: row.measured)
        lines.append(
            f"{name}: error {mape(mine):.1%}, tau {tau(mine):.2f}; the chosen plan takes {longer:.1%} more than the best "
            f"that ran ({best.name}), with a spread of {spread:.1%}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--profiles", type=Path, help="folder that keeps the profiles")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--patience", type=float, default=PATIENCE_MINUTES, help="minutes for each model")
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds to measure operators in")
    parser.add_argument("--table", type=Path, help="page to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    page: list[str] = []
    for name in arguments.models:
        model, batch = MODELS[name]()
        start = time.perf_counter()
        path = arguments.profiles / f"{name.replace(' ', '_')}.json" if arguments.profiles else None
        profile = autopar.profile(
            model, Cluster.local(NUM_RANKS, kind="cpu"), batch, path=path, budget_seconds=arguments.budget
        )
        took = time.perf_counter() - start
        mine, measured = rows_of(name, profile, trace(model, batch).graph, arguments.rounds, arguments.patience)
        rows += mine
        said = f"{len(profile.operators)} operators, profiled in {took:.0f} s; {measured.noise}."
        page += [f"## {name}", "", f"{said[0].upper()}{said[1:]}", "", *table(mine), ""]
        print("\n".join(page[-len(mine) - 5 :]), flush=True)
    lines = summary(rows, arguments.models)
    print("\n".join(lines))
    if arguments.table:
        arguments.table.write_text("\n".join([HEAD, *(f"* {line}" for line in lines), "", *page]), encoding="utf-8")


if __name__ == "__main__":
    main()
