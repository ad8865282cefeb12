"""Fits the figures of stacks and devices to published runs: ``python -m tests.benchmarks.fit_validation RUNS.csv ...``.

Enters: files of runs, of which only the calibration half is used (``splits``), and of it decoders without experts: of others
routing or convolutions are priced less well. Leaves: printed figures, which a person copies into
``autopar/validation/stacks.py`` and ``cost_models/catalogue.py``. The loss is the mean absolute relative error of the
seconds, averaged over the families of rows that have the stack (runs on one node and on several count as two families); the
search goes along one figure after another, up or down as long as that helps, in steps that shrink from round to round. Of
memory, the share and the bytes that make the mean error least are printed, from a grid.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from autopar.errors import AutoparError
from autopar.validation.dims import ModelDims
from autopar.validation.jobs import Job, job_of
from autopar.validation.prediction import Predictor
from autopar.validation.runs import Run, read_runs
from autopar.validation.splits import family_of, is_calibration
from cost_models import ClusterError

# What is fitted for each stack, with the factor of the first step. Figures of the device end in ``efficiency``.
FIGURES: Mapping[str, Mapping[str, float]] = {
    "Megatron-DeepSpeed": {
        "host_seconds": 1.1, "pass_seconds": 1.3, "light_passes": 1.15, "loss_passes": 1.2, "sent_passes": 1.15,
        "rank_seconds": 1.5,
    },
    "BigScience": {"sent_passes": 1.2, "rank_seconds": 1.5},
    "FSDP": {"overlap": 1.1, "light_passes": 1.2},
    "Alpa": {"light_passes": 1.2, "loss_passes": 1.3},
}  # fmt: skip
DEVICES: Mapping[str, tuple[str, ...]] = {"FSDP": ("sustained_efficiency",)}
GIB = 2**30
SHRINK = 0.6  # of a step, in logarithms, from round to round


@dataclass(frozen=True)
class Point:
    """A row of the calibration half: its job, its measured seconds, the family whose errors are averaged, and its measured
    memory (0 where there is none)."""

    job: Job
    seconds: float
    family: str
    memory_bytes: float


def points(runs: Iterable[Run]) -> list[Point]:
    """The rows of the calibration half that were timed and can be modelled."""
    found = []
    for run in runs:
        measured = run.measured()
        if measured is None or not is_calibration(run):
            continue
        try:
            job = job_of(run)
        except (AutoparError, ClusterError):
            continue
        if not isinstance(job.dims, ModelDims) or job.dims.experts:
            continue
        nodes = "one node" if len(job.cluster.nodes) == 1 else "several nodes"
        memory = (run.number("memory_gb") or 0.0) * GIB
        found.append(Point(job, measured[0], f"{family_of(run.source)}, {nodes}", memory))
    return found


def with_figures(job: Job, figures: Mapping[str, float]) -> Job:
    """The job with other figures of its stack and device."""
    own = {name: value for name, value in figures.items() if not name.endswith("efficiency")}
    devices = {name: value for name, value in figures.items() if name.endswith("efficiency")}
    node = job.cluster.nodes[0]
    device = replace(node.device, **devices)  # type: ignore[arg-type]
    cluster = (
        replace(job.cluster, nodes=(replace(node, device=device),) * len(job.cluster.nodes)) if devices else job.cluster
    )
    return replace(job, stack=replace(job.stack, **own), cluster=cluster)  # type: ignore[arg-type]


def loss(rows: Sequence[Point], figures: Mapping[str, float], predictor: Predictor) -> float:
    """The mean error of each family, averaged."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        predicted = predictor.predict(with_figures(row.job, figures)).seconds
        errors.setdefault(row.family, []).append(abs(predicted / row.seconds - 1))
    return mean(mean(some) for some in errors.values())


def fitted(
    rows: Sequence[Point], start: Mapping[str, float], factors: Mapping[str, float], rounds: int
) -> dict[str, float]:
    """The figures from ``start`` that suit the rows best."""
    best, predictor = dict(start), Predictor()
    least = loss(rows, best, predictor)
    for turn in range(rounds):
        for name, factor in factors.items():
            step = factor ** (SHRINK**turn)
            for move in (step, 1 / step):
                before = least
                while True:
                    tried = {**best, name: _within(name, best[name] * move)}
                    found = loss(rows, tried, predictor)
                    if found >= least - 1e-6:
                        break
                    best, least = tried, found
                if least < before:
                    break
        print(
            f"  round {turn + 1}: error {least:.4f}  " + "  ".join(f"{k}={v:.4g}" for k, v in best.items()), flush=True
        )
    return best


def _within(name: str, value: float) -> float:
    """Shares are at most one; passes are at least one, since they count against the fewest kernels or a lone collective."""
    if name.endswith("passes"):
        return max(value, 1.0)
    return min(value, 1.0) if name == "overlap" or name.endswith("efficiency") else value


def fitted_memory(rows: Sequence[Point]) -> tuple[float, float, float]:
    """The mean error, share and bytes (``Stack.memory_share``, ``memory_bytes``) that suit the rows' measured memory best."""
    predictor = Predictor()
    none = {"memory_share": 0.0, "memory_bytes": 0.0}
    pairs = [(predictor.predict(with_figures(row.job, none)).memory_bytes, row.memory_bytes) for row in rows]
    return min(
        (
            mean(abs((predicted * (1 + share / 100) + gib * GIB) / measured - 1) for predicted, measured in pairs),
            share / 100,
            gib,
        )
        for share in range(0, 41, 5)
        for gib in range(13)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUNS.csv")
    parser.add_argument("--rounds", type=int, default=4, metavar="N")
    parser.add_argument("--stack", action="append", choices=sorted(FIGURES), help="only this stack; may be repeated")
    arguments = parser.parse_args()
    rows = points(run for path in arguments.runs for run in read_runs(path))
    for name, factors in FIGURES.items():
        mine = [row for row in rows if row.job.stack.name == name]
        if not mine or (arguments.stack and name not in arguments.stack):
            continue
        stack = mine[0].job.stack
        print(f"{name}: {len(mine)} rows", flush=True)
        for kind in sorted({row.job.cluster.nodes[0].device.name for row in mine} if name in DEVICES else ()):
            some = [row for row in mine if row.job.cluster.nodes[0].device.name == kind]
            start = {field: getattr(some[0].job.cluster.nodes[0].device, field) for field in DEVICES[name]}
            print(f" {kind}: {len(some)} rows", flush=True)
            fitted(some, start, dict.fromkeys(start, 1.05), arguments.rounds)
        fitted(mine, {field: getattr(stack, field) for field in factors}, factors, arguments.rounds)
        if any(row.memory_bytes for row in mine):
            error, share, gib = fitted_memory([row for row in mine if row.memory_bytes])
            print(f"  memory: error {error:.4f}  memory_share={share:g}  memory_bytes={gib} GiB", flush=True)


if __name__ == "__main__":
    main()
