"""The rows of a run as a Markdown document: counts, failures by cause, how much tensor parallelism splits, every row."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from tests.zoo.plans import PLANS, TENSOR
from tests.zoo.running import TOLERANCE, Row

KINDS = ("loss", "outputs", "gradients", "parameters", "buffers")
MOST = 0.9  # of an entry's FLOPs that forced tensor parallelism should split
CAUSES = {
    "build": "the collection cannot build it",
    "trace": "cannot be traced",
    "plan": "no plan is made",
    "run": "the program fails, or the plain model itself",
    "compare": "computes or sends something else",
    "limit": "takes longer than the limit",
    "crash": "the process ends",
}

HEAD = f"""# The zoo

Tiny models of transformers' architectures, each planned, run on simulated ranks in float64 and compared with the plain
model: loss, outputs, every gradient, and every parameter after a step of AdamW, within {TOLERANCE:.0e} as the module
`autopar.verifier` measures (1e-8 for parameters); what the first rank sends is compared with the plan's own list. Two
searched plans, on four devices in a row and in a square, and three forced ones. `searched` is for devices of 1 GFLOP/s on
quick links, where tiny models are worth splitting. The pipelines have two micro-batches under 1F1B, or one where the samples
depend on each other. Dropout that a config cannot switch off is switched off in the module.

Made by

    python -m tests.zoo --collection zoo.py --out build/zoo.jsonl --table docs/zoo.md

which can be interrupted, continues where it was, and runs in parts (`--part 1/4`); `--one-in-four` runs a sample of the heads
for sequence and token classification and question answering. `whole` names operators that every device
computes whole, with their part of the model's FLOPs (forward and backward); `split` is the part of the FLOPs that a forced
tensor axis splits.

"""


def document(rows: Sequence[Row], names: Sequence[str], sample: Sequence[str]) -> str:
    """The whole document; ``names`` are all entries of the collection, ``sample`` those with fewer heads."""
    by_entry: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        by_entry[row["entry"]][row["plan"]] = row
    parts = [_counts(by_entry, names, sample), _failures(rows), _tensor(rows), _entries(by_entry)]
    return HEAD + "\n".join(line for part in parts for line in part) + "\n"


def _counts(
    by_entry: dict[str, dict[str, Row]], names: Sequence[str], sample: Sequence[str]
) -> Iterator[str]:
    complete = {name for name, rows in by_entry.items() if all(plan in rows for plan in PLANS)}
    passed = {name for name in complete if all(by_entry[name][plan]["passed"] for plan in PLANS)}
    yield from ("## Counts", "")
    for what, wanted in (("names", set(names)), ("of the sample with one in four of the heads", set(sample))):
        run, equal = len(complete & wanted), len(passed & wanted)
        share = f" ({equal / run:.1%})" if run else ""
        yield f"{run} of {len(wanted)} {what} were run under all plans; {equal}{share} are equal under all of them."
        yield ""
    yield from ("| plan | run | equal | fail with an error | wrong |", "|---|---|---|---|---|")
    for plan in PLANS:
        rows = [entry[plan] for entry in by_entry.values() if plan in entry]
        wrong = sum(row.get("stage") == "compare" for row in rows)
        equal = sum(row["passed"] for row in rows)
        yield f"| {plan} | {len(rows)} | {equal} | {len(rows) - equal - wrong} | {wrong} |"
    yield ""


def _failures(rows: Sequence[Row]) -> Iterator[str]:
    """Failing rows by stage and message, the commonest first."""
    failed = [row for row in rows if not row["passed"]]
    yield from ("## What fails", "")
    if not failed:
        yield from ("Nothing.", "")
        return
    yield from ("| cause | error | entries | plans |", "|---|---|---|---|")
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in failed:
        found[row["stage"], row["error"]].append(row)
    for (stage, error), alike in sorted(found.items(), key=lambda item: (-len(item[1]), item[0])):
        entries = dict.fromkeys(row["entry"] for row in alike)
        plans = [plan for plan in PLANS if any(row["plan"] == plan for row in alike)]
        listed = "all" if len(plans) == len(PLANS) else ", ".join(plans)
        yield f"| {CAUSES[stage]} | {_cell(error[:300])} | {', '.join(entries)} | {listed} |"
    yield ""


def _tensor(rows: Sequence[Row]) -> Iterator[str]:
    """How much a forced tensor axis splits."""
    shares = [row["tensor_share"] for row in rows if row["plan"] == TENSOR and "tensor_share" in row]
    enough = sum(share >= MOST for share in shares)
    yield from ("## What tensor parallelism splits", "")
    yield f"Under {TENSOR}, {enough} of {len(shares)} entries that are planned have at least {MOST:.0%} of their FLOPs split."
    reasons: Counter[str] = Counter()
    for row in rows:
        if row["plan"] == TENSOR and row.get("tensor_share", 1.0) < MOST:
            reasons.update(target for target, share in row["tensor_whole"].items() if share > 0.01)
    if reasons:
        yield from ("", "Of the others, operators that are computed whole with more than 1% of the FLOPs:", "")
        yield ", ".join(f"`{target}` in {count}" for target, count in reasons.most_common())
    yield ""


def _entries(by_entry: dict[str, dict[str, Row]]) -> Iterator[str]:
    yield from (
        "## Entries",
        "",
        "| entry | plan | axes | largest error | split | whole |",
        "|---|---|---|---|---|---|",
    )
    for entry in sorted(by_entry):
        for plan in PLANS:
            row = by_entry[entry].get(plan)
            if row is None:
                continue
            errors = [row[kind] for kind in KINDS if kind in row]
            result = f"{max(errors):.0e}" if row["passed"] else f"**{row['stage']}**"
            split = f"{row['tensor_share']:.1%}" if "tensor_share" in row else ""
            alone = row.get("stages", 1) > 1  # each stage is on one device: there is nothing to split over
            whole = {} if alone else row.get("tensor_whole", row.get("whole", {}))
            yield f"| {entry} | {plan} | {row.get('axes', '')} | {result} | {split} | {_cell(_shares(whole))} |"


def _shares(whole: dict[str, float]) -> str:
    shown: Iterable[str] = (
        f"{target.removeprefix('aten.')} {share:.1%}" for target, share in whole.items() if share >= 0.001
    )
    return ", ".join(shown)


def _cell(text: str) -> str:
    """Text that may stand in a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")
