"""What the rows of a run have covered: operators with a rule, letters split, steps of layout changes, kinds of plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from autopar.reshard import COLLECTIVES
from autopar.strategies import creation, elementwise
from autopar.strategies.registry import FAMILIES, RULES

RANDOM = {f"aten.{name}" for name in creation.RANDOM} | {
    target for target, rule in elementwise.RULES.items() if rule is elementwise.RULES["aten.rand_like.default"]
}  # no plain model gives the same numbers
HEAD = """# Random programs equal one device

Every program is a random model of at least 10 operators, drawn from all families of rules, under a random legal plan: mesh,
strategies, storage of parameters, and in part micro-batches, two stages, recomputation. A model has four plans. It is
generated, run on simulated ranks in float64 and compared with the plain model: loss, outputs, every gradient, every parameter
after a step of AdamW, every buffer; what it sends is compared with the plan's own count, byte by byte. Made by
`python -m tests.random_programs --count 2000 --table docs/random_programs.md` (`--part 1/4` ... in parts; resumable);
`--show SEED` prints a model, `--shrink SEED` cuts a failing program down to a few lines: such are the models of
`tests/properties/test_shrunk_programs.py`.

Left out: operators that draw random numbers otherwise than dropout, since no plain model draws the same; models that rounding
in the 13th digit changes (comparisons on a knife's edge). A parameter whose results are all written over in place has a
gradient of zero in torch and none here, so that weight decay passes it by: such models are not drawn.

"""


def document(rows: Sequence[dict[str, Any]]) -> str:
    """The result and the coverage in Markdown."""
    passed = sum(bool(row["passed"]) for row in rows)
    planned = [row for row in rows if "kind" in row]
    targets: Counter[str] = Counter()
    for row in planned:
        targets.update(row.get("targets", {}))
    letters = {pair for row in planned for pair in row.get("letters", ())}
    steps = Counter(step for row in planned for step in row.get("steps", ()))
    parts = [HEAD, f"{passed} of {len(rows)} programs are equal.\n"]
    failed = [row for row in rows if not row["passed"]]
    parts += [f"* program {row['seed']}: {row['stage']}: {' '.join(row['error'].split())[:200]}" for row in failed]
    worst = {
        kind: max(row["errors"].get(kind, 0.0) for row in rows if row["passed"])
        for kind in ("loss", "outputs", "gradients", "parameters", "buffers")
    }
    parts.append(
        "\nLargest relative error of those that are: " + ", ".join(f"{k} {v:.0e}" for k, v in worst.items()) + ".\n"
    )
    parts += ["", _table(("", "programs"), _kinds(planned)), "", "## Operators", ""]
    families = []
    for family in FAMILIES:
        own = [target for target in family.RULES if target not in RANDOM]
        met = [target for target in own if targets[target]]
        split = [target for target in own if any(pair.startswith(f"{target} ") for pair in letters)]
        families.append(
            (family.__name__.rpartition(".")[2], len(own), len(met), len(split), sum(targets[t] for t in own))
        )
    total = ["all", *(sum(int(row[column]) for row in families) for column in range(1, 5))]
    names = ("family", "with a rule", "met", "met split", "calls")
    parts.append(_table(names, [*families, tuple(total)]))
    missing = sorted(target for target in RULES if target not in RANDOM and not targets[target])
    random_only = f"{len(RANDOM & set(RULES))} that draw random numbers are left out"
    parts.append(f"\n{len(letters)} pairs of operator and letter were split ({random_only}).")
    parts.append(f"Never met: {', '.join(missing) or 'none'}.\n")
    absent = [name for name in COLLECTIVES if not steps[name]]
    parts += [
        "## Steps of layout changes",
        "",
        _table(("step", "programs"), [(name, steps[name]) for name in COLLECTIVES]),
    ]
    parts.append(f"\nNever taken: {', '.join(absent) or 'none'}.")
    return "\n".join(parts) + "\n"


def _kinds(rows: Sequence[dict[str, Any]]) -> list[tuple[object, ...]]:
    facts: Counter[str] = Counter()
    for row in rows:
        facts[f"plan {row['kind']}"] += 1
        facts["mesh " + " x ".join(map(str, row["mesh"]))] += 1
        facts.update(f"ZeRO-{level}" for level in row.get("zero", ()) if level)
        facts.update(f"recompute {mode}" for mode in row.get("recompute", ()) if mode != "none")
        facts["several micro-batches"] += row.get("micro_batches", 1) > 1
    return sorted(facts.items())


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])
