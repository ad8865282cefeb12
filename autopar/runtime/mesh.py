"""The mesh of ranks, its axes, and the ledger of what they send.

A program makes its mesh at import time, before there is any process group; :meth:`Mesh.bind` gives every axis its group
later. Ranks are row-major: with ``Mesh(data=2, tensor=4)`` rank = data * 4 + tensor. With ``stages=2`` there are two such
meshes one after the other, one for each pipeline rank, and ``mesh`` is the one of this rank.
"""

from __future__ import annotations

import math
import os
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.runtime.draws import Draws
from autopar.runtime.errors import ProgramError


@dataclass(frozen=True)
class Sent:
    """One collective: ``num_bytes`` is the buffer of an all-reduce or a broadcast, the gathered result of an all-gather, the
    unreduced input of a reduce-scatter and the whole local input of an all-to-all, padding included. A ``send_recv`` is noted
    by the rank that sends."""

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
        return self.mesh.group_of(self)

    def record(self, kind: str, num_bytes: int) -> None:
        """Note one collective in the ledger, if the mesh keeps one."""
        if self.mesh.ledger is not None:
            self.mesh.ledger.entries.append(Sent(kind, self.name, num_bytes))

    def __repr__(self) -> str:
        return f"Axis({self.name!r}, size={self.size})"


