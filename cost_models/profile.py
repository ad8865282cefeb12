"""Profile: what was measured on a machine, as values: seconds of operators, of collectives, of copies and optimizers.

Enters: measurements of ``autopar.profiler``. Leaves: a frozen :class:`Profile`, which merges with others of the same
machine and answers for sizes between those measured. Its JSON is in ``profile_json``. Keys are plain text:

    operators     ``aten.linear.default(float32[512,768]g, float32[768,768]g) -> float32[512,768]``: target, local shapes
                  and types of the inputs (``g``: a gradient flows back), of the outputs, and the other arguments
    collectives   ``all_reduce size=2 stride=1 groups=2 per_node=2``: the kind, and the groups that run it at one time
    memory        ``copy``, ``adamw float32``: by bytes moved, and by bytes of one parameter
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from cost_models.errors import ProfileError
from cost_models.hardware import Cluster
from cost_models.measurements import (
    Context,
    Curve,
    InContext,
    Machine,
    OperatorEntry,
    Overlap,
    Run,
    in_context,
    merged_entries,
    numbers_text,
)
from cost_models.profile_json import parse_profile, profile_to_json


@dataclass(frozen=True)
class Profile:
    """Measurements on one machine.

    Args:
        machine: where.
        operators: by key (see the module).
        collectives: by kind and groups.
        memory: ``copy`` by bytes moved; an optimizer and a type, by bytes of one parameter.
        overlaps: by groups, of an all-reduce beside matrix multiplies.
        contexts: by model and batch, what its operators take in a row against alone.
        unmeasurable: keys of operators that do not run here on their own, or take too much memory: nobody tries again.
        finished: by model and what its plans need, the largest budget in seconds that was spent on it to the end.
        runs: trained steps, whose median ratio to their prediction corrects later predictions.

    Example:
        >>> profile = Profile.load("profile.json")                                            # doctest: +SKIP
        >>> costs = CostModel(Cluster.local(2), profile)                                      # doctest: +SKIP
    """

    machine: Machine
    operators: Mapping[str, OperatorEntry] = field(default_factory=dict)
    collectives: Mapping[str, Curve] = field(default_factory=dict)
    memory: Mapping[str, Curve] = field(default_factory=dict)
    overlaps: Mapping[str, Overlap] = field(default_factory=dict)
    contexts: Mapping[str, Context] = field(default_factory=dict)
    unmeasurable: tuple[str, ...] = ()
    finished: Mapping[str, float] = field(default_factory=dict)
    runs: tuple[Run, ...] = ()

    def __post_init__(self) -> None:
        for name in ("operators", "collectives", "memory", "overlaps", "contexts", "finished"):
            object.__setattr__(
                self, name, dict(sorted(getattr(self, name).items()))
            )  # processes send each other profiles

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a file that :meth:`save` wrote.

        Raises:
            ProfileError: no such file, cut off, not a profile, another schema version, or values out of range.
        """
        name = os.fspath(path)
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
            raise ProfileError(f"cannot read the profile {name!r}: {reason}; 'autopar profile' writes one") from error
        try:
            return cls(**parse_profile(text))
        except ProfileError as error:
            raise ProfileError(f"{name}: {error}") from error

    def to_json(self) -> str:
        """JSON text, the same for equal profiles."""
        return profile_to_json(
            self.machine,
            self.operators,
            self.collectives,
            self.memory,
            self.overlaps,
            self.contexts,
            self.unmeasurable,
            self.finished,
            self.runs,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``to_json()`` so that the file is at any time either the old or the new one."""
        target = Path(path)
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            beside.write_text(self.to_json(), encoding="utf-8")
            beside.replace(target)
        except OSError as error:
            raise ProfileError(
                f"cannot write the profile {os.fspath(path)!r}: {error.strerror}; check the path"
            ) from error

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the JSON text."""
        return hashlib.sha256(self.to_json().encode("utf-8")).hexdigest()

    def merged(self, other: Profile) -> Profile:
        """Both profiles together; what both have is weighted by its rounds.

        Raises:
            ProfileError: they are of different machines.
        """
        self.check_machine(other.machine)
        return replace(
            self,
            machine=max(self.machine, other.machine, key=lambda machine: sum(machine.devices_per_node)),
            operators=merged_entries(self.operators, other.operators),
            collectives=merged_entries(self.collectives, other.collectives),
            memory=merged_entries(self.memory, other.memory),
            overlaps={**self.overlaps, **other.overlaps},
            contexts={**self.contexts, **other.contexts},
            unmeasurable=tuple(sorted({*self.unmeasurable, *other.unmeasurable})),
            finished={
                key: max(self.finished.get(key, 0.0), other.finished.get(key, 0.0))
                for key in {*self.finished, *other.finished}
            },
            runs=tuple(dict.fromkeys((*self.runs, *other.runs))),
        )

    def check_machine(self, machine: Machine) -> None:
        """Raise unless the measurements hold on ``machine``.

        Raises:
            ProfileError: names every difference.
        """
        found = machine.differences(self.machine)
        if found:
            raise ProfileError(
                f"the profile was measured on another machine ({'; '.join(found)}): measure this one with 'autopar profile', "
                "or plan without the profile"
            )

    def check_cluster(self, cluster: Cluster) -> None:
        """Raise unless the measurements can be of the devices of ``cluster``.

        Raises:
            ProfileError: other kinds of devices, or on CPUs other numbers of processes on a node.
        """
        devices = {node.device for node in cluster.nodes}
        here = " and ".join(sorted({f"{device.name} ({device.kind})" for device in devices}))
        if len(devices) > 1 or any(device.kind != self.machine.kind for device in devices):
            raise ProfileError(
                f"the profile is of {self.machine.device} ({self.machine.kind}) and the cluster has {here}: a profile holds "
                "for clusters of the one kind of device that was measured"
            )
        processes = {node.num_devices for node in cluster.nodes}
        if self.machine.kind == "cpu" and processes != set(self.machine.devices_per_node):
            measured = numbers_text(self.machine.devices_per_node)
            raise ProfileError(
                f"the profile was measured with {measured} processes on a node and the cluster "
                f"has {'+'.join(map(str, sorted(processes)))}: processes share the memory's bandwidth, so measure as many "
                f"('autopar profile MODEL --cluster local:{cluster.num_devices}')"
            )

    @cached_property
    def forward_context(self) -> InContext:
        """What operators take inside models in the forward pass, as ``contexts`` have it."""
        found = self.contexts.values()
        return in_context(
            [one.num_operators for one in found],
            [one.forward_alone_seconds for one in found],
            [one.forward_seconds for one in found],
        )

    @cached_property
    def backward_context(self) -> InContext:
        """The same of the backward pass."""
        found = self.contexts.values()
        return in_context(
            [one.num_operators for one in found],
            [one.backward_alone_seconds for one in found],
            [one.backward_seconds for one in found],
        )

    @cached_property
    def correction(self) -> float:
        """The median ratio of measured to predicted steps of the runs; 1 without any."""
        ratios = [run.measured_seconds / run.predicted_seconds for run in self.runs]
        return float(np.median(ratios)) if ratios else 1.0


def groups_key(cluster: Cluster, groups: Sequence[Sequence[int]]) -> str:
    """What the seconds of a collective depend on beside its kind and bytes: groups alike in this cost the same.

    >>> groups_key(Cluster.homogeneous(num_nodes=2, devices_per_node=2), [[0, 2], [1, 3]])
    'size=2 stride=2 groups=2 per_node=1+1'
    """
    first = groups[0]
    stride = abs(first[1] - first[0]) if len(first) > 1 else 0
    shapes = {
        "+".join(str(count) for _, count in sorted(Counter(cluster.node_of(rank) for rank in group).items()))
        for group in groups
    }
    return f"size={len(first)} stride={stride} groups={len(groups)} per_node={'/'.join(sorted(shapes))}"
