"""Predicted against measured steps on this machine: ``python -m tests.benchmarks.bench_profile [MODEL ...]``.

The machine is profiled for each model first (two processes, a thread each). Then plans that people would write, and the one
that autopar chooses, are predicted from the profile, and from the estimate alone, and measured: all in the same two
processes over gloo, one plan after the other in every round. Printed are each plan's seconds, the mean absolute percentage
error and Kendall's tau of the predictions, and how the chosen plan compares with the best of those that ran.

``--keep FOLDER`` keeps profiles and results: a model that is there is not measured again, so that models may be measured one
at a time, and an interrupted profile goes on. All models that are there are printed together, and ``--table
docs/profile_accuracy.md`` writes their page.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import autopar
from autopar.codegen import generate
from autopar.graph import OpGraph
from autopar.options import Parallelism, PlanOptions
from autopar.planner import plan_graph
from autopar.plans import Plan
from autopar.tracing import trace
from cost_models import Cluster, Profile
from tests.support.timed_plans import MODELS, NUM_RANKS, measure

HEAD = """\
# Steps predicted from a profile, and measured

Made by `python -m tests.benchmarks.bench_profile --table docs/profile_accuracy.md` on a machine with two cores, in two
processes over gloo with a thread and a core each (`autopar/binding.py`). A step is forward, backward and AdamW of the whole
batch, in float32; measured is the median of several rounds, in each of which every plan runs two steps, one plan after the
other, or short ones twice as many times as take 0.2 s; the second half counts. *Spread*: half of the range of the middle
half of the rounds, over the median. *From the profile*: predicted from operators, collectives and optimizer steps that were
measured before; no step of a plan was run for it. *Estimate alone*: from the catalogue's `CPU-core` and `Loopback`, of the
plan that is best under the same options then. Tau is of pairs of different plans of one model; a pair with equal predictions
counts neither way.
"""

PATIENCE_MINUTES = 6.0  # for each model, to wait for moments without other work
ROUNDS = 7
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
    """A plan's seconds: from the profile, from the estimate alone, and measured (the median, and its spread). ``program``: what
    tells its program from others."""

    model: str
    name: str
    program: str
    profiled: float
    estimated: float
    measured: float
    spread: float

    @property
    def error(self) -> float:
        return self.profiled / self.measured - 1


@dataclass(frozen=True)
class Result:
    """All rows of a model, and in what circumstances they were measured."""

    rows: list[Row]
    circumstances: str

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Result:
        document = json.loads(path.read_text(encoding="utf-8"))
        return cls([Row(**row) for row in document["rows"]], document["circumstances"])


def planned(graph: OpGraph, cluster: Cluster, options: PlanOptions, profile: Profile) -> tuple[Plan, float, float]:
    """A plan made with the profile, its predicted step, and what the estimate alone says of the plan of these options."""
    found = plan_graph(graph, cluster, options, profile=profile)
    estimated = plan_graph(graph, cluster, options)
    return found, *(float(plan.report()["predicted"]["step_seconds"]) for plan in (found, estimated))


def program_key(plan: Plan, graph: OpGraph) -> str:
    """The same for plans that are run by the same program, whose docstring alone names the plan."""
    _, _, code = generate(plan, graph).split('"""', 2)
    return hashlib.sha256(code.encode()).hexdigest()[:12]


def result_of(name: str, path: Path, arguments: argparse.Namespace) -> Result:
    """One model profiled (``path`` has what was measured of it before), all its cases and the plan that is chosen freely
    predicted and measured."""
    model, batch = MODELS[name]()
    cluster = Cluster.local(NUM_RANKS, kind="cpu")
    start = time.perf_counter()
    profile = autopar.profile(model, cluster, batch, path=path, budget_seconds=arguments.budget)
    took = time.perf_counter() - start
    graph = trace(model, batch).graph
    cases = [(case.name, case.options(graph.batch_size)) for case in CASES] + [(CHOSEN, PlanOptions())]
    found = []
    for case, options in cases:
        found.append(planned(graph, cluster, options, profile))
        print(f"planned {case}", file=sys.stderr, flush=True)
    measured = measure(name, [plan for plan, _, _ in found], graph, arguments.rounds, arguments.patience)
    rows = [
        Row(name, case, program_key(plan, graph), profiled, estimated, median, spread)
        for (case, _), (plan, profiled, estimated), median, spread in zip(
            cases, found, measured.medians, measured.spreads, strict=True
        )
    ]
    said = f"{len(profile.operators)} operators, profiled in {took:.0f} s; {measured.noise}."
    return Result(rows, said)


def mape(rows: Sequence[Row], predicted: str = "profiled") -> float:
    """The mean absolute percentage error, as a fraction."""
    return statistics.mean(abs(getattr(row, predicted) / row.measured - 1) for row in rows)


def tau(rows: Sequence[Row], predicted: str = "profiled") -> float:
    """Kendall's tau: of pairs of plans of one model, those that are ranked as measured less those that are not, over all."""
    score, pairs = 0, 0
    for one, other in itertools.combinations(rows, 2):
        if one.model == other.model and one.program != other.program:
            product = (getattr(one, predicted) - getattr(other, predicted)) * (one.measured - other.measured)
            score += (product > 0) - (product < 0)
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


def summary(results: Sequence[Result]) -> list[str]:
    """What the acceptance asks for, in lines."""
    rows = [row for result in results for row in result.rows]
    lines = [
        (
            f"{len({(row.model, row.program) for row in rows})} plans of {len(results)} models: mean absolute error "
            f"{mape(rows):.1%} from the profile ({mape(rows, 'estimated'):.1%} from the estimate alone), Kendall's tau "
            f"{tau(rows):.2f} ({tau(rows, 'estimated'):.2f})"
        )
    ]
    for result in results:
        longer, spread = regret(result.rows)
        best = min(result.rows, key=lambda row: row.measured)
        lines.append(
            f"{best.model}: error {mape(result.rows):.1%}, tau {tau(result.rows):.2f}; the chosen plan takes {longer:.1%} more "
            f"than the best that ran ({best.name}), with a spread of {spread:.1%}"
        )
    return lines


def section(result: Result) -> list[str]:
    """A model's part of the page."""
    said = result.circumstances
    return [f"## {result.rows[0].model}", "", f"{said[0].upper()}{said[1:]}", "", *table(result.rows), ""]


def measured_models(folder: Path, arguments: argparse.Namespace) -> list[Result]:
    """The results of all models that are asked for or in the folder."""
    found = []
    for name in MODELS:
        stem = name.replace(" ", "_")
        path = folder / f"{stem}.results.json"
        if name in arguments.models and not path.exists():
            result_of(name, folder / f"{stem}.profile.json", arguments).save(path)
        if path.exists():
            found.append(Result.load(path))
            print("\n".join(section(found[-1])), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--keep", type=Path, help="folder that keeps profiles and results")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--patience", type=float, default=PATIENCE_MINUTES, help="minutes for each model")
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds to measure a model's profile in")
    parser.add_argument("--table", type=Path, help="page to write")
    arguments = parser.parse_args()
    unknown = sorted({*arguments.models} - {*MODELS})
    if unknown:
        parser.error(f"unknown models {', '.join(unknown)}: there are {', '.join(MODELS)}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-profile-") as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        results = measured_models(folder, arguments)
    lines = summary(results)
    print("\n".join(lines))
    if arguments.table:
        page = [HEAD, *(f"* {line}" for line in lines), "", *(line for result in results for line in section(result))]
        arguments.table.write_text("\n".join(page), encoding="utf-8")


if __name__ == "__main__":
    main()
