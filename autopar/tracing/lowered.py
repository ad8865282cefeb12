"""A traced program while it is being made: values of ``autopar.graph``, not yet frozen into a graph."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from autopar.graph import Buffer, Constant, Operator, Output, Parameter, Value


@dataclass
class Lowered:
    """The traced program as values of ``autopar.graph``, before batch literals and blocks are known.

    ``inputs`` are (value, path); ``nests`` has the numbered module paths around each operator, from the outside in;
    ``tensors`` the data of the constants.
    """

    values: dict[str, Value] = field(default_factory=dict)
    inputs: list[tuple[str, str]] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    loss: str | None = None
    nests: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Unknown:
    """What depends on the values of tensors in its shape or as a number, and all that follows from it. What only assertions
    look at is dropped with them; where a result needs it, it is refused with the fact about the line that made it."""

    fact: str
    line: str


def drop_dead(lowered: Lowered) -> None:
    """Leave out operators whose results nobody reads (assertions and identities leave some behind)."""
    wanted = {output.value for output in lowered.outputs} | {lowered.loss}
    wanted |= {buffer.updated for buffer in lowered.buffers}
    kept = []
    for record in reversed(lowered.operators):
        if wanted.isdisjoint(record.outputs):
            for value in record.outputs:
                lowered.values.pop(value, None)
            del lowered.nests[record.id]
            continue
        kept.append(record)
        wanted.update(record.inputs)
    lowered.operators = kept[::-1]
