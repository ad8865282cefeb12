"""A device and a link: the two parts that clusters are made of, as values that check themselves.

Enters: figures in SI units (bytes, seconds, bytes per second, FLOP/s). Leaves: frozen, hashable dataclasses.
The catalogue names the common ones; a person may make their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from cost_models.errors import ClusterError

DeviceKind = Literal["cuda", "rocm", "cpu"]

DEVICE_KINDS: tuple[str, ...] = get_args(DeviceKind)

PEAK_DTYPES: tuple[str, ...] = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8", "float4", "int8")

LARGEST = 1e30  # of any figure; a larger one (or infinity, or not a number) is a mistake

GIVEN = "given by the user"


@dataclass(frozen=True)
class Device:
    """One device as a process sees it: a GPU, one die (GCD) of a two-die GPU, or the cores of one CPU process.

    Args:
        name: any name; shown in reports and errors.
        kind: ``cuda``, ``rocm`` or ``cpu``; decides launch and context costs that belong to the software.
        memory_bytes: what the process can address, the software's own context included.
        memory_bandwidth_bytes_per_second: data sheet figure; ``memory_efficiency`` is what is reached of it.
        peak_flops: dense FLOP/s by dtype name (``float32``, ``bfloat16``, ...), never counting sparsity. ``float32`` is
            required: a dtype without a figure of its own runs at that rate.
        launch_seconds: what an operator costs whatever its size (launch of a kernel, or dispatch on a CPU).
        source: where the figures come from.
        matmul_efficiency: share of the peak that the best-shaped large matrix multiply reaches, 0 < e <= 1.
        attention_efficiency: share of the peak that fused attention reaches, 0 < e <= 1.
        memory_efficiency: share of the memory bandwidth that a long stream reaches, 0 < e <= 1.
        sustained_efficiency: share of a lone matrix multiply's rate that those of a training step reach (power limit, real
            data, other work in between), 0 < e <= 1.

    Raises:
        ClusterError: a figure is missing, not a number, not finite, or out of range.

    Example:
        >>> Device("toy", "cuda", 16 * 2**30, 900e9, {"float32": 15e12, "float16": 120e12}).flops_per_second("float16")
        120000000000000.0
    """

    name: str
    kind: DeviceKind
    memory_bytes: int
    memory_bandwidth_bytes_per_second: float
    peak_flops: Mapping[str, float] = field(hash=False)
    launch_seconds: float = 4e-6
    source: str = GIVEN
    matmul_efficiency: float = 0.8
    attention_efficiency: float = 0.5
    memory_efficiency: float = 0.85
    sustained_efficiency: float = 1.0

    def __post_init__(self) -> None:
        what = f"device {self.name!r}"
        check_text("device", "name", self.name)
        check_text(what, "source", self.source)
        if self.kind not in DEVICE_KINDS:
            raise ClusterError(f"{what}: kind is {self.kind!r}; use one of {', '.join(DEVICE_KINDS)}")
        object.__setattr__(self, "memory_bytes", whole_number(what, "memory_bytes", self.memory_bytes))
        check_positive(what, "memory_bandwidth_bytes_per_second", self.memory_bandwidth_bytes_per_second)
        check_positive(what, "launch_seconds", self.launch_seconds, zero_allowed=True)
        for key in ("matmul_efficiency", "attention_efficiency", "memory_efficiency", "sustained_efficiency"):
            check_fraction(what, key, getattr(self, key))
        as_floats(self)
        object.__setattr__(self, "peak_flops", _checked_peaks(what, self.peak_flops))

    def flops_per_second(self, dtype: str) -> float:
        """Dense peak of ``dtype`` in FLOP/s; a dtype without a figure (bfloat16 on V100, integers) has float32's."""
        return self.peak_flops.get(dtype, self.peak_flops["float32"])


