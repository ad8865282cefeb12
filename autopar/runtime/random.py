"""Random numbers that do not depend on how many ranks draw them, nor on their layouts.

A number is a function of a seed, the step, the place in the model (*site*) where it is drawn, and the index of its element
in the whole tensor of the whole batch, so every rank finds the numbers of its own elements without a generator or traffic,
and a part that is computed again in backward finds the same ones. The function is a counter-based generator in the sense of
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11); the mixing is the 32-bit finalizer of MurmurHash3
(Appleby, public domain) in whole numbers, so that all devices agree on every bit.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from autopar.runtime.draws import Draws
from autopar.runtime.layouts import parse_words, split_of
from autopar.runtime.mesh import Mesh
from autopar.runtime.split import Interval

_WORD = 1 << 32
_MOST_AT_ONCE = 1 << 22  # elements whose numbers are drawn together: bounds the memory held for a moment


# The step is part of its numbers: compiled, it would be compiled anew in every step.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def dropout(
    x: Tensor, p: float, mesh: Mesh, site: str, shape: Sequence[int], layout: str, batch_dims: Sequence[int] = ()
) -> Tensor:
    """``F.dropout(x, p)`` of this rank's share of a tensor, with the numbers of its elements in the whole one.

    ``shape``: of the whole tensor of the planned micro-batch; ``layout``: one word for each axis; ``batch_dims``: the dims
    that follow the batch.
    """
    places, first = _held(mesh, tuple(shape), layout, tuple(batch_dims))
    return _dropped(x, p, places, first, keys(mesh.draws.seed, mesh.draws.step, site))


def whole_dropout(x: Tensor, p: float, site: str, draws: Draws, batch_dims: Sequence[int] = ()) -> Tensor:
    """The same of a whole tensor of a whole batch, on one device."""
    held = tuple(((0, size),) if size else () for size in x.shape)
    places = _Places(held, tuple(x.shape), batch_dims[0] if len(batch_dims) == 1 else None)
    return _dropped(x, p, places, 0, keys(draws.seed, draws.step, site))


def _dropped(x: Tensor, p: float, places: _Places, first: int, words: tuple[int, int, int]) -> Tensor:
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    if not x.numel():  # no elements fell to this rank
        return x * scale
    kept = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    fill_kept(kept, places, first, p, words)
    return torch.where(kept, x * scale, torch.zeros((), dtype=x.dtype, device=x.device))


@dataclass(frozen=True)
class _Places:
    """The global indices that a rank holds along each dim of a tensor of ``sizes``. ``batch_dim`` is the one dim that
    follows the batch: it counts first, so that an index does not depend on how large the batch is."""

    held: tuple[tuple[Interval, ...], ...]
    sizes: tuple[int, ...]
    batch_dim: int | None

    @property
    def column_dim(self) -> int | None:
        """The last dim that does not follow the batch."""
        others = [dim for dim in range(len(self.sizes)) if dim != self.batch_dim]
        return others[-1] if others else None

    def strides(self) -> list[int]:
        """Of each dim in the index of a row; 0 of the column's own dim."""
        order = [dim for dim in range(len(self.sizes)) if dim not in (self.batch_dim, self.column_dim)]
        if self.batch_dim is not None:
            order.insert(0, self.batch_dim)
        found, stride = [0] * len(self.sizes), 1
        for dim in reversed(order):
            found[dim] = stride
            stride *= self.sizes[dim]
        return found


def _held(mesh: Mesh, shape: tuple[int, ...], layout: str, batch_dims: tuple[int, ...]) -> tuple[_Places, int]:
    """The places of this rank's share of a micro-batch's tensor, and where its batch begins along the batch dim."""
    draws = mesh.draws
    words = parse_words(layout, mesh, len(shape))
    sizes = tuple(
        size * draws.samples // draws.planned if dim in batch_dims else size for dim, size in enumerate(shape)
    )
    held = tuple(split_of(words, dim, size, mesh).intervals() for dim, size in enumerate(sizes))
    batch_dim = batch_dims[0] if len(batch_dims) == 1 else None
    first = 0 if batch_dim is None else draws.first * shape[batch_dim] // draws.planned
    return _Places(held, sizes, batch_dim), first


