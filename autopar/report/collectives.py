"""Every collective of a step with its bytes, its links and its price.

Enters: the plan's ledger (what the program will issue, counted from its conversions). Leaves: JSON objects. Prices are the
cost model's for one collective of that size, times the count, except the gradients of replicated parameters: the program
sends them in buckets, and they are priced by the bytes of full buckets, as in the search.
"""

from __future__ import annotations

from typing import Any

from autopar.codegen.ledger import Entry, ledger
from autopar.costing.candidate import Candidate
from autopar.costing.parameters import BUCKET_BYTES
from autopar.graph import OpGraph
from autopar.plans import Plan
from autopar.report.summary import axis_links
from cost_models import AxisCost, Cluster


def collectives_json(plan: Plan, graph: OpGraph, candidate: Candidate, cluster: Cluster) -> dict[str, Any]:
    """Every collective, alike ones counted, and their totals by kind and axis."""
    mesh = plan.stages[0].mesh
    costs = {name: candidate.costed.conversions.axes[axis] for axis, name in enumerate(mesh.names)}
    links = {name: axis_links(cluster, mesh, axis) for axis, name in enumerate(mesh.names)}
    entries: list[dict[str, Any]] = [
        {
            "kind": entry.kind,
            "axis": entry.axis,
            "links": links[entry.axis],
            "phase": entry.phase,
            "what": entry.what,
            "num_bytes": entry.num_bytes,
            "count": entry.count,
            "seconds": entry_seconds(entry, costs[entry.axis]),
        }
        for entry in ledger(plan, graph)
    ]
    totals: dict[tuple[str, str], dict[str, Any]] = {}
    for found in entries:
        key = (found["kind"], found["axis"])
        total = totals.setdefault(key, {"kind": key[0], "axis": key[1], "count": 0, "num_bytes": 0, "seconds": 0.0})
        total["count"] += found["count"]
        total["num_bytes"] += found["count"] * found["num_bytes"]
        total["seconds"] += found["seconds"]
    return {"entries": entries, "totals": list(totals.values())}


def entry_seconds(entry: Entry, axis: AxisCost) -> float:
    """Seconds of all collectives of one entry."""
    if entry.phase == "gradient" and entry.kind == "all_reduce":
        buckets = entry.count * entry.num_bytes / BUCKET_BYTES
        return buckets * float(axis.seconds("all_reduce", float(BUCKET_BYTES)))
    return entry.count * float(axis.seconds(entry.kind, float(entry.num_bytes)))  # type: ignore[arg-type]
