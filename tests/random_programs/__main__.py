"""``python -m tests.random_programs``: random models under random plans, each verified equal to one device.

``--count N`` programs from ``--start`` on. Resumable: rows are appended to ``--out`` and seeds that are there are not run
again (``--again``: those that failed are). ``--part 2/8`` runs the second of eight parts. ``--table FILE`` writes what all
rows in ``--out`` have covered. ``--show SEED`` prints a model; ``--shrink SEED`` cuts a failing program down and prints what
is left.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from pathlib import Path
from typing import Any

from tests.random_programs.coverage import document
from tests.random_programs.models import draw_recipe
from tests.random_programs.recipe import source
from tests.random_programs.running import model_seed, run_program
from tests.random_programs.shrinking import shrink


def main() -> None:
    arguments = _arguments()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if arguments.show is not None:
        print(source(draw_recipe(model_seed(int(arguments.show)))))
        return
    if arguments.shrink is not None:
        recipe = draw_recipe(model_seed(int(arguments.shrink)))
        row = run_program(int(arguments.shrink))
        if row["passed"]:
            print(f"program {arguments.shrink} passes")
            return
        small, found = shrink(recipe, row, arguments.shrink)
        print(source(small), found, sep="\n")
        return
    number, parts = map(int, arguments.part.split("/"))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    done = finished(arguments.out)
    length = -(-arguments.count // parts)
    first = arguments.start + (number - 1) * length
    for seed in range(first, min(first + length, arguments.start + arguments.count)):
        if seed in done and not (arguments.again and not done[seed]["passed"]):
            continue
        row = run_program(seed)
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if not row["passed"]:
            print(f"program {seed}: {row['stage']}: {row['error'][:300]}", flush=True)
    text = document(list(finished(arguments.out).values()))
    print(text)
    if arguments.table:
        arguments.table.write_text(text)


def finished(results: Path) -> dict[int, dict[str, Any]]:
    """Rows in the file, the last of each seed."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {row["seed"]: row for row in map(json.loads, lines)}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("build/random_programs.jsonl"))
    parser.add_argument("--table", type=Path)
    parser.add_argument("--show", metavar="SEED")
    parser.add_argument("--shrink", metavar="SEED")
    return parser.parse_args()


if __name__ == "__main__":
    main()
