"""Between two assignments: the first part of the graph from one, the rest from the other.

The two solutions that bracket a memory budget (one fits and is dear, one is cheap and does not fit) differ by as much
as the whole model. Along an order of the graph, with x up to position t and y after it,

    cost(t) = sum of the tables whose ends are all before t at x, all after at y, across at (x, y)      `curves`

for all t at once: each table contributes a step function, their sum is one cumulative sum. Where the graph is a chain
the tables across are few, so the best t that fits is close to the optimum.                              `best_splice`
"""

from __future__ import annotations

from collections import deque

import numpy as np

from autopar.solver.network import IntArray, Network
from autopar.solver.problem import FloatArray


def order_of(network: Network) -> tuple[IntArray, IntArray]:
    """(position of each node along the graph, hubs). Hubs, which are near everything, have no place in an order.

    Breadth-first from a node that is far from everything; repeated from there, as Cuthill and McKee do.
    """
    near: list[list[int]] = [[] for _ in network.sizes]
    for source, target, _ in network.edges:
        near[source].append(target)
        near[target].append(source)
    degrees = np.array([len(others) for others in near], dtype=np.int64)
    most = max(12.0, 6.0 * float(degrees.mean())) if degrees.size else 0.0
    hubs = np.flatnonzero(degrees > most)
    seen = np.zeros(len(near), dtype=np.bool_)
    seen[hubs] = True
    order: list[int] = hubs.tolist()
    for start in range(len(near)):
        if not seen[start]:
            first = _breadth_first(near, seen.copy(), start)
            found = _breadth_first(near, seen, first[-1])
            order += found
    positions = np.empty(len(near), dtype=np.int64)
    positions[order] = np.arange(len(near))
    return positions, hubs


def _breadth_first(near: list[list[int]], seen: np.ndarray[tuple[int], np.dtype[np.bool_]], start: int) -> list[int]:
    seen[start] = True
    queue, order = deque([start]), []
    while queue:
        node = queue.popleft()
        order.append(node)
        for other in near[node]:
            if not seen[other]:
                seen[other] = True
                queue.append(other)
    return order


def curves(network: Network, positions: IntArray, first: IntArray, second: IntArray) -> FloatArray:
    """(1 + rows, nodes + 1): totals of taking `first` at positions below t and `second` from t on, for each t.

    The cost is infinite where a pair across t is absent.
    """
    rows, places = network.num_rows, network.places
    low, high = positions[places.ends].min(axis=0), positions[places.ends].max(axis=0)
    # Up to `low` all ends are in the second part, above `high` in the first, between there is one in each.
    early = positions[places.ends] == low
    befores, afters = first[places.ends], second[places.ends]
    across = np.where(early, befores, afters)
    parts = [network.flat[:, places.index(*chosen)] for chosen in (afters, across, befores)]
    absent = [np.isinf(part[0]) for part in parts]
    for part, none in zip(parts, absent):
        part[0, none] = 0.0
    layers = [np.concatenate([part, none[None]]) for part, none in zip(parts, absent)]
    steps = np.zeros((2 + rows, positions.size + 2))
    for row, step in enumerate(steps):
        step[0] = layers[0][row].sum()
        step += np.bincount(low + 1, layers[1][row] - layers[0][row], step.size)
        step += np.bincount(high + 1, layers[2][row] - layers[1][row], step.size)
    totals: FloatArray = np.cumsum(steps, axis=1)[:, :-1]
    totals[0, totals[1 + rows] > 0.5] = np.inf
    return totals[: 1 + rows]


def best_splice(
    network: Network,
    order: tuple[IntArray, IntArray],
    pair: tuple[IntArray, IntArray],
    budgets_bytes: FloatArray,
) -> tuple[IntArray, int] | None:
    """The cheapest splice of a pair of assignments that fits, with its position; hubs from either, either one first."""
    positions, hubs = order
    best: tuple[float, IntArray, int] | None = None
    for first, second in (pair, pair[::-1]):
        for of_hubs in pair if hubs.size else pair[:1]:
            left, right = first.copy(), second.copy()
            left[hubs] = right[hubs] = of_hubs[hubs]
            totals = curves(network, positions, left, right)
            slack = 1e-12 * np.abs(budgets_bytes)
            fits = (totals[1:] <= (budgets_bytes + slack)[:, None]).all(axis=0)
            costs = np.where(fits, totals[0], np.inf)
            place = int(np.argmin(costs))
            if np.isfinite(costs[place]) and (best is None or costs[place] < best[0]):
                best = float(costs[place]), np.where(positions < place, left, right), place
    return None if best is None else best[1:]
