"""What is known of a value in a mixture of experts while the operators are gone through (``experts``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.graph import TorchName


@dataclass(frozen=True)
class Chosen:
    """The chosen experts, one a row: a token's side by side, or all sorted."""

    ids: str
    is_sorted: bool = False


@dataclass(frozen=True)
class Order:
    """The permutation that sorts the rows by expert; ``is_inverse``: the one that puts them back."""

    ids: str
    is_inverse: bool = False


@dataclass(frozen=True)
class Tokens:
    """Which token each sorted row is of."""

    ids: str


@dataclass(frozen=True)
class Counts:
    """How many rows each of ``num_experts`` has; ``is_sum``: and those before it; ``is_spread``: ones, to be added up."""

    ids: str
    num_experts: int
    is_sum: bool = False
    is_spread: bool = False


@dataclass(frozen=True)
class Turned:
    """The parameters with their last two dims exchanged."""

    value: str


@dataclass(frozen=True)
class Zeros:
    """Zeros of any shape."""


@dataclass(frozen=True)
class Weights:
    """The router's weights, one a row; ``ids``: sorted by these, None: a token's side by side."""

    weights: str
    ids: str | None = None
    is_column: bool = False


@dataclass(frozen=True)
class Picked:
    """A parameter's entry for the expert of each row; ``is_turned``: with its two dims exchanged."""

    value: str
    ids: str
    is_sorted: bool
    is_turned: bool = False


@dataclass(frozen=True)
class Rows:
    """Rows of ``tokens`` after some steps. ``step`` is the last one, None for the tokens themselves; its arguments refer to
    other rows, and to parameters, by value. ``ids``: by whose choice, where that is known; ``extra``: the place of a dim of
    size 1 that a ``bmm`` wants, None without one."""

    tokens: str
    ids: str | None
    is_sorted: bool
    step: tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]] | None = None
    output: int = 0
    extra: int | None = None


@dataclass(frozen=True)
class Weighted:
    """Finished rows multiplied by the router's weights. ``is_spread``: as ``[tokens, k, width]``."""

    rows: Rows
    last: str
    weights: str
    is_sorted: bool
    is_spread: bool = False
    dtype: TorchName | None = None


Fact = (
    Chosen | Order | Tokens | Counts | Turned | Zeros | Weights | Picked | Rows | Weighted
)  # what is known of a value
