"""The body of each function of a program: statements in order, parameters fetched once, runs that are computed again.

Enters: an :class:`~autopar.codegen.arrange.Arrangement` and a place. Leaves: a
:class:`~autopar.codegen.statements.FunctionBody`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autopar.codegen.again import with_runs
from autopar.codegen.arrange import STAGE, Arrangement
from autopar.codegen.conversions import Key
from autopar.codegen.statements import (
    Again,
    Change,
    Compute,
    Fetch,
    FunctionBody,
    Run,
    Statement,
    StatementMaker,
    loss_key,
    sent_key,
)
from autopar.graph import Operator
from autopar.strategies.registry import signature_of


def function_body(arrangement: Arrangement, place: int) -> FunctionBody:
    """The forward of a block, or of the stage."""
    maker = StatementMaker(arrangement, place)
    body = arrangement.bodies[place]
    found = list(maker.stage() if place == STAGE else maker.block())
    if place == STAGE:
        graph = arrangement.graph
        inputs: tuple[Key, ...] = tuple((value, "") for value in (*graph.received, *(e.value for e in graph.inputs)))
        found += list(maker.last_updates())
        returns = _stage_returns(arrangement)
        found += list(maker.handed_on())
    else:
        inputs, returns = tuple(body.inputs), tuple(body.outputs)
    found = list(_with_sources(arrangement, place, _without_unread(found, returns), returns))
    return FunctionBody(tuple(with_runs(arrangement, place, found, returns)), inputs, returns)


def _stage_returns(arrangement: Arrangement) -> tuple[Key, ...]:
    """What the next stage gets, the loss, the outputs."""
    graph = arrangement.graph
    found: list[Key] = [sent_key(arrangement, value) for value in graph.sent]
    if graph.loss is not None:
        found.append(loss_key(arrangement))
    found += [(output.value, "") for output in graph.outputs if output.value != graph.loss]
    return tuple(dict.fromkeys(found))


def _without_unread(found: list[Statement], returns: tuple[Key, ...]) -> list[Statement]:
    """Calls of blocks keep only the results that are read outside the loop."""
    read = set(returns) | {key for statement in found for key in statement.reads}
    kept: list[Statement] = []
    for statement in found:
        if isinstance(statement, Run):
            statement = Run(statement.call, statement.reads, tuple(key for key in statement.writes if key in read))
        kept.append(statement)
    return kept


def _with_sources(
    arrangement: Arrangement, place: int, found: list[Statement], returns: tuple[Key, ...]
) -> Iterator[Statement]:
    """Parameters that several statements read get a name; buffers and constants that are wanted cut are cut once."""
    wiring, graph = arrangement.wiring, arrangement.graph
    own = {value: graph.values[value].kind for value in arrangement.bodies[place].sources}
    times = Counter(key[0] for statement in found for key in statement.reads if not key[1] and key[0] in own)
    times.update(value for value, copy in returns if value in own)
    loops = [statement for statement in found if isinstance(statement, Run) and len(statement.call.blocks) > 1]
    times.update(key[0] for statement in loops for key in statement.reads if key[0] in own)  # not once per round
    named = {value for value, count in times.items() if own[value] == "parameter" and count > 1}
    cut = {value for value in times if own[value] != "parameter" and wiring.layout(value) != wiring.whole}
    for statement in found:
        for key in statement.reads:
            if key[1] or key[0] not in own:
                continue
            if key[0] in named:
                named.remove(key[0])
                yield Fetch((key,))
            elif key[0] in cut:
                cut.remove(key[0])
                yield Change(((key[0], "@rest"),), (key,), wiring.whole, wiring.layout(key[0]), False)
        yield statement
    yield from (Fetch(((value, ""),)) for value in sorted(named))


def computed_again(arrangement: Arrangement) -> tuple[frozenset[int], frozenset[str]]:
    """The blocks of which backward computes all again, by place, and the operators of other blocks that are in runs.

    What is computed again is what backward asks for: a block of which it needs nothing is not.
    """
    whole: set[int] = set()
    single: set[str] = set()
    for places in arrangement.kinds:
        operators = [operator.id for operator in arrangement.bodies[places[0]].operators]
        if not any(_keeps_something(arrangement, operator) for operator in arrangement.bodies[places[0]].operators):
            continue
        whole.update(place for place in places if arrangement.modes[place] == "full")
        statements = function_body(arrangement, places[0]).statements
        runs = [statement for statement in statements if isinstance(statement, Again)]
        inside = {inner.operator.id for run in runs for inner in run.body.statements if isinstance(inner, Compute)}
        at = [index for index, name in enumerate(operators) if name in inside]
        single.update(arrangement.bodies[place].operators[index].id for place in places for index in at)
    return frozenset(whole), frozenset(single)


def _keeps_something(arrangement: Arrangement, operator: Operator) -> bool:
    """Whether autograd keeps a tensor of an operator's call for backward."""
    if not any(value in arrangement.wiring.gradient for value in operator.outputs):
        return False
    rule = signature_of(operator, arrangement.graph)
    return rule is None or bool(rule.saved_inputs or rule.saved_outputs or rule.saved_extra_bytes)
