"""How far predictions are from measurements, by source.

Enters: :class:`Outcome` values, one a row. Leaves: the figures of each source, as fractions; None where there are no rows.

Kendall's tau is over pairs of rows of one group of like runs: the same source, model (depth, widths, vocabulary, sequence),
precision, kind and number of devices, and global batch, so that they differ in how they are run; (concordant - discordant)
pairs of all groups of a source over all pairs whose measurements differ. A pair of rows with the same plan, which differ by
noise alone, is none; a pair of different plans with equal predictions counts neither way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from autopar.validation.runs import Run

LIKE = (
    "source", "model", "n_layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len", "n_experts", "precision",
    "gpu_type", "n_gpus", "global_batch",
)  # fmt: skip
GIB = 2**30


@dataclass(frozen=True)
class Outcome:
    """A row with what was predicted of it, or with the reason why nothing was.

    ``held_out``: no constant was fitted on it; ``device_bytes``: the memory of its device that it may take; ``plan``: how it
    is run, in words; ``assumed``: what of that the row does not say.
    """

    run: Run
    held_out: bool
    measured_seconds: float | None = None
    measured_from: str | None = None
    predicted_seconds: float | None = None
    predicted_bytes: float | None = None
    device_bytes: float | None = None
    plan: str | None = None
    assumed: str | None = None
    reason: str | None = None

    @property
    def error(self) -> float | None:
        """Signed relative error of the seconds."""
        if self.measured_seconds is None or self.predicted_seconds is None:
            return None
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def measured_bytes(self) -> float | None:
        """Memory as measured on the fullest device; what a row that ran out would have wanted is not measured."""
        gib = self.run.number("memory_gb")
        return None if gib is None or self.run.ran_out or not self.run.was_run else gib * GIB

    @property
    def memory_error(self) -> float | None:
        """Signed relative error of the memory."""
        if self.measured_bytes is None or self.predicted_bytes is None:
            return None
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def runs_out(self) -> bool | None:
        """Whether more memory is predicted than the device has."""
        if self.predicted_bytes is None or self.device_bytes is None:
            return None
        return self.predicted_bytes > self.device_bytes


def by_source(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    """The figures of each source, in the order of the rows."""
    sources: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        sources.setdefault(outcome.run.source, []).append(outcome)
    return [{"source": source, **figures(rows)} for source, rows in sources.items()]


def figures(rows: Sequence[Outcome]) -> dict[str, object]:
    """The figures of some rows. ``rows`` are all, ``timed_rows`` those behind the errors of time."""
    errors = [abs(row.error) for row in rows if row.error is not None]
    memory = [abs(row.memory_error) for row in rows if row.memory_error is not None]
    out = [row for row in rows if row.run.ran_out and row.runs_out is not None]
    ran = [row for row in rows if not row.run.ran_out and row.run.was_run and row.runs_out is not None]
    return {
        "rows": len(rows),
        "not_modelled_rows": sum(row.reason is not None for row in rows),
        "timed_rows": len(errors),
        "mape": mean(errors) if errors else None,
        "median_ape": median(errors) if errors else None,
        "p95_ape": percentile(errors, 0.95) if errors else None,
        "kendall_tau": kendall_tau(rows),
        "memory_rows": len(memory),
        "memory_median_ape": median(memory) if memory else None,
        "oom_rows": len(out),
        "oom_foreseen": mean([bool(row.runs_out) for row in out]) if out else None,
        "oom_false_alarms": mean([bool(row.runs_out) for row in ran]) if ran else None,
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of the values do not exceed, between neighbours linearly.

    >>> percentile([1.0, 2.0, 3.0], 0.75)
    2.5
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def kendall_tau(rows: Sequence[Outcome]) -> float | None:
    """Kendall's tau within groups of like runs, pooled over their pairs; None without a pair."""
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for row in rows:
        if row.error is not None:
            groups.setdefault(group_of(row.run), []).append(row)
    agreeing = pairs = 0
    for one, other in itertools.chain.from_iterable(itertools.combinations(group, 2) for group in groups.values()):
        measured, predicted = _signs(one, other)
        if measured and one.plan != other.plan:
            pairs += 1
            agreeing += measured * predicted
    return agreeing / pairs if pairs else None


def group_of(run: Run) -> tuple[str, ...]:
    """What like runs have in common."""
    return tuple(run.text(column) for column in LIKE)


def _signs(one: Outcome, other: Outcome) -> tuple[int, int]:
    """Which of two timed rows took longer, and which was predicted to: 1 the first, -1 the second, 0 neither."""
    pairs = ((one.measured_seconds, other.measured_seconds), (one.predicted_seconds, other.predicted_seconds))
    measured, predicted = ((a > b) - (a < b) for a, b in pairs if a is not None and b is not None)
    return measured, predicted


def as_run(outcome: Outcome) -> Mapping[str, object]:
    """A row of the JSON. Memory in GiB, as the files have it."""
    run = outcome.run
    return {
        "file": run.file,
        "row": run.line,
        "source": run.source,
        "model": run.text("model"),
        "status": run.status,
        "half": "held out" if outcome.held_out else "calibration",
        "measured_seconds": outcome.measured_seconds,
        "measured_from": outcome.measured_from,
        "predicted_seconds": outcome.predicted_seconds,
        "relative_error": outcome.error,
        "measured_memory_gib": None if outcome.measured_bytes is None else outcome.measured_bytes / GIB,
        "predicted_memory_gib": None if outcome.predicted_bytes is None else outcome.predicted_bytes / GIB,
        "device_memory_gib": None if outcome.device_bytes is None else outcome.device_bytes / GIB,
        "plan": outcome.plan,
        "assumed": outcome.assumed,
        "modelled": outcome.reason is None,
        "reason": outcome.reason,
    }
