"""What costing needs to know of a model whatever the mesh: rules, cuts, gradients, saved tensors, likeness of blocks.

Enters: an OpGraph. Leaves: :class:`Prepared`. Blocks of one group are alike, so each fact is found once, for the block's
representative (its first or, where the first differs, its second occurrence), and holds for all: preparing, like all
that follows, does not grow with the depth of the model beyond light bookkeeping.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.gradients import has_gradient
from autopar.graph import BatchLiteral, Block, Operator, OpGraph
from autopar.sharing import Reader, sharing_groups
from autopar.staging import derived_operators
from autopar.strategies.choices import AxisChoice
from autopar.strategies.cuts import LetterCuts, letter_cuts
from autopar.strategies.registry import signature_of
from autopar.strategies.rule import Signature
from autopar.strategies.spatial import letters_of_space


@dataclass(frozen=True)
class Between:
    """A block with its neighbours, all of one group: it reads the one before as that reads its own, and is read by the one
    behind alone. ``flows``: through which of what each of the three makes a gradient flows."""

    group: str
    before: Block
    block: Block
    behind: Block
    flows: tuple[tuple[bool, ...], ...]


@dataclass(frozen=True)
class Prepared:
    """Facts of a graph. Ids are canonical where noted: of the representative of a repeated block.

    ``signatures`` and ``cuts`` are by canonical operator (an operator without a rule has no entry); ``gradient`` are the
    values through which a gradient flows; ``saved`` the canonical storages that autograd keeps for backward; ``derived`` the
    canonical operators that depend on no parameter (masks, positions, rotary tables); ``of_parameters`` those whose gradient
    flows to parameters only (an embedding of positions, a cast of a weight). ``space`` are letters of space by canonical
    operator, longest first. ``between`` has the blocks, by path, that differ from others of their group in names alone.
    """

    graph: OpGraph
    signatures: Mapping[str, Signature]
    cuts: Mapping[str, LetterCuts]
    gradient: frozenset[str]
    groups: Mapping[Reader, str]
    saved: frozenset[str]
    derived: frozenset[str]
    of_parameters: frozenset[str]
    space: Mapping[str, tuple[str, ...]]
    between: Mapping[str, Between]

    def name(self, item: str) -> str:
        """The canonical id of an operator or value."""
        return self.graph.canonical.get(item, item)

    def flows(self, operator: Operator, index: int) -> bool:
        """Whether a gradient flows back through an operator's tensor input."""
        value = operator.inputs[index]
        return value in self.gradient and any(output in self.gradient for output in operator.outputs)

    def num_conversions(self, value: str) -> int:
        """How many conversions of a value may be needed: one per reader, one for all readers of a sharing group."""
        return len({self.groups.get(reader, reader) for reader in self.graph.readers_of.get(value, ())})

    @cached_property
    def offered(self) -> dict[tuple[str, int], tuple[AxisChoice, ...]]:
        """Choices on one axis by canonical operator and size of the axis: filled while meshes are priced."""
        return {}

    @cached_property
    def fallbacks(self) -> tuple[str, ...]:
        """Operators without a rule, which are computed replicated."""
        return tuple(op.id for op in self.graph.operators if self.name(op.id) not in self.signatures)

    def group_key(self, reader: Reader) -> str | None:
        """The sharing group of a reader, with its value's id in front."""
        group = self.groups.get(reader)
        if group is None:
            return None
        return f"{self.graph.operator_of[reader[0]].inputs[reader[1]]}{group}"


def prepare(graph: OpGraph, like: Prepared | None = None) -> Prepared:
    """Gather the facts of a graph. ``like``: the same with fewer blocks in its groups, the first two among them."""
    canonical = graph.canonical
    representatives = [op for op in graph.operators if canonical.get(op.id, op.id) == op.id]
    gradient = has_gradient(graph)
    signatures, cuts, space = (
        (like.signatures, like.cuts, like.space) if like is not None else _of_rules(graph, canonical, representatives)
    )
    return Prepared(
        graph=graph,
        signatures=signatures,
        cuts=cuts,
        gradient=gradient,
        groups=sharing_groups(graph),
        saved=_saved(graph, representatives, signatures, gradient, canonical),
        derived=derived_operators(graph),
        of_parameters=graph.of_structure("of_parameters", _of_parameters),
        space=space,
        between=graph.of_structure("between", _between),
    )


def _of_rules(
    graph: OpGraph, canonical: Mapping[str, str], representatives: Sequence[Operator]
) -> tuple[Mapping[str, Signature], Mapping[str, LetterCuts], Mapping[str, tuple[str, ...]]]:
    """Signatures, cuts and letters of space."""
    found = ((operator.id, signature_of(operator, graph)) for operator in representatives)
    signatures = {name: signature for name, signature in found if signature is not None}
    space = letters_of_space([_renamed(operator, canonical) for operator in representatives], signatures)
    return signatures, _cuts(graph, canonical, signatures), space


