"""Files of published runs -> predictions beside measurements, as JSON or as a table.

Enters: paths. Leaves: a document ``{"sources": [...], "runs": [...]}`` with fractions, and its text. Every row is in it; one
that cannot be modelled has its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from autopar.errors import AutoparError
from autopar.validation.jobs import Job, NotModelled, job_of
from autopar.validation.prediction import Prediction, Predictor
from autopar.validation.runs import Run, read_runs
from autopar.validation.splits import is_calibration
from autopar.validation.statistics import Outcome, as_run, by_source

Progress = Callable[[str], None]

HEADER = (
    "source",
    "rows",
    "timed",
    "MAPE",
    "median",
    "95%",
    "tau",
    "memory",
    "median",
    "OOM",
    "foreseen",
    "false alarms",
)


def validate(
    paths: Sequence[str], held_out_only: bool = False, progress: Progress = lambda message: None
) -> list[Outcome]:
    """Predicts the rows of some files. ``held_out_only``: without the rows that constants were fitted on.

    Raises InputError for a file that cannot be read as a whole; what is wrong with a row is in its outcome.
    """
    runs = [run for path in paths for run in read_runs(path)]
    chosen = [run for run in runs if not (held_out_only and is_calibration(run))]
    return outcomes(chosen, progress)


def outcomes(runs: Iterable[Run], progress: Progress = lambda message: None) -> list[Outcome]:
    """Predicts rows; like ones share their prices."""
    predictor = Predictor()
    found: list[Outcome] = []
    for run in runs:
        if len(found) % 100 == 0:
            progress(f"row {len(found) + 1}: {run.source}, {run.text('model')}")
        found.append(_outcome(run, predictor))
    return found


def _outcome(run: Run, predictor: Predictor) -> Outcome:
    held_out = not is_calibration(run)
    try:
        job = job_of(run)
        prediction = predictor.predict(job)
    except (AutoparError, ValueError) as error:  # ClusterError, and what a schedule refuses, are ValueErrors
        return Outcome(run, held_out, reason=str(error))
    seconds, column = run.measured() or (None, None)
    return Outcome(
        run,
        held_out,
        measured_seconds=seconds,
        measured_from=column,
        predicted_seconds=prediction.seconds,
        predicted_bytes=prediction.memory_bytes,
        device_bytes=job.device_bytes,
        plan=_plan(job, prediction),
        assumed=_assumed(job, prediction),
    )


def _plan(job: Job, prediction: Prediction) -> str:
    """How a job is run, in words: jobs of the same words on the same model do the same."""
    degrees = job.degrees
    zero = f", ZeRO {degrees.zero}" if degrees.data > 1 else ""
    sequence = " with sequence" if degrees.sequence_parallel else ""
    last = {"forced": "", "free": " laid out by a solver", "longest": " along longest dims"}[degrees.last_axis]
    return (
        f"data {degrees.data}{zero}, tensor {degrees.tensor}{sequence}{last}, pipeline {job.pipeline} of "
        f"{prediction.chunks} stages a rank, micro-batch {prediction.samples:g}, {degrees.recompute} recomputed"
    )


def _assumed(job: Job, prediction: Prediction) -> str | None:
    """What the row leaves open and was chosen for it."""
    words = []
    if job.samples is None:
        words.append(f"micro-batch {prediction.samples:g}, the best of those tried")
    if job.chunks is None:
        words.append(f"{prediction.chunks} stages a rank, likewise")
    return "; ".join(words) or None


def document(found: Sequence[Outcome]) -> Mapping[str, object]:
    """The JSON: figures by source as fractions, and every run."""
    return {"sources": by_source(found), "runs": [as_run(outcome) for outcome in found]}


def text(found: Sequence[Outcome]) -> str:
    """The same as a table, with the reasons of rows that could not be modelled."""
    lines = [list(HEADER)] + [_cells(source) for source in by_source(found)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(HEADER))]
    table = [f"{line[0]:<{widths[0]}}  " + "  ".join(map(str.rjust, line[1:], widths[1:])) for line in lines]
    return "\n".join([*table, "", *_left_out(found)])


def _cells(source: Mapping[str, object]) -> list[str]:
    names = (
        "timed_rows", "mape", "median_ape", "p95_ape", "kendall_tau", "memory_rows", "memory_median_ape", "oom_rows",
        "oom_foreseen", "oom_false_alarms",
    )  # fmt: skip
    shares = ("mape", "median_ape", "p95_ape", "memory_median_ape", "oom_foreseen", "oom_false_alarms")
    cells = [str(source["source"]), str(source["rows"])]
    for name in names:
        value = source[name]
        if value is None:
            cells.append("-")
        elif name in shares:
            cells.append(f"{value:.1%}")
        else:
            cells.append(f"{value:.2f}" if isinstance(value, float) else str(value))
    return cells


def _left_out(found: Sequence[Outcome]) -> list[str]:
    """How many rows could not be modelled, and why."""
    rows = [outcome for outcome in found if outcome.reason is not None]
    if not rows:
        return ["All rows are modelled."]
    reasons = Counter((outcome.run.file, outcome.run.source, outcome.reason) for outcome in rows)
    lines = [f"{len(rows)} of {len(found)} rows are not modelled:"]
    for (file, source, reason), count in reasons.items():
        numbers = [o.run.line for o in rows if (o.run.file, o.run.source, o.reason) == (file, source, reason)]
        lines.append(f"  {count} of {source}: {reason} ({file}, lines {_ranges(numbers)})")
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in order, runs of them joined.

    >>> _ranges([2, 3, 4, 7])
    '2-4, 7'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


__all__ = ["NotModelled", "document", "outcomes", "text", "validate"]
