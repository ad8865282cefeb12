"""The JSON Schema (draft 2020-12) of ``plan.report()``: the one source; ``docs/report.schema.json`` is written from it.

Objects are closed: a key that the schema does not know is an error, so that schema and report change together.
"""

from __future__ import annotations

from typing import Any, get_args

from autopar.costing.operators import Role
from cost_models import SCHEDULES

SCHEMA_VERSION = 3

Schema = dict[str, Any]


def _object(**properties: Schema) -> Schema:
    """An object with exactly these keys."""
    named = dict(properties)
    return {"type": "object", "properties": named, "required": list(named), "additionalProperties": False}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _tuple(*items: Schema) -> Schema:
    """A list with exactly these items."""
    return {"type": "array", "prefixItems": list(items), "items": False, "minItems": len(items)}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
POSITIVE: Schema = {"type": "integer", "minimum": 1}
AMOUNT: Schema = {"type": "number", "minimum": 0}
SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
NUMBER: Schema = {"type": "number"}
SHAPE = _list(COUNT)
MESH_SHAPE = _list(POSITIVE)
STAGE_NUMBERS: Schema = {**_list(COUNT), "minItems": 1}
LAYOUT: Schema = {"type": "string", "pattern": r"^((S\d+\[[0-9x/+]+\]|R|G|P)(,|$))*$"}
ZERO: Schema = {"enum": [0, 1, 2, 3]}
FINGERPRINT: Schema = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
STATUS: Schema = {"enum": ["OPTIMAL", "FEASIBLE", "INFEASIBLE", "TIMED_OUT", "ERROR"]}
MODE: Schema = {"enum": ["none", "selective", "full"]}
SCHEDULE_KIND: Schema = {"enum": list(SCHEDULES)}
PHASE: Schema = {"enum": ["forward", "backward", "recompute", "gradient", "parameter"]}
PROVENANCE: Schema = {"enum": ["measured", "corrected", "estimated"]}
COLLECTIVE: Schema = {"enum": ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]}

