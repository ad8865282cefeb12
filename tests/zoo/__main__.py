"""``python -m tests.zoo``: plan, run and verify every entry of a collection of models, and write the table.

``--collection FILE`` (or the environment variable ``AUTOPAR_ZOO``) names the collection, see ``entries.py``; without it the
repository's own sample is run. Resumable: rows are appended to ``--out``, and what is there is not run again.
``--part 2/8`` runs the second of eight parts of the names, ``--names`` only those given (a name, or its beginning),
``--one-in-four`` leaves out three of four heads that classify or answer questions, which are much alike,
``--again`` runs what failed once more, ``--sizes batch=6 heads=3`` builds other sizes than the collection's own,
``--table FILE`` writes the table of all rows in ``--out``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import warnings
from pathlib import Path

from tests.zoo.entries import collection_of, own_sample, with_fewer_heads
from tests.zoo.plans import PLANS
from tests.zoo.running import Row, run_entry
from tests.zoo.table import document


def main() -> None:
    arguments = _arguments()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    sizes = {key: int(size) for key, size in (pair.split("=") for pair in arguments.sizes)}
    collection = collection_of(arguments.collection, sizes) if arguments.collection else own_sample()
    names = [name for name in collection.names if not arguments.names or name.startswith(tuple(arguments.names))]
    names = with_fewer_heads(names) if arguments.one_in_four else names
    random.Random(0).shuffle(names)
    number, parts = map(int, arguments.part.split("/"))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    done = finished(arguments.out)
    for name in names[number - 1 :: parts] if arguments.run else ():
        waiting = [
            plan
            for plan in arguments.plans
            if (name, plan) not in done or (arguments.again and not done[name, plan]["passed"])
        ]
        for row in run_entry(collection, name, waiting, arguments.limit):
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            verdict = "equal" if row["passed"] else f"{row['stage']}: {row['error'][:160]}"
            print(f"{row['entry']}, {row['plan']}: {verdict}, {row['seconds']:.1f} s", flush=True)
    if arguments.table:
        arguments.table.parent.mkdir(parents=True, exist_ok=True)
        rows = list(finished(arguments.out).values())
        arguments.table.write_text(document(rows, collection.names, with_fewer_heads(collection.names)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collection", type=Path, default=os.environ.get("AUTOPAR_ZOO"))
    parser.add_argument("--sizes", nargs="*", default=[], metavar="NAME=SIZE", help="for the collection's build()")
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--names", nargs="*", default=[])
    parser.add_argument("--plans", nargs="*", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--out", type=Path, default=Path("build/zoo.jsonl"))
    parser.add_argument("--table", type=Path)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one entry under one plan")
    parser.add_argument("--one-in-four", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--no-run", dest="run", action="store_false", help="only write the table")
    found = parser.parse_args()
    found.collection = Path(found.collection) if found.collection else None
    return found


def finished(out: Path) -> dict[tuple[str, str], Row]:
    """Rows in the file, the last of each entry and plan."""
    lines = out.read_text().splitlines() if out.exists() else []
    return {(row["entry"], row["plan"]): row for row in map(json.loads, lines)}


if __name__ == "__main__":
    main()
