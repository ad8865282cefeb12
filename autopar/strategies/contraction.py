"""Matrix products, einsum and convolutions: a letter that only the inputs have leaves a sum over the devices."""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.graph import ITEM_BYTES, Operator, OpGraph
from autopar.strategies.rule import Dim, RuleFunction, Signature, Term, letters_of, shapes_of
from autopar.strategies.signatures import Extras, needs_gradient, number, shape, signature, written
from autopar.strategies.spatial import sizes_of, space_dims, terms_of, with_space


def work(operator: Operator, graph: OpGraph, factors: tuple[int, int], flops: float) -> Extras:
    """Fields that all products share: each of the two ``factors`` is kept for the other's gradient."""
    wanted = needs_gradient(operator, graph)
    first, second = factors
    return {
        "kind": "matmul",
        "flops": flops,
        "backward_flops": flops * sum(wanted[index] for index in factors),
        "saves": [kept for kept, other in ((first, second), (second, first)) if wanted[other]],
        "linear": ((first,), (second,)),
    }


def with_bias(fields: Extras, factors: tuple[int, int], bias: int) -> Extras:
    """The fields of a product that something is added to: linear in either factor only together with it."""
    first, second = factors
    linear = ((first, bias), (second, bias))
    return {**fields, "linear": linear, "additive": (bias,)}


def _linear(operator: Operator, graph: OpGraph) -> Signature:
    """y = x w' + b."""
    x, weight = (shape(graph, value) for value in operator.inputs[:2])
    flops = 2.0 * math.prod(x) * (weight[0] if len(weight) == 2 else 1)
    out = "n" if len(weight) == 2 else ""
    w = "n k" if len(weight) == 2 else "k"
    if len(operator.inputs) == 3:
        fields = with_bias(work(operator, graph, (0, 1), flops), (0, 1), 2)
        return written(operator, graph, f"b.. k, {w}, {out} -> b.. {out}", **fields)
    return written(operator, graph, f"b.. k, {w} -> b.. {out}", **work(operator, graph, (0, 1), flops))


def _matmul(operator: Operator, graph: OpGraph) -> Signature:
    x, y = (shape(graph, value) for value in operator.inputs)
    left, rows = ("b.. m k", "m") if len(x) > 1 else ("k", "")
    right, columns = ("b.. k n", "n") if len(y) > 1 else ("k", "")
    leading = "b.." if max(len(x), len(y)) > 2 else ""
    if not leading:
        left, right = left.replace("b..", ""), right.replace("b..", "")
    output = shape(graph, operator.outputs[0])
    flops = 2.0 * math.prod(output) * x[-1]
    text = f"{left}, {right} -> {leading} {rows} {columns}"
    fields = work(operator, graph, (0, 1), flops)
    if min(len(x), len(y)) > 2 and x[:-2] != y[:-2]:  # what is broadcast is copied
        wide = [index for index, given in enumerate((x, y)) if given[:-2] != output[:-2]]
        kept = set(fields["saves"])
        item = ITEM_BYTES[graph.values[operator.inputs[0]].dtype]
        elements = sum(math.prod(output[:-2]) * math.prod((x, y)[index][-2:]) for index in wide if index in kept)
        fields["saves"] = kept - set(wide)
        fields["saves_extra_bytes"] = float(item * elements)
    return written(operator, graph, text, **fields)


def _product(text: str) -> RuleFunction:
    def rule(operator: Operator, graph: OpGraph) -> Signature:
        flops = 2.0 * math.prod(shape(graph, operator.inputs[0])) * shape(graph, operator.inputs[1])[-1]
        return written(operator, graph, text, **work(operator, graph, (0, 1), flops))

    return rule


def _vector_product(text: str) -> RuleFunction:
    def rule(operator: Operator, graph: OpGraph) -> Signature:
        flops = 2.0 * max(math.prod(shape(graph, value)) for value in operator.inputs)
        return written(operator, graph, text, **work(operator, graph, (0, 1), flops))

    return rule


