"""Parameters and buffers of a program: how they rest, how they are used, and what the optimizer sees.

A :class:`ParameterSlot` rests as this rank's piece in its *store* layout, wrapped as a DTensor for optimizers and
checkpoints (:attr:`ParameterSlot.storage`), and is called to get the local tensor in its *use* layout:

* ``zero=0``: rest and use are the same tensor; its gradient is summed over the axes where the use layout says G.
* ``zero=1``, ``zero=2``: a working copy is gathered when the shards have changed; its gradient is reduce-scattered at the
  end of backward (1) or as soon as it is there (2).
* ``zero=3``: gathered around each use, forward and backward (:mod:`autopar.runtime.gathered`).

With ``compute=`` a type to compute in, what rests is the *master*: the working copy, which there then is under ``zero=0``
too, is in that type, and so is what is gathered. Each micro-batch's gradient is brought to the master's type before it is
added to others or sent.

With ``offload`` what rests is in the host's memory (pinned, where the device is a GPU), and so are its gradient, once it is
finished, and what an optimizer keeps for it: the update runs on the host. The device then always has a working copy, under
``zero=3`` one of the shard, made again when the piece at rest has changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.runtime import host
from autopar.runtime.errors import ProgramError
from autopar.runtime.gathered import Gathers, gathered
from autopar.runtime.layouts import Change, Word, Words, changes, local_shape, parse_words, split_of, take_share
from autopar.runtime.mesh import Axis, Mesh
from autopar.runtime.split import Interval, Pieces


class Chunk(NamedTuple):
    """A rectangle of the whole tensor that this rank holds: where it starts, its sizes, and a view of the local memory."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: Tensor


class _Slot(nn.Module):
    """What parameters and buffers share: a name, a global shape, and the layout at rest."""

    def __init__(self, mesh: Mesh, name: str, shape: Sequence[int], dtype: torch.dtype, aliases: Sequence[str]) -> None:
        super().__init__()
        self.mesh = mesh
        self.name = name
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.aliases = tuple(aliases)
        self.rest: Words = (Word("R"),) * len(mesh.axes)

    @property
    def local(self) -> Tensor:
        """This rank's piece at rest, detached."""
        raise NotImplementedError

    @torch.no_grad()
    def fill(self, read: Callable[[], Tensor]) -> None:
        """Copy this rank's piece of the whole tensor that ``read`` returns, on whatever device."""
        whole = read()
        if whole.shape != self.shape:
            raise ProgramError(f"{self.name} has shape {tuple(self.shape)}, the tensor given has {tuple(whole.shape)}")
        if whole.device.type == "meta":
            raise ProgramError(f"the tensor given for {self.name} is on the meta device and has no values")
        self.local.copy_(take_share(whole, self.rest, self.mesh))

    def chunks(self, tensor: Tensor | None = None) -> list[Chunk]:
        """The rectangles that this rank holds, as views of ``tensor`` (by default the piece at rest).

        ``tensor`` may be anything laid out like the piece at rest: the gradient, or an optimizer's state; a DTensor or its
        local tensor. An empty piece has no chunks.
        """
        tensor = self.local if tensor is None else tensor
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        held = [split_of(self.rest, dim, size, self.mesh).intervals() for dim, size in enumerate(self.shape)]
        chunks = []
        for rectangle in itertools.product(*(_with_positions(intervals) for intervals in held)):
            view = tensor.detach()
            for dim, (first, last, at) in enumerate(rectangle):
                view = view.narrow(dim, at, last - first)
            chunks.append(Chunk(tuple(piece[0] for piece in rectangle), tuple(view.shape), view))
        return chunks

    def extra_repr(self) -> str:
        return f"{self.name!r}, {tuple(self.shape)}"


def _with_positions(intervals: tuple[Interval, ...]) -> list[tuple[int, int, int]]:
    """(start, stop, position in the local dim) of each interval."""
    found, at = [], 0
    for first, last in intervals:
        found.append((first, last, at))
        at += last - first
    return found


