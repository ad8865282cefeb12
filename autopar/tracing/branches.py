"""``torch.cond`` as one operator of the graph that holds its two branches, each a small graph of its own.

Enters: the node of a traced program that chooses. Leaves: the places of what it makes. Parameters and whatever else a branch
reads of its surroundings are operands: torch's export sees to that.
"""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

import torch

from autopar.graph import Ref, Subgraph, Value
from autopar.tracing.lowered import Lowered
from autopar.tracing.places import Place, memory_of, read
from autopar.tracing.targets import DROPOUTS, dtype_name, resolve_target

COND = "higher_order.cond"


class Lowering(Protocol):
    """What branches are read with: a lowering whose operators and values are exchanged while it walks a branch."""

    lowered: Lowered
    node: torch.fx.Node | None  # where the walk is
    fakes: dict[str, Any]

    def run_graph(self, module: torch.fx.GraphModule, arguments: list[Any] | None) -> list[Any]: ...
    def value_of(self, place: Place) -> str: ...
    def emit(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]: ...
    def record(
        self, target: str, args: Any, kwargs: dict[str, Any], outputs: list[Any], several: bool
    ) -> list[str]: ...
    def fail(self, what: str) -> NoReturn: ...


def conditional(lowering: Lowering, node: torch.fx.Node, env: dict[torch.fx.Node, Any]) -> tuple[Place, ...]:
    """The places of the results of ``cond(predicate, yes, no, operands)``."""
    predicate, yes, no, given = node.args
    chosen = env[predicate] if isinstance(predicate, torch.fx.Node) else None
    if not isinstance(chosen, Place):
        lowering.fail("uses torch.cond on a number; write a plain if, or give it a tensor of one boolean")
    operands = []
    for item in given:  # type: ignore[union-attr]
        place = env[item] if isinstance(item, torch.fx.Node) else None
        if not isinstance(place, Place):
            lowering.fail(f"gives torch.cond the operand {item!r}, which is no tensor; put it into the branches")
        operands.append(lowering.value_of(place))
    branches = tuple(_branch(lowering, env[body], operands) for body in (yes, no))  # type: ignore[index]
    outputs = list(node.meta["val"])
    arguments = (Ref(lowering.value_of(chosen)), *branches, tuple(map(Ref, operands)))
    ids = lowering.record(COND, arguments, {}, outputs, True)
    return tuple(Place(value, memory_of(fake)) for value, fake in zip(ids, outputs, strict=True))


def _branch(lowering: Lowering, body: torch.fx.GraphModule, operands: list[str]) -> Subgraph:
    outer, node = lowering.lowered, lowering.node
    lowering.lowered = Lowered()
    try:
        places = [_operand(lowering, outer.values[name], index) for index, name in enumerate(operands)]
        results = [read(place, lowering.emit) for place in lowering.run_graph(body, places)]
        inner = lowering.lowered
    finally:
        lowering.lowered, lowering.node = outer, node
    if inner.constants:
        lowering.fail("has a tensor written in a branch of torch.cond; register it as a buffer of the module")
    if any(place.value != f"operand_{index}" for index, place in enumerate(places)):
        lowering.fail("writes into a tensor in a branch of torch.cond; return the new value instead")
    random = next((operator.target for operator in inner.operators if _draws(operator.target)), None)
    if random is not None:
        lowering.fail(f"draws random numbers ({random}) in a branch of torch.cond; draw them before it")
    inputs = tuple(place.value for place in places)
    return Subgraph(inputs, tuple(inner.operators), tuple(results), tuple(inner.values.values()))


def _operand(lowering: Lowering, value: Value, index: int) -> Place:
    """A name of the branch's own for an operand."""
    name = f"operand_{index}"
    fake = lowering.fakes[value.id]
    lowering.fakes[name] = fake
    lowering.lowered.values[name] = Value(name, value.shape, dtype_name(fake.dtype), value.requires_grad, "input", name)
    return Place(name, memory_of(fake))


def _draws(target: str) -> bool:
    if target == COND:
        return False
    return target.split(".")[1] in DROPOUTS or torch.Tag.nondeterministic_seeded in resolve_target(target).tags