@lru_cache(maxsize=4096)
def keys(seed: int, step: int, site: str) -> tuple[int, int, int]:
    """Three words from a seed, a step and a site."""
    state = (seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + zlib.crc32(site.encode()) * 0x8CB92BA72F3D8DD7) % (
        1 << 64
    )
    found = []
    for _ in range(3):  # SplitMix64 (Steele, Lea, Flood, OOPSLA'14)
        state = (state + 0x9E3779B97F4A7C15) % (1 << 64)
        mixed = state
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % (1 << 64)
        found.append((mixed ^ (mixed >> 31)) % _WORD)
    return found[0], found[1], found[2]


def fill_kept(kept: Tensor, places: _Places, first: int, p: float, words: tuple[int, int, int]) -> None:
    """Write into ``kept`` which elements stay: each with probability 1 - p."""
    rows, columns = _row_words(places, first, words, kept.device), _column_words(places, words, kept.device)
    threshold = _signed(min(_WORD - 1, math.ceil(p * _WORD)) - _WORD // 2)
    for part, row in _parts(kept, rows, places.column_dim):
        numbers = _mixed(row + columns)
        torch.ge(numbers ^ _signed(_WORD // 2), threshold, out=part)


def _parts(kept: Tensor, rows: Tensor, column_dim: int | None) -> list[tuple[Tensor, Tensor]]:
    """The tensor and its rows cut along the first dim, so that the numbers of a part take little memory."""
    if kept.dim() == 0 or column_dim == 0 or kept.numel() <= _MOST_AT_ONCE:
        return [(kept, rows)]
    length = max(1, _MOST_AT_ONCE * kept.shape[0] // kept.numel())
    return [(kept[at : at + length], rows[at : at + length]) for at in range(0, kept.shape[0], length)]


def _row_words(places: _Places, first: int, words: tuple[int, int, int], device: torch.device) -> Tensor:
    """A word for each row: the index over all dims but the column's."""
    total = torch.zeros((1,) * len(places.sizes), dtype=torch.int64, device=device)
    for dim, stride in enumerate(places.strides()):
        if stride:
            shape = [-1 if other == dim else 1 for other in range(len(places.sizes))]
            start = first if dim == places.batch_dim else 0
            total = total + (_indices(places.held[dim], device) + start).view(shape) * stride
    low, high = total % _WORD, total // _WORD
    return _mixed(_mixed(_as_word(low) ^ _signed(words[0])) + _mixed(_as_word(high) ^ _signed(words[1])))


def _column_words(places: _Places, words: tuple[int, int, int], device: torch.device) -> Tensor:
    """A word for each column."""
    dim = places.column_dim
    if dim is None:
        return torch.zeros((), dtype=torch.int32, device=device)
    shape = [-1 if other == dim else 1 for other in range(len(places.sizes))]
    return _mixed(_as_word(_indices(places.held[dim], device) % _WORD) ^ _signed(words[2])).view(shape)


def _indices(intervals: tuple[Interval, ...], device: torch.device) -> Tensor:
    ranges = [torch.arange(start, stop, dtype=torch.int64, device=device) for start, stop in intervals]
    return torch.cat(ranges) if len(ranges) != 1 else ranges[0]


def _as_word(tensor: Tensor) -> Tensor:
    """Whole numbers from 0 to 2^32 - 1 as signed 32-bit words of the same bits."""
    return torch.where(tensor >= _WORD // 2, tensor - _WORD, tensor).to(torch.int32)


def _signed(word: int) -> int:
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word


def _mixed(words: Tensor) -> Tensor:
    """MurmurHash3's finalizer: every bit of the result depends on every bit given."""
    words = words ^ ((words >> 16) & 0xFFFF)
    words = words * _signed(0x85EBCA6B)
    words = words ^ ((words >> 13) & 0x7FFFF)
    words = words * _signed(0xC2B2AE35)
    return words ^ ((words >> 16) & 0xFFFF)
