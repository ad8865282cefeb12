"""The device mesh: devices in row-major order along named axes.

An *axis* is an axis of the mesh; a *dim* is a dimension of a tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from keyword import iskeyword

from autopar.errors import InputError


@dataclass(frozen=True)
class Mesh:
    """``Mesh((2, 4), ("data", "tensor"))``: 8 devices, rank = data * 4 + tensor. The last axis holds neighbours."""

    shape: tuple[int, ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.names) or len(set(self.names)) != len(self.names):
            raise InputError(f"a mesh needs one distinct name per axis: shape {self.shape}, names {self.names}")
        if not all(isinstance(name, str) and name.isidentifier() and not iskeyword(name) for name in self.names):
            raise InputError(f"the axes of a mesh are named as variables are, since programs name them: {self.names}")
        if any(size < 1 for size in self.shape):
            raise InputError(f"every axis of a mesh has at least one device: shape {self.shape}")

    @property
    def num_axes(self) -> int:
        return len(self.shape)

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    def stride(self, axis: int) -> int:
        """Distance in ranks between neighbours along ``axis``."""
        return math.prod(self.shape[axis + 1 :])

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Where ``rank`` stands, one index per axis."""
        return tuple(rank // self.stride(axis) % size for axis, size in enumerate(self.shape))

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in zip(self.names, self.shape, strict=True)) or "one device"


def factorizations(num_devices: int, max_axes: int) -> list[tuple[int, ...]]:
    """Every ordered factorisation of ``num_devices`` into 1 to ``max_axes`` factors above 1 (``(1,)`` for one device)."""
    if num_devices == 1:
        return [(1,)]
    found: list[tuple[int, ...]] = []

    def extend(prefix: tuple[int, ...], rest: int) -> None:
        if rest == 1:
            found.append(prefix)
        elif len(prefix) < max_axes:
            for factor in range(2, rest + 1):
                if rest % factor == 0:
                    extend((*prefix, factor), rest // factor)

    extend((), num_devices)
    return sorted(found, key=lambda shape: (len(shape), shape))