MODEL = _object(
    name=TEXT,
    num_parameters=COUNT,
    parameter_bytes=COUNT,
    dtype=TEXT,
    batch_size=POSITIVE,
    inputs=_map(SHAPE),
    training=FLAG,
    has_loss=FLAG,
    num_operators=COUNT,
    flops_per_step=AMOUNT,
    blocks=_map(POSITIVE),
)
CLUSTER = _object(
    name=TEXT,
    num_devices=POSITIVE,
    nodes=_list(
        _object(count=POSITIVE, device=TEXT, num_devices=POSITIVE, link=TEXT, memory_bytes=POSITIVE, source=TEXT)
    ),
    inter_link=_or_null(TEXT),
)
MESH = _object(
    shape=MESH_SHAPE,
    names=_list(TEXT),
    axes=_list(
        _object(
            name=TEXT,
            size=POSITIVE,
            stride=POSITIVE,
            links=_list(TEXT),
            splits=_object(batch=SHARE, other=SHARE, nothing=SHARE),
            zero=_map(COUNT),
        )
    ),
)
SCHEDULE = _object(
    kind=SCHEDULE_KIND,
    num_pipeline_ranks=POSITIVE,
    num_stages=POSITIVE,
    num_micro_batches=POSITIVE,
    micro_batch_size=POSITIVE,
    bubble_fraction=SHARE,
    links=_list(TEXT),
)
KINDS_OF_SECONDS = {
    "compute_seconds": AMOUNT,
    "copies_seconds": AMOUNT,
    "resharding_seconds": NUMBER,
    "recomputation_seconds": AMOUNT,
    "parameter_communication_seconds": NUMBER,
    "optimizer_seconds": AMOUNT,
    "offload_seconds": AMOUNT,
}
KINDS_OF_BYTES = {
    "parameter_bytes": AMOUNT,
    "working_copy_bytes": AMOUNT,
    "gradient_bytes": AMOUNT,
    "optimizer_state_bytes": AMOUNT,
    "saved_activation_bytes": AMOUNT,
    "momentary_bytes": AMOUNT,
    "total_bytes": AMOUNT,
    "available_bytes": AMOUNT,
    "host_bytes": AMOUNT,
    "host_available_bytes": AMOUNT,
}
STAGE = _object(
    index=COUNT,
    pipeline_rank=COUNT,
    first_device=COUNT,
    num_devices=POSITIVE,
    mesh_shape=MESH_SHAPE,
    like=COUNT,
    first_module=TEXT,
    last_module=TEXT,
    blocks=_list(
        _object(
            group=TEXT,
            first_block=TEXT,
            last_block=TEXT,
            num_blocks=POSITIVE,
            num_in_model=POSITIVE,
            num_variants=POSITIVE,
            variants=_list(_tuple(COUNT, POSITIVE)),
            recompute=_list(_tuple(MODE, POSITIVE)),
        )
    ),
    in_flight=POSITIVE,
    seconds=_object(
        forward_seconds=AMOUNT,
        backward_seconds=AMOUNT,
        backward_weight_seconds=AMOUNT,
        once_seconds=AMOUNT,
        busy_seconds=AMOUNT,
        **KINDS_OF_SECONDS,
        send_recv_seconds=AMOUNT,
    ),
    memory=_object(**KINDS_OF_BYTES),
)
OPERATOR = _object(
    id=TEXT,
    module=TEXT,
    source=TEXT,
    target=TEXT,
    kind={"enum": ["matmul", "attention", "elementwise", "view", "free", "fallback"]},
    strategy=TEXT,
    splits=_map(TEXT),
    inputs=_list(LAYOUT),
    outputs=_list(LAYOUT),
    provenance=PROVENANCE,
    compute_seconds=AMOUNT,
    exchange_seconds=NUMBER,
    conversion_seconds=AMOUNT,
    device_flops=AMOUNT,
    saved_bytes=AMOUNT,
    occurrences=POSITIVE,
    stages=STAGE_NUMBERS,
)
PARAMETER = _object(
    names={**_list(TEXT), "minItems": 1},
    shape=SHAPE,
    dtype=TEXT,
    trainable=FLAG,
    use=LAYOUT,
    storage=LAYOUT,
    zero=ZERO,
    parameter_bytes=AMOUNT,
    working_copy_bytes=AMOUNT,
    gradient_bytes=AMOUNT,
    optimizer_state_bytes=AMOUNT,
    momentary_bytes=AMOUNT,
    offload=FLAG,
    host_bytes=AMOUNT,
    communication_seconds=NUMBER,
    optimizer_seconds=AMOUNT,
    offload_seconds=AMOUNT,
    occurrences=POSITIVE,
    stages=STAGE_NUMBERS,
)
COLLECTIVES = _object(
    entries=_list(
        _object(
            kind=COLLECTIVE,
            axis=TEXT,
            links=_list(TEXT),
            phase=PHASE,
            what=TEXT,
            num_bytes=COUNT,
            count=POSITIVE,
            seconds=AMOUNT,
            provenance=PROVENANCE,
            stages=STAGE_NUMBERS,
        )
    ),
    totals=_list(_object(kind=COLLECTIVE, axis=TEXT, count=POSITIVE, num_bytes=COUNT, seconds=AMOUNT)),
)
SPAN = _tuple({"enum": ["F", "B", "I", "W", "send", "once"]}, COUNT, {"type": "integer", "minimum": -1}, AMOUNT, AMOUNT)
TIMELINE = _object(
    complete=FLAG,
    micro_batches=_list(COUNT),
    legend=_map(TEXT),
    ranks=_list(_object(pipeline_rank=COUNT, busy_seconds=AMOUNT, chart=TEXT, spans=_list(SPAN))),
)
# How much of the seconds is measured, corrected by what was measured of their kind, or estimated; what most of them are;
# the mean absolute error of steps predicted so, as a fraction.
BASIS = _object(provenance=PROVENANCE, shares=_map(SHARE), expected_error=AMOUNT)
PREDICTED = _object(
    provenance=PROVENANCE,
    basis=_object(
        profile=_or_null(FINGERPRINT),
        correction=AMOUNT,
        step_seconds=BASIS,
        kinds={
            "type": "object",
            "properties": dict.fromkeys(KINDS_OF_SECONDS, BASIS),
            "additionalProperties": False,
        },
    ),
    step_seconds=AMOUNT,
    samples_per_second=_or_null(AMOUNT),
    breakdown=_object(**KINDS_OF_SECONDS, idle_seconds=AMOUNT),
    bubble_fraction=SHARE,
    memory=_object(**KINDS_OF_BYTES, pipeline_rank=COUNT),
    mfu=_object(
        value=AMOUNT,
        model_flops=AMOUNT,
        peak_flops_per_second=AMOUNT,
        dtype=TEXT,
        peak_source=TEXT,
        repeated_work=AMOUNT,
        recomputed_work=AMOUNT,
    ),
    timeline=TIMELINE,
)
_ARRANGED = {
    "num_pipeline_ranks": POSITIVE,
    "mesh_shape": MESH_SHAPE,
    "roles": _list({"enum": list(get_args(Role))}),
    "schedule": SCHEDULE_KIND,
    "num_stages": POSITIVE,
    "num_micro_batches": POSITIVE,
    "recompute": _list(MODE),
    "fits": FLAG,
    "seconds": _or_null(AMOUNT),
    "ratio": _or_null(AMOUNT),
    "peak_bytes": _or_null(AMOUNT),
    "missing_bytes": _or_null(AMOUNT),
}
_BOUNDED = {**_ARRANGED, "lower_bound_seconds": _or_null(NUMBER)}
ALTERNATIVES = _object(
    by_hand=_map(_object(**_ARRANGED, status=STATUS)),
    neighbours=_list(_object(change=TEXT, **{**_BOUNDED, "fits": _or_null(FLAG)}, evaluated=FLAG, reason=TEXT)),
)
SOLVER = _object(
    status=STATUS,
    cost_seconds=AMOUNT,
    lower_bound_seconds=NUMBER,
    gap=AMOUNT,
    num_frames=POSITIVE,
    num_priced=COUNT,
    num_bounded=COUNT,
    num_evaluated=POSITIVE,
    evaluated={**_list(_object(**_BOUNDED)), "minItems": 1, "maxItems": 12},
    variants=_map(POSITIVE),
)
FALLBACK = _object(
    target=TEXT,
    occurrences=POSITIVE,
    modules=_list(TEXT),
    source=TEXT,
    seconds=AMOUNT,
    saved_bytes=AMOUNT,
    whole_bytes=COUNT,
)

SCHEMA: Schema = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "autopar report",
    "description": "What plan.report() returns. SI units, named in the keys; seconds are of a whole step, all of its "
    "micro-batches, but a stage's forward, backward and backward_weight seconds, which are of one "
    "micro-batch. `timings` is left out of saved plans.",
    **_object(
        schema_version={"const": SCHEMA_VERSION},
        model=MODEL,
        cluster=CLUSTER,
        options={"type": "object"},
        mesh=MESH,
        schedule=SCHEDULE,
        stages={**_list(STAGE), "minItems": 1},
        operators=_list(OPERATOR),
        parameters=_list(PARAMETER),
        collectives=COLLECTIVES,
        predicted=PREDICTED,
        solver=SOLVER,
        alternatives=ALTERNATIVES,
        fallbacks=_list(FALLBACK),
        warnings=_list(TEXT),
        fingerprints=_object(graph=FINGERPRINT, cluster=FINGERPRINT, options=FINGERPRINT, plan=FINGERPRINT),
        timings=_map(AMOUNT),
    ),
}
