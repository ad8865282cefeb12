"""Inputs of a step: checked against what the program was planned for, cut into micro-batches and this rank's shares."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.runtime.errors import ProgramError
from autopar.runtime.layouts import Words, parse_words, take_share
from autopar.runtime.mesh import Axis, Mesh
from autopar.runtime.program import Input
from autopar.runtime.split import Split
from autopar.runtime.steps import gather


class MicroBatch(NamedTuple):
    """This rank's shares of the inputs of one micro-batch by name, its samples over all devices, and how many come before."""

    shares: dict[str, Tensor]
    size: int
    first: int


@dataclass(frozen=True)
class MicroBatching:
    """How a program cuts a batch: of ``global_batch`` samples, into ``num_micro_batches`` that are multiples of ``unit``."""

    global_batch: int
    num_micro_batches: int = 1
    unit: int = 1

    def sizes(self, batch: int, num: int) -> tuple[int, ...]:
        """Samples of each of ``num`` micro-batches, the larger ones first; none where a batch cannot be cut so."""
        units, rest = divmod(batch, self.unit)
        if num == 1:
            return (batch,)
        if rest or units < num:
            return ()
        each, larger = divmod(units, num)
        return tuple((each + (index < larger)) * self.unit for index in range(num))


class Batches:
    """The inputs of one program: names, layouts, and which batch sizes it takes.

    ``planned`` is the micro-batch for which ``inputs`` have their shapes, ``multiple`` what other micro-batches are multiples
    of. ``used``: names of the inputs of which this rank needs its shares; the others are only checked.
    """

    def __init__(
        self,
        inputs: Sequence[Input],
        mesh: Mesh,
        planned: int,
        multiple: int | None,
        loop: MicroBatching | None = None,
        used: Collection[str] | None = None,
    ) -> None:
        self._inputs = tuple(inputs)
        self._mesh = mesh
        self._planned = planned
        self._multiple = multiple
        self._loop = loop or MicroBatching(planned)
        self._used = {given.name for given in inputs} if used is None else set(used)
        self._words = {given.name: parse_words(given.layout, mesh, len(given.shape)) for given in inputs}
        self._data_axes = max((self._batch_axes(given) for given in inputs), key=_num_shares, default=())

    @property
    def data_size(self) -> int:
        """Into how many shares the batch is cut, by the input that is cut most."""
        return self._data()[0]

    @property
    def data_rank(self) -> int:
        """Which of them this rank takes."""
        return self._data()[1]

    def _data(self) -> tuple[int, int]:
        size, rank = 1, 0
        for axis in self._data_axes:
            size, rank = size * axis.size, rank * axis.size + axis.place
        return size, rank

    def _batch_axes(self, given: Input) -> tuple[Axis, ...]:
        """The axes that cut an input's batch, outermost first."""
        if given.batch_dim is None:
            return ()
        words = self._words[given.name]
        return tuple(
            axis for axis, w in zip(self._mesh.axes, words, strict=True) if w.kind == "S" and w.dim == given.batch_dim
        )

    def micro_batches(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], local: bool, evaluates: bool = False
    ) -> list[MicroBatch]:
        """This rank's shares of every micro-batch.

        With ``local`` the tensors given hold this rank's share of the batch (see ``data_rank``) and all of every other dim. A
        batch that is only evaluated may be so small that there are fewer micro-batches than planned.
        """
        tensors = self._by_name(args, kwargs)
        sizes = self._batch(tensors, local, evaluates)
        for given in self._inputs:
            self._check(given, tensors[given.name], self._expected(given, sizes, local), local)
        starts = dict.fromkeys(self._words, 0)
        found: list[MicroBatch] = []
        for size in sizes:
            shares = {}
            for given in self._inputs:
                tensor = tensors[given.name]
                if given.batch_dim is not None:
                    length = self._expected(given, (size,), local)[given.batch_dim]
                    tensor = tensor.narrow(given.batch_dim, starts[given.name], length)
                    starts[given.name] += length
                if given.name in self._used:
                    shares[given.name] = self._share(given, tensor, size, local)
            found.append(MicroBatch(shares, size, sum(micro_batch.size for micro_batch in found)))
        return found

    def _share(self, given: Input, tensor: Tensor, size: int, local: bool) -> Tensor:
        """This rank's share of an input of a micro-batch of ``size`` samples."""
        words = self._words[given.name]
        if local and given.batch_dim is not None:
            if self._batch_axes(given) == self._data_axes:
                words = tuple(word if word.dim != given.batch_dim else type(word)("R") for word in words)
            else:
                tensor = self._whole(tensor.to(self._mesh.device), given.batch_dim, size * self._per_sample(given))
        return take_share(tensor, words, self._mesh).contiguous().to(self._mesh.device, non_blocking=True)

    def order(self, sizes: Sequence[int]) -> Tensor | None:
        """For each sample of a batch given with ``local``, its place in the micro-batches one after the other.

        None where that is the same: the batch is the ranks' shares one after the other, and so is every micro-batch.
        """
        if len(sizes) == 1 or self.data_size == 1:
            return None
        places: list[list[int]] = [[] for _ in range(self.data_size)]
        start = 0
        for size in sizes:
            split = Split(size, *((axis, None) for axis in self._data_axes))
            for rank, (first, last) in enumerate(_all_pieces(split, self._data_axes)):
                places[rank].extend(range(start + first, start + last))
            start += size
        return torch.tensor([place for of_rank in places for place in of_rank], device=self._mesh.device)

    def _per_sample(self, given: Input) -> int:
        """Elements of an input's batch dim for each sample."""
        assert given.batch_dim is not None
        return given.shape[given.batch_dim] // self._planned

    def _whole(self, share: Tensor, dim: int, size: int) -> Tensor:
        """The global batch of an input that the program wants otherwise cut than the batch is handed out."""
        for count in range(len(self._data_axes), 0, -1):
            split = Split(size, *((axis, None) for axis in self._data_axes[:count]))
            share = gather(share, self._data_axes[count - 1], dim, split)
        return share

    def _by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        names = [given.name for given in self._inputs]
        if len(args) > len(names):
            raise ProgramError(f"the program takes {len(names)} inputs ({', '.join(names)}), {len(args)} were given")
        tensors = dict(zip(names, args, strict=False))
        twice = sorted(set(tensors) & set(kwargs))
        unknown = sorted(set(kwargs) - set(names))
        tensors.update(kwargs)
        missing = [name for name in names if name not in tensors]
        if twice or unknown or missing:
            problems = [("given twice", twice), ("unknown", unknown), ("missing", missing)]
            said = "; ".join(f"{what}: {', '.join(which)}" for what, which in problems if which)
            raise ProgramError(f"wrong inputs ({said}): the program takes {', '.join(names)}")
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise ProgramError(f"input {name!r} must be a tensor, got {type(tensor).__name__}")
        return tensors

    def _batch(self, tensors: Mapping[str, Tensor], local: bool, evaluates: bool) -> tuple[int, ...]:
        """Samples of each micro-batch of the global batch that the first batched input means."""
        loop = self._loop
        planned = loop.sizes(loop.global_batch, loop.num_micro_batches)
        if not planned:
            raise ProgramError(
                f"the program's batch of {loop.global_batch} cannot be cut into {loop.num_micro_batches} micro-batches of "
                f"multiples of {loop.unit} samples"
            )
        for given in self._inputs:
            if given.batch_dim is None:
                continue
            tensor = tensors[given.name]
            if tensor.dim() != len(given.shape):
                self._check(given, tensor, self._expected(given, planned, local), local)
            return self._allowed(given, tensor.shape[given.batch_dim], planned, local, evaluates)
        return planned

    def _allowed(
        self, given: Input, size: int, planned: tuple[int, ...], local: bool, evaluates: bool
    ) -> tuple[int, ...]:
        """The micro-batches of a batch for which ``given`` has ``size`` along its batch dim; an error where there are none."""
        assert given.batch_dim is not None
        wanted = self._expected(given, planned, local)[given.batch_dim]
        whole = self._expected(given, planned, False)[given.batch_dim]
        if size == wanted:
            return planned
        if local and size == whole:
            raise ProgramError(
                f"input {given.name!r}: step(local=True) takes this rank's share of the batch, {wanted} along dim "
                f"{given.batch_dim}, and got {size}, the global batch: leave local=True away, or pass share "
                f"{self.data_rank} of {self.data_size}"
            )
        per_sample = self._per_sample(given)
        total = size * (self.data_size if local else 1)
        batch = total // per_sample
        if self._multiple and batch > 0 and batch * per_sample == total:
            num = self._loop.num_micro_batches
            num = max(1, min(num, batch // self._loop.unit)) if evaluates else num
            sizes = self._loop.sizes(batch, num)
            if sizes and all(part % self._multiple == 0 for part in sizes):
                return sizes
        kind = f"a local batch of {size}, global {batch}" if local else f"a global batch of {batch}"
        hint = self._hint(size, batch, whole, local)
        raise ProgramError(
            f"input {given.name!r}: the program takes {self._takes()} as global batch, and got {kind}{hint}"
        )

    def _takes(self) -> str:
        loop = self._loop
        if not self._multiple:
            return f"only {loop.global_batch}"
        if loop.num_micro_batches == 1:
            return f"multiples of {self._multiple}"
        unit = math.lcm(self._multiple, loop.unit)
        return f"multiples of {unit} from {unit * loop.num_micro_batches} ({loop.num_micro_batches} micro-batches)"

    def _hint(self, size: int, batch: int, whole: int, local: bool) -> str:
        """What to do about a batch that is not taken."""
        if not local and size * self.data_size == whole and self.data_size > 1:
            return "; this looks like one rank's share: pass the global batch, or step(..., local=True)"
        if batch < self._loop.global_batch:
            return (
                "; for a last, smaller batch: leave it out (drop_last=True of a DataLoader), or pad it to the planned size "
                "with samples whose labels are ignored"
            )
        return ""

    def _expected(self, given: Input, sizes: Sequence[int], local: bool) -> tuple[int, ...]:
        """Shape to be given for a global batch that is cut into micro-batches of these sizes."""
        shape = list(given.shape)
        if given.batch_dim is not None:
            dim = given.batch_dim
            parts = [given.shape[dim] * size // self._planned for size in sizes]
            if local:
                parts = [Split(part, *((axis, None) for axis in self._data_axes)).local for part in parts]
            shape[dim] = sum(parts)
        return tuple(shape)

    def _check(self, given: Input, tensor: Tensor, expected: tuple[int, ...], local: bool) -> None:
        kind = "local" if local else "global"
        if tuple(tensor.shape) != expected:
            raise ProgramError(f"input {given.name!r}: expected the {kind} shape {expected}, got {tuple(tensor.shape)}")
        if tensor.dtype != given.dtype:
            raise ProgramError(f"input {given.name!r}: expected {given.dtype}, got {tensor.dtype}")


def scaled(shape: Sequence[int], batch_dim: int | None, batch: int, planned: int) -> tuple[int, ...]:
    """A shape of the planned batch for another batch."""
    return tuple(size * batch // planned if dim == batch_dim else size for dim, size in enumerate(shape))


def scaled_dims(shape: Sequence[int], batch_dims: Sequence[int], batch: int, planned: int) -> tuple[int, ...]:
    """Likewise, where several dims follow the batch."""
    return tuple(size * batch // planned if dim in batch_dims else size for dim, size in enumerate(shape))


def replicated(words: Words) -> Words:
    """The layout in which every rank holds the whole."""
    return tuple(type(word)("R") for word in words)


def _all_pieces(split: Split, axes: Sequence[Axis]) -> list[tuple[int, int]]:
    """The interval of every rank along ``axes``, the first axis outermost, of a dim that all of them cut plainly."""
    pieces = [(0, split.size)]
    for axis in axes:
        pieces = [piece for first, last in pieces for piece in _cut(first, last, axis.size)]
    return pieces


def _cut(first: int, last: int, num: int) -> list[tuple[int, int]]:
    each = -(-(last - first) // num)
    bounds = [min(last, first + index * each) for index in range(num + 1)]
    return list(itertools.pairwise(bounds))


def _num_shares(axes: Sequence[Axis]) -> int:
    return math.prod(axis.size for axis in axes)
