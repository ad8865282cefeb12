"""What a bound would do: which blocks recompute on the cheapest way through a run of units at a price of memory.

Enters: matrices of units under a few multipliers. Leaves: for a run of units, how many of its blocks are in each mode of
recomputation where its dual bound is best, which is where the solver of a stage begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autopar.search.places import Place
from autopar.solver.chain import Table


def modes_of_run(
    places: Sequence[Place], matrices: Mapping[str, Sequence[Table]], plain: str, weight: int
) -> tuple[float, list[str]]:
    """The least cost of a run of these units under one of the weights, and the mode of each block that is whole in it."""
    modes = list(matrices)
    value = np.zeros(matrices[plain][places[0].kind].shape[1], dtype=np.float32)
    open_values = dict.fromkeys(modes, value)
    whole = places[0].opens
    steps: list[tuple[dict[str, np.ndarray], np.ndarray | None]] = []  # by unit: where each state came from; its mode
    for place in places:
        if place.opens:
            open_values, whole = dict.fromkeys(modes, value), True
        taken = modes if whole and place.block is not None else [plain]
        sums = {mode: open_values[mode][:, None] + matrices[mode][place.kind][weight] for mode in taken}
        came = {mode: array.argmin(axis=0) for mode, array in sums.items()}
        open_values = {mode: array.min(axis=0) for mode, array in sums.items()}
        best = None
        if place.closes:
            stacked = np.stack([open_values[mode] for mode in taken])
            best, value = stacked.argmin(axis=0), stacked.min(axis=0)
        steps.append((came, best))
    last = value if places[-1].closes else open_values[plain]
    return float(last.min()), _traced(places, steps, int(last.argmin()), plain)


def _traced(
    places: Sequence[Place], steps: Sequence[tuple[dict[str, np.ndarray], np.ndarray | None]], state: int, plain: str
) -> list[str]:
    """The modes of whole blocks along the way that ends in ``state``, in order."""
    found: list[str] = []
    mode = plain
    inside = False  # a block that closes in the run
    for place, (came, best) in zip(reversed(places), reversed(steps), strict=True):
        if best is not None:
            mode, inside = list(came)[int(best[state])], True
        state = int(came[mode if mode in came else plain][state])
        if place.opens:
            if inside and place.block is not None:
                found.append(mode)
            mode, inside = plain, False
    return found[::-1]
