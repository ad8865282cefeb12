"""Operators that work element by element, with broadcasting: every dim may be split.

The tables say what eager autograd keeps for backward; sources: ``derivatives.yaml`` of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from autopar.graph import ITEM_BYTES, Operator, OpGraph
from autopar.strategies.rule import RuleFunction, Signature
from autopar.strategies.signatures import (
    Extras,
    first_shape,
    is_floating,
    names,
    needs_gradient,
    only_shape,
    place_in_inputs,
    signature,
    written,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

KEEPS_INPUT = """
    abs acos acosh asin asinh atan atanh celu clamp clamp_max clamp_min cos cosh digamma elu erf erfc erfinv gelu
    hardsigmoid hardswish hardtanh leaky_relu lgamma log log10 log1p log2 mish relu6 selu silu sin sinc
    sinh softplus square threshold hardshrink softshrink """.split()
KEEPS_OUTPUT = "exp exp2 special_expit expm1 reciprocal relu rsqrt sigmoid sqrt tan tanh".split()
KEEPS_NOTHING = """
    bitwise_not ceil floor frac isfinite isinf isnan isneginf isposinf logical_not round sgn sign signbit trunc
""".split()
LINEAR = "rad2deg deg2rad neg negative positive alias clone contiguous detach lift_fresh_copy lift_fresh real imag conj".split()
CASTS = "to.dtype to.dtype_layout to.device to.other _to_copy.default type_as.default".split()
COMPARISONS = "eq ne lt le gt ge greater less greater_equal less_equal not_equal".split()
LOGICAL = """
    __and__.Tensor __or__.Tensor __xor__.Tensor __and__.Scalar __or__.Scalar __xor__.Scalar bitwise_and.Tensor
    bitwise_or.Tensor bitwise_xor.Tensor bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar logical_and.default
    logical_or.default logical_xor.default __lshift__.Scalar __rshift__.Scalar bitwise_left_shift.Tensor_Scalar
    bitwise_right_shift.Tensor_Scalar isclose.default bitwise_left_shift.Tensor bitwise_right_shift.Tensor
""".split()
STEPWISE = """
    fmod.Scalar remainder.Scalar
    floor_divide.default floor_divide.Scalar div.Scalar_mode heaviside.default nextafter.default
""".split()
REMAINDERS = ("fmod.Tensor", "remainder.Tensor")
ROUNDED_QUOTIENTS = ("div.Tensor_mode", "divide.Tensor_mode")
TWO_KEPT = """
    atan2.default clamp.Tensor clamp_max.Tensor clamp_min.Tensor fmax.default fmin.default
    max.other maximum.default min.other minimum.default xlogy.Tensor
    xlogy.Scalar_Other pow.Tensor_Scalar logaddexp.default float_power.Tensor_Scalar