def _added_product(term: str) -> RuleFunction:
    """c + a b, with c broadcast."""

    def rule(operator: Operator, graph: OpGraph) -> Signature:
        left, right = term.split(",")
        letters = left.split()[:-1] + right.split()[-1:]
        bias = shape(graph, operator.inputs[0])
        aligned = " ".join(letters[len(letters) - len(bias) :])
        flops = 2.0 * math.prod(shape(graph, operator.inputs[1])) * shape(graph, operator.inputs[2])[-1]
        fields = with_bias(work(operator, graph, (1, 2), flops), (1, 2), 0)
        return written(operator, graph, f"{aligned}, {left}, {right} -> {' '.join(letters)}", **fields)

    return rule


def _einsum(operator: Operator, graph: OpGraph) -> Signature | None:
    """The equation is the rule; ``...`` stands for leading dims that broadcast."""
    equation = str(operator.argument(0, "equation")).replace(" ", "")
    if "->" not in equation:
        flat = equation.replace(",", "").replace("...", "")
        once = "".join(sorted(letter for letter in set(flat) if flat.count(letter) == 1))
        equation += "->" + ("..." if "..." in equation else "") + once
    left, right = equation.split("->")
    text = ", ".join(_spaced(term) for term in left.split(",")) + " -> " + _spaced(right)
    count = len(operator.inputs)
    fields: Extras = {"linear": tuple((index,) for index in range(count)), "kind": "matmul"}
    parsed = written(operator, graph, text, **fields)
    letters = {letter for term in (*parsed.inputs, *parsed.outputs) for letter in letters_of(term)}
    flops = 2.0 * math.prod(parsed.sizes[letter] for letter in letters)
    wanted = needs_gradient(operator, graph)
    fields["flops"] = flops
    fields["backward_flops"] = flops * sum(wanted)
    saved = [index for index in range(count) if any(wanted[other] for other in range(count) if other != index)]
    copied = _copied(parsed) if count == 2 else set()
    fields["saves"] = [index for index in saved if index not in copied]
    fields["saves_extra_bytes"] = float(
        sum(graph.values[operator.inputs[index]].num_bytes for index in saved if index in copied)
    )
    return written(operator, graph, text, **fields)


def _copied(rule: Signature) -> set[int]:
    """Which of two operands einsum copies to multiply them: it joins the dims of a kind (in both and the result, in one
    and the result, in both only), and those that do not lie side by side are gathered into a new tensor.
    """
    sides = [letters_of(term) for term in rule.inputs]
    output = letters_of(rule.outputs[0])
    summed = [letter for letter in sides[0] if letter in sides[1] and letter not in output]
    found = set()
    for index, own in enumerate(sides):
        other = sides[1 - index]
        groups = [
            [letter for letter in output if letter in own and letter in other],
            [letter for letter in output if letter in own and letter not in other],
            summed,
        ]
        for group in groups:
            places = [own.index(letter) for letter in group if rule.sizes[letter] > 1]
            if places != list(range(min(places, default=0), min(places, default=0) + len(places))):
                found.add(index)
    return found


def _spaced(term: str) -> str:
    """``"...bd"`` as this project writes it: ``"e.. b d"``."""
    return " ".join(["e.."] * ("..." in term) + list(term.replace("...", "")))


def _convolution(transposed: bool) -> RuleFunction:
    def rule(operator: Operator, graph: OpGraph) -> Signature | None:
        return _convolved(operator, graph, transposed)

    return rule


