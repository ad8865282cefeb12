"""Which operators of a graph draw random numbers, and which depend on training or evaluation mode."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from autopar.graph import Operator, OpGraph

_PROBABILITIES = ("dropout_p", "dropout", "p")
_MODES = ("train", "training")


def random_operators(graph: OpGraph) -> tuple[str, ...]:
    """Ids of the operators whose result depends on random numbers; dropout of probability 0 does not."""
    return tuple(operator.id for operator in graph.operators if _is_random(operator))


def uncounted_operators(graph: OpGraph) -> tuple[str, ...]:
    """Of the random operators those whose numbers are not functions of the elements' places: no two runs agree on them."""
    counted = set(dropouts(graph))
    return tuple(name for name in random_operators(graph) if name not in counted)


def dropouts(graph: OpGraph) -> tuple[str, ...]:
    """Ids of the operators that drop elements by their places, in the order in which the model calls them."""
    return tuple(op.id for op in graph.operators if op.target == "aten.dropout.default" and _is_random(op))


def mode_dependent_operators(graph: OpGraph) -> tuple[str, ...]:
    """Ids of the operators that the model would compute otherwise in the other mode: dropout and batch norm."""
    named = ("batch_norm", "instance_norm", "dropout")
    return tuple(
        operator.id
        for operator in graph.operators
        if _is_random(operator) or any(name in operator.target for name in named)
    )


def _is_random(operator: Operator) -> bool:
    names, is_seeded = _schema(operator.target)
    if not is_seeded:
        return False
    given = {name: operator.argument(at, name) for at, name in enumerate(names)}
    chances = [given[name] for name in _PROBABILITIES if name in given]
    if any(given.get(name) is False for name in _MODES):
        return False
    return not chances or any(isinstance(chance, (int, float)) and chance > 0 for chance in chances)


@lru_cache(maxsize=4096)
def _schema(target: str) -> tuple[tuple[str, ...], bool]:
    """Names of an operator's arguments, and whether torch says that it draws random numbers."""
    found: Any = torch.ops
    try:
        for part in target.split("."):
            found = getattr(found, part)
        arguments = tuple(argument.name for argument in found._schema.arguments)
    except AttributeError:
        return (), False
    return arguments, torch.Tag.nondeterministic_seeded in found.tags
