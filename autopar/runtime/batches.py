"""Inputs of a step: checked against what the program was planned for, and cut into this rank's shares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from autopar.runtime.errors import ProgramError
from autopar.runtime.layouts import Words, parse_words, take_share
from autopar.runtime.mesh import Axis, Mesh
from autopar.runtime.program import Input
from autopar.runtime.split import Split
from autopar.runtime.steps import gather


class Batches:
    """The inputs of one program: names, layouts, and which batch sizes it takes."""

    def __init__(self, inputs: Sequence[Input], mesh: Mesh, planned: int, multiple: int | None) -> None:
        self._inputs = tuple(inputs)
        self._mesh = mesh
        self._planned = planned
        self._multiple = multiple
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
        return tuple(axis for axis, w in zip(self._mesh.axes, words, strict=True) if w.kind == "S" and w.dim == given.batch_dim)

    def shares(self, args: Sequence[Any], kwargs: Mapping[str, Any], local: bool) -> tuple[dict[str, Tensor], int]:
        """This rank's shares by name, and the global batch size.

        With ``local`` the tensors given hold this rank's share of the batch (see ``data_rank``) and all of every other dim.
        """
        tensors = self._by_name(args, kwargs)
        batch = self._batch(tensors, local)
        shares = {}
        for given in self._inputs:
            tensor = tensors[given.name]
            words = self._words[given.name]
            self._check(given, tensor, self._expected(given, batch, local), local)
            if local and given.batch_dim is not None:
                if self._batch_axes(given) == self._data_axes:
                    words = tuple(word if word.dim != given.batch_dim else type(word)("R") for word in words)
                else:
                    tensor = self._whole(tensor.to(self._mesh.device), given.batch_dim, batch * self._per_sample(given))
            shares[given.name] = take_share(tensor, words, self._mesh).contiguous().to(self._mesh.device, non_blocking=True)
        return shares, batch

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

    def _batch(self, tensors: Mapping[str, Tensor], local: bool) -> int:
        """The global batch size that the first batched input means."""
        for given in self._inputs:
            if given.batch_dim is None:
                continue
            tensor = tensors[given.name]
            if tensor.dim() != len(given.shape):
                self._check(given, tensor, self._expected(given, self._planned, local), local)
            return self._allowed(given, tensor.shape[given.batch_dim], local)
        return self._planned

    def _allowed(self, given: Input, size: int, local: bool) -> int:
        """The batch for which ``given`` has ``size`` along its batch dim; an error where the program does not take it."""
        assert given.batch_dim is not None
        per_sample = self._per_sample(given)
        planned = self._expected(given, self._planned, local)[given.batch_dim]
        if size == planned:
            return self._planned
        if local and size == given.shape[given.batch_dim]:
            raise ProgramError(
                f"input {given.name!r}: step(local=True) takes this rank's share of the batch, {planned} along dim "
                f"{given.batch_dim}, and got {size}, the global batch: leave local=True away, or pass share "
                f"{self.data_rank} of {self.data_size}"
            )
        total = size * (self.data_size if local else 1)
        batch = total // per_sample
        if self._multiple and batch > 0 and batch * per_sample == total and batch % self._multiple == 0:
            return batch
        takes = f"multiples of {self._multiple}" if self._multiple else f"only {self._planned}"
        kind = f"a local batch of {size}, global {batch}" if local else f"a global batch of {batch}"
        hint = ""
        if not local and size * self.data_size == given.shape[given.batch_dim] and self.data_size > 1:
            hint = "; this looks like one rank's share: pass the global batch, or step(..., local=True)"
        raise ProgramError(f"input {given.name!r}: the program takes {takes} as global batch, and got {kind}{hint}")

    def _expected(self, given: Input, batch: int, local: bool) -> tuple[int, ...]:
        """Shape to be given for a global batch."""
        shape = list(given.shape)
        if given.batch_dim is not None:
            shape[given.batch_dim] = shape[given.batch_dim] * batch // self._planned
            if local:
                split = Split(shape[given.batch_dim], *((axis, None) for axis in self._data_axes))
                shape[given.batch_dim] = split.local
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


def replicated(words: Words) -> Words:
    """The layout in which every rank holds the whole."""
    return tuple(type(word)("R") for word in words)


def _num_shares(axes: Sequence[Axis]) -> int:
    return math.prod(axis.size for axis in axes)
