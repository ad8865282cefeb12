"""Random problems for the solver's tests, each from a seed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.solver import Edge, Problem, Repeat, solve


def small_problem(seed: int) -> Problem:
    """1-8 nodes of 1-4 choices, random edges with cycles and parallels, some absent, 0-2 memory rows."""
    random = np.random.default_rng(seed)
    num_nodes, rows = int(random.integers(1, 9)), int(random.integers(0, 3))
    sizes = random.integers(1 if seed % 5 == 0 else 2, 5, num_nodes)
    costs, memory = [], []
    for size in sizes:
        cost = random.random(size)
        cost[random.random(size) < 0.05] = np.inf
        costs.append(cost)
        memory.append(np.floor(random.random((rows, size)) * 1000) if random.random() < 0.8 else None)
    edges = []
    for _ in range(int(random.integers(0, 2 * num_nodes)) if num_nodes > 1 else 0):
        source, target = (int(node) for node in random.choice(num_nodes, 2, replace=False))
        cost = random.random((sizes[source], sizes[target]))
        cost[random.random(cost.shape) < 0.15] = np.inf
        used = np.floor(random.random((rows, *cost.shape)) * 500) if random.random() < 0.5 else None
        edges.append(Edge(source, target, cost, used))
    most = sum((used.max(axis=1) for used in memory if used is not None), np.zeros(rows))
    return Problem(tuple(costs), tuple(memory), tuple(edges), most * random.uniform(0.2, 1.0, rows))


def chain_problem(num_nodes: int, seed: int = 0) -> Problem:
    """A chain with skips of width 3, 8-20 choices, cheap choices take memory; one row without a limit."""
    random = np.random.default_rng(seed)
    sizes = random.integers(8, 21, num_nodes)
    costs = tuple(random.random(size) for size in sizes)
    memory = tuple(np.floor((1.2 - cost + 0.3 * random.random(cost.size)) * 1e6)[None] for cost in costs)
    edges = []
    for node in range(1, num_nodes):
        for back in (1, 2, 3):
            if node >= back and (back == 1 or random.random() < 0.5):
                cost = random.random((sizes[node - back], sizes[node]))
                cost[random.random(cost.shape) < 0.05] = np.inf
                edges.append(Edge(node - back, node, cost * 0.5))
    return Problem(costs, memory, tuple(edges), np.array([np.inf]))


def block_problem(
    num_instances: int,
    num_body: int = 6,
    num_leaves: int = 3,
    sizes: tuple[int, int] = (2, 6),
    hubs: tuple[int, ...] = (3,),
    seed: int = 0,
    rows: int = 1,
    max_variants: int | None = None,
) -> Problem:
    """Residual blocks in a chain between an entry and a head, with leaves (parameters) and hubs read by every block."""
    random = np.random.default_rng(seed)
    costs: list[np.ndarray] = []
    memory: list[np.ndarray | None] = []
    edges: list[Edge] = []

    def unary(size: int) -> tuple[np.ndarray, np.ndarray]:
        return random.random(size), np.floor(random.random((rows, size)) * 1e6)

    def pair(first: int, second: int) -> np.ndarray:
        cost = random.random((first, second)) * 0.7
        cost[random.random(cost.shape) < 0.03] = np.inf
        return cost

    def add(tables: tuple[np.ndarray, np.ndarray]) -> int:
        costs.append(tables[0])
        memory.append(tables[1])
        return len(costs) - 1

    carried, middle = sizes[1] - 1, num_body // 2
    widths = [int(size) for size in random.integers(*sizes, num_body)]
    widths[-1] = carried
    leaves = [int(size) for size in random.integers(2, 5, num_leaves)]
    body_tables, leaf_tables = [unary(size) for size in widths], [unary(size) for size in leaves]
    chain = [pair(widths[i - 1], widths[i]) for i in range(1, num_body)]
    enter, first_skip = pair(carried, widths[0]), pair(carried, widths[middle])
    second_skip = pair(widths[middle], carried)
    reads = [pair(size, widths[i % num_body]) for i, size in enumerate(leaves)]
    hub_nodes = [add(unary(size)) for size in hubs]
    hub_places = [int(random.integers(1, num_body - 1)) for _ in hubs]
    hub_reads = [pair(size, widths[place]) for size, place in zip(hubs, hub_places)]
    previous = add(unary(carried))
    edges += [Edge(hub, previous, pair(size, carried)) for hub, size in zip(hub_nodes, hubs)]
    instances = []
    for _ in range(num_instances):
        body, leaf = [add(tables) for tables in body_tables], [add(tables) for tables in leaf_tables]
        edges += [Edge(body[i - 1], body[i], chain[i - 1]) for i in range(1, num_body)]
        edges += [Edge(previous, body[0], enter), Edge(previous, body[middle], first_skip)]
        edges += [Edge(body[middle], body[-1], second_skip)]
        edges += [Edge(node, body[i % num_body], reads[i]) for i, node in enumerate(leaf)]
        edges += [Edge(hub, body[place], read) for hub, place, read in zip(hub_nodes, hub_places, hub_reads)]
        instances.append((*body, *leaf))
        previous = body[-1]
    head = add(unary(carried))
    edges.append(Edge(previous, head, pair(carried, carried)))
    repeats = (Repeat(tuple(instances), max_variants),)
    return Problem(tuple(costs), tuple(memory), tuple(edges), np.full(rows, np.inf), repeats)


def tightened(problem: Problem, share: float) -> Problem:
    """The problem with budgets below what its unlimited optimum takes, by `share` of what could be saved."""
    free = solve(problem)
    least = solve(replace(problem, memory_budgets_bytes=np.zeros(problem.num_rows))).smallest_budgets_bytes
    assert least is not None
    used = np.array(free.memory_bytes)
    return replace(problem, memory_budgets_bytes=np.array(least) + (used - np.array(least)) * (1.0 - share))
