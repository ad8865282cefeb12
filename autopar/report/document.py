"""All parts of the report put together."""

from __future__ import annotations

import json
from typing import Any

from autopar.costing.candidate import SearchResult
from autopar.graph import OpGraph
from autopar.options import PlanOptions
from autopar.plans import Plan, Resolved
from autopar.report.breakdown import bytes_of, seconds_of
from autopar.report.collectives import collectives_json
from autopar.report.entries import fallback_entries, operator_entries, parameter_entries
from autopar.report.schema import SCHEMA_VERSION
from autopar.report.search import alternatives_json, solver_json
from autopar.report.summary import cluster_json, mesh_json, model_json, predicted_json, stages_json, warnings_of
from cost_models import Cluster


def details(plan: Plan, graph: OpGraph, cluster: Cluster, options: PlanOptions, result: SearchResult) -> dict[str, Any]:
    """The report of a plan without timings: JSON values only, the same for the same plan."""
    best, stage = result.best, plan.stages[0]
    resolved = Resolved(stage, graph)
    predicted = predicted_json(seconds_of(best, resolved), bytes_of(best, graph), best, graph, cluster)
    solver = solver_json(result, stage)
    repeated = predicted["mfu"]["repeated_work"]
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model_json(graph, best),
        "cluster": cluster_json(cluster),
        "options": json.loads(json.dumps(options.to_json())),
        "mesh": mesh_json(best, resolved, cluster),
        "schedule": {
            "kind": plan.schedule,
            "num_stages": len(plan.stages),
            "num_micro_batches": plan.num_micro_batches,
        },
        "stages": stages_json(graph, stage),
        "operators": operator_entries(best, resolved),
        "parameters": parameter_entries(best, resolved),
        "collectives": collectives_json(plan, graph, best, cluster),
        "predicted": predicted,
        "solver": solver,
        "alternatives": alternatives_json(result),
        "fallbacks": fallback_entries(best, graph),
        "warnings": warnings_of(best, graph, stage, repeated, solver["gap"], options.max_variants),
        "fingerprints": {
            "graph": plan.graph_fingerprint,
            "cluster": plan.cluster_fingerprint,
            "options": plan.options_fingerprint,
            "plan": plan.fingerprint,
        },
    }