def _read_within(graph: OpGraph, values: Iterable[str], operators: Set[str]) -> bool:
    """Whether nothing but some operators reads some values."""
    return all(name in operators for value in values for name, _ in graph.readers_of.get(value, ()))


def _between(graph: OpGraph) -> dict[str, Between]:
    """The first two blocks of a group may be given other things than those behind them, the last is followed by others."""
    found = {}
    leaving = {*graph.sent, *(output.value for output in graph.outputs), graph.loss}
    leaving.update(buffer.updated for buffer in graph.buffers)
    gradient = has_gradient(graph)
    for group in graph.block_groups:
        made = [
            [value for name in block.operators for value in graph.operator_of[name].outputs if value] for block in group.blocks
        ]
        flows = [tuple(value in gradient for value in values) for values in made]
        for at in range(2, len(group.blocks) - 1):
            block, behind = group.blocks[at], group.blocks[at + 1]
            own, near = set(block.operators), {*block.operators, *behind.operators}
            read = _read_within(graph, made[at], near) and _read_within(graph, block.parameters, own)
            if read and leaving.isdisjoint(made[at]):
                around = group.blocks[at - 1], block, behind
                found[block.path] = Between(group.name, *around, tuple(flows[at - 1 : at + 2]))
    return found


def _cuts(
    graph: OpGraph, canonical: Mapping[str, str], signatures: Mapping[str, Signature]
) -> dict[str, LetterCuts]:
    """Cuts by canonical operator. The second block of a group shows how a block follows another."""
    shown = set(signatures)
    for group in graph.block_groups:
        shown.update(group.blocks[min(1, len(group.blocks) - 1)].operators)
    operators = [_renamed(op, canonical) for op in graph.operators if op.id in shown]
    renamed = {op.id: signatures[canonical.get(op.id, op.id)] for op in operators if canonical.get(op.id, op.id) in signatures}
    found = letter_cuts(
        operators,
        renamed,
        _batch_dims(graph, operators),
        {canonical.get(parameter.value, parameter.value) for parameter in graph.parameters},
    )
    return {name: cuts for name, cuts in found.items() if name in signatures}


def _batch_dims(graph: OpGraph, operators: Sequence[Operator]) -> list[tuple[str, int, int]]:
    """Where the batch comes from: the model's inputs, and what is made in the batch's size (masks, positions)."""
    found = [
        (entry.value, entry.batch_dim, graph.values[entry.value].shape[entry.batch_dim])
        for entry in graph.inputs
        if entry.batch_dim is not None
    ]
    for operator in operators:
        sizes = {literal.value for literal in _literals(operator.args)}
        for value in operator.outputs if sizes else ():
            shape = graph.values[value].shape
            place = next((dim for dim, size in enumerate(shape) if size == graph.batch_size and size in sizes), None)
            if place is not None:
                found.append((value, place, shape[place]))
    return found


def _literals(tree: object) -> Iterator[BatchLiteral]:
    if isinstance(tree, BatchLiteral):
        yield tree
    elif isinstance(tree, tuple):
        for item in tree:
            yield from _literals(item)


def _renamed(operator: Operator, canonical: Mapping[str, str]) -> Operator:
    """The operator with canonical values."""
    outputs = tuple(canonical.get(value, value) for value in operator.outputs)
    copy = replace(operator, outputs=outputs)
    object.__setattr__(copy, "inputs", tuple(canonical.get(value, value) for value in operator.inputs))
    return copy


def _saved(
    graph: OpGraph,
    representatives: list[Operator],
    signatures: Mapping[str, Signature],
    gradient: frozenset[str],
    canonical: Mapping[str, str],
) -> frozenset[str]:
    """Canonical storages that some operator keeps for its backward pass."""
    kept: set[str] = set()
    for operator in representatives:
        outputs = [value for value in operator.outputs if value]
        if not any(value in gradient for value in outputs):
            continue
        signature = signatures.get(operator.id)
        inputs = range(len(operator.inputs)) if signature is None else signature.saved_inputs
        results = range(len(outputs)) if signature is None else signature.saved_outputs
        values = [operator.inputs[index] for index in inputs] + [outputs[index] for index in results]
        for value in values:
            storage = graph.values[value].storage or value
            kept.add(canonical.get(storage, storage))
    return frozenset(kept)


def _of_parameters(graph: OpGraph) -> frozenset[str]:
    """Operators whose inputs with a gradient are parameters, or come from such operators."""
    gradient = has_gradient(graph)
    values = {parameter.value for parameter in graph.parameters}
    found = set()
    for operator in graph.operators:
        flowing = [value for value in operator.inputs if value in gradient]
        if flowing and all(value in values for value in flowing):
            values.update(operator.outputs)
            found.add(operator.id)
    return frozenset(found)
