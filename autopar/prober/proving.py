"""Whether a rule is right for an operator, by running every strategy that it allows on two and three shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autopar.errors import RuleError
from autopar.layout import PARTIAL as PARTIAL_STATE
from autopar.layout import SUMMED_GRADIENT, Cut, Shard
from autopar.layout import State as LayoutState
from autopar.prober.example import Example, example_of
from autopar.prober.shards import PARTIAL, SUMMED, WHOLE, State, wrong
from autopar.strategies.choices import AxisChoice, axis_choices
from autopar.strategies.cuts import LetterCuts
from autopar.strategies.registry import check_signature
from autopar.strategies.rule import Signature
from autopar.strategies.signatures import written

PARTS = (2, 3)
DRAWS = (0, 1)  # of the example's numbers: as given, and shuffled


def prove_rule(
    target: str,
    rule: str,
    *arguments: Any,
    linear: Iterable[Iterable[int]] = (),
    additive: Iterable[int] = (),
    whole: Iterable[str] = (),
    **keywords: Any,
) -> int:
    """Run every strategy that a rule allows on two and three shards of an example, and compare outputs and gradients with
    those of one device, in float64 where the operator takes it. Returns how many were right.

    ``rule``, ``linear``, ``additive`` and ``whole`` are as in :func:`autopar.register_rule`; ``arguments`` and
    ``keywords`` are the operator's own. A letter can be proved only where its size is at least three.

    Raises RuleError, naming the split and what it makes wrong.

    >>> prove_rule("mylib::scaled_linear", "b k, n k -> b n", torch.rand(4, 6), torch.rand(5, 6), linear=[(0,), (1,)])
    """
    example = example_of(target, arguments, keywords)
    return proved(example, rule, tuple(map(tuple, linear)), tuple(additive), tuple(whole))


def proved(
    example: Example,
    rule: str,
    linear: Iterable[Iterable[int]] = (),
    additive: Iterable[int] = (),
    whole: Iterable[str] = (),
) -> int:
    """The same for an example that is there already."""
    operator, graph = example.operator()
    signature = written(operator, graph, rule, linear=linear, additive=additive, whole=whole)
    check_signature(signature, operator, graph)
    flows = [t.requires_grad for t in example.tensors], [t.requires_grad for t in example.outputs]
    tried = 0
    for draw in DRAWS:
        here = example.shuffled(draw) if draw else example
        for parts in PARTS:
            for choice in axis_choices(signature, _plain_cuts(signature), flows, parts):
                if choice.cut is not None and choice.cut.num_units < parts:
                    continue  # not every rank would get something
                fault = wrong(here, _states(choice.inputs), _states(choice.outputs), parts)
                if fault is not None:
                    raise RuleError(
                        f"the rule {rule!r} of {example.target} is wrong: {_said(choice)} on {parts} ranks, {fault}"
                    )
                tried += 1
    return tried


def _plain_cuts(signature: Signature) -> LetterCuts:
    """Every letter cut anywhere."""
    cuts = {letter: (Cut.plain(signature.sizes[letter]),) for letter in signature.splittable()}
    return LetterCuts(cuts, frozenset())


def _states(layout: Iterable[LayoutState]) -> list[State]:
    found: list[State] = []
    for state in layout:
        if isinstance(state, Shard):
            found.append(state.dim)
        else:
            found.append(PARTIAL if state == PARTIAL_STATE else SUMMED if state == SUMMED_GRADIENT else WHOLE)
    return found


def _said(choice: AxisChoice) -> str:
    if choice.letter is not None:
        return f"split along {choice.letter!r}"
    return {"P": "given partial values", "G": "with gradients as terms"}.get(choice.label, "replicated")
