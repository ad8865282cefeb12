"""Predicted and measured memory of twelve plans: ``python -m tests.benchmarks.bench_memory [--alive]``.

One line a pipeline rank, in MB: what the planner sets aside, the predicted peak, the measured one (``tests.support.memory``
says how), and predicted over measured. ``--alive``: also what was alive at the measured peak.
"""

from __future__ import annotations

import argparse

import torch

from tests.support.memory import CASES, compare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alive", action="store_true", help="what was alive at the peak")
    show_alive = parser.parse_args().alive
    torch.set_num_threads(1)
    print(f"{'plan':<58} {'rank':>4} {'set aside':>9} {'predicted':>9} {'measured':>9} {'ratio':>6}")
    for case in CASES:
        for one in compare(case):
            sizes = (one.set_aside_bytes, one.predicted_bytes, one.measured_bytes)
            columns = " ".join(f"{size / 1e6:9.2f}" for size in sizes)
            print(f"{case!s:<58} {one.pipeline_rank:>4} {columns} {one.ratio:6.3f}", flush=True)
            for name, num_bytes in list(one.alive.items())[: 15 * show_alive]:
                print(f"    {num_bytes / 1e6:9.2f}  {name}")


if __name__ == "__main__":
    main()
