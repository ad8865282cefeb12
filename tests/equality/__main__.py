"""``python -m tests.equality``: verify the whole grid and write its table to docs/equality.md.

Resumable: finished cases are kept in a JSON lines file (``--results``) and not run again. ``--only WORD`` runs cases whose
name has the word.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path

from tests.equality.cases import Case, all_cases, run

HEAD = """# Programs equal one device

Every case plans a model, generates its program, runs it on simulated ranks in float64 and compares with the plain model:
loss, outputs, every gradient, and every parameter after a step of AdamW (with torch's own epsilon of 1e-8). Errors are
relative, as the module `autopar.verifier` says; 1e-10 is allowed, 1e-8 for parameters after the step. Collectives counted
while it runs equal the plan's own list, kind by kind and byte by byte. Made by `python -m tests.equality`.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("build/equality.jsonl"))
    parser.add_argument("--table", type=Path, default=Path("docs/equality.md"))
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    done = {}
    if arguments.results.exists():
        done = {row["case"]: row for row in map(json.loads, arguments.results.read_text().splitlines())}
    for case in all_cases():
        if str(case) in done or arguments.only not in str(case):
            continue
        row = outcome(case)
        done[str(case)] = row
        with arguments.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        verdict = "equal" if row["passed"] else f"NOT EQUAL {row.get('error')}"
        print(f"{row['case']}: {verdict}, {row['seconds']:.1f} s", flush=True)
    arguments.table.parent.mkdir(exist_ok=True)
    arguments.table.write_text(HEAD + table([done[str(case)] for case in all_cases() if str(case) in done]))


def outcome(case: Case) -> dict[str, object]:
    """One row of the table; a failure is a row too."""
    start = time.perf_counter()
    row: dict[str, object] = {"case": str(case), "model": case.model, "mesh": list(case.mesh), "plan": case.plan}
    try:
        verification, plan = run(case)
    except Exception as error:
        row.update(passed=False, error=f"{type(error).__name__}: {error}"[:300])
    else:
        row.update(passed=verification.passed, axes=str(plan.stages[0].mesh), error=str(verification)[:300])
        row.update({measure.kind: measure.error for measure in verification.measures})
    return {**row, "seconds": time.perf_counter() - start}


def table(rows: list[dict[str, object]]) -> str:
    """The rows in Markdown."""
    kinds = ("loss", "outputs", "gradients", "parameters", "buffers")
    passed = sum(bool(row["passed"]) for row in rows)
    head = " | ".join(("model", "mesh", "plan", "axes", *kinds, "equal"))
    lines = [f"{passed} of {len(rows)} cases are equal.", "", f"| {head} |"]
    lines.append("|" + "---|" * (len(kinds) + 5))
    for row in rows:
        errors = " | ".join(f"{row[kind]:.0e}" if isinstance(row.get(kind), float) else "" for kind in kinds)
        mesh = " x ".join(map(str, row["mesh"]))  # type: ignore[call-overload]
        verdict = "yes" if row["passed"] else f"no: {row.get('error')}"
        lines.append(f"| {row['model']} | {mesh} | {row['plan']} | {row.get('axes', '')} | {errors} | {verdict} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
