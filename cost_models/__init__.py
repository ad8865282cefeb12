"""Prices on a cluster: seconds of operators and collectives, bytes of training. In the order in which data flows.

``Device``, ``Link`` (parts) -> the catalogue -> ``Host`` (hosts) -> ``Node``, ``Cluster`` (hardware) -> compute, collectives,
memory, and what was measured (measurements -> ``Profile`` -> measured) -> ``CostModel``. Needs the standard library and numpy
only.
"""

from cost_models.catalogue import DEVICES, LINKS, find_device, find_link
from cost_models.collectives import (
    COLLECTIVE_KINDS,
    AxisCost,
    CollectiveKind,
    Line,
    axis_cost,
    axis_groups,
    collective_seconds,
)
from cost_models.compute import OPERATOR_KINDS, OperatorKind, operator_seconds
from cost_models.errors import ClusterError, ProfileError
from cost_models.hardware import Cluster, Node
from cost_models.hosts import Host, HostShare
from cost_models.measured import provenance_of
from cost_models.measurements import Context, Curve, Machine, OperatorEntry, Overlap, Point, Run
from cost_models.memory import (
    OPTIMIZERS,
    OptimizerStates,
    dtype_bytes,
    find_optimizer,
    gradient_bytes,
    optimizer_state_bytes,
    parameter_bytes,
    rounded_bytes,
    shard_elements,
    usable_bytes,
)
from cost_models.model import CostModel
from cost_models.parts import Device, DeviceKind, Link
from cost_models.profile import Profile, groups_key
from cost_models.schedule import (
    Hops,
    Simulation,
    Span,
    StageTimes,
    lower_bound_seconds,
    simulate,
    step_seconds_only,
)
from cost_models.schedule_orders import (
    SCHEDULES,
    Action,
    in_flight,
    orders,
    placement,
    problem_with,
)

__all__ = [
    "COLLECTIVE_KINDS",
    "DEVICES",
    "LINKS",
    "OPERATOR_KINDS",
    "OPTIMIZERS",
    "SCHEDULES",
    "Action",
    "AxisCost",
    "Cluster",
    "ClusterError",
    "CollectiveKind",
    "Context",
    "CostModel",
    "Curve",
    "Device",
    "DeviceKind",
    "Hops",
    "Host",
    "HostShare",
    "Line",
    "Link",
    "Machine",
    "Node",
    "OperatorEntry",
    "OperatorKind",
    "OptimizerStates",
    "Overlap",
    "Point",
    "Profile",
    "ProfileError",
    "Run",
    "Simulation",
    "Span",
    "StageTimes",
    "axis_cost",
    "axis_groups",
    "collective_seconds",
    "dtype_bytes",
    "find_device",
    "find_link",
    "find_optimizer",
    "gradient_bytes",
    "groups_key",
    "in_flight",
    "lower_bound_seconds",
    "operator_seconds",
    "optimizer_state_bytes",
    "orders",
    "parameter_bytes",
    "placement",
    "problem_with",
    "provenance_of",
    "rounded_bytes",
    "shard_elements",
    "simulate",
    "step_seconds_only",
    "usable_bytes",
]
