"""Prices on a cluster: seconds of operators and collectives, bytes of training. In the order in which data flows.

``Device``, ``Link`` (parts) -> the catalogue -> ``Node``, ``Cluster`` (hardware) -> compute, collectives, memory ->
``CostModel``. Needs the standard library and numpy only.
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
from cost_models.errors import ClusterError
from cost_models.hardware import Cluster, Node
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

__all__ = [
    "COLLECTIVE_KINDS",
    "DEVICES",
    "LINKS",
    "OPERATOR_KINDS",
    "OPTIMIZERS",
    "AxisCost",
    "Cluster",
    "ClusterError",
    "CollectiveKind",
    "CostModel",
    "Device",
    "DeviceKind",
    "Line",
    "Link",
    "Node",
    "OperatorKind",
    "OptimizerStates",
    "axis_cost",
    "axis_groups",
    "collective_seconds",
    "dtype_bytes",
    "find_device",
    "find_link",
    "find_optimizer",
    "gradient_bytes",
    "operator_seconds",
    "optimizer_state_bytes",
    "parameter_bytes",
    "rounded_bytes",
    "shard_elements",
    "usable_bytes",
]
