"""Reductions and what works along a dim: split sums leave a partial result, the others keep their dim whole."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.graph import Operator, OpGraph
from autopar.strategies.pieces import along
from autopar.strategies.rule import Dim, RuleFunction, Signature
from autopar.strategies.signatures import dims_argument, first_shape, names, positive, shape, signature


def reduced(operator: Operator, graph: OpGraph, dims: Sequence[int], sums: bool, **saved: Sequence[int]) -> Signature:
    """A reduction over ``dims``, which the result keeps with size 1 where it has as many dims as the input."""
    given = first_shape(operator, graph)
    sizes: dict[str, int] = {}
    source = names("d", given, sizes)
    if not sums:
        source = [(given[index],) if index in dims else dim for index, dim in enumerate(source)]
    outputs = []
    for value in operator.outputs:
        if value:
            kept = len(shape(graph, value)) == len(given)
            term: list[Dim] = [() if i in dims else dim for i, dim in enumerate(source) if kept or i not in dims]
            outputs.append(tuple(term))
    return signature(
        operator, graph, [tuple(source)], outputs, sizes, linear=((0,),) if sums else (),
        saves=saved.get("saves", ()), saves_outputs=saved.get("saves_outputs", ()),
        flops=float(graph.values[operator.inputs[0]].num_elements),
    )  # fmt: skip


def _over(
    position: int | None, sums: bool = False, saves: Sequence[int] = (), saves_outputs: Sequence[int] = ()
) -> RuleFunction:
    """A reduction whose dims are argument ``position`` (None: all dims)."""

    def rule(operator: Operator, graph: OpGraph) -> Signature:
        argument = None if position is None else operator.argument(position, "dim")
        dims = dims_argument(argument, len(first_shape(operator, graph)))
        return reduced(operator, graph, dims, sums, saves=saves, saves_outputs=saves_outputs)

    return rule


def _alongside(
    position: int, default: int, linear: bool = False, saves: Sequence[int] = (), saves_outputs: Sequence[int] = ()
) -> RuleFunction:
    """An operator along the dim that is argument ``position``."""

    def rule(operator: Operator, graph: OpGraph) -> Signature:
        count = len(first_shape(operator, graph))
        place = positive(operator.argument(position, "dim", default), count)
        return along(
            operator,
            graph,
            (place,) if count else (),
            ((0,),) if linear else (),
            saves=saves,
            saves_outputs=saves_outputs,
        )

    return rule


def _histogram(operator: Operator, graph: OpGraph) -> Signature | None:
    """How many elements fall between fixed borders: a sum over all. Without borders they are the extremes of all elements."""
    if operator.argument(2, "min", 0) == operator.argument(3, "max", 0):
        return None
    sizes: dict[str, int] = {}
    source = names("d", first_shape(operator, graph), sizes)
    return signature(operator, graph, [tuple(source)], [(shape(graph, operator.outputs[0]),)], sizes,
                     flops=float(graph.values[operator.inputs[0]].num_elements))  # fmt: skip


RULES: dict[str, RuleFunction] = {
    "aten.histc.default": _histogram,
    "aten.sum.default": _over(None, sums=True),
    "aten.sum.dim_IntList": _over(1, sums=True),
    "aten.mean.default": _over(None, sums=True),
    "aten.mean.dim": _over(1, sums=True),
    **{f"aten.{name}.default": _over(1, saves=(0,), saves_outputs=(0,)) for name in ("amax", "amin", "logsumexp")},
    **{f"aten.{name}.default": _over(None, saves=(0,), saves_outputs=(0,)) for name in ("max", "min")},
    **{f"aten.{name}.dim": _over(1, saves_outputs=(1,)) for name in ("max", "min", "median")},
    **{f"aten.{name}.default": _over(1) for name in ("argmax", "argmin")},
    **{f"aten.{name}.default": _over(None) for name in ("all", "any", "count_nonzero")},
    **{f"aten.{name}.{kind}": _over(1) for name in ("all", "any") for kind in ("dim", "dims")},
    "aten.var.default": _over(None, saves=(0,)),
    **{f"aten.{name}.default": _over(None, saves=(0,), saves_outputs=(0,)) for name in ("std", "prod")},
    **{
        f"aten.{name}.{kind}": _over(1, saves=(0,), saves_outputs=(0,) if name == "std" else ())
        for name in ("var", "std", "var_mean")
        for kind in ("dim", "correction")
    },
    "aten.prod.dim_int": _over(1, saves=(0,), saves_outputs=(0,)),
    "aten.linalg_vector_norm.default": _over(2, saves=(0,), saves_outputs=(0,)),
    "aten.norm.Scalar": _over(None, saves=(0,), saves_outputs=(0,)),
    "aten.norm.ScalarOpt_dim": _over(2, saves=(0,), saves_outputs=(0,)),
    "aten.cumsum.default": _alongside(1, -1, linear=True),
    "aten.cumprod.default": _alongside(1, -1, saves=(0,), saves_outputs=(0,)),
    "aten.logcumsumexp.default": _alongside(1, -1, saves=(0,), saves_outputs=(0,)),
    "aten.topk.default": _alongside(2, -1, saves_outputs=(1,)),
    "aten.sort.default": _alongside(1, -1, saves_outputs=(1,)),
    "aten.sort.stable": _alongside(2, -1, saves_outputs=(1,)),
    "aten.argsort.default": _alongside(1, -1),
    "aten.argsort.stable": _alongside(1, -1),
    "aten.glu.default": _alongside(1, -1, saves=(0,)),
}
