"""What a sample of a rule is: an operator's call on tensors that are described.

``T`` is a float tensor with gradient, ``N`` one without, ``C`` a complex one, ``I`` integers below a bound, ``B`` booleans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.graph import Slot, TorchName


@dataclass(frozen=True)
class Given:
    """A tensor to draw: uniform in ``[low, high)``; of distinct values where ``distinct``."""

    shape: tuple[int, ...]
    dtype: str
    low: float = 0.0
    high: float = 1.0
    gradient: bool = False


@dataclass(frozen=True)
class Sample:
    """One call. ``mesh`` shapes are tried beside the axes of one, two and three devices."""

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    meshes: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        def text(argument: Any) -> str:
            if isinstance(argument, Given):
                return "x".join(map(str, argument.shape)) or "scalar"
            if isinstance(argument, tuple):
                return "[" + ",".join(map(text, argument)) + "]"
            if isinstance(argument, Slot):
                return f"{argument.kind[0]}{argument.index}"
            return argument.name if isinstance(argument, TorchName) else str(argument)

        return f"{self.target}({', '.join(text(a) for a in (*self.args, *(v for _, v in self.kwargs)))})"


def T(*shape: int, low: float = 0.2, high: float = 0.8) -> Given:
    return Given(shape, "float64", low, high, gradient=True)


def C(*shape: int, gradient: bool = True) -> Given:
    return Given(shape, "complex128", 0.2, 0.8, gradient)


def N(*shape: int, low: float = 0.2, high: float = 0.8) -> Given:
    return Given(shape, "float64", low, high)


def I(below: int, *shape: int) -> Given:  # noqa: E743
    return Given(shape, "int64", 0, below)


def B(*shape: int) -> Given:
    return Given(shape, "bool", 0, 2)


def F32(*shape: int) -> Given:
    return Given(shape, "float32", 0.2, 0.8, gradient=True)