class Mesh:
    """``Mesh(data=2, tensor=4)``: named axes, first to last; ``mesh.data`` and ``mesh["data"]`` are :class:`Axis` objects.

    ``stages``: the number of pipeline ranks, each with a mesh of these axes. ``ranks``: for each place (pipeline rank, then
    row-major in its mesh) the rank that takes it; by default in order. ``mesh.stages`` is the axis of the ranks that have the
    same position in the meshes of all pipeline ranks; it is not among ``mesh.axes``.
    """

    def __init__(self, *, stages: int = 1, ranks: Sequence[int] = (), **sizes: int) -> None:
        for name, size in (*sizes.items(), ("stages", stages)):
            if size < 1:
                raise ProgramError(f"every axis of a mesh has at least one rank: {name}={size}")
        self.axes = tuple(Axis(self, name, index, size) for index, (name, size) in enumerate(sizes.items()))
        self.stages = Axis(self, "stages", len(self.axes), stages)
        self.size = math.prod(sizes.values())
        self.num_ranks = stages * self.size
        self.ranks = tuple(ranks) or tuple(range(self.num_ranks))
        if sorted(self.ranks) != list(range(self.num_ranks)):
            raise ProgramError(f"ranks= must name each of {self.num_ranks} ranks once, not {self.ranks}")
        self.ledger: Ledger | None = None
        self.device = torch.device("cpu")
        self.is_bound = False
        self.share = 1.0  # samples of this micro-batch / samples of the step
        self.counts: dict[str, torch.Tensor] = {}
        self.draws = Draws()  # which random numbers this micro-batch draws
        self._root: DeviceMesh | None = None
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
    def position(self) -> int:
        """This rank's number in the mesh of its pipeline rank, row-major over the axes."""
        position = 0
        for axis in self.axes:
            position = position * axis.size + axis.place
        return position

    @property
    def rank(self) -> int:
        """This rank's number among all."""
        return self.ranks[self.stages.place * self.size + self.position]

    def rank_of(self, stage_place: int) -> int:
        """The rank at this position in the mesh of another pipeline rank."""
        return self.ranks[stage_place * self.size + self.position]

    def seen_from(self, position: int) -> Mesh:
        """The mesh as the rank at another position in it sees it: for its shares, not for its messages."""
        mesh = Mesh(stages=1, ranks=(), **{axis.name: axis.size for axis in self.axes})
        for axis in reversed(mesh.axes):
            position, axis._place = divmod(position, axis.size)
        return mesh

    def begin(self, first: int, samples: int, total: int) -> None:
        """A micro-batch of so many samples of the ``total`` of a step begins, ``first`` of them before it."""
        self.share = samples / total
        self.draws = replace(self.draws, first=first, samples=samples)

    def count(self, name: str) -> torch.Tensor:
        """A number of labels of the whole step, by its name in ``COUNTS``."""
        if name not in self.counts:
            raise ProgramError(f"there is no count {name!r} in this step, only {', '.join(self.counts) or 'none'}")
        return self.counts[name]

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
        self._make_groups()
        self.is_bound = True

    def _make_groups(self) -> None:
        """A process group for every axis, and the mesh for DTensors."""
        names = tuple(axis.name for axis in self.axes) or ("all",)
        shape = self.shape or (1,)
        if self.stages.size > 1 or self.ranks != tuple(range(self.num_ranks)):
            names = ("stages", *names)
            table = torch.tensor(self.ranks, dtype=torch.int).view(self.stages.size, *shape)
            if self.ranks == tuple(sorted(self.ranks)):
                self._root = DeviceMesh(self.device.type, table, mesh_dim_names=names)
            else:
                # A DeviceMesh sorts the ranks of its own groups, and their places would not be those of the mesh.
                groups = [_ordered_groups(table, dim) for dim in range(table.dim())]
                self._root = DeviceMesh.from_group(groups, self.device.type, table, mesh_dim_names=names)
            self._device_mesh = self._root[names[1:]]
        else:
            self._root = self._device_mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        # Gloo's threads end with their group, and one that still frees a tensor while the interpreter ends aborts the
        # process. A DeviceMesh keeps its groups, also after destroy_process_group: let go of them before the end.
        for kept in (self._root, self._device_mesh):
            weakref.finalize(kept, getattr(kept, "_pg_registry", {}).clear)
        for axis in (*self.axes, self.stages) if "stages" in (self._root.mesh_dim_names or ()) else self.axes:
            axis._group_name = self._root.get_group(axis.name).group_name
            axis._place = self._root.get_local_rank(axis.name)

    def group_of(self, axis: Axis) -> dist.ProcessGroup:
        """The process group of the ranks that differ from this one along ``axis`` only."""
        if self._root is None:
            raise ProgramError(f"axis {axis.name!r} has no process group: call mesh.bind() first")
        return self._root.get_group(axis.name)

    def part_of_stages(self, places: Sequence[int]) -> Axis | None:
        """The axis of some pipeline ranks alone; None on others. All ranks must call this together, in the same order."""
        if len(places) == self.stages.size:
            return self.stages
        found: Axis | None = None
        for position in range(self.size):
            ranks = [self.ranks[place * self.size + position] for place in places]
            group = _new_group(ranks)
            if self.rank in ranks:
                found = Axis(self, "stages", self.stages.index, len(places))
                found._group_name = group.group_name
                found._place = list(places).index(self.stages.place)
        return found

    def keep_ledger(self, enabled: bool) -> None:
        """Start a new ledger, or stop keeping one."""
        self.ledger = Ledger() if enabled else None

    def _named_sizes(self) -> list[str]:
        stages = (self.stages,) if self.stages.size > 1 else ()
        return [f"{axis.name}={axis.size}" for axis in (*stages, *self.axes)]

    def __str__(self) -> str:
        return " x ".join(self._named_sizes()) or "one rank"

    def __repr__(self) -> str:
        return f"Mesh({', '.join(self._named_sizes())})"


def _ordered_groups(table: torch.Tensor, dim: int) -> dist.ProcessGroup:
    """The process group of this rank along one dim of a table of ranks, in the table's order."""
    lines = table.movedim(dim, -1).reshape(-1, table.shape[dim]).tolist()
    groups = [(line, _new_group(line)) for line in lines]
    return next(group for line, group in groups if dist.get_rank() in line)


def _new_group(ranks: list[int]) -> dist.ProcessGroup:
    """A process group whose members are in the order given."""
    in_order: dict[str, bool] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    return dist.new_group(ranks, **in_order)  # type: ignore[arg-type, no-any-return]


def _choose_device(device: torch.device | str | None) -> torch.device:
    """The device given, or this rank's GPU under NCCL, or the CPU."""
    chosen = torch.device(device) if device is not None else None
    if chosen is None:
        chosen = torch.device("cuda" if "nccl" in str(dist.get_backend()) and torch.cuda.is_available() else "cpu")
    if chosen.type == "cuda" and chosen.index is None:
        local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank() % torch.cuda.device_count()))
        chosen = torch.device("cuda", local_rank)
    return chosen
