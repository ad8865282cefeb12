"""Repeated blocks: consecutive modules ``path.0``, ``path.1``, ... that compute the same with parameters of their own.

Enters: the operators in order, with the numbered module paths around each. Leaves: the operators, reordered where that
makes each block one contiguous run, and the groups of blocks.

Two neighbours a, b are alike when their operators agree one by one in target, literals, shapes and dtypes, and in what
they read: the same place inside the block, the parameter in the same position, the same place in the block before (the
chain), or the very same value outside (masks, rotary tables, an encoder's output). The first block of a group may read
anything of the right kind where the others read the block before. Where the outermost numbered level does not repeat
(stages of a ResNet), the next one is tried inside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.graph import Block, BlockGroup, Operator, Ref, Value
from autopar.tracing.lowered import Lowered


@dataclass(frozen=True)
class _Model:
    """What is known of the traced model: the names of each state, which values replace a buffer, which are results."""

    values: Mapping[str, Value]
    names: Mapping[str, tuple[str, ...]]
    updates: frozenset[str]
    results: frozenset[str]
    nests: Mapping[str, tuple[str, ...]]
    masters: Mapping[str, str | None]


@dataclass(frozen=True)
class _Candidate:
    """One numbered module: its operators, where each value is made inside, and its own states in order of first use."""

    path: str
    operators: tuple[Operator, ...]
    places: dict[str, tuple[int, int]]
    states: dict[str, int]


def find_blocks(lowered: Lowered) -> tuple[tuple[str, ...], tuple[BlockGroup, ...]]:
    """Ids of the operators with each block in one run; the groups of at least two blocks, in order of appearance."""
    names = {parameter.value: parameter.names for parameter in lowered.parameters}
    model = _Model(
        values=lowered.values,
        names=names | {buffer.value: buffer.names for buffer in lowered.buffers},
        updates=frozenset(buffer.updated for buffer in lowered.buffers if buffer.updated),
        results=frozenset(output.value for output in lowered.outputs) | frozenset([lowered.loss or ""]),
        nests=lowered.nests,
        masters={parameter.value: parameter.master for parameter in lowered.parameters},
    )
    order, groups = _search(model, list(lowered.operators), lowered.operators, 0)
    position = {operator.id: index for index, operator in enumerate(order)}
    groups.sort(key=lambda group: position[group.blocks[0].operators[0]])
    return tuple(position), tuple(groups)


def _search(
    model: _Model, order: list[Operator], scope: Sequence[Operator], level: int
) -> tuple[list[Operator], list[BlockGroup]]:
    """Groups among the modules at one level of numbering within ``scope``, and inside those that have no like."""
    members: dict[str, list[Operator]] = {}
    for operator in scope:
        nest = model.nests[operator.id]
        if len(nest) > level:
            members.setdefault(nest[level], []).append(operator)
    containers: dict[str, list[int]] = {}
    for path in members:
        container, _, number = path.rpartition(".")
        containers.setdefault(container, []).append(int(number))
    groups: list[BlockGroup] = []
    for container, indices in containers.items():
        candidates: dict[int, _Candidate] = {}
        for index in sorted(indices):
            path = f"{container}.{index}" if container else str(index)
            gathered = _gather(model, order, members[path], level)
            if gathered is not None:
                order, block = gathered
                candidates[index] = _candidate(model, path, block)
        runs = _runs(model, candidates)
        if not runs:
            candidates = _with_what_follows(model, order, candidates)
            runs = _runs(model, candidates)
        for run in runs:
            name = container or "layers"
            if len(runs) > 1:
                name += f"[{run[0]}:{run[-1] + 1}]"
            groups.append(BlockGroup(name, tuple(_block(model, candidates[index]) for index in run)))
        grouped = {index for run in runs for index in run}
        for index in sorted(set(indices) - grouped):
            path = f"{container}.{index}" if container else str(index)
            order, inner = _search(model, order, members[path], level + 1)
            groups.extend(inner)
    return order, groups


def _gather(
    model: _Model, order: list[Operator], block: Sequence[Operator], level: int
) -> tuple[list[Operator], list[Operator]] | None:
    """The order with the block in one run, and the block with what belongs inside it.

    An operator between those of the block goes into it where only the block reads it, or where it reads the block's
    results and the block its (what the caller does in between); otherwise before or behind it. None where that would
    take in a part of another block.
    """
    inside = {operator.id for operator in block}
    positions = [index for index, operator in enumerate(order) if operator.id in inside]
    first, last = positions[0], positions[-1]
    if last - first + 1 == len(positions):
        return order, list(block)
    segment = order[first : last + 1]
    elsewhere = {value for operator in (*order[:first], *order[last + 1 :]) for value in operator.inputs}
    elsewhere |= model.results
    needed = {value for operator in block for value in operator.inputs}
    feeding: set[str] = set()
    private: set[str] = set()
    for operator in reversed(segment):
        if operator.id in inside:
            continue
        if needed.isdisjoint(operator.outputs):
            elsewhere.update(operator.inputs)
            continue
        feeding.add(operator.id)
        needed.update(operator.inputs)
        if elsewhere.isdisjoint(operator.outputs) and len(model.nests[operator.id]) <= level:
            private.add(operator.id)
        else:
            elsewhere.update(operator.inputs)
    before: list[Operator] = []
    run: list[Operator] = []
    after: list[Operator] = []
    made: set[str] = set()
    for operator in segment:
        reads_block = not made.isdisjoint(operator.inputs)
        if operator.id in inside or operator.id in private or (reads_block and operator.id in feeding):
            if operator.id not in inside and len(model.nests[operator.id]) > level:
                return None
            run.append(operator)
        elif reads_block:
            after.append(operator)
        else:
            before.append(operator)
            continue
        made.update(operator.outputs)
    return [*order[:first], *before, *run, *after, *order[last + 1 :]], run


def _with_what_follows(
    model: _Model, order: Sequence[Operator], candidates: Mapping[int, _Candidate]
) -> dict[int, _Candidate]:
    """The candidates with the operators up to the next one added (a residual sum in the caller); the last has as many."""
    position = {operator.id: index for index, operator in enumerate(order)}
    spans = {
        index: (position[candidate.operators[0].id], position[candidate.operators[-1].id] + 1)
        for index, candidate in candidates.items()
    }
    found: dict[int, _Candidate] = {}
    length = 0
    for index, candidate in candidates.items():
        end = spans[index][1]
        if index + 1 in spans:
            length = spans[index + 1][0] - end
        if length <= 0 or any(end < start < end + length for start, _ in spans.values()):
            return {}
        found[index] = _candidate(model, candidate.path, [*candidate.operators, *order[end : end + length]])
    return found


def _candidate(model: _Model, path: str, operators: Sequence[Operator]) -> _Candidate:
    places = {
        value: (index, output)
        for index, operator in enumerate(operators)
        for output, value in enumerate(operator.outputs)
        if value
    }
    states: dict[str, int] = {}
    for operator in operators:
        for value in operator.inputs:
            names = model.names.get(value)
            if names and all(name.startswith(f"{path}.") for name in names):
                states.setdefault(value, len(states))
    return _Candidate(path, tuple(operators), places, states)


def _runs(model: _Model, candidates: Mapping[int, _Candidate]) -> list[list[int]]:
    """Longest runs, greedily from the front, of consecutive numbers whose blocks are alike."""
    runs: list[list[int]] = []
    current: list[int] = []
    for index in sorted(candidates):
        if current and index == current[-1] + 1:
            before = candidates[current[-2]] if len(current) > 1 else None
            if _alike(model, before, candidates[current[-1]], candidates[index]):
                current.append(index)
                continue
        runs.append(current)
        current = [index]
    return [run for run in (*runs, current) if len(run) > 1]


def _alike(model: _Model, before: _Candidate | None, a: _Candidate, b: _Candidate) -> bool:
    """Whether ``b`` does to ``a``'s results what ``a`` did to those of ``before`` (None: to whatever it was given)."""
    if len(a.operators) != len(b.operators) or len(a.states) != len(b.states):
        return False
    values = model.values
    entering: dict[str, str] = {}

    def same_kind(x: str, y: str) -> bool:
        p, q = values[x], values[y]
        masters = model.masters.get(x), model.masters.get(y)
        return (p.shape, p.dtype, p.requires_grad, masters[0]) == (q.shape, q.dtype, q.requires_grad, masters[1])

    def same_source(x: str, y: str) -> bool:
        if y in b.places:
            return a.places.get(x) == b.places[y]
        if y in b.states:
            return a.states.get(x) == b.states[y] and values[x].kind == values[y].kind and same_kind(x, y)
        if y not in a.places:
            return x == y
        if before is not None:
            return before.places.get(x) == a.places[y]
        return x not in a.places and x not in a.states and same_kind(x, y) and entering.setdefault(y, x) == x

    for one, other in zip(a.operators, b.operators, strict=True):
        if one.target != other.target or one.module_class != other.module_class:
            return False
        if _shape_of_call(one) != _shape_of_call(other):
            return False
        if not all(same_source(x, y) for x, y in zip(one.inputs, other.inputs, strict=True)):
            return False
        for x, y in zip(one.outputs, other.outputs, strict=True):
            if bool(x) != bool(y) or (x in model.updates) != (y in model.updates) or (x and not same_kind(x, y)):
                return False
    return True


def _shape_of_call(operator: Operator) -> Any:
    """The arguments with every tensor left blank, and the number of outputs."""

    def blank(tree: Any) -> Any:
        if isinstance(tree, Ref):
            return Ref
        return tuple(blank(item) for item in tree) if isinstance(tree, tuple) else (type(tree), tree)

    return blank((operator.args, operator.kwargs, len(operator.outputs)))


def _block(model: _Model, candidate: _Candidate) -> Block:
    parameters = tuple(state for state in candidate.states if model.values[state].kind == "parameter")
    buffers = tuple(state for state in candidate.states if model.values[state].kind == "buffer")
    return Block(candidate.path, tuple(operator.id for operator in candidate.operators), parameters, buffers)