def _convolved(operator: Operator, graph: OpGraph, transposed: bool) -> Signature | None:
    """b (g c) space, (g o) c kernel, (g o) -> b (g o) space: batch, channels and space may be split, the kernel may not."""
    x, weight = (shape(graph, value) for value in operator.inputs[:2])
    output = shape(graph, operator.outputs[0])
    space = len(weight) - 2
    if len(x) != space + 2:
        return None
    groups = number(operator.argument(6, "groups", 1))
    if transposed and groups > 1:
        return None
    dims = space_dims(operator, graph)
    sizes = {"b": x[0], "g": groups, "c": x[1] // groups, "o": output[1] // groups} | sizes_of(dims)
    given, result = terms_of(dims)
    inner: Dim = ("c",)
    kernel: list[Dim] = [(size,) for size in weight[2:]]
    grouped: tuple[Dim, Dim] = (("g", "c"), ("g", "o")) if groups > 1 else (("c",), ("o",))
    weight_channels = [grouped[0], grouped[1]] if transposed else [grouped[1], inner]
    inputs: list[Term] = [(("b",), grouped[0], *given), (*weight_channels, *kernel)]
    if len(operator.inputs) == 3:
        inputs.append((grouped[1],))
    outputs: Term = (("b",), grouped[1], *result)
    pixels = math.prod(x[2:]) if transposed else math.prod(output[2:])
    flops = 2.0 * x[0] * pixels * math.prod(weight)
    fields = work(operator, graph, (0, 1), flops)
    if any(needs_gradient(operator, graph)):
        fields["saves"] = (0, 1)  # whichever of the two needs a gradient, autograd keeps both
    if len(operator.inputs) == 3:
        fields = with_bias(fields, (0, 1), 2)
    return signature(operator, graph, inputs, [outputs], sizes, **with_space(fields, operator, graph, dims))


def _bilinear(operator: Operator, graph: OpGraph) -> Signature:
    flops = 2.0 * math.prod(shapes_of(operator, graph)[-1]) * math.prod(shape(graph, operator.inputs[2])[1:])
    bias = len(operator.inputs) == 4
    wanted = needs_gradient(operator, graph)[:3]
    saves = [index for index in range(3) if any(wanted[:index] + wanted[index + 1 :])]  # each for the others' gradients
    fields: Extras = {"kind": "matmul", "flops": flops, "backward_flops": sum(wanted) * flops, "saves": saves}
    fields["linear"] = ((0, 3), (1, 3), (2, 3)) if bias else ((0,), (1,), (2,))
    fields["additive"] = (3,) if bias else ()
    return written(operator, graph, "b.. i, b.. j, o i j" + (", o" if bias else "") + " -> b.. o", **fields)


def _by_expert(rule: RuleFunction) -> RuleFunction:
    """A product that has a parameter for each entry of a dim: that dim is one of experts."""

    def found(operator: Operator, graph: OpGraph) -> Signature | None:
        plain = rule(operator, graph)
        if plain is None:
            return None
        terms = [set(letters_of(term)) for term in (*plain.inputs, *plain.outputs)]
        stacks = [
            set(letters_of(plain.inputs[index][:1]))
            for index, value in enumerate(operator.inputs)
            if len(shape(graph, value)) > 2 and _is_parameter(graph, value)
        ]
        return replace(plain, experts=frozenset(set().union(*stacks).intersection(*terms)))

    return found


def _is_parameter(graph: OpGraph, value: str) -> bool:
    """Whether a value is a parameter, or one in another type."""
    maker = graph.producer_of.get(value)
    while maker is not None and maker.target.startswith(("aten.to.", "aten._to_copy.")):
        value = maker.inputs[0]
        maker = graph.producer_of.get(value)
    return graph.values[value].kind == "parameter"


RULES: dict[str, RuleFunction] = {
    "aten.linear.default": _linear,
    "aten.matmul.default": _by_expert(_matmul),
    "aten.mm.default": _product("m k, k n -> m n"),
    "aten.bmm.default": _by_expert(_product("b m k, b k n -> b m n")),
    "aten.mv.default": _vector_product("m k, k -> m"),
    "aten.dot.default": _vector_product("k, k ->"),
    "aten.outer.default": _vector_product("m, n -> m n"),
    "aten.addmm.default": _added_product("m k, k n"),
    "aten.baddbmm.default": _by_expert(_added_product("b m k, b k n")),
    "aten.einsum.default": _by_expert(_einsum),
    "aten.bilinear.default": _bilinear,
    **{f"aten.conv{n}d.{overload}": _convolution(False) for n in (1, 2, 3) for overload in ("default", "padding")},
    "aten.conv_transpose1d.default": _convolution(True),
    "aten.conv_transpose2d.input": _convolution(True),
    "aten.conv_transpose3d.input": _convolution(True),
}
