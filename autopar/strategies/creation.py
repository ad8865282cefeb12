"""Tensors made from nothing, or from another's shape. Constant ones may be split; counted and random ones are whole."""

from __future__ import annotations

from autopar.graph import Operator, OpGraph
from autopar.strategies.rule import RuleFunction, Signature, Term
from autopar.strategies.signatures import names, only_shape, shape, signature

CONSTANT = "zeros ones full".split()
LIKE = "zeros_like ones_like full_like empty_like".split()
NEW = "new_zeros new_ones new_full new_empty".split()
COUNTING = (
    "arange.default arange.start arange.start_step eye.default eye.m linspace.default scalar_tensor.default".split()
)
RANDOM = "rand.default randn.default randint.default randint.low randperm.default normal_functional.default".split()


def _made(zero: bool = False, random: bool = False, whole: bool = False) -> RuleFunction:
    """A rule for results whose inputs, if any, only lend shape and dtype. A zero may stand for a partial zero."""

    def rule(operator: Operator, graph: OpGraph) -> Signature:
        sizes: dict[str, int] = {}
        output = operator.outputs[0]
        term = tuple(names("d", shape(graph, output), sizes))
        inputs: list[Term] = []
        unread: set[str] = set()
        for value in operator.inputs:
            own, more = only_shape(graph, value, output, term, sizes)
            inputs.append(own)
            unread |= more
        return signature(
            operator, graph, inputs, [term], sizes, replicated_after=unread, random=random,
            whole=set(sizes) if whole else (), linear=((0,),) if zero and len(inputs) == 1 else (),
        )  # fmt: skip

    return rule


RULES: dict[str, RuleFunction] = {
    **{f"aten.{name}.default": _made() for name in CONSTANT},
    "aten.empty.memory_format": _made(),
    **{f"aten.{name}.default": _made(zero="zeros" in name) for name in (*LIKE, *NEW)},
    **{f"aten.{name}": _made(whole=True) for name in COUNTING},
    **{f"aten.{name}": _made(random=True) for name in RANDOM},
}
