"""All rules: one table of the families' own, and what users register for operators of theirs."""

from __future__ import annotations

import re
from collections.abc import Iterable

from autopar.errors import RuleError
from autopar.graph import Operator, OpGraph
from autopar.strategies import (
    attention,
    contraction,
    creation,
    elementwise,
    experts,
    indexing,
    logits,
    loss,
    normalization,
    pieces,
    pooling,
    reduction,
    spectral,
    views,
)
from autopar.strategies.rule import CostKind, RuleFunction, Signature, shapes_of
from autopar.strategies.signatures import written

FAMILIES = (
    elementwise, views, contraction, normalization, attention, loss, indexing, pieces, reduction, creation, pooling, spectral,
    experts, logits,
)  # fmt: skip
RULES: dict[str, RuleFunction] = {target: rule for family in FAMILIES for target, rule in family.RULES.items()}
_registered: dict[str, RuleFunction] = {}  # by register_rule; read before the families' own


def full_target(target: str) -> str:
    """``lib::op``, ``lib::op.overload`` and ``lib.op`` as ``lib.op.default`` or with their overload."""
    match = re.fullmatch(r"(\w+)(?:::|\.)(\w+)(?:\.(\w+))?", target.removeprefix("torch.ops."))
    if not match:
        raise RuleError(f"not an operator: {target!r}; write it as 'library::name' or 'library.name.overload'")
    return f"{match[1]}.{match[2]}.{match[3] or 'default'}"


def registered_targets() -> tuple[str, ...]:
    """Every operator that has a rule, sorted."""
    return tuple(sorted({*RULES, *_registered}))


def signature_of(operator: Operator, graph: OpGraph) -> Signature | None:
    """The operator's rule filled in with its sizes; None where it has none (it is computed replicated)."""
    rule = _registered.get(operator.target) or RULES.get(operator.target)
    if rule is None:
        return None
    found = rule(operator, graph)
    if found is not None:
        check_signature(found, operator, graph)
    return found


def signatures_of(graph: OpGraph) -> dict[str, Signature | None]:
    """The rule of each operator by its id; those of repeated blocks are looked at once."""
    found: dict[str, Signature | None] = {}
    for operator in graph.operators:
        like = graph.canonical.get(operator.id)
        found[operator.id] = found[like] if like in found else signature_of(operator, graph)
    return found


def check_signature(found: Signature, operator: Operator, graph: OpGraph) -> None:
    """Raise RuleError where the terms do not fit the operator's tensors."""
    terms, shapes = (*found.inputs, *found.outputs), shapes_of(operator, graph)
    if [len(term) for term in terms] != [len(shape) for shape in shapes]:
        raise RuleError(
            f"the rule of {operator.target} gives {len(found.inputs)} inputs and {len(found.outputs)} outputs with "
            f"{[len(term) for term in terms]} dims; {operator.id or 'the operator'} has tensors of {shapes}"
        )


def register_rule(
    target: str,
    rule: str | RuleFunction,
    *,
    linear: Iterable[Iterable[int]] = (),
    additive: Iterable[int] = (),
    whole: Iterable[str] = (),
    saves: Iterable[int] | None = None,
    kind: CostKind = "elementwise",
    random: bool = False,
) -> None:
    """Say how an operator of yours may be split, as a rule's text or as a function that returns a signature.

    ``linear`` are groups of input positions in which the operator is linear together, ``additive`` inputs that are
    added beside a sum, ``whole`` letters that must not be split, ``saves`` the inputs that its backward needs (default: all).
    Raises RuleError for a text that is no rule; sizes that do not fit are reported when the operator is met.

    >>> register_rule("mylib::scaled_linear", "b.. k, n k -> b.. n", linear=[(0,), (1,)], kind="matmul")
    """
    name = full_target(target)
    if not isinstance(rule, str):
        _registered[name] = rule
        return
    text = rule
    if text.count("->") != 1:
        raise RuleError(f"the rule of {target} reads 'inputs -> outputs' with one arrow, got {text!r}")
    if text.count("(") != text.count(")") or re.search(r"[^\w\s().,>-]", text):
        raise RuleError(f"the rule of {target} is made of letters, numbers and (a b), got {text!r}")
    groups, added, kept = [tuple(group) for group in linear], tuple(additive), tuple(whole)
    saved = None if saves is None else tuple(saves)

    def from_text(operator: Operator, graph: OpGraph) -> Signature:
        try:
            return written(
                operator, graph, text, linear=groups, additive=added, whole=kept, kind=kind, random=random,
                saves=range(len(operator.inputs)) if saved is None else saved,
            )  # fmt: skip
        except RuleError as error:
            raise RuleError(f"the rule registered for {target} does not fit {operator.id}: {error}") from None

    _registered[name] = from_text
