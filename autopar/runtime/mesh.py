"""The mesh of ranks, its axes, and the ledger of what they send.

A program makes its mesh at import time, before there is any process group; :meth:`Mesh.bind` gives every axis its group
later. Ranks are row-major: with ``Mesh(data=2, tensor=4)`` rank = data * 4 + tensor.
"""

from __future__ import annotations

import math
import os
import weakref
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.runtime.errors import ProgramError


@dataclass(frozen=True)
class Sent:
    """One collective: ``num_bytes`` is the buffer of an all-reduce, the gathered result of an all-gather, the unreduced
    input of a reduce-scatter and the whole local input of an all-to-all, padding included."""

    kind: str
    axis: str
    num_bytes: int


class Ledger:
    """Collectives in the order in which this rank issued them."""

    def __init__(self) -> None:
        self.entries: list[Sent] = []

    def totals(self) -> dict[tuple[str, str], int]:
        """Bytes per (kind, axis)."""
        totals: Counter[tuple[str, str]] = Counter()
        for entry in self.entries:
            totals[entry.kind, entry.axis] += entry.num_bytes
        return dict(totals)

    def clear(self) -> None:
        self.entries.clear()


class Axis:
    """One axis of a mesh: its ``index`` and ``size``, and once bound this rank's ``place`` on it and the process group."""

    def __init__(self, mesh: Mesh, name: str, index: int, size: int) -> None:
        self.mesh = mesh
        self.name = name
        self.index = index
        self.size = size
        self._place = 0 if size == 1 else None
        self._group_name: str | None = None

    @property
    def place(self) -> int:
        """Coordinate of this rank along the axis."""
        if self._place is None:
            raise ProgramError(f"axis {self.name!r} is not bound to processes yet: call mesh.bind() first")
        return self._place

    @property
    def group_name(self) -> str:
        """Name of the process group, as functional collectives want it."""
        if self._group_name is None:
            raise ProgramError(f"axis {self.name!r} has no process group: call mesh.bind() first")
        return self._group_name

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the ranks that differ from this one along this axis only."""
        return self.mesh.device_mesh.get_group(self.index)

    def record(self, kind: str, num_bytes: int) -> None:
        """Note one collective in the ledger, if the mesh keeps one."""
        if self.mesh.ledger is not None:
            self.mesh.ledger.entries.append(Sent(kind, self.name, num_bytes))

    def __repr__(self) -> str:
        return f"Axis({self.name!r}, size={self.size})"


class Mesh:
    """``Mesh(data=2, tensor=4)``: named axes, first to last; ``mesh.data`` and ``mesh["data"]`` are :class:`Axis` objects."""

    def __init__(self, **sizes: int) -> None:
        for name, size in sizes.items():
            if size < 1:
                raise ProgramError(f"every axis of a mesh has at least one rank: {name}={size}")
        self.axes = tuple(Axis(self, name, index, size) for index, (name, size) in enumerate(sizes.items()))
        self.num_ranks = math.prod(sizes.values())
        self.ledger: Ledger | None = None
        self.device = torch.device("cpu")
        self.is_bound = False
        self._device_mesh: DeviceMesh | None = None
        for axis in self.axes:
            if axis.name in self.__dict__ or hasattr(type(self), axis.name):
                raise ProgramError(
                    f"a mesh axis cannot be called {axis.name!r}: the mesh has something else of that name"
                )
            self.__dict__[axis.name] = axis

    def __getattr__(self, name: str) -> Axis:
        # Reached only for what is not there: axes are ordinary attributes.
        raise AttributeError(f"this mesh has no axis {name!r}")

    def __getitem__(self, name: str) -> Axis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise ProgramError(f"this mesh has no axis {name!r}, only {[axis.name for axis in self.axes]}")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def rank(self) -> int:
        """This rank's number, row-major over the axes."""
        rank = 0
        for axis in self.axes:
            rank = rank * axis.size + axis.place
        return rank

    @property
    def device_mesh(self) -> DeviceMesh:
        """The same mesh for DTensors."""
        if self._device_mesh is None:
            raise ProgramError(
                "the mesh is not bound to process groups: start the program with torchrun, then mesh.bind()"
            )
        return self._device_mesh

    @property
    def has_groups(self) -> bool:
        """Whether there are process groups: a single process may do without."""
        return self._device_mesh is not None

    def bind(self, device: torch.device | str | None = None) -> None:
        """Make a process group for every axis; all ranks of the default process group must call this together.

        ``device`` is where this rank computes: by default its GPU (torchrun's LOCAL_RANK) where the backend is NCCL,
        else the CPU. A mesh of one rank needs no ``torch.distributed``. Binding again changes nothing.
        """
        if self.is_bound:
            return
        if not dist.is_initialized():
            if self.num_ranks > 1:
                raise ProgramError(
                    f"this program runs on {self.num_ranks} ranks ({self}) and torch.distributed is not initialised: "
                    "start it with torchrun and call torch.distributed.init_process_group() first"
                )
            self.device = torch.device(device or "cpu")
            self.is_bound = True
            return
        if dist.get_world_size() != self.num_ranks:
            raise ProgramError(
                f"this program runs on {self.num_ranks} ranks ({self}), torch.distributed has {dist.get_world_size()}: "
                "start that many processes, or plan again for as many"
            )
        self.device = _choose_device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        names = tuple(axis.name for axis in self.axes) or ("all",)
        self._device_mesh = init_device_mesh(self.device.type, self.shape or (1,), mesh_dim_names=names)
        # Gloo's threads end with their group, and one that still frees a tensor while the interpreter ends aborts the
        # process. A DeviceMesh keeps its groups, also after destroy_process_group: let go of them before the end.
        weakref.finalize(self._device_mesh, getattr(self._device_mesh, "_pg_registry", {}).clear)
        for axis in self.axes:
            group = self._device_mesh.get_group(axis.index)
            axis._group_name = group.group_name
            axis._place = self._device_mesh.get_local_rank(axis.index)
        self.is_bound = True

    def keep_ledger(self, enabled: bool) -> None:
        """Start a new ledger, or stop keeping one."""
        self.ledger = Ledger() if enabled else None

    def __str__(self) -> str:
        return " x ".join(f"{axis.name}={axis.size}" for axis in self.axes) or "one rank"

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{axis.name}={axis.size}' for axis in self.axes)})"


def _choose_device(device: torch.device | str | None) -> torch.device:
    """The device given, or this rank's GPU under NCCL, or the CPU."""
    chosen = torch.device(device) if device is not None else None
    if chosen is None:
        chosen = torch.device("cuda" if "nccl" in str(dist.get_backend()) and torch.cuda.is_available() else "cpu")
    if chosen.type == "cuda" and chosen.index is None:
        local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank() % torch.cuda.device_count()))
        chosen = torch.device("cuda", local_rank)
    return chosen