""".split()
SUMS = "add sub subtract".split()
FLOPS_OF_A_NUMBER = 12.0  # of the runtime's counter-based generator, for an element
PRODUCTS = "mul multiply".split()
QUOTIENTS = "div divide true_divide".split()


def pointwise(operator: Operator, graph: OpGraph, **extras: Unpack[Extras]) -> Signature:
    """All tensors broadcast together."""
    num_outputs = sum(1 for value in operator.outputs if value)
    text = ", ".join(["b.."] * len(operator.inputs)) + " -> " + ", ".join(["b.."] * num_outputs)
    return written(operator, graph, text, **extras)


def _keeps_input(operator: Operator, graph: OpGraph) -> Signature:
    return pointwise(operator, graph, saves=(0,))


def _keeps_output(operator: Operator, graph: OpGraph) -> Signature:
    return pointwise(operator, graph, saves_outputs=(0,))


def _keeps_nothing(operator: Operator, graph: OpGraph) -> Signature:
    return pointwise(operator, graph)


def _keeps_inputs(operator: Operator, graph: OpGraph) -> Signature:
    return pointwise(operator, graph, saves=range(len(operator.inputs)))


def _keeps_all(operator: Operator, graph: OpGraph) -> Signature:
    return pointwise(operator, graph, saves=range(len(operator.inputs)), saves_outputs=(0,))


def _log_sigmoid(operator: Operator, graph: OpGraph) -> Signature:
    """Keeps its input and, on the CPU, as much again."""
    return pointwise(operator, graph, saves=(0,), saves_extra_bytes=float(graph.values[operator.inputs[0]].num_bytes))


def _linear(operator: Operator, graph: OpGraph) -> Signature:
    output = operator.outputs[0]
    shared = graph.values[output].storage not in ("", output)
    return pointwise(operator, graph, linear=((0,),), kind="free" if shared else "elementwise")


def _cast(operator: Operator, graph: OpGraph) -> Signature:
    """A change of dtype, to that of a second tensor if there is one; between floats it is linear."""
    source, output = operator.inputs[0], operator.outputs[0]
    sizes: dict[str, int] = {}
    dims = tuple(names("d", first_shape(operator, graph), sizes))
    place = place_in_inputs(operator, 1, "other")
    inputs, unread = [dims], set[str]()
    if place is not None:
        term, unread = only_shape(graph, operator.inputs[place], output, dims, sizes)
        inputs.append(term)
    linear = ((0,),) if is_floating(graph, source) and is_floating(graph, output) else ()
    same = graph.values[source].dtype == graph.values[output].dtype
    return signature(
        operator, graph, inputs, [dims], sizes, linear=linear, replicated_after=unread,
        kind="free" if same else "elementwise",
    )  # fmt: skip


def _sum(operator: Operator, graph: OpGraph) -> Signature:
    """x + y: linear in both together; with a number beside it, in neither."""
    both = len(operator.inputs) == 2
    return pointwise(operator, graph, linear=((0, 1),) if both else ())


def _product(operator: Operator, graph: OpGraph) -> Signature:
    if len(operator.inputs) == 1:
        return pointwise(operator, graph, linear=((0,),))
    first, second = needs_gradient(operator, graph)
    saves = [index for index, wanted in ((0, second), (1, first)) if wanted]
    return pointwise(operator, graph, saves=saves, linear=((0,), (1,)))


def _quotient(operator: Operator, graph: OpGraph) -> Signature:
    if len(operator.inputs) == 1:
        divisor = _divisor(operator)
        return pointwise(operator, graph, linear=() if divisor else ((0,),), saves=divisor)
    saves = (0, 1) if needs_gradient(operator, graph)[1] else (1,)
    return pointwise(operator, graph, saves=saves, linear=((0,),))


def _rounded_quotient(operator: Operator, graph: OpGraph) -> Signature:
    """Its gradient is zero, but autograd keeps what the quotient's would need."""
    if len(operator.inputs) == 1:
        return pointwise(operator, graph, saves=_divisor(operator))
    return pointwise(operator, graph, saves=(0, 1) if needs_gradient(operator, graph)[1] else (1,))


def _divisor(operator: Operator) -> tuple[int, ...]:
    """The one tensor of two arguments, where it is what the other is divided by."""
    return (0,) if isinstance(operator.args[0], (int, float)) else ()


def _remainder(operator: Operator, graph: OpGraph) -> Signature:
    return pointwise(operator, graph, saves=(0, 1) if needs_gradient(operator, graph)[1] else ())


def _hypotenuse(operator: Operator, graph: OpGraph) -> Signature:
    return pointwise(operator, graph, saves=_wanting(operator, graph), saves_outputs=(0,))


def _sign_of_another(operator: Operator, graph: OpGraph) -> Signature:
    return pointwise(operator, graph, saves=_wanting(operator, graph)[:1], saves_outputs=(0,))


def _wanting(operator: Operator, graph: OpGraph) -> list[int]:
    """The inputs that have a gradient."""
    return [index for index, wanted in enumerate(needs_gradient(operator, graph)) if wanted]


def _where(operator: Operator, graph: OpGraph) -> Signature:
    """where(condition, x, y): linear in the tensors chosen from, if a number among them is zero."""
    chosen = [operator.argument(1, "self"), operator.argument(2, "other")]
    zero = all(argument == 0 for argument in chosen if isinstance(argument, (int, float)))
    group = range(1, len(operator.inputs))
    return pointwise(operator, graph, saves=(0,), linear=(group,) if zero and len(group) else ())


def _masked_fill(operator: Operator, graph: OpGraph) -> Signature:
    if len(operator.inputs) == 3:
        return pointwise(operator, graph, saves=(1,), linear=((0, 2),))
    return pointwise(operator, graph, saves=(1,), linear=((0,),) if operator.argument(2, "value") == 0 else ())


def _dropout(operator: Operator, graph: OpGraph) -> Signature:
    """Without dropping anything, the identity; else each element is dropped by its place, and what is kept is saved."""
    if not operator.argument(2, "train") or operator.argument(1, "p") == 0:
        return pointwise(operator, graph, linear=((0,),), kind="free")
    elements = float(graph.values[operator.inputs[0]].num_elements)
    return pointwise(
        operator, graph, random=True, counted=True, linear=((0,),), saves_extra_bytes=elements,
        flops=FLOPS_OF_A_NUMBER * elements, backward_flops=elements,
    )  # fmt: skip


