"""CPU seconds of the solver on synthetic problems, printed: `python -m tests.benchmarks.bench_solver`.

Chains with skips of 30, 300 and 3000 nodes under a tight memory row; a block of 80 nodes repeated 80 and 160 times
with one and with four hubs, without and with a memory row; 500 small problems by each method.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from autopar.solver import Assignment, Problem, check, solve
from tests.unit.solver.random_problems import block_problem, chain_problem, small_problem, tightened


def timed(call: Callable[[], Assignment]) -> tuple[float, Assignment]:
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def report(what: str, problem: Problem, limited: Problem) -> None:
    free_seconds, free = timed(lambda: solve(problem))
    limited_seconds, found = timed(lambda: solve(limited))
    check(problem, free)
    check(limited, found)
    sys.stdout.write(
        f"{what:<38} no budget {free_seconds:6.3f} s gap {free.gap:.1e}   "
        f"budget {limited_seconds:6.3f} s gap {found.gap:.1e} {found.status.name}\n"
    )
    sys.stdout.flush()


def main() -> None:
    for num_nodes in (30, 300, 3000):
        problem = chain_problem(num_nodes)
        report(f"chain of {num_nodes}", problem, tightened(problem, 0.3))
    for hubs in ((4,), (16, 9, 9, 30)):
        for num_instances in (80, 160):
            problem = block_problem(num_instances, 40, 40, (20, 60), hubs, max_variants=4)
            report(f"{num_instances} blocks of 80, hubs {hubs}", problem, tightened(problem, 0.3))
    for method in ("exhaustive", "ilp", "elimination"):
        start = time.process_time()
        for seed in range(500):
            solve(small_problem(seed), method)
        sys.stdout.write(f"500 small problems, {method}: {time.process_time() - start:.2f} s\n")


if __name__ == "__main__":
    main()
