"""Every collective of a step with its bytes, its links and its price.

Enters: the plan's ledger (what the program will issue, counted from its conversions). Leaves: JSON objects, one for alike
collectives of like blocks and stages; ``count`` and ``seconds`` are of each stage that is named. Prices are the
cost model's for one collective of that size, times the count, except where the program sends those of many parameters in
buckets (gradients of replicated parameters, shards under ZeRO-1 and 2): they are priced by the bytes of full buckets, as in
the search.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.codegen.ledger import STAGES, Entry, ledger
from autopar.codegen.stages import Part
from autopar.costing.parameters import BUCKET_BYTES
from autopar.graph import OpGraph
from autopar.plans import Plan
from autopar.report.summary import axis_links, links_of
from autopar.report.views import View
from cost_models import AxisCost, Cluster, provenance_of


def collectives_json(
    plan: Plan,
    graph: OpGraph,
    parts: Sequence[Part],
    views: Sequence[View],
    cluster: Cluster,
    canonical: Mapping[str, str],
) -> dict[str, Any]:
    """Every collective, alike ones counted, and their totals by kind and axis over all stages."""
    priced = _Priced(views, cluster)
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    for entry in _alike(ledger(plan, graph, made=parts), canonical):
        links, seconds = priced.links(entry), priced.seconds(entry)
        what = canonical.get(entry.what, entry.what)
        key = (entry.kind, entry.axis, *links, entry.phase, what, entry.num_bytes, entry.count, seconds)
        described = {
            "kind": entry.kind,
            "axis": entry.axis,
            "links": links,
            "phase": entry.phase,
            "what": entry.what,
            "num_bytes": entry.num_bytes,
            "count": entry.count,
            "seconds": seconds,
            "provenance": provenance_of(priced.cost(entry), entry.kind),
            "stages": [],
        }
        found.setdefault(key, described)["stages"].append(entry.stage)
    return {"entries": list(found.values()), "totals": _totals(list(found.values()))}


def _alike(entries: Iterable[Entry], canonical: Mapping[str, str]) -> list[Entry]:
    """The entries with those of like blocks of a stage added up, under the name of the first."""
    found: dict[Entry, Entry] = {}
    for entry in entries:
        key = replace(entry, what=canonical.get(entry.what, entry.what), count=1)
        known = found.get(key)
        found[key] = entry if known is None else replace(known, count=known.count + entry.count)
    return list(found.values())


def _totals(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    totals: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in entries:
        key, times = (entry["kind"], entry["axis"]), len(entry["stages"])
        total = totals.setdefault(key, {"kind": key[0], "axis": key[1], "count": 0, "num_bytes": 0, "seconds": 0.0})
        total["count"] += times * entry["count"]
        total["num_bytes"] += times * entry["count"] * entry["num_bytes"]
        total["seconds"] += times * entry["seconds"]
    return list(totals.values())


class _Priced:
    """Links and prices of a ledger's entries: on the axes of a stage's mesh, and between stages."""

    def __init__(self, views: Sequence[View], cluster: Cluster) -> None:
        self.views, self.cluster = views, cluster
        self._between: dict[tuple[int, ...], tuple[AxisCost, list[str]]] = {}
        self._links = {
            (view.index, name): axis_links(cluster, view.mesh, axis, [view.first_device])
            for view in views
            for axis, name in enumerate(view.mesh.names)
        }

    def links(self, entry: Entry) -> list[str]:
        return self._stages(entry)[1] if entry.axis == STAGES else self._links[entry.stage, entry.axis]

    def seconds(self, entry: Entry) -> float:
        """Seconds of all collectives of one entry."""
        cost = self.cost(entry)
        times, num_bytes = float(entry.count), float(entry.num_bytes)
        if entry.in_bucket:
            times, num_bytes = times * num_bytes / BUCKET_BYTES, float(BUCKET_BYTES)
        return times * float(cost.seconds(entry.kind, num_bytes))  # type: ignore[arg-type]

    def cost(self, entry: Entry) -> AxisCost:
        """What prices an entry."""
        if entry.axis == STAGES:
            return self._stages(entry)[0]
        view = self.views[entry.stage]
        return view.costed.conversions.axes[view.mesh.names.index(entry.axis)]

    def _stages(self, entry: Entry) -> tuple[AxisCost, list[str]]:
        """What stages send one another: a stage to its neighbour, or all that have a parameter, or every pipeline rank."""
        if entry.kind == "send_recv":
            towards = entry.stage + (1 if entry.phase == "forward" else -1)
            firsts: tuple[int, ...] = (self.views[entry.stage].first_device, self.views[towards].first_device)
        else:
            holders = [view for view in self.views if entry.kind == "broadcast" or entry.what in view.graph.values]
            firsts = tuple(dict.fromkeys(view.first_device for view in holders))
        if firsts not in self._between:
            groups = [[first + place for first in firsts] for place in range(self.views[0].mesh.num_devices)]
            self._between[firsts] = (
                self.views[0].costed.conversions.cost_model.groups(groups),
                links_of(self.cluster, groups),
            )
        return self._between[firsts]


def hop_links(views: Sequence[View], cluster: Cluster) -> list[str]:
    """The links between neighbouring stages."""
    found: dict[str, None] = {}
    for one, other in itertools.pairwise(views):
        if one.first_device != other.first_device:
            groups = [[one.first_device + i, other.first_device + i] for i in range(one.mesh.num_devices)]
            found.update(dict.fromkeys(links_of(cluster, groups)))
    return list(found)
