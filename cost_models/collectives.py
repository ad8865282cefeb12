"""Seconds of a collective over a group of ranks: every algorithm is a line in the bytes, the best line is taken.

Enters: a cluster and groups of ranks that communicate at the same time (the groups of one mesh axis). Leaves: for each
distinct kind of group and each collective, lines ``latency + seconds_per_byte x bytes``; a size costs the least line of
the slowest group. The lines are what NCCL (gloo on CPUs) runs, not what an ideal network could do. With n ranks on N
nodes, g of them on one node, B the bandwidth of a device in its node and W what the group gets out of a node:

    all-reduce      ring: 2 (n-1)/n S / min(B, W), 2 (n-1) steps
                    tree (chain in the node, double binary tree between): 2 S / (B x TREE_EFFICIENCY) and 2 S / W at the
                    same time, logarithmic steps
                    multicast (NVLink SHARP; tree between nodes): (1 + 1/g) S / (B x Link.multicast_efficiency) and 2 S / W
                    (S / W for two nodes, as 16 H100s reach; without multicast nothing published does)
    all-gather, reduce-scatter   ring: (n-1)/n S / min(B, W), n - 1 steps
    all-to-all      pairwise: (g-1)/n S / B and g (n-g)/n S / W at the same time
    broadcast       ring: S / min(B, W), n - 1 steps; gloo: logarithmic steps
    send/recv       from each coordinate of the axis to the next: S / (bandwidth of one pair)

``S`` is ``num_bytes``: all_reduce, broadcast and send_recv: of one rank's buffer; all_gather: of the gathered result;
reduce_scatter: of the unreduced input; all_to_all: of one rank's whole input.

Contention. Between nodes a node has P ports, and c groups of the axis leave it: W = min(min(g, P) b, P b / c). Within a
node whose devices share P < active ports, B = b P / active. Of B a group of g reaches what was measured for its size
(``Link.efficiency_by_size``), or, on direct wires (no switch), (g-1)/(devices-1).

Sources of the algorithms: Patarasu and Yuan 2009 (ring); Sanders, Speck, Traeff 2009 (double binary tree), as in NCCL.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from cost_models.hardware import Cluster, Node
from cost_models.parts import Link

FloatArray = npt.NDArray[np.float64]
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]

COLLECTIVE_KINDS: tuple[str, ...] = get_args(CollectiveKind)

# Floor of a collective before its first step. CUDA: all-reduce of 1 KB over 8 GPUs takes 26 (H100), 30 (H200), 43 us
# (A100), less six steps (Azure/AI-benchmarking-guide@8fd0c6e1). ROCm: 97 us over 2, 162 us over 8 GCDs at 256 KB
# (microsoft/nnscaler@1585c15d mi200 profile). CPU: half of the 90 us that gloo takes to send 1
# KB between two processes, measured once.
LAUNCH_SECONDS: Mapping[str, float] = MappingProxyType({"cuda": 20e-6, "rocm": 80e-6, "cpu": 50e-6})

# 8 MB takes 85 us on H100, 81 us on H200, of which 31 us is bandwidth and 20 us launch (same guide)
MULTICAST_STEPS = 10

# Share of the ring's bandwidth in a node's chain of the tree: 1 MB over 8x A100 takes 51 us (same guide), where the
# floor is 43.
TREE_EFFICIENCY = 0.6

# Traffic of gloo as a multiple of the formula above, at the bandwidth of its all-reduce. Over 2 processes, 64 MiB
# take 38 ms all-reduced, 64 ms gathered, 71 ms reduce-scattered (it reduces all and copies), 14 ms broadcast, 14 ms
# sent. Measured once, PyTorch 2.13, loopback.
GLOO_TRAFFIC: Mapping[str, float] = MappingProxyType(
    {"all_gather": 2.5, "reduce_scatter": 3.5, "broadcast": 0.5, "send_recv": 0.4}
)

# RCCL beside all-reduce (microsoft/nnscaler@1585c15d mi200 profile, 2 to 16 GCDs): gathers and reduce-scatters have 170
# us and 45 us for each other rank before the first byte and then 1.1 to 1.9 times the traffic of the formula, all-to-all
# 100 us and 24 us for each peer, with 36 GB/s to each peer at the same time.
RCCL_TRAFFIC = 1.4
RCCL_LAUNCH_SECONDS = 90e-6  # beside LAUNCH_SECONDS
RCCL_STEP_SECONDS = 40e-6  # beside the link's own
RCCL_PEER_STEP_SECONDS = 24e-6
RCCL_PEER_BYTES_PER_SECOND = 36e9

# sends that NCCL works on at the same time in an all-to-all (NCCL_MAX_DEV_WORK_P2P_PER_BATCH, recalled)
PEERS_AT_ONCE = 8


@dataclass(frozen=True)
class Line:
    """One algorithm: ``latency_seconds + seconds_per_byte * num_bytes``."""

    algorithm: str
    latency_seconds: float
    seconds_per_byte: float


@dataclass(frozen=True)
class GroupShape:
    """What the lines of one group depend on; groups alike in this cost the same.

    Args:
        size: ranks in the group.
        per_node: (ranks of the group, bytes/s of a device within, bytes/s of the group out of the node) for each node.
        intra_latency_seconds: of a step within a node.
        inter_latency_seconds: of a step between nodes.
        multicast_bytes_per_second: of a device for switch reduction, the least of the nodes; 0 if one cannot.
        launch_seconds: floor.
        gloo: a CPU takes part.
        rccl: an AMD device takes part.
    """

    size: int
    per_node: tuple[tuple[int, float, float], ...]
    intra_latency_seconds: float
    inter_latency_seconds: float
    multicast_bytes_per_second: float
    launch_seconds: float
    gloo: bool
    rccl: bool

    @property
    def num_nodes(self) -> int:
        """Nodes that the group touches."""
        return len(self.per_node)

    @property
    def intra_bytes_per_second(self) -> float:
        """Least bandwidth of a device within its node; infinite if no two ranks share one."""
        return min((within for count, within, _ in self.per_node if count > 1), default=math.inf)

    @property
    def inter_bytes_per_second(self) -> float:
        """Least bandwidth of the group out of a node; infinite on one node."""
        return min(out for _, _, out in self.per_node) if self.num_nodes > 1 else math.inf

    @property
    def ring_bytes_per_second(self) -> float:
        """Least bandwidth along a ring that visits node after node."""
        return min(self.intra_bytes_per_second, self.inter_bytes_per_second)

    def ring_latency_seconds(self) -> float:
        """n - 1 steps, of which N - 1 cross between nodes."""
        inter = self.num_nodes - 1
        return (self.size - 1 - inter) * self.intra_latency_seconds + inter * self.inter_latency_seconds

    def tree_latency_seconds(self) -> float:
        """One way through a tree: logarithmic in the node and between nodes."""
        within = max(count for count, _, _ in self.per_node)
        inter = _log2_ceil(self.num_nodes) * self.inter_latency_seconds
        return _log2_ceil(within) * self.intra_latency_seconds + inter


@dataclass(frozen=True)
class AxisCost:
    """Seconds of the collectives over all groups of a mesh axis at the same time.

    Args:
        size: ranks in each group.
        lines: for each kind of collective and each distinct shape of group, the algorithms to choose from.
    """

    size: int
    lines: Mapping[str, tuple[tuple[Line, ...], ...]]

    def seconds(self, kind: CollectiveKind, num_bytes: npt.ArrayLike) -> FloatArray:
        """Seconds of a collective, in the shape of ``num_bytes`` (for its meaning see the module).

        0 where the group has one rank and where there are no bytes; monotone in the bytes.

        Raises:
            ValueError: an unknown kind, or bytes that are negative or not numbers.
        """
        if kind not in self.lines:
            raise ValueError(f"unknown collective {kind!r}; known are {', '.join(COLLECTIVE_KINDS)}")
        amount = np.asarray(num_bytes, dtype=np.float64)
        if not (amount >= 0).all():
            raise ValueError(
                f"num_bytes has a value that is negative or not a number (least {amount.min()}); give 0 or more"
            )
        worst: FloatArray = np.zeros_like(amount)
        for algorithms in self.lines[kind]:
            best: FloatArray | None = None
            for line in algorithms:
                this = line.latency_seconds + line.seconds_per_byte * amount
                best = np.asarray(this if best is None else np.minimum(best, this))
            if best is not None:
                worst = np.asarray(np.maximum(worst, best))
        return np.asarray(np.where(amount > 0, worst, 0.0))

    def algorithm(self, kind: CollectiveKind, num_bytes: float) -> str:
        """Name of the algorithm that the slowest group takes for this size; ``none`` for a group of one rank."""
        if kind not in self.lines:
            raise ValueError(f"unknown collective {kind!r}; known are {', '.join(COLLECTIVE_KINDS)}")
        best = [
            min((line.latency_seconds + line.seconds_per_byte * num_bytes, line.algorithm) for line in algorithms)
            for algorithms in self.lines[kind]
        ]
        return max(best)[1] if best else "none"


def axis_groups(size: int, stride: int, first: int, num_devices: int) -> list[range]:
    """Groups of a mesh axis in row-major order: ``{base + i * stride}`` for i < size, over the given ranks.

    Args:
        size: ranks in a group.
        stride: distance of neighbours: the product of the sizes of the axes after this one.
        first: first rank of the mesh.
        num_devices: ranks of the mesh, a multiple of ``size * stride``.

    Raises:
        ValueError: a number below 1, or one that does not divide.
    """
    if size < 1 or stride < 1 or first < 0 or num_devices < 1:
        raise ValueError(
            f"axis: size {size}, stride {stride}, first rank {first}, {num_devices} devices; give positive numbers"
        )
    block = size * stride
    if num_devices % block:
        raise ValueError(
            f"axis: {num_devices} devices are not a multiple of size {size} x stride {stride} = {block}; change one"
        )
    bases = (start + offset for start in range(first, first + num_devices, block) for offset in range(stride))
    return [range(base, base + block, stride) for base in bases]


def axis_cost(cluster: Cluster, groups: Sequence[Sequence[int]]) -> AxisCost:
    """Cost of collectives that all ``groups`` (equal in size, disjoint) run at the same time.

    Raises:
        ValueError: no groups, unequal sizes, or a rank in two places.
        ClusterError: a rank that the cluster does not have.
    """
    ranks = [rank for group in groups for rank in group]
    sizes = {len(group) for group in groups}
    if len(sizes) != 1 or len(set(ranks)) != len(ranks) or not ranks:
        raise ValueError(
            f"groups of sizes {sorted(sizes)} with {len(ranks)} ranks; give equal, disjoint, non-empty groups"
        )
    size = sizes.pop()
    if size == 1:
        return AxisCost(1, MappingProxyType(dict.fromkeys(COLLECTIVE_KINDS, ())))
    node_of = {rank: cluster.node_of(rank) for rank in ranks}
    apart = any(
        later - earlier > 1 and node_of[earlier] == node_of[later] for earlier, later in pairwise(sorted(groups[0]))
    )
    shapes = _group_shapes(cluster, [Counter(node_of[rank] for rank in group) for group in groups], apart)
    hops = _hop_lines(cluster, groups, node_of)
    lines: dict[str, tuple[tuple[Line, ...], ...]] = {
        "all_reduce": tuple(_all_reduce(shape) for shape in shapes),
        "all_gather": tuple(_ring(shape, "all_gather") for shape in shapes),
        "reduce_scatter": tuple(_ring(shape, "reduce_scatter") for shape in shapes),
        "all_to_all": tuple(_all_to_all(shape) for shape in shapes),
        "broadcast": tuple(_broadcast(shape) for shape in shapes),
        "send_recv": tuple((hop,) for hop in hops),
    }
    return AxisCost(size, MappingProxyType(lines))


def collective_seconds(
    cluster: Cluster, ranks: Sequence[int], kind: CollectiveKind, num_bytes: npt.ArrayLike
) -> FloatArray:
    """Seconds of a collective over one group of ranks while no other group communicates; see ``AxisCost.seconds``.

    Example:
        >>> eight = Cluster.homogeneous(num_nodes=1, devices_per_node=8, device="A100-80GB", intra_link="NVLink3")
        >>> round(float(collective_seconds(eight, range(8), "all_reduce", 2**30)) * 1e3, 1)   # milliseconds
        8.2
    """
    return axis_cost(cluster, [ranks]).seconds(kind, num_bytes)


def _group_shapes(cluster: Cluster, members: Sequence[Counter[int]], apart: bool) -> list[GroupShape]:
    """The distinct shapes among groups that are given as counts per node; ``apart``: their ranks are no neighbours."""
    leaving: Counter[int] = Counter()  # groups that leave the node
    active: Counter[int] = Counter()  # devices that talk within the node
    for counts in members:
        for node, count in counts.items():
            leaving[node] += len(counts) > 1
            active[node] += count if count > 1 else 0
    shapes: dict[GroupShape, None] = {}  # in order, each once
    for counts in members:
        key = tuple(sorted(counts.items()))
        per_node = []
        for node, count in key:
            described = cluster.nodes[node]
            within = _within_bytes_per_second(described, count, active[node], apart)
            per_node.append((count, within, _out_bytes_per_second(cluster, described, count, leaving[node])))
        nodes = [cluster.nodes[node] for node, _ in key]
        shape = _shape(cluster.inter_link, nodes, tuple(sorted(per_node)))
        shapes[shape] = None
    return list(shapes)


def _shape(inter_link: Link, nodes: Sequence[Node], per_node: tuple[tuple[int, float, float], ...]) -> GroupShape:
    kinds = {node.device.kind for node in nodes}
    can_multicast = all(node.link.multicast for node in nodes)
    return GroupShape(
        size=sum(count for count, _, _ in per_node),
        per_node=per_node,
        intra_latency_seconds=max(node.link.latency_seconds for node in nodes),
        inter_latency_seconds=inter_link.latency_seconds,
        multicast_bytes_per_second=(
            min(node.link.bandwidth_bytes_per_second * node.link.multicast_efficiency for node in nodes)
            if can_multicast
            else 0.0
        ),
        launch_seconds=max(LAUNCH_SECONDS[kind] for kind in kinds),
        gloo="cpu" in kinds,
        rccl="rocm" in kinds,
    )


def _within_bytes_per_second(node: Node, count: int, active: int, apart: bool = False) -> float:
    """Bandwidth of a device to the ``count - 1`` others of its group in the node. What was measured for groups of neighbours
    holds behind a switch for all; on direct wires a group whose ranks are apart has what a pair has."""
    share = min(1.0, node.link.ports(node.num_devices) / active) if active else 1.0
    measured = node.link.efficiency_of(2 if apart and node.link.direct else count)
    if measured is not None:
        return node.link.bandwidth_bytes_per_second * measured * share
    if node.link.direct and node.num_devices > 1:
        share *= max(1, count - 1) / (node.num_devices - 1)
    return node.link.reached_bytes_per_second * share


def _out_bytes_per_second(cluster: Cluster, node: Node, count: int, leaving: int) -> float:
    """Bandwidth of a group with ``count`` ranks out of a node that ``leaving`` such groups leave."""
    ports = cluster.inter_link.ports(node.num_devices)
    return cluster.inter_link.reached_bytes_per_second * min(float(min(count, ports)), ports / max(1, leaving))


def _all_reduce(shape: GroupShape) -> tuple[Line, ...]:
    size, launch = shape.size, shape.launch_seconds
    ring_bytes = 2 * (size - 1) / size
    ring = Line("ring", launch + 2 * shape.ring_latency_seconds(), ring_bytes / shape.ring_bytes_per_second)
    if shape.gloo:
        return (ring,)
    between = 2 / shape.inter_bytes_per_second
    within = 2 / (shape.intra_bytes_per_second * TREE_EFFICIENCY)
    tree = Line("tree", launch + 2 * shape.tree_latency_seconds(), max(within, between))
    fewest = min(count for count, _, _ in shape.per_node)
    if not shape.multicast_bytes_per_second or fewest == 1:
        return ring, tree
    within = (1 + 1 / fewest) / shape.multicast_bytes_per_second
    between = between / 2 if shape.num_nodes == 2 else between
    steps = 2 * _log2_ceil(shape.num_nodes) * shape.inter_latency_seconds
    latency = launch + MULTICAST_STEPS * shape.intra_latency_seconds + steps
    return ring, tree, Line("multicast", latency, max(within, between))


def _ring(shape: GroupShape, kind: str) -> tuple[Line, ...]:
    traffic = (
        (shape.size - 1) / shape.size * (GLOO_TRAFFIC[kind] if shape.gloo else RCCL_TRAFFIC if shape.rccl else 1.0)
    )
    steps = 2 if shape.gloo and kind == "reduce_scatter" else 1
    latency = shape.launch_seconds + steps * shape.ring_latency_seconds()
    if shape.rccl:
        latency += RCCL_LAUNCH_SECONDS + RCCL_STEP_SECONDS * (shape.size - 1)
    return (Line("ring", latency, traffic / shape.ring_bytes_per_second),)


def _all_to_all(shape: GroupShape) -> tuple[Line, ...]:
    size = shape.size
    within = max((count - 1) / size / inside for count, inside, _ in shape.per_node)
    between = max(count * (size - count) / size / out for count, _, out in shape.per_node)
    at_once = 1 if shape.gloo else PEERS_AT_ONCE
    fewest, most = (pick(count for count, _, _ in shape.per_node) for pick in (min, max))
    intra = math.ceil((most - 1) / at_once) * shape.intra_latency_seconds
    inter = math.ceil((size - fewest) / at_once) * shape.inter_latency_seconds
    if not shape.rccl:
        return (Line("pairwise", shape.launch_seconds + intra + inter, max(within, between)),)
    latency = shape.launch_seconds + RCCL_LAUNCH_SECONDS + RCCL_PEER_STEP_SECONDS * (size - 1) + inter
    return (Line("pairwise", latency, max(1 / size / RCCL_PEER_BYTES_PER_SECOND, between)),)


def _broadcast(shape: GroupShape) -> tuple[Line, ...]:
    if shape.gloo:
        latency = shape.launch_seconds + shape.tree_latency_seconds()
        return (Line("tree", latency, GLOO_TRAFFIC["broadcast"] / shape.ring_bytes_per_second),)
    return (Line("ring", shape.launch_seconds + shape.ring_latency_seconds(), 1 / shape.ring_bytes_per_second),)


def _hop_lines(cluster: Cluster, groups: Sequence[Sequence[int]], node_of: Mapping[int, int]) -> list[Line]:
    """Distinct hops from each coordinate to the next, all at the same time."""
    hops = Counter((node_of[here], node_of[there]) for group in groups for here, there in pairwise(group))
    leaving: Counter[int] = Counter()
    entering: Counter[int] = Counter()
    inside: Counter[int] = Counter()
    for (source, target), count in hops.items():
        if source == target:
            inside[source] += count
        else:
            leaving[source] += count
            entering[target] += count
    lines: dict[Line, None] = {}  # in order, each once
    for source, target in hops:
        if source == target:
            link = cluster.nodes[source].link
            bandwidth = _within_bytes_per_second(cluster.nodes[source], 2, inside[source])
        else:
            link = cluster.inter_link
            bandwidth = min(
                _out_bytes_per_second(cluster, cluster.nodes[source], 1, leaving[source]),
                _out_bytes_per_second(cluster, cluster.nodes[target], 1, entering[target]),
            )
        kinds = {cluster.nodes[node].device.kind for node in (source, target)}
        traffic = GLOO_TRAFFIC["send_recv"] if "cpu" in kinds else 1.0
        launch = max(LAUNCH_SECONDS[kind] for kind in kinds)
        lines[Line("pair", launch + link.latency_seconds, traffic / bandwidth)] = None
    return list(lines)


def _log2_ceil(number: int) -> int:
    return (number - 1).bit_length()
