"""The traced model as plain values: operators, the tensors between them, parameters, buffers and repeated blocks.

Enters: nothing (``trace.py`` builds it). Leaves: frozen dataclasses without torch, read by strategies, costing, codegen
and report. Operator and value ids survive every later stage, so that a report can lead back to the user's module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip

Fact = TypeVar("Fact")
ValueKind = Literal["input", "received", "parameter", "buffer", "constant", "computed"]


@dataclass(frozen=True)
class Ref:
    """An operator's argument that is a tensor: the id of its value."""

    value: str


@dataclass(frozen=True)
class TorchName:
    """An argument that is one of torch's own constants, such as ``torch.float32`` or ``torch.contiguous_format``."""

    name: str


@dataclass(frozen=True)
class DeviceArgument:
    """A ``device=`` argument: wherever the program runs."""


@dataclass(frozen=True)
class BatchLiteral:
    """An integer argument that follows the batch: ``value`` at the traced batch, in proportion at any other."""

    value: int


@dataclass(frozen=True)
class Slot:
    """A tensor in the body of a macro-operator (``strategies/experts.py``): a ``row`` value by its number, or one of the
    ``parameter`` tensors that the operator reads, by its place among them."""

    kind: Literal["row", "parameter"]
    index: int


@dataclass(frozen=True)
class Value:
    """A tensor of the graph. ``storage`` names the value whose memory this one shares (views), itself otherwise.

    ``batch_dims``: the dims whose sizes are in proportion to the batch; none where only one batch size works.
    """

    id: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    kind: ValueKind = "computed"
    storage: str = ""
    batch_dims: tuple[int, ...] = ()

    @property
    def num_elements(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Operator:
    """One call of an ATen operator.

    ``target`` is the overload's name, such as ``aten.linear.default``. ``args`` and ``kwargs`` hold ints, floats, bools,
    strings, None, tuples (lists become tuples), ``Ref``, ``TorchName``, ``DeviceArgument``, ``BatchLiteral`` and, in a
    macro-operator, ``Slot``.
    ``outputs`` are the ids of the tensors it returns, in order (an output that nobody reads is still named; an output
    that is no tensor is ``""``). ``module`` is the path of the innermost module, ``source`` the user's line.
    """

    id: str
    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[str, ...] = ()
    module: str = ""
    module_class: str = ""
    source: str = field(default="", repr=False)  # no part of the fingerprint: a comment more makes no other model

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Ids of the tensor arguments in order of appearance, positional first; a tensor given twice appears twice."""
        return tuple(ref.value for ref in refs((self.args, tuple(value for _, value in self.kwargs))))

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """The argument at ``position``, or else by ``name``, or else ``default``."""
        if position < len(self.args):
            return self.args[position]
        return dict(self.kwargs).get(name, default)


@dataclass(frozen=True)
class Subgraph:
    """A branch of an operator that chooses between two: an argument of it, and a small graph of its own.

    ``inputs`` are the branch's names for the operator's operands, in their order; ``values`` describes these and what the
    ``operators`` compute; ``outputs`` are the results. No id is one of the graph around it.
    """

    inputs: tuple[str, ...]
    operators: tuple[Operator, ...]
    outputs: tuple[str, ...]
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Input:
    """A tensor that the user gives. ``path`` is its name (``input_ids``) or place (``args[0]``, ``batch["x"][1]``)."""

    value: str
    path: str
    batch_dim: int | None


@dataclass(frozen=True)
class Parameter:
    """A parameter; ``names`` are all of its module paths (more than one when tied), the first is the one shown.

    ``master``: the dtype of the copy that rests and that the optimizer updates, where a precision policy keeps one apart
    from the working copy, whose dtype is the value's.
    """

    value: str
    names: tuple[str, ...]
    trainable: bool = True
    master: str | None = field(default=None, repr=False)  # the fingerprint has it apart

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class Buffer:
    """A buffer; ``updated`` is the id of the value that replaces it after a training step (batch norm's statistics)."""

    value: str
    names: tuple[str, ...]
    persistent: bool = True
    updated: str | None = None

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class Constant:
    """A tensor written in the model's code; small ones hold their numbers, flattened."""

    value: str
    numbers: tuple[Any, ...]


@dataclass(frozen=True)
class Output:
    """One tensor of the model's result; ``path`` as of :class:`Input` (``logits``, ``[0]``)."""

    value: str
    path: str


@dataclass(frozen=True)
class Block:
    """One instance of a repeated block: its module path, and its operators and states aligned with its siblings'."""

    path: str
    operators: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...] = ()


@dataclass(frozen=True)
class BlockGroup:
    """Consecutive blocks of one structure (``transformer.h.0`` ... ``transformer.h.11``): one class in the program."""

    name: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class OpGraph:
    """A traced model, or one stage of it. ``operators`` are in a topological order; ``loss`` is the id of a scalar, or
    None.

    ``received``: what a stage gets from the stage before it (values of kind ``received``), in the order in which it is
    sent; ``sent``: what it hands to the next one. Both are empty in a whole model.
    """

    model: str
    values: dict[str, Value]
    inputs: tuple[Input, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    constants: tuple[Constant, ...]
    operators: tuple[Operator, ...]
    outputs: tuple[Output, ...]
    loss: str | None
    batch_size: int
    block_groups: tuple[BlockGroup, ...] = ()
    warnings: tuple[str, ...] = ()
    training: bool = True
    received: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    _cache: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def of_structure(self, name: str, find: Callable[[OpGraph], Fact]) -> Fact:
        """``find(graph)``, a fact that is the same at every batch size: found once for the graph and its copies at others."""
        known: dict[str, Any] = self._cache.setdefault("structure", {})
        if name not in known:
            known[name] = find(self)
        fact: Fact = known[name]
        return fact

    @cached_property
    def operator_of(self) -> dict[str, Operator]:
        """Operator by its id."""
        return {operator.id: operator for operator in self.operators}

    @cached_property
    def producer_of(self) -> dict[str, Operator]:
        """The operator that computes a value; inputs, parameters, buffers and constants have none."""
        return {value: operator for operator in self.operators for value in operator.outputs if value}

    @cached_property
    def readers_of(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """For each value, the operators that read it with the index among their tensor inputs."""
        return self.of_structure("readers_of", _readers)

    @cached_property
    def parameter_of(self) -> dict[str, Parameter]:
        """Parameter by its value."""
        return {entry.value: entry for entry in self.parameters}

    @cached_property
    def masters(self) -> dict[str, str]:
        """The dtype in which each parameter rests, is updated, and has its gradient summed, by value."""
        return {entry.value: entry.master or self.values[entry.value].dtype for entry in self.parameters}

    @cached_property
    def canonical(self) -> dict[str, str]:
        """Operators, values and parameters of repeated blocks -> those of the first block of their group."""
        return self.of_structure("canonical", _canonical)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the structure: two models with one fingerprint take the same plans."""
        digest = hashlib.sha256()
        for part in (self.model, self.inputs, self.parameters, self.buffers, self.operators, self.outputs, self.loss):
            digest.update(repr(part).encode())
        for value in self.values.values():
            digest.update(repr((value.id, value.shape, value.dtype, value.requires_grad)).encode())
        masters = tuple(entry.master for entry in self.parameters)
        if any(masters):
            digest.update(repr(masters).encode())
        return digest.hexdigest()


def _readers(graph: OpGraph) -> dict[str, tuple[tuple[str, int], ...]]:
    found: dict[str, list[tuple[str, int]]] = {}
    for operator in graph.operators:
        for index, value in enumerate(operator.inputs):
            found.setdefault(value, []).append((operator.id, index))
    return {value: tuple(places) for value, places in found.items()}


def _canonical(graph: OpGraph) -> dict[str, str]:
    names: dict[str, str] = {}
    for group in graph.block_groups:
        first = group.blocks[0]
        for block in group.blocks:
            names.update(zip(block.operators, first.operators, strict=True))
            names.update(zip(block.parameters, first.parameters, strict=True))
            for here, there in zip(block.operators, first.operators, strict=True):
                names.update(zip(graph.operator_of[here].outputs, graph.operator_of[there].outputs, strict=True))
    names.pop("", None)
    return names


def refs(tree: Any) -> Iterator[Ref]:
    """All tensor references in a tree of tuples, in order."""
    if isinstance(tree, Ref):
        yield tree
    elif isinstance(tree, tuple):
        for item in tree:
            yield from refs(item)


def check(graph: OpGraph) -> None:
    """Assert that the graph is well formed: order, references, blocks. Run after tracing in tests and before planning."""
    known = {entry.value for entry in graph.inputs} | {parameter.value for parameter in graph.parameters}
    known |= {buffer.value for buffer in graph.buffers} | {constant.value for constant in graph.constants}
    known |= set(graph.received)
    for operator in graph.operators:
        missing = [value for value in operator.inputs if value not in known]
        assert not missing, f"{operator.id} reads {missing} before they are computed"
        known.update(value for value in operator.outputs if value)
    assert known <= set(graph.values), f"values without a description: {sorted(known - set(graph.values))[:5]}"
    wanted = [output.value for output in graph.outputs] + ([graph.loss] if graph.loss else []) + list(graph.sent)
    assert set(wanted) <= known, f"outputs never computed: {sorted(set(wanted) - known)[:5]}"
    owned: set[str] = set()
    for group in graph.block_groups:
        shapes = {(len(block.operators), len(block.parameters)) for block in group.blocks}
        assert len(shapes) == 1, f"blocks of {group.name} are not aligned: {shapes}"
        for block in group.blocks:
            assert not owned & set(block.operators), f"{block.path} shares operators with another block"
            owned |= set(block.operators)
