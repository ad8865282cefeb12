"""``python -m tests.equality``: verify the whole grid and write its table to docs/equality.md.

``--pipelines`` does the grid of pipelines instead, for docs/pipelines.md. Resumable: finished cases are kept in a JSON lines
file (``--results``) and not run again. ``--part 2/8`` runs the second of eight equal parts, so that several processes may
share the work and the file. ``--only WORD`` runs cases whose name has the word.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.equality.cases import all_cases, run
from tests.equality.pipelines import all_pipelines, run_pipeline

MEASURED = """Errors are
relative, as the module `autopar.verifier` says; 1e-10 is allowed, 1e-8 for parameters after the step. Collectives counted
while it runs equal the plan's own list, kind by kind and byte by byte."""

HEAD = f"""# Programs equal one device

Every case plans a model, generates its program, runs it on simulated ranks in float64 and compares with the plain model:
loss, outputs, every gradient, and every parameter after a step of AdamW (with torch's own epsilon of 1e-8). {MEASURED}
Made by `python -m tests.equality`.

"""

PIPELINES_HEAD = f"""# Pipelines equal one device

Every case cuts a model into stages, solves each on its mesh, generates the program, runs it on simulated ranks in float64
under the schedule of torch.distributed.pipelining, and compares with the plain model: loss, outputs, every gradient, and
every parameter after a step of AdamW (with torch's own epsilon of 1e-8). {MEASURED}
`ranks` are pipeline ranks, each with the devices that `axes` says. Interleaved and V-shaped schedules have two stages a rank,
but for the interleaved zero-bubble one on more than two ranks, which is seen with one.
Micro-batches: 4 of 10 samples on 2 ranks (of 4, 2, 2 and 2 where the batch is shared by two devices), 3 of 6 on 3, 4 of 8
on 4. The U-Net repeats no block, so that there is nothing to recompute. Made by `python -m tests.equality --pipelines`.

"""

KINDS = ("loss", "outputs", "gradients", "parameters", "buffers")


@dataclass(frozen=True)
class Grid:
    """Cases, how one is run, and what of a case are the table's first columns."""

    cases: Callable[[], Iterable[Any]]
    run: Callable[[Any], Any]
    columns: tuple[str, ...]
    head: str
    results: Path
    table: Path


GRIDS = {
    False: Grid(
        all_cases,
        run,
        ("model", "mesh", "plan", "axes"),
        HEAD,
        Path("build/equality.jsonl"),
        Path("docs/equality.md"),
    ),
    True: Grid(
        all_pipelines,
        run_pipeline,
        ("model", "num_ranks", "num_stages", "schedule", "spread", "axes", "recompute"),
        PIPELINES_HEAD,
        Path("build/pipelines.jsonl"),
        Path("docs/pipelines.md"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipelines", action="store_true")
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    grid = GRIDS[arguments.pipelines]
    results, written = arguments.results or grid.results, arguments.table or grid.table
    results.parent.mkdir(parents=True, exist_ok=True)
    number, parts = map(int, arguments.part.split("/"))
    cases = list(grid.cases())
    random.Random(0).shuffle(cases)
    done = finished(results)
    for case in cases[number - 1 :: parts]:
        if str(case) in done or arguments.only not in str(case):
            continue
        row = outcome(case, grid)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        verdict = "equal" if row["passed"] else f"NOT EQUAL {row.get('error')}"
        print(f"{row['case']}: {verdict}, {row['seconds']:.1f} s", flush=True)
    done = finished(results)
    rows = [done[str(case)] for case in grid.cases() if str(case) in done]
    written.parent.mkdir(exist_ok=True)
    written.write_text(grid.head + table(rows, grid.columns))


def finished(results: Path) -> dict[str, dict[str, Any]]:
    """Rows in the file, the last of each case."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {row["case"]: row for row in map(json.loads, lines)}


def outcome(case: Any, grid: Grid) -> dict[str, Any]:
    """One row of the table; a failure is a row too."""
    start = time.perf_counter()
    row: dict[str, Any] = {"case": str(case), **asdict(case)}
    row |= {name: getattr(case, name) for name in grid.columns if name != "axes"}
    try:
        verification, plan = grid.run(case)
    except Exception as error:
        row.update(passed=False, error=f"{type(error).__name__}: {error}"[:300])
    else:
        row.update(passed=verification.passed, axes=str(plan.stages[0].mesh), error=str(verification)[:300])
        row.update({measure.kind: measure.error for measure in verification.measures})
    return {**row, "seconds": time.perf_counter() - start}


def table(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> str:
    """The rows in Markdown."""
    kinds = [kind for kind in KINDS if any(kind in row for row in rows)]
    passed = sum(bool(row["passed"]) for row in rows)
    head = " | ".join((*(column.removeprefix("num_") for column in columns), *kinds, "equal"))
    lines = [f"{passed} of {len(rows)} cases are equal.", "", f"| {head} |"]
    lines.append("|" + "---|" * (len(columns) + len(kinds) + 1))
    for row in rows:
        facts = " | ".join(cell(row.get(column, "")) for column in columns)
        errors = " | ".join(f"{row[kind]:.0e}" if isinstance(row.get(kind), float) else "" for kind in kinds)
        verdict = "yes" if row["passed"] else f"no: {' '.join(str(row.get('error')).split())}"
        lines.append(f"| {facts} | {errors} | {verdict} |")
    return "\n".join(lines) + "\n"


def cell(fact: Any) -> str:
    """A fact in a column of the table."""
    return " x ".join(map(str, fact)) if isinstance(fact, (list, tuple)) else str(fact)


if __name__ == "__main__":
    main()
