"""All parts of the report put together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.codegen.stages import parts
from autopar.graph import OpGraph
from autopar.options import PlanOptions
from autopar.plans import Plan
from autopar.report.basis import basis_json
from autopar.report.breakdown import seconds_of
from autopar.report.collectives import collectives_json, hop_links
from autopar.report.entries import fallback_entries, operator_entries, parameter_entries
from autopar.report.neighbours import neighbours_json
from autopar.report.schema import SCHEMA_VERSION
from autopar.report.search import by_hand_json, chosen, solver_json
from autopar.report.stages import predicted_json, stages_json
from autopar.report.summary import cluster_json, main_dtype, mesh_json, model_json, warnings_of, work_json
from autopar.report.timeline import timeline_json
from autopar.report.views import View, views
from autopar.search.evaluate import Evaluated
from autopar.search.joint import Found
from cost_models import Cluster, simulate


def details(
    plan: Plan,
    graph: OpGraph,
    cluster: Cluster,
    options: PlanOptions,
    found: Found,
    rivals: Mapping[str, Evaluated],
) -> dict[str, Any]:
    """The report of a plan without timings: JSON values only, the same for the same plan.

    ``found``: the search that ended with the plan; ``rivals``: plans of one stage as people write them by hand.
    """
    made = parts(plan, graph)
    best, shown, canonical = chosen(found), views(plan, made, found), graph.canonical
    times, num_ranks = [view.times for view in shown], best.frame.grid.num_ranks
    step = simulate(plan.schedule, times, best.hops, num_ranks, plan.num_micro_batches)
    work = work_json(shown, plan.batch_size / plan.micro_batch_size, best.step_seconds, graph, cluster)
    seconds = [seconds_of(view) for view in shown]
    predicted = predicted_json(shown, seconds, step, best.step_seconds, graph.batch_size, work)
    solver = solver_json(found, shown)
    operators, collectives = (
        operator_entries(shown, canonical),
        collectives_json(plan, graph, made, shown, cluster, canonical),
    )
    model = shown[0].costed.conversions.cost_model
    offloads = any(kept.offload for stage in plan.stages for kept in stage.parameters.values())
    basis = basis_json(
        model, operators, collectives["entries"], predicted["breakdown"], options.optimizer, main_dtype(graph), offloads
    )
    predicted = {**predicted, "provenance": basis["step_seconds"]["provenance"], "basis": basis}
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model_json(graph, work["model_flops"]),
        "cluster": cluster_json(cluster),
        "options": json.loads(json.dumps(options.to_json())),
        "mesh": mesh_json(shown, cluster),
        "schedule": _schedule(plan, shown, num_ranks, predicted["bubble_fraction"], cluster),
        "stages": stages_json(shown, seconds, graph, best.hops),
        "operators": operators,
        "parameters": parameter_entries(shown, canonical),
        "collectives": collectives,
        "predicted": {**predicted, "timeline": timeline_json(step, plan.num_micro_batches)},
        "solver": solver,
        "alternatives": {"by_hand": by_hand_json(rivals, best.step_seconds), "neighbours": neighbours_json(found)},
        "fallbacks": fallback_entries(shown),
        "warnings": warnings_of(shown, graph, work["repeated_work"], solver["gap"], options.max_variants),
        "fingerprints": {
            "graph": plan.graph_fingerprint,
            "cluster": plan.cluster_fingerprint,
            "options": plan.options_fingerprint,
            "plan": plan.fingerprint,
        },
    }


def _schedule(
    plan: Plan, shown: Sequence[View], num_ranks: int, bubble_fraction: float, cluster: Cluster
) -> dict[str, Any]:
    return {
        "kind": plan.schedule,
        "num_pipeline_ranks": num_ranks,
        "num_stages": len(plan.stages),
        "num_micro_batches": plan.num_micro_batches,
        "micro_batch_size": plan.micro_batch_size,
        "bubble_fraction": bubble_fraction,
        "links": hop_links(shown, cluster),
    }
