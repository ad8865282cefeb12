"""The report as text, for people: a screen or two, whatever the depth of the model.

Enters: what ``plan.report()`` returns (or the saved report, without timings). Leaves: lines of at most about 120 characters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autopar.report.units import bytes_text, count_text, percent_text, seconds_text

Report = Mapping[str, Any]

_SECONDS = {
    "compute_seconds": "compute",
    "copies_seconds": "copies of layout changes",
    "resharding_seconds": "communication of activations",
    "parameter_communication_seconds": "communication of parameters and gradients",
    "optimizer_seconds": "optimizer",
}
_BYTES = {
    "parameter_bytes": "parameters",
    "working_copy_bytes": "gathered working copies",
    "gradient_bytes": "gradients",
    "optimizer_state_bytes": "optimizer states",
    "saved_activation_bytes": "activations saved for backward",
    "momentary_bytes": "held for a moment",
}
_MAX_ROWS = 24


def text(report: Report) -> str:
    """The whole report."""
    sections = (_head, _mesh, _blocks, _parameters, _prediction, _memory, _collectives, _search, _fallbacks, _notes)
    return "\n\n".join(part for part in ("\n".join(section(report)) for section in sections) if part)


def _head(report: Report) -> Iterable[str]:
    model, cluster = report["model"], report["cluster"]
    yield (
        f"{model['name']}: {count_text(model['num_parameters'])} parameters, {model['dtype']}, "
        f"batch {model['batch_size']}, {count_text(model['flops_per_step'])}FLOP a step"
    )
    nodes = [f"{node['count']} x {node['num_devices']} {node['device']} on {node['link']}" for node in cluster["nodes"]]
    between = f", {cluster['inter_link']} between nodes" if cluster["inter_link"] else ""
    yield f"on {cluster['name']} ({'; '.join(nodes)}{between})"


def _mesh(report: Report) -> Iterable[str]:
    mesh = report["mesh"]
    yield "mesh  " + " x ".join(f"{name}={size}" for name, size in zip(mesh["names"], mesh["shape"], strict=True))
    rows = []
    for axis in mesh["axes"]:
        links = " and ".join(axis["links"]) or "no traffic"
        rows.append((axis["name"], f"{axis['size']} devices over {links}", f"splits {_split_words(axis['splits'])}"))
    yield from _table(rows)


def _split_words(shares: Mapping[str, float]) -> str:
    words = {"batch": "the batch", "other": "other dims", "nothing": "nothing"}
    found = [f"{words[kind]} in {percent_text(share)} of the work" for kind, share in shares.items() if share > 0.0005]
    return ", ".join(found) or "nothing that computes"


def _blocks(report: Report) -> Iterable[str]:
    """The heavy operators; of like blocks the first."""
    yield "heavy operators"
    for stage in report["stages"]:
        for block in stage["blocks"]:
            variants = block["num_variants"]
            alike = "all alike" if variants == 1 else f"{variants} variants"
            yield f"  {block['group']}: {block['num_blocks']} blocks, {alike}"
    heavy = [operator for operator in report["operators"] if operator["kind"] in ("matmul", "attention")]
    calls = Counter((operator["module"], operator["target"]) for operator in heavy)
    rows, axes = [], report["mesh"]["names"]
    for operator in heavy:
        times = f"{operator['occurrences']} x" if operator["occurrences"] > 1 else ""
        splits = ", ".join(f"{axis}: {operator['splits'][axis]}" for axis in axes if axis in operator["splits"])
        line = operator["source"] if calls[operator["module"], operator["target"]] > 1 else ""
        rows.append((times, operator["module"], operator["target"].split(".")[1], splits, line.rpartition("/")[2]))
    yield from _shortened(rows, "operators")


def _parameters(report: Report) -> Iterable[str]:
    """How many bytes of parameters rest in which way."""
    kinds: dict[tuple[str, str, str], tuple[int, float]] = {}
    for entry in report["parameters"]:
        where = "frozen" if not entry["trainable"] else f"ZeRO-{entry['zero']}" if entry["zero"] else ""
        key = (_plain(entry["use"]), _plain(entry["storage"]), where)
        count, size = kinds.get(key, (0, 0.0))
        kinds[key] = (count + entry["occurrences"], size + entry["parameter_bytes"] * entry["occurrences"])
    yield f"parameters  used and stored as ({', '.join(report['mesh']['names'])})"
    ordered = sorted(kinds.items(), key=lambda item: -item[1][1])
    rows = [
        (f"{count} tensors", bytes_text(size), f"used {use}", f"stored {storage}", where)
        for (use, storage, where), (count, size) in ordered
    ]
    yield from _shortened(rows, "ways")


def _plain(layout: str) -> str:
    """A layout without its cuts: ``S0[1x8/1],R`` -> ``(S0, R)``."""
    return "(" + ", ".join(word.split("[")[0] for word in layout.split(",")) + ")"


def _prediction(report: Report) -> Iterable[str]:
    predicted = report["predicted"]
    step, mfu = predicted["step_seconds"], predicted["mfu"]
    yield (
        f"predicted step  {seconds_text(step)} ({predicted['provenance']}), "
        f"{percent_text(mfu['value'])} of the peak in {mfu['dtype']}"
    )
    rows = [
        (
            words,
            seconds_text(predicted["breakdown"][kind]),
            percent_text(predicted["breakdown"][kind] / step if step else 0),
        )
        for kind, words in _SECONDS.items()
        if abs(predicted["breakdown"][kind]) > 1e-9 * step
    ]
    yield from _table(rows)


def _memory(report: Report) -> Iterable[str]:
    memory = report["predicted"]["memory"]
    yield (
        f"memory  {bytes_text(memory['total_bytes'])} on the fullest device, "
        f"{bytes_text(memory['available_bytes'])} available"
    )
    yield from _table([(words, bytes_text(memory[kind])) for kind, words in _BYTES.items() if memory[kind]])


def _collectives(report: Report) -> Iterable[str]:
    links = {axis["name"]: " and ".join(axis["links"]) for axis in report["mesh"]["axes"]}
    totals = report["collectives"]["totals"]
    yield "collectives a step" + ("" if totals else "  none")
    rows = [
        (
            total["kind"],
            f"{total['axis']} ({links[total['axis']]})",
            f"{total['count']} x",
            bytes_text(total["num_bytes"]),
            seconds_text(total["seconds"]),
        )
        for total in totals
    ]
    yield from _table(rows)


def _search(report: Report) -> Iterable[str]:
    solver = report["solver"]
    certificate = (
        "nothing in the searched space is faster"
        if solver["status"] == "OPTIMAL"
        else f"nothing can be more than {percent_text(solver['gap'])} faster"
    )
    meshes = f"{solver['num_meshes']} mesh{'es' if solver['num_meshes'] > 1 else ''}"
    yield f"search  {meshes}, {solver['status']}: {certificate}, under these costs"
    alternatives = report["alternatives"]
    rows = [(name, *_compared(other)) for name, other in sorted(alternatives["by_hand"].items())]
    rows += [
        (f"best of {' x '.join(map(str, other['mesh_shape']))}", *_compared(other))
        for other in alternatives["other_meshes"]
    ]
    yield from _table(rows)


def _compared(other: Mapping[str, Any]) -> tuple[str, str, str]:
    ratio = "-" if other["ratio"] is None else f"{other['ratio']:.3f} x this plan"
    if other["fits"]:
        fits = f"fits in {bytes_text(other['peak_bytes'])}"
    elif other["missing_bytes"]:
        slower = "" if (other["ratio"] or 2) >= 1 else "; what fits there is slower"
        fits = f"does not fit: {bytes_text(other['missing_bytes'])} too much{slower}"
    else:
        fits = f"no plan ({other['status']})"
    return seconds_text(other["seconds"]), ratio, fits


def _fallbacks(report: Report) -> Iterable[str]:
    if report["fallbacks"]:
        yield "operators without a sharding rule, computed whole on every device"
    rows = [
        (
            f"{entry['occurrences']} x",
            entry["target"],
            seconds_text(entry["seconds"]),
            bytes_text(entry["whole_bytes"]),
            entry["source"],
        )
        for entry in report["fallbacks"]
    ]
    yield from _shortened(rows, "operators")


def _notes(report: Report) -> Iterable[str]:
    yield from (f"warning: {warning}" for warning in report["warnings"])
    timings = report.get("timings") or {}
    if timings:
        total = sum(timings.values())
        phases = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in timings.items())
        yield f"planned in {seconds_text(total)} ({phases})"


def _shortened(rows: Sequence[tuple[str, ...]], what: str) -> Iterable[str]:
    yield from _table(rows[:_MAX_ROWS])
    if len(rows) > _MAX_ROWS:
        yield f"  ... and {len(rows) - _MAX_ROWS} more {what} (see the JSON report)"


def _table(rows: Sequence[tuple[str, ...]]) -> Iterable[str]:
    """Rows with columns aligned; numbers are ranged right by their column."""
    if not rows:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if _is_amount(cell) else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ]
        yield ("  " + "  ".join(cells)).rstrip()


def _is_amount(cell: str) -> bool:
    return bool(cell) and (cell[0].isdigit() or cell[0] == "-") and len(cell) < 12