@dataclass(frozen=True)
class Link:
    """What connects the devices of a node, or the nodes of a cluster. Full duplex; figures are for one direction.

    Args:
        name: any name; shown in reports and errors.
        bandwidth_bytes_per_second: of **one port in one direction**. Within a node a device has one port, so this is
            the bandwidth of a device; between nodes it is that of one network card.
        latency_seconds: of one step of an algorithm over this link, for messages large enough to want bandwidth.
        source: where the figures come from.
        efficiency: share of the bandwidth that large messages reach, 0 < e <= 1 (1 if the bandwidth was measured).
        ports_per_node: ports that a node has in all. ``None``: one for each device. Four cards shared by eight
            devices are 4; one Ethernet port is 1; processes that share two cores are 2.
        direct: the bandwidth is the sum of a device's separate wires to each other device of its node (xGMI, NVLink of
            the V100), so that g of n devices can use only (g - 1) / (n - 1) of it. Otherwise there is a switch.
        multicast: the switch can reduce and multicast (NVLink SHARP), which all-reduce uses.
        multicast_efficiency: share of the bandwidth that this reaches, 0 < e <= 1.
        efficiency_by_size: pairs (ranks, share of the bandwidth) for groups of so many ranks or more in a node, where that
            was measured; in place of ``efficiency`` and of what ``direct`` says of smaller groups.

    Raises:
        ClusterError: a figure is missing, not a number, not finite, or out of range.
    """

    name: str
    bandwidth_bytes_per_second: float
    latency_seconds: float
    source: str = GIVEN
    efficiency: float = 1.0
    ports_per_node: int | None = None
    direct: bool = False
    multicast: bool = False
    multicast_efficiency: float = 0.684  # NVLink4, see the catalogue
    efficiency_by_size: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        what = f"link {self.name!r}"
        check_text("link", "name", self.name)
        check_text(what, "source", self.source)
        check_positive(what, "bandwidth_bytes_per_second", self.bandwidth_bytes_per_second)
        check_positive(what, "latency_seconds", self.latency_seconds, zero_allowed=True)
        check_fraction(what, "efficiency", self.efficiency)
        check_fraction(what, "multicast_efficiency", self.multicast_efficiency)
        object.__setattr__(self, "efficiency_by_size", _checked_sizes(what, self.efficiency_by_size))
        if self.ports_per_node is not None:
            ports = whole_number(what, "ports_per_node", self.ports_per_node)
            object.__setattr__(self, "ports_per_node", ports)
        as_floats(self)
        for key in ("direct", "multicast"):
            if not isinstance(getattr(self, key), bool):
                raise ClusterError(f"{what}: {key} is {getattr(self, key)!r}; use true or false")

    @property
    def reached_bytes_per_second(self) -> float:
        """What large messages reach over one port in one direction."""
        return self.bandwidth_bytes_per_second * self.efficiency

    def efficiency_of(self, num_ranks: int) -> float | None:
        """The measured share of the bandwidth that a group of ``num_ranks`` of a node reaches; None where none is known."""
        known = [share for ranks, share in self.efficiency_by_size if ranks <= num_ranks]
        return known[-1] if known else None

    def ports(self, num_devices: int) -> int:
        """Ports of a node that has ``num_devices`` devices."""
        return num_devices if self.ports_per_node is None else self.ports_per_node


def _checked_sizes(what: str, pairs: object) -> tuple[tuple[int, float], ...]:
    """Pairs of ranks and shares, in rising order of ranks; lists, as JSON has them, become tuples."""
    if not isinstance(pairs, (tuple, list)) or not all(isinstance(p, (tuple, list)) and len(p) == 2 for p in pairs):
        raise ClusterError(
            f"{what}: efficiency_by_size is {pairs!r}; give pairs (ranks, share), such as [[2, 0.6], [8, 0.8]]"
        )
    found = []
    for ranks, share in pairs:
        check_fraction(what, "efficiency_by_size", share)
        found.append((whole_number(what, "efficiency_by_size", ranks), float(share)))
    if [ranks for ranks, _ in found] != sorted({ranks for ranks, _ in found}):
        raise ClusterError(
            f"{what}: efficiency_by_size has ranks {[ranks for ranks, _ in found]}; give each once, rising"
        )
    return tuple(found)


def _checked_peaks(what: str, peaks: object) -> dict[str, float]:
    if not isinstance(peaks, Mapping) or not peaks:
        raise ClusterError(f"{what}: peak_flops is {peaks!r}; give FLOP/s by dtype, such as {{'float32': 19.5e12}}")
    for dtype, value in peaks.items():
        if dtype not in PEAK_DTYPES:
            raise ClusterError(f"{what}: peak_flops has unknown dtype {dtype!r}; known are {', '.join(PEAK_DTYPES)}")
        check_positive(what, f"peak_flops[{dtype!r}]", value)
    if "float32" not in peaks:
        raise ClusterError(f"{what}: peak_flops has no 'float32' (has {', '.join(peaks)}); add the dense figure")
    return {dtype: float(peaks[dtype]) for dtype in PEAK_DTYPES if dtype in peaks}


def as_floats(part: Device | Link) -> None:
    """Make every field that is annotated ``float`` one, so that equal values have equal JSON."""
    for one in fields(part):
        if one.type == "float":
            object.__setattr__(part, one.name, float(getattr(part, one.name)))


def check_text(what: str, key: str, value: object) -> None:
    """Raise unless ``value`` is text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ClusterError(f"{what}: {key} is {value!r}; give a text that is not empty")


def check_positive(what: str, key: str, value: object, zero_allowed: bool = False) -> None:
    """Raise unless ``value`` is a finite number above zero (or zero, where allowed)."""
    wanted = "zero or more" if zero_allowed else "more than zero"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ClusterError(f"{what}: {key} is {value!r} ({type(value).__name__}); give a number, {wanted}")
    if not abs(value) <= LARGEST or value < 0 or (value == 0 and not zero_allowed):
        raise ClusterError(f"{what}: {key} is {value}; give a finite number, {wanted}, in SI units")


def check_fraction(what: str, key: str, value: object) -> None:
    """Raise unless 0 < ``value`` <= 1."""
    check_positive(what, key, value)
    if isinstance(value, (int, float)) and value > 1:
        raise ClusterError(f"{what}: {key} is {value}; it is a share, so give at most 1")


def whole_number(what: str, key: str, value: object) -> int:
    """``value`` as an int of at least 1; a float without a fraction (80e9) is accepted."""
    check_positive(what, key, value)
    if not isinstance(value, (int, float)) or value != int(value):
        raise ClusterError(f"{what}: {key} is {value}; give a whole number, 1 or more")
    return int(value)
