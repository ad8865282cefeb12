"""Why not otherwise: for each choice that the search made, the best arrangement that chooses something else.

Enters: what the search found. Leaves: JSON objects. Where an arrangement was evaluated, its seconds are simulated; where its
lower bound was enough to leave it, the bound is what is known of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from autopar.report.search import best_of_frames, chosen, evaluated_json, finite, frame_json, missing_bytes, modes_of
from autopar.report.units import bytes_text, percent_text
from autopar.search.evaluate import Evaluated
from autopar.search.joint import Found
from autopar.search.space import Frame
from autopar.solver.problem import RELATIVE_TOLERANCE

Allowed = Callable[[Frame], bool]


def neighbours_json(found: Found) -> list[dict[str, Any]]:
    """The best arrangement for each change of one choice, as far as there is one."""
    best, evaluated = chosen(found), best_of_frames(found)
    bounds = {frame: (bound, estimate) for frame, bound, estimate in found.looked_at}
    bounds = {**{frame: (other.step_seconds, other.step_seconds) for frame, other in evaluated.items()}, **bounds}
    listed = []
    for change, allowed in _changes(best.frame, list(bounds)):
        frames = [frame for frame in bounds if allowed(frame)]
        if not frames:
            continue
        frame = min(frames, key=lambda frame: _promise(frame, evaluated, bounds))
        listed.append((change, _of_frame(frame, evaluated.get(frame), bounds[frame], best.step_seconds)))
    again = [other for other in found.evaluated if modes_of(other) != modes_of(best) and _alike(other, best)]
    if again:
        other = min(again, key=lambda other: (other.step_seconds, missing_bytes(other)))
        listed.append(("other recomputation", _of_frame(other.frame, other, bounds[other.frame], best.step_seconds)))
    return [{"change": change, **described} for change, described in listed]


def _changes(best: Frame, frames: list[Frame]) -> Iterator[tuple[str, Allowed]]:
    """The nearest other values of each choice, with the frames that have them."""
    grid = best.grid
    ranks = {frame.grid.num_ranks for frame in frames}
    fewer, more = _nearest(ranks, grid.num_ranks)
    for word, number in (("fewer pipeline ranks", fewer), ("more pipeline ranks", more)):
        yield word, {f for f in frames if f.grid.num_ranks == number}.__contains__
    same = {f for f in frames if f.grid == grid and (f.schedule, f.num_stages) == (best.schedule, best.num_stages)}
    fewer, more = _nearest({frame.num_micro_batches for frame in same}, best.num_micro_batches)
    for word, number in (("fewer micro-batches", fewer), ("more micro-batches", more)):
        yield word, {f for f in same if f.num_micro_batches == number}.__contains__
    yield "other schedule", lambda f: f.grid == grid and f.schedule != best.schedule
    yield (
        "other number of stages",
        lambda f: f.grid == grid and f.schedule == best.schedule and f.num_stages != best.num_stages,
    )
    yield "other mesh", lambda f: f.grid.num_ranks == grid.num_ranks and f.grid.mesh_shape != grid.mesh_shape


def _nearest(numbers: set[int], number: int) -> tuple[int | None, int | None]:
    """The next smaller and the next larger of some numbers."""
    return (
        max((other for other in numbers if other < number), default=None),
        min((other for other in numbers if other > number), default=None),
    )


def _promise(
    frame: Frame, evaluated: dict[Frame, Evaluated], bounds: dict[Frame, tuple[float, float]]
) -> tuple[float, ...]:
    """What is best known of a frame, the most promising least."""
    other = evaluated.get(frame)
    if other is None:
        return bounds[frame][1], bounds[frame][0]
    return other.step_seconds, missing_bytes(other)


def _alike(other: Evaluated, best: Evaluated) -> bool:
    return other.frame.grid.num_ranks == best.frame.grid.num_ranks


def _of_frame(
    frame: Frame, other: Evaluated | None, bounds: tuple[float, float], best_seconds: float
) -> dict[str, Any]:
    bound, estimate = bounds
    known = {"lower_bound_seconds": finite(bound), "evaluated": other is not None}
    if other is not None:
        described = evaluated_json(other, best_seconds)
        return {**described, **known, "reason": _evaluated_reason(other, described, best_seconds)}
    return {
        **frame_json(frame),
        "recompute": [],
        "fits": None if math.isfinite(bound) else False,
        "seconds": None,
        "ratio": None,
        "peak_bytes": None,
        "missing_bytes": None,
        **known,
        "reason": _bound_reason(bound, estimate, best_seconds),
    }


def _evaluated_reason(other: Evaluated, described: dict[str, Any], best_seconds: float) -> str:
    if described["fits"]:
        slower = other.step_seconds / best_seconds - 1
        return (
            f"slower by {percent_text(slower)}" if slower > RELATIVE_TOLERANCE else "as fast; the first found is taken"
        )
    missing = missing_bytes(other)
    if missing and math.isfinite(missing):
        return f"does not fit by {bytes_text(missing)}, or only in a form that is slower than this plan"
    return "no plan of it that fits is as fast as this one"


def _bound_reason(bound: float, estimate: float, best_seconds: float) -> str:
    if math.isinf(bound):
        return "nothing fits"
    if bound >= best_seconds:
        return f"its lower bound is already {percent_text(bound / best_seconds - 1)} above this plan"
    saved = f"could save {percent_text(1 - bound / best_seconds)} at most"
    if estimate > best_seconds:
        return f"{saved}, and is expected to be slower by {percent_text(estimate / best_seconds - 1)}"
    return saved