def _unsplit_dropout(operator: Operator, graph: OpGraph) -> Signature:
    """Of whole channels, or with other statistics: random, and not split. The mask has the input's dtype on the CPU."""
    if not operator.argument(2, "train") or operator.argument(1, "p") == 0:
        return pointwise(operator, graph, linear=((0,),), kind="free")
    value = graph.values[operator.inputs[0]]
    return pointwise(
        operator, graph, random=True, saves_extra_bytes=float(value.num_elements * ITEM_BYTES[value.dtype])
    )


def _random(operator: Operator, graph: OpGraph) -> Signature:
    return pointwise(operator, graph, random=True)


def _copy(operator: Operator, graph: OpGraph) -> Signature:
    """copy(x, source): the source in the shape and dtype of x."""
    return pointwise(operator, graph, linear=((1,),) if is_floating(graph, operator.inputs[1]) else ())


def _fill(operator: Operator, graph: OpGraph) -> Signature:
    """fill(x, value): x only gives the shape."""
    return pointwise(operator, graph, linear=((1,),) if len(operator.inputs) == 2 else ())


def _lerp(operator: Operator, graph: OpGraph) -> Signature:
    saves: list[int] = []
    if len(operator.inputs) == 3:
        first, end, weight = needs_gradient(operator, graph)
        saves = [*((0, 1) if weight else ()), *((2,) if first or end else ())]
    return pointwise(operator, graph, linear=((0, 1),), saves=saves)


def _addcmul(operator: Operator, graph: OpGraph) -> Signature:
    _, first, second = needs_gradient(operator, graph)
    saves = [index for index, wanted in ((1, second), (2, first)) if wanted]
    return pointwise(operator, graph, linear=((0, 1), (0, 2)), saves=saves)


def _addcdiv(operator: Operator, graph: OpGraph) -> Signature:
    _, numerator, divisor = needs_gradient(operator, graph)
    saves = [index for index, wanted in ((1, divisor), (2, numerator or divisor)) if wanted]
    return pointwise(operator, graph, linear=((0, 1),), saves=saves)


def _complex_view(text: str) -> RuleFunction:
    def rule(operator: Operator, graph: OpGraph) -> Signature:
        return written(operator, graph, text, linear=((0,),), kind="view")

    return rule


def _table(function: RuleFunction, targets: Iterable[str], overloads: Iterable[str] = ("",)) -> dict[str, RuleFunction]:
    return {f"aten.{name}{overload}": function for name in targets for overload in overloads}


_TENSOR_OR_SCALAR = (".Tensor", ".Scalar")

RULES: dict[str, RuleFunction] = {
    **_table(_keeps_input, KEEPS_INPUT, (".default",)),
    **_table(_keeps_output, KEEPS_OUTPUT, (".default",)),
    **_table(_keeps_nothing, KEEPS_NOTHING, (".default",)),
    "aten.polar.default": _keeps_output,
    **_table(_keeps_nothing, COMPARISONS, _TENSOR_OR_SCALAR),
    **_table(_keeps_nothing, LOGICAL),
    **_table(_keeps_nothing, STEPWISE),
    **_table(_rounded_quotient, ROUNDED_QUOTIENTS),
    **_table(_keeps_inputs, TWO_KEPT),
    **_table(_remainder, REMAINDERS),
    **_table(_keeps_all, ("pow.Tensor_Tensor", "pow.Scalar", "float_power.Tensor_Tensor")),
    "aten.hypot.default": _hypotenuse,
    "aten.copysign.Tensor": _sign_of_another,
    **_table(_linear, LINEAR, (".default",)),
    **_table(_cast, CASTS),
    **_table(_sum, SUMS, _TENSOR_OR_SCALAR),
    **_table(_product, PRODUCTS, _TENSOR_OR_SCALAR),
    **_table(_quotient, QUOTIENTS, _TENSOR_OR_SCALAR),
    **_table(_sum, ("rsub",), _TENSOR_OR_SCALAR),
    **_table(_where, ("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")),
    **_table(_masked_fill, ("masked_fill.Scalar", "masked_fill.Tensor")),
    **_table(_dropout, ("dropout.default",)),
    **_table(_unsplit_dropout, ("feature_dropout.default", "alpha_dropout.default")),
    **_table(_random, ("bernoulli.default", "bernoulli.p", "rand_like.default", "randn_like.default")),
    **_table(_copy, ("copy.default",)),
    **_table(_fill, ("fill.Scalar", "fill.Tensor")),
    **_table(_lerp, ("lerp.Scalar", "lerp.Tensor")),
    "aten.addcmul.default": _addcmul,
    "aten.addcdiv.default": _addcdiv,
    "aten.round.decimals": _keeps_nothing,
    "aten.log_sigmoid.default": _log_sigmoid,
    "aten.view_as_complex.default": _complex_view("b.. 2 -> b.."),
    "aten.view_as_real.default": _complex_view("b.. -> b.. 2"),
}
