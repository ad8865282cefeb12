"""The report as text, for people: a screen or two, whatever the depth of the model.

Enters: what ``plan.report()`` returns (or the saved report, without timings). Leaves: lines of at most about 120 characters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from autopar.report.entries import BY_CHUNKS
from autopar.report.tables import shortened, table
from autopar.report.units import bytes_text, count_text, percent_text, seconds_text

Report = Mapping[str, Any]

_SECONDS = {
    "compute_seconds": "compute",
    "copies_seconds": "copies of layout changes",
    "resharding_seconds": "communication of activations",
    "recomputation_seconds": "recomputation",
    "parameter_communication_seconds": "communication of parameters and gradients",
    "optimizer_seconds": "optimizer",
    "offload_seconds": "copies to the host and back",
    "idle_seconds": "waiting for other stages",
}
_BYTES = {
    "parameter_bytes": "parameters",
    "working_copy_bytes": "gathered working copies",
    "gradient_bytes": "gradients",
    "optimizer_state_bytes": "optimizer states",
    "saved_activation_bytes": "activations saved for backward",
    "momentary_bytes": "held for a moment",
}
_MAX_STAGES = 16


def text(report: Report) -> str:
    """The whole report."""
    plan = (_head, _plan, _mesh, _stages, _timeline, _blocks, _parameters)
    sections = (*plan, _prediction, _memory, _collectives, _search, _neighbours, _fallbacks, _notes)
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


def _plan(report: Report) -> Iterable[str]:
    """The plan in a sentence or two."""
    schedule, mesh, stages = report["schedule"], report["mesh"], report["stages"]
    ranks, count, size = schedule["num_pipeline_ranks"], schedule["num_micro_batches"], schedule["micro_batch_size"]
    devices = math.prod(mesh["shape"])
    if ranks == 1:
        yield f"plan  the whole model on {_many(devices, 'device')}, {_batches(count, size)}"
    else:
        over = " and ".join(schedule["links"])
        yield (
            f"plan  a pipeline of {ranks} ranks of {_many(devices, 'device')} each, {_many(schedule['num_stages'], 'stage')}, "
            f"schedule {schedule['kind']}, {_batches(count, size)}"
        )
        yield f"  stages send one another activations over {over}; {percent_text(schedule['bubble_fraction'])} of the step idle"
    again = Counter[str]()
    for mode, number in (run for stage in stages for group in stage["blocks"] for run in group["recompute"]):
        again[mode] += number
    blocks = sum(again.values())
    words = {"selective": "compute cheap operators and attention", "full": "are computed whole"}
    for mode in words:
        if again[mode]:
            yield f"  {again[mode]} of {blocks} blocks {words[mode]} again in backward, to save memory"
    if any(operator["strategy"].endswith(BY_CHUNKS) for operator in report["operators"]):
        yield "  logits exist for some rows at a time, and are computed again in backward, to save memory"


def _batches(count: int, size: int) -> str:
    return f"in {count} micro-batches of {size}" if count > 1 else "the whole batch at once"


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _mesh(report: Report) -> Iterable[str]:
    mesh = report["mesh"]
    yield "mesh  " + " x ".join(f"{name}={size}" for name, size in zip(mesh["names"], mesh["shape"], strict=True))
    rows = []
    for axis in mesh["axes"]:
        links = " and ".join(axis["links"]) or "no traffic"
        rows.append((axis["name"], f"{axis['size']} devices over {links}", f"splits {_split_words(axis['splits'])}"))
    yield from table(rows)


def _split_words(shares: Mapping[str, float]) -> str:
    words = {"batch": "the batch", "other": "other dims", "nothing": "nothing"}
    found = [f"{words[kind]} in {percent_text(share)} of the work" for kind, share in shares.items() if share > 0.0005]
    return ", ".join(found) or "nothing that computes"


def _stages(report: Report) -> Iterable[str]:
    """A row for each stage of several."""
    stages = report["stages"]
    if len(stages) == 1:
        return
    yield "stages  (seconds of a micro-batch; bytes of a device)"
    rows = [("", "rank", "devices", "modules", "forward", "backward", "once", "in flight", "memory")]
    for stage in stages[:_MAX_STAGES]:
        first, seconds = stage["first_device"], stage["seconds"]
        rows.append(
            (
                str(stage["index"]),
                str(stage["pipeline_rank"]),
                f"{first}-{first + stage['num_devices'] - 1}",
                _held(stage),
                seconds_text(seconds["forward_seconds"]),
                seconds_text(seconds["backward_seconds"]),
                seconds_text(seconds["once_seconds"]),
                str(stage["in_flight"]),
                bytes_text(stage["memory"]["total_bytes"]),
            )
        )
    yield from table(rows)
    if len(stages) > _MAX_STAGES:
        yield f"  ... and {len(stages) - _MAX_STAGES} more stages (see the JSON report)"


def _held(stage: Mapping[str, Any]) -> str:
    """What a stage holds: its first and last modules, and how many whole blocks."""
    first, last = stage["first_module"], stage["last_module"]
    blocks = sum(group["num_blocks"] for group in stage["blocks"])
    again = sum(number for group in stage["blocks"] for mode, number in group["recompute"] if mode != "none")
    words = f" ({_many(blocks, 'block')}{f', {again} recomputed' if again else ''})" if blocks else ""
    return (first if first == last else f"{_cut(first)} .. {_cut(last)}") + words


def _cut(module: str, width: int = 26) -> str:
    return module if len(module) <= width else f"..{module[2 - width :]}"


def _timeline(report: Report) -> Iterable[str]:
    """The step as a chart, a row for each pipeline rank."""
    timeline = report["predicted"]["timeline"]
    ranks = timeline["ranks"]
    if len(ranks) == 1:
        return
    legend = ", ".join(f"{letter} {words}" for letter, words in timeline["legend"].items())
    yield f"timeline of a step ({seconds_text(report['predicted']['step_seconds'])})"
    yield f"  {legend}"
    yield from table([(f"rank {rank['pipeline_rank']}", rank["chart"]) for rank in ranks[:_MAX_STAGES]])
    if len(ranks) > _MAX_STAGES:
        yield f"  ... and {len(ranks) - _MAX_STAGES} more ranks (see the JSON report)"


def _blocks(report: Report) -> Iterable[str]:
    """The heavy operators; of like blocks the first."""
    yield "heavy operators"
    for group, size in report["model"]["blocks"].items():
        most = report["solver"]["variants"].get(group, 1)
        yield f"  {group}: {size} blocks, {'all alike' if most == 1 else f'{most} variants'}"
    heavy = [operator for operator in report["operators"] if operator["kind"] in ("matmul", "attention")]
    calls = Counter((operator["module"], operator["target"]) for operator in heavy)
    rows, axes = [], report["mesh"]["names"]
    for operator in heavy:
        times = f"{operator['occurrences']} x" if operator["occurrences"] > 1 else ""
        splits = ", ".join(f"{axis}: {operator['splits'][axis]}" for axis in axes if axis in operator["splits"])
        line = operator["source"] if calls[operator["module"], operator["target"]] > 1 else ""
        rows.append((times, operator["module"], operator["target"].split(".")[1], splits, line.rpartition("/")[2]))
    yield from shortened(rows, "operators")


def _parameters(report: Report) -> Iterable[str]:
    """How many bytes of parameters rest in which way."""
    kinds: dict[tuple[str, str, str], tuple[int, float]] = {}
    for entry in report["parameters"]:
        rests = entry["parameter_bytes"] or entry["working_copy_bytes"]  # of what is on the host there is a copy
        where = "frozen" if not entry["trainable"] else f"ZeRO-{entry['zero']}" if entry["zero"] else ""
        where = f"{where}{', ' if where else ''}updated on the host" if entry["offload"] else where
        key = (_plain(entry["use"]), _plain(entry["storage"]), where)
        count, size = kinds.get(key, (0, 0.0))
        kinds[key] = (count + entry["occurrences"], size + rests * entry["occurrences"])
    yield f"parameters  used and stored as ({', '.join(report['mesh']['names'])})"
    ordered = sorted(kinds.items(), key=lambda item: -item[1][1])
    rows = [
        (f"{count} tensors", bytes_text(size), f"used {use}", f"stored {storage}", where)
        for (use, storage, where), (count, size) in ordered
    ]
    yield from shortened(rows, "ways")


def _plain(layout: str) -> str:
    """A layout without its cuts: ``S0[1x8/1],R`` -> ``(S0, R)``."""
    return "(" + ", ".join(word.split("[")[0] for word in layout.split(",")) + ")"


def _prediction(report: Report) -> Iterable[str]:
    predicted = report["predicted"]
    step, mfu = predicted["step_seconds"], predicted["mfu"]
    basis = predicted["basis"]
    yield (
        f"predicted step  {seconds_text(step)} ({basis_words(basis['step_seconds'])}), "
        f"{percent_text(mfu['value'])} of the peak in {mfu['dtype']}"
    )
    if basis["correction"] != 1.0:
        yield f"  corrected by {basis['correction']:.3f}, which runs took over their prediction"
    rows = [
        (
            words,
            seconds_text(predicted["breakdown"][kind]),
            percent_text(predicted["breakdown"][kind] / step if step else 0),
            basis_words(basis["kinds"][kind]) if kind in basis["kinds"] else "",
        )
        for kind, words in _SECONDS.items()
        if abs(predicted["breakdown"][kind]) > 1e-9 * step
    ]
    yield from table(rows)


def basis_words(basis: Mapping[str, Any]) -> str:
    """``97% measured, to within about 15%``: what seconds rest on."""
    shares = basis["shares"]
    most = basis["provenance"]
    part = "" if shares[most] > 0.995 else f"{shares[most]:.0%} "
    return f"{part}{most}, to within about {basis['expected_error']:.0%}"


def _memory(report: Report) -> Iterable[str]:
    memory, several = report["predicted"]["memory"], report["schedule"]["num_pipeline_ranks"] > 1
    where = (
        f"on the devices of pipeline rank {memory['pipeline_rank']}, the fullest"
        if several
        else "on the fullest device"
    )
    yield (f"memory  {bytes_text(memory['total_bytes'])} {where}, {bytes_text(memory['available_bytes'])} available")
    yield from table([(words, bytes_text(memory[kind])) for kind, words in _BYTES.items() if memory[kind]])
    if memory["host_bytes"]:
        there, has = bytes_text(memory["host_bytes"]), bytes_text(memory["host_available_bytes"])
        yield f"  on the host, for each device: {there} of optimizer states and what they update, {has} available"


def _collectives(report: Report) -> Iterable[str]:
    links = {axis["name"]: " and ".join(axis["links"]) for axis in report["mesh"]["axes"]}
    links["stages"] = " and ".join(report["schedule"]["links"])
    totals = report["collectives"]["totals"]
    several = ", all stages together" if len(report["stages"]) > 1 else ""
    yield f"collectives a step{several}" + ("" if totals else "  none")
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
    yield from table(rows)


def _search(report: Report) -> Iterable[str]:
    solver = report["solver"]
    certificate = (
        "nothing in the searched space is faster"
        if solver["status"] == "OPTIMAL"
        else f"nothing can be more than {percent_text(solver['gap'])} faster"
    )
    yield f"search  {solver['status']}: {certificate}, under these costs"
    yield (
        f"  {_many(solver['num_frames'], 'arrangement')} of pipeline ranks, mesh, micro-batches and schedule: "
        f"{_many(solver['num_bounded'], 'bound')}, {_many(solver['num_evaluated'], 'plan')} in full"
    )
    rows = [(name, *_compared(other)) for name, other in sorted(report["alternatives"]["by_hand"].items())]
    if rows:
        yield "by hand"
    yield from table(rows)


def _neighbours(report: Report) -> Iterable[str]:
    """Why each choice is not made otherwise."""
    neighbours = report["alternatives"]["neighbours"]
    if neighbours:
        yield "why not otherwise"
    rows = [
        (other["change"], _arranged(other), seconds_text(other["seconds"]), other["reason"]) for other in neighbours
    ]
    yield from table(rows)


def _arranged(other: Mapping[str, Any]) -> str:
    shape = " x ".join(map(str, other["mesh_shape"]))
    stages = (
        f"{other['num_stages']} stages of {shape}, {other['schedule']}" if other["num_stages"] > 1 else f"mesh {shape}"
    )
    count = f", {other['num_micro_batches']} micro-batches" if other["num_micro_batches"] > 1 else ""
    return f"{stages}{count}"


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
    yield from shortened(rows, "operators")


def _notes(report: Report) -> Iterable[str]:
    yield from (f"warning: {warning}" for warning in report["warnings"])
    timings = report.get("timings") or {}
    if timings:
        total = sum(timings.values())
        phases = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in timings.items())
        yield f"planned in {seconds_text(total)} ({phases})"