class ParameterSlot(_Slot):
    """One parameter; see the module. Called, it gives the local tensor in the use layout, connected to autograd."""

    def __init__(
        self,
        mesh: Mesh,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        use: str,
        store: str | None = None,
        zero: int = 0,
        aliases: Sequence[str] = (),
        trainable: bool = True,
        compute: torch.dtype | None = None,
        offload: bool = False,
    ) -> None:
        super().__init__(mesh, name, shape, dtype, aliases)
        self.is_cast = compute is not None
        self.compute = compute or dtype
        self.use = parse_words(use, mesh, len(self.shape))
        self.rest = _rest(name, self.use, parse_words(store, mesh, len(self.shape)) if store is not None else self.use)
        if zero not in (0, 1, 2, 3) or (zero == 0 and self.rest != self.use):
            raise ProgramError(f"{name} rests in another layout than its use {use}: zero={zero} must say 1, 2 or 3 how")
        # Without a ZeRO axis there is nothing to gather, whatever the level.
        self.zero = zero if self.rest != self.use else 0
        self.offload = offload
        self.has_working_copy = offload or self.zero in (1, 2) or (self.is_cast and self.zero == 0)
        self.trainable = trainable and (dtype.is_floating_point or dtype.is_complex)
        self._sum: Tensor | None = None
        self.gathers = Gathers()
        self.twins: tuple[ParameterSlot, ...] = ()
        self._changes: tuple[Change, ...] = ()
        self._gathered_version = -1
        self._has_had_gradient = False

    def allocate(self, device: torch.device, twin: ParameterSlot | None = None) -> None:
        """Make the piece at rest, uninitialised; the mesh must be bound. Called once, by the engine.

        ``twin``: the slot of the same parameter in an earlier stage on this rank, whose piece serves both. Each keeps a
        gradient of its own until it is reduced: the two may be other sums of terms.
        """
        if twin is not None:
            self._check_rests_as(twin)
            self.twins, twin.twins = (*twin.twins, twin), (*twin.twins, self)
            local, storage = twin.local, twin.storage
        else:
            local = self._at_rest(local_shape(self.shape, self.rest, self.mesh), self.dtype, device)
            storage = nn.Parameter(self._wrapped(local), requires_grad=self.trainable)
        leaf = local
        if self.has_working_copy:
            words, dtype = (self.rest, self.dtype) if self.zero == 3 else (self.use, self.compute)
            leaf = torch.empty(local_shape(self.shape, words, self.mesh), dtype=dtype, device=device)
        self._device = device
        self._shuttle: Tensor | None = None
        if self.offload and leaf.dtype != self.dtype:
            self._shuttle = twin._shuttle if twin is not None else self._at_rest(local.shape, leaf.dtype, device)
        # Not as module attributes: a Parameter would be registered, and `.to()` of the stage would part it from its leaf.
        self.__dict__["_local"] = local
        self.__dict__["storage"] = storage
        self.__dict__["leaf"] = leaf.detach().requires_grad_(self.trainable)
        self._changes = changes(self.rest, self.use, self.shape, self.mesh)
        self.invalidate()

    def _at_rest(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory where the piece at rest is: the device's, or the host's."""
        return host.empty(shape, dtype, device) if self.offload else torch.empty(shape, dtype=dtype, device=device)

    def _check_rests_as(self, other: ParameterSlot) -> None:
        rests = [tuple(word if word.kind == "S" else Word("R") for word in slot.rest) for slot in (self, other)]
        types = [(slot.dtype, slot.compute, slot.offload) for slot in (self, other)]
        if rests[0] != rests[1] or self.shape != other.shape or types[0] != types[1]:
            raise ProgramError(f"{self.name} rests otherwise in one stage than in another: its pieces must be the same")

    storage: nn.Parameter
    leaf: Tensor

    @property
    def local(self) -> Tensor:
        return self.__dict__["_local"]  # type: ignore[no-any-return]

    @property
    def reduce_axes(self) -> tuple[Axis, ...]:
        """Axes over which the gradient at rest is still a sum of terms."""
        return tuple(
            axis for axis, word in zip(self.mesh.axes, self.rest, strict=True) if word.kind == "G" and axis.size > 1
        )

    @property
    def sharded_axes(self) -> tuple[Axis, ...]:
        """Axes over which the piece at rest is a shard."""
        return tuple(
            axis for axis, word in zip(self.mesh.axes, self.rest, strict=True) if word.kind == "S" and axis.size > 1
        )

    def forward(self) -> Tensor:
        """The local tensor in the use layout."""
        if self.zero == 3:
            return gathered(self.leaf, self.join, self.fold, self.gathers, self.compute)
        return self.leaf

    def narrowed(self, master: Tensor) -> Tensor:
        """A copy of ``master`` in the type to compute in; ``master`` itself where that is its own."""
        return master.to(self.compute, copy=True) if self.is_cast else master

    @torch.no_grad()
    def brought(self) -> Tensor:
        """The piece at rest on the device, in the type that is sent from there: a copy, but where it is the same. From the
        host it may still be on its way."""
        if not self.offload:
            return self.narrowed(self.local)
        source = self.local if self._shuttle is None else self._shuttle.copy_(self.local)
        return host.to_device(source, self._device)

    def join(self, shard: Tensor) -> Tensor:
        """From rest to use, without gradient."""
        return self.widened(self.narrowed(shard))

    def widened(self, shard: Tensor) -> Tensor:
        """From the layout at rest to that of use, in the type to compute in."""
        for change in self._changes:
            shard = change.forward(shard)
        return shard

    def fold(self, gradient: Tensor) -> Tensor:
        """The gradient in the use layout brought to the layout and the type at rest; a sum of terms over
        :attr:`reduce_axes` still."""
        gradient = gradient.to(self.dtype)
        for change in reversed(self._changes):
            gradient = change.backward(gradient)
        return gradient

    @torch.no_grad()
    def collect(self) -> None:
        """Add what autograd has left on the leaf of a working copy to this step's gradient, in the master's type."""
        gradient = self.leaf.grad
        if self.leaf.dtype == self.dtype or gradient is None:
            return
        self.leaf.grad = None
        self._sum = gradient.to(self.dtype) if self._sum is None else self._sum.add_(gradient)

    @property
    def arrived(self) -> Tensor | None:
        """This step's gradient in the use layout, as far as it has not been taken."""
        return self.leaf.grad if self._sum is None else self._sum

    def take_arrived(self) -> Tensor:
        """:attr:`arrived`, which is there, and is no more afterwards."""
        self.collect()
        found = self.arrived
        assert found is not None, "a gradient is taken once it is there"
        self.drop_arrived()
        return found

    def drop_arrived(self) -> None:
        """Forget this step's gradient."""
        self.leaf.grad = self._sum = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the working copy again, if the pieces at rest may have changed since.

        An optimizer may have changed them if there has been a gradient: foreach and fused optimizers leave the version of a
        DTensor as it is, so versions show other writes only. All ranks decide alike.
        """
        if self.is_stale():
            self.take_working_copy(self.brought() if self.zero == 3 else self.widened(self.brought()))

    def is_stale(self) -> bool:
        """Whether there is a working copy and what it was made from may have changed since."""
        return self.has_working_copy and (self._has_had_gradient or self._gathered_version != self._num_writes())

    def take_working_copy(self, whole: Tensor) -> None:
        """Use ``whole``, gathered just now, until it is stale."""
        self.leaf.data = whole
        self._gathered_version = self._num_writes()
        self._has_had_gradient = self.storage.grad is not None

    def has_one_gather(self) -> bool:
        """Whether rest and use are one all-gather apart, so that the shard may travel together with others."""
        return len(self._changes) == 1 and self._changes[0].name == "all_gather"

    def is_gathered_ahead(self) -> bool:
        """Whether that all-gather is made before the step: not around each use."""
        return self.zero != 3 and self.has_one_gather()

    def one_gather(self) -> tuple[Axis, int, Pieces]:
        """The axis and dim of that all-gather, and the pieces of the dim."""
        move = self._changes[0].move
        assert move.split is not None, "changes() always says how a dim is cut"
        return move.axis, move.dim, move.split.pieces(move.axis)

    def _num_writes(self) -> int:
        """Grows with most writes in place, through the DTensor, its local tensor or the piece itself."""
        return self.storage._version + local_of(self.storage)._version + self.local._version

    def invalidate(self) -> None:
        """Have the working copies gathered at the next step: after writes through ``.data``, on all ranks."""
        for slot in (self, *self.twins):
            slot._gathered_version = -1

    @torch.no_grad()
    def add_gradient(self, gradient: Tensor) -> None:
        """Add to ``storage.grad`` a finished gradient in the layout at rest."""
        for slot in (self, *self.twins):
            slot._has_had_gradient = True
        if self.storage.grad is None:
            # On the host it may still be on its way when this returns.
            self.storage.grad = self._wrapped(host.to_host(gradient.detach()) if self.offload else gradient.detach())
        else:
            local_of(self.storage.grad).add_(gradient.to(self.local.device))

    def _wrapped(self, local: Tensor) -> Tensor:
        """The local piece as a DTensor of the global shape; as it is where there are no process groups."""
        if not self.mesh.has_groups:
            return local
        placements: list[Placement] = [Shard(word.dim) if word.kind == "S" else Replicate() for word in self.rest]
        stride = torch.empty(self.shape, device="meta").stride()
        if self.offload:
            return host.as_dtensor(local, self.mesh.device_mesh, placements or [Replicate()], self.shape, stride)
        return DTensor.from_local(
            local,
            self.mesh.device_mesh,
            placements or [Replicate()],
            run_check=False,
            shape=self.shape,
            stride=stride,
        )


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, sharing memory; any other tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _rest(name: str, use: Words, store: Words) -> Words:
    """The layout at rest with the gradient's state: G where the piece at rest is whole and used so."""
    rest = []
    for used, stored in zip(use, store, strict=True):
        if used.kind == "P" or stored.kind == "P" or (used.kind == "S" and stored != used):
            raise ProgramError(f"{name} cannot rest as {stored} and be used as {used}")
        rest.append(stored if stored.kind == "S" else used)
    return tuple(rest)


class BufferSlot(_Slot):
    """One buffer, whole on every rank. Called, it gives the tensor."""

    def __init__(
        self,
        mesh: Mesh,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        persistent: bool = True,
        aliases: Sequence[str] = (),
    ) -> None:
        super().__init__(mesh, name, shape, dtype, aliases)
        self.persistent = persistent
        self._next: Tensor | None = None

    def allocate(self, device: torch.device, twin: BufferSlot | None = None) -> None:
        """Make the tensor, uninitialised, or share that of another stage's slot. Called once, by the engine."""
        own = torch.empty(self.shape, dtype=self.dtype, device=device) if twin is None else twin.local
        self.__dict__["_local"] = own

    @property
    def local(self) -> Tensor:
        return self.__dict__["_local"]  # type: ignore[no-any-return]

    def forward(self) -> Tensor:
        return self.local

    def update(self, new: Tensor) -> None:
        """Have ``new`` take the buffer's place after the step: until then backward may need the old value."""
        self._next = new.detach()

    def abandon(self) -> None:
        """Forget what :meth:`update` was given: the step failed."""
        self._next = None

    @torch.no_grad()
    def commit(self) -> None:
        """Take over what :meth:`update` was given."""
        if self._next is not None:
            self.local.copy_(self._next)
            self._next = None


def parameter(
    mesh: Mesh,
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    use: str,
    store: str | None = None,
    zero: int = 0,
    aliases: Sequence[str] = (),
    trainable: bool = True,
    compute: torch.dtype | None = None,
    offload: bool = False,
) -> ParameterSlot:
    """The slot of one parameter: ``name`` and ``aliases`` are the model's, ``use`` and ``store`` layouts in words. It rests
    and is updated in ``dtype``, with ``offload`` in the host's memory, and is used in ``compute`` where that is given."""
    return ParameterSlot(mesh, name, shape, dtype, use, store, zero, aliases, trainable, compute, offload)


def buffer(
    mesh: Mesh,
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    persistent: bool = True,
    aliases: Sequence[str] = (),
) -> BufferSlot:
    """The slot of one buffer, whole on every rank."""
    return BufferSlot(mesh, name, shape, dtype, persistent, aliases)
