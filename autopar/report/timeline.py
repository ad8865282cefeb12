"""When each pipeline rank does what: the simulated step, shortened.

Enters: the simulation. Leaves: JSON objects: a chart of the whole step, and spans with their exact times, of all
micro-batches where these are few, else of the first and the last ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cost_models import Simulation, Span

MAX_SPANS = 400
ENDS = (2, 1)  # micro-batches at either end that are shown where there are too many
CHART_COLUMNS = 96
IDLE = "."
LETTERS = {"F": "F", "B": "B", "I": "I", "W": "W", "once": "U"}
LEGEND = {
    "F": "forward",
    "B": "backward",
    "I": "backward (input)",
    "W": "backward (parameters)",
    "U": "gradients reduced and update",
    IDLE: "idle",
}


def timeline_json(simulation: Simulation, num_micro_batches: int) -> dict[str, Any]:
    """The timeline of every pipeline rank: a chart, in which each character is what most of that part of the step is spent
    with, and spans ``[kind, stage, micro-batch, start, end]`` (micro-batch -1: once a step)."""
    shown = list(range(num_micro_batches))
    spans = simulation.timeline
    for ends in ENDS:
        if sum(map(len, spans)) > MAX_SPANS:
            shown = [index for index in range(num_micro_batches) if index < ends or index >= num_micro_batches - ends]
            spans = tuple(_of(rank, {*shown, -1}) for rank in simulation.timeline)
    most = MAX_SPANS // max(1, len(spans))
    whole = len(shown) == num_micro_batches and all(len(rank) <= most for rank in spans)
    if sum(map(len, spans)) > MAX_SPANS:
        spans = tuple(rank[:most] for rank in spans)
    charts = [chart(rank, simulation.step_seconds) for rank in simulation.timeline]
    letters = set("".join(charts))
    return {
        "complete": whole or sum(map(len, simulation.timeline)) <= MAX_SPANS,
        "micro_batches": shown,
        "legend": {letter: words for letter, words in LEGEND.items() if letter in letters},
        "ranks": [
            {"pipeline_rank": rank, "busy_seconds": busy, "chart": drawn, "spans": [list(span) for span in listed]}
            for rank, (busy, drawn, listed) in enumerate(zip(simulation.busy_seconds, charts, spans, strict=True))
        ],
    }


def _of(spans: Sequence[Span], micro_batches: set[int]) -> tuple[Span, ...]:
    return tuple(span for span in spans if span.micro_batch in micro_batches)


def chart(spans: Sequence[Span], step_seconds: float, columns: int = CHART_COLUMNS) -> str:
    """A step as characters, each of what the rank does for most of it."""
    if step_seconds <= 0:
        return IDLE * columns
    width = step_seconds / columns
    shares: list[dict[str, float]] = [{} for _ in range(columns)]
    for span in spans:
        letter = LETTERS.get(span.kind)
        if letter is None:
            continue
        first = min(columns - 1, int(span.start_seconds / width))
        last = min(columns - 1, int(span.end_seconds / width))
        for column in range(first, last + 1):
            part = min(span.end_seconds, (column + 1) * width) - max(span.start_seconds, column * width)
            shares[column][letter] = shares[column].get(letter, 0.0) + max(0.0, part)
    return "".join(_most(share, width) for share in shares)


def _most(share: dict[str, float], width: float) -> str:
    """The letter of most of a column; idle where less than half of it is anything."""
    if sum(share.values()) < width / 2:
        return IDLE
    return max(share, key=lambda letter: share[letter])
