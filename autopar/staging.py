"""Where a graph can be cut into pipeline stages, and the graph of each stage.

Enters: a traced graph. Leaves: cut points, and for a choice of them one graph per stage. Operators that no parameter leads
to (masks, positions, rotary tables) belong to no stage: each stage that reads them computes them from the model's inputs
itself. Everything else lies in the order of the trace, and a stage is a run of it. A value that several later stages read
is relayed through the stages between.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autopar.errors import InputError
from autopar.graph import Block, BlockGroup, Operator, OpGraph

MAX_RELAYED = 8  # values sent together; where more are alive, a cut is not offered
NEIGHBOURS = 14  # operators on either side; where fewer values are alive at one of these places, a cut is not offered


@dataclass(frozen=True)
class CutPoint:
    """A place between two operators: ``operator`` is the first of the later stage, ``values`` are alive across it."""

    operator: str
    values: tuple[str, ...]


def derived_operators(graph: OpGraph) -> frozenset[str]:
    """Operators that no parameter leads to."""
    return graph.of_structure("derived_operators", _derived_operators)


def _derived_operators(graph: OpGraph) -> frozenset[str]:
    led_to = {parameter.value for parameter in graph.parameters} | set(graph.received)
    found = set()
    for operator in graph.operators:
        if any(value in led_to for value in operator.inputs):
            led_to.update(operator.outputs)
        else:
            found.add(operator.id)
    return frozenset(found)


def cut_points(graph: OpGraph) -> tuple[CutPoint, ...]:
    """The places where few values are alive, and more after the next operator, or where that one reads a parameter.

    Between two blocks of a transformer, and between its attention and its MLP, one value is alive.
    """
    derived = derived_operators(graph)
    parameters = {parameter.value for parameter in graph.parameters}
    line = [operator for operator in graph.operators if operator.id not in derived]
    places = _alive(graph, line)
    counts = [len(alive) for alive in places]
    found = []
    for at in range(1, len(line)):
        least = min(counts[max(1, at - NEIGHBOURS) : at + 1 + NEIGHBOURS])
        opens = at + 1 == len(line) or counts[at] < counts[at + 1] or not parameters.isdisjoint(line[at].inputs)
        if 0 < counts[at] == least <= MAX_RELAYED and opens:
            found.append(CutPoint(line[at].id, places[at]))
    return tuple(found)


def _alive(graph: OpGraph, line: Sequence[Operator]) -> list[tuple[str, ...]]:
    """For each place in the line, the values made before it that are read at or after it."""
    last: dict[str, int] = {}
    for at, operator in enumerate(line):
        last.update((value, at) for value in operator.inputs)
    if graph.loss is not None:
        last[graph.loss] = len(line)
    made: dict[str, None] = {}
    found: list[tuple[str, ...]] = []
    for at, operator in enumerate(line):
        for value in [value for value in made if last.get(value, -1) < at]:
            del made[value]
        found.append(tuple(made))
        made.update((value, None) for value in operator.outputs if value)
    return found


def stage_graphs(graph: OpGraph, cuts: Sequence[str]) -> tuple[OpGraph, ...]:
    """The graph of each stage; ``cuts`` are the first operators of all stages but the first, in order.

    Ids of operators and values stay. A received value has kind ``received``. A block that is cut is no block any more.
    Outputs of the model are those of the stage that computes them; the loss is the last stage's, to which it is relayed if
    need be. Without cuts the one stage is the graph itself.

    Raises InputError for cuts that are no operators of the line, or out of order.
    """
    if not cuts:
        return (graph,)
    derived = derived_operators(graph)
    line = [operator for operator in graph.operators if operator.id not in derived]
    place = {operator.id: at for at, operator in enumerate(line)}
    starts = [0, *(place.get(cut, -1) for cut in cuts)]
    if any(later <= earlier for earlier, later in itertools.pairwise(starts)):
        raise InputError(f"the cuts {list(cuts)} are no operators of the graph that depend on parameters, in its order")
    alive = _alive(graph, line)
    ends = [*starts[1:], len(line)]
    runs = [line[start:end] for start, end in zip(starts, ends, strict=True)]
    crossing = [(), *(alive[start] for start in starts[1:]), ()]
    extra = _homes(graph, runs, derived)
    return tuple(
        _stage(graph, run, derived, extra[index], crossing[index], crossing[index + 1]) for index, run in enumerate(runs)
    )


def _homes(graph: OpGraph, runs: Sequence[Sequence[Operator]], derived: frozenset[str]) -> list[set[str]]:
    """For each stage the values that it has though its own operators do not ask for them.

    The last stage returns the loss and outputs that no stage computes. A buffer that a derived operator updates is where
    its module is; what nobody reads is in the first stage.
    """
    found: list[set[str]] = [set() for _ in runs]
    own = {value for run in runs for operator in run for value in operator.outputs}
    found[-1].update(output.value for output in graph.outputs if output.value not in own)
    found[-1].update([graph.loss] if graph.loss else [])
    for buffer in graph.buffers:
        producer = graph.producer_of.get(buffer.updated or "")
        if buffer.updated and (producer is None or producer.id in derived):
            module = producer.module if producer else ""
            inside = [at for at, run in enumerate(runs) if any(operator.module == module for operator in run)]
            found[inside[0] if inside else -1].update((buffer.updated, buffer.value))
    known = set(graph.readers_of).union(*found)
    sources = [entry.value for entry in graph.inputs]
    sources += [*(entry.value for entry in graph.parameters), *(entry.value for entry in graph.buffers)]
    found[0].update(value for value in sources if value not in known)
    return found


def _stage(
    graph: OpGraph,
    line: Sequence[Operator],
    derived: frozenset[str],
    extra: set[str],
    received: tuple[str, ...],
    sent: tuple[str, ...],
) -> OpGraph:
    own = {operator.id for operator in line}
    needed = _ancestors(graph, [*(value for operator in line for value in operator.inputs), *extra], derived)
    operators = tuple(operator for operator in graph.operators if operator.id in own or operator.id in needed)
    made = {value for operator in operators for value in operator.outputs if value} | set(received)
    read = {value for operator in operators for value in operator.inputs} | extra
    computed = {value for operator in line for value in operator.outputs}
    outputs = [o for o in graph.outputs if o.value in extra or (o.value in computed and o.value != graph.loss)]
    values = {name: value for name, value in graph.values.items() if name in made or name in read}
    values.update((name, replace(values[name], kind="received", storage=name)) for name in received)
    return replace(
        graph,
        values=values,
        inputs=tuple(entry for entry in graph.inputs if entry.value in read),
        parameters=tuple(parameter for parameter in graph.parameters if parameter.value in read),
        buffers=tuple(buffer for buffer in graph.buffers if buffer.value in read),
        constants=tuple(constant for constant in graph.constants if constant.value in read),
        operators=operators,
        outputs=tuple(outputs),
        loss=None if sent else graph.loss,
        block_groups=_groups(graph.block_groups, {operator.id for operator in operators}, own),
        received=received,
        sent=sent,
        _cache={},
    )


def _ancestors(graph: OpGraph, wanted: Iterable[str], derived: frozenset[str]) -> set[str]:
    """The derived operators that lead to some values."""
    found: set[str] = set()
    waiting = list(wanted)
    while waiting:
        producer = graph.producer_of.get(waiting.pop())
        if producer is not None and producer.id in derived and producer.id not in found:
            found.add(producer.id)
            waiting.extend(producer.inputs)
    return found


def _groups(groups: Iterable[BlockGroup], present: set[str], own: set[str]) -> tuple[BlockGroup, ...]:
    """The groups with the blocks of which this stage has all operators."""
    found = []
    for group in groups:
        blocks: list[Block] = [
            block for block in group.blocks if present.issuperset(block.operators) and not own.isdisjoint(block.operators)
        ]
        if blocks:
            found.append(replace(group, blocks=tuple(blocks)))
    return tuple(found)
