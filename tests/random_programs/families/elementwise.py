"""Proposals of the elementwise family: one tensor, two that broadcast, masks, integers, casts, complex numbers, dropout."""

from __future__ import annotations

import torch

from autopar.strategies import elementwise as rules
from tests.random_programs.drawing import Draw

RANGES = {
    "acos": (-0.8, 0.8), "asin": (-0.8, 0.8), "atanh": (-0.8, 0.8), "erfinv": (-0.8, 0.8), "acosh": (1.2, 3.0),
    "digamma": (0.5, 4.0), "lgamma": (0.5, 4.0), "tan": (-1.2, 1.2), "log1p": (-0.5, 4.0),
    **dict.fromkeys(("log", "log10", "log2", "rsqrt", "sqrt", "reciprocal"), (0.2, 4.0)),
}  # fmt: skip
SMOOTH = [
    name for name in (*rules.KEEPS_INPUT, *rules.KEEPS_OUTPUT)
    if name not in ("clamp", "clamp_max", "clamp_min", "threshold")
]  # fmt: skip
STEPS = "ceil floor frac round sgn sign trunc".split()
TESTS = "isfinite isinf isnan isneginf isposinf signbit".split()
SAME = "rad2deg deg2rad neg negative positive alias clone contiguous detach lift_fresh_copy lift_fresh".split()
POSITIVE = "pow.Tensor_Tensor float_power.Tensor_Tensor xlogy.Tensor hypot.default atan2.default".split()
ANY_SIGN = """
    maximum.default minimum.default fmax.default fmin.default max.other min.other logaddexp.default copysign.Tensor
    clamp_max.Tensor clamp_min.Tensor clamp.Tensor heaviside.default nextafter.default
""".split()
ARITHMETIC = (*rules.SUMS, *rules.PRODUCTS, "rsub")


def one(d: Draw) -> None:
    name = d.random.choice(SMOOTH)
    x = d.within(d.float(0), *RANGES.get(name, (-3.0, 3.0)))
    approximate = ', approximate="tanh"' if name == "gelu" and d.random.random() < 0.5 else ""
    d.one(f"aten.{name}.default({x}{approximate})")


def bounded(d: Draw) -> None:
    x = d.apart(d.float(0))
    call = d.random.choice(
        ("clamp.default({}, -0.45, 0.55)", "clamp_max.default({}, 0.35)", "clamp_min.default({}, -0.35)",
         "threshold.default({}, 0.15, 0.1)", "log_sigmoid.default({})", "glu.default({}, -1)",
         "pow.Tensor_Scalar({}, 3)", "pow.Tensor_Scalar({}, 2)", "pow.Scalar(1.7, {})", "round.decimals({}, decimals=1)")
    )  # fmt: skip
    d.one(f"aten.{call.format(x)}")


def stepwise(d: Draw) -> None:
    x = d.apart(d.float(0))
    if d.random.random() < 0.6:
        made = d.one(f"aten.{d.random.choice(STEPS)}.default({x} * 1.37 + 0.11)")
    else:
        made = d.one(f"aten.{d.random.choice(TESTS)}.default({x}).to(torch.float64)")
    d.one(f"{x} * {made}")


def same(d: Draw) -> None:
    d.one(f"aten.{d.random.choice(SAME)}.default({d.apart(d.float(0))})")


def second(d: Draw, x: str, low: float = -1.5, high: float = 1.5) -> str:
    """A tensor that broadcasts with ``x``: a parameter or buffer, or a value of the model."""
    if d.random.random() < 0.5:
        return d.parameter(d.suffix(x), max(low, -0.9), min(high, 0.9))
    ours = d.value(x).shape

    def meets(other: torch.Tensor) -> bool:
        pairs = zip(reversed(ours), reversed(other.shape), strict=False)
        return other.dtype == torch.float64 and all(a == b or 1 in (a, b) for a, b in pairs)

    return d.within(d.pick(meets), low, high)


def two(d: Draw) -> None:
    chance = d.random.random()
    x = d.apart(d.float(0))
    if chance < 0.45:
        y = second(d, x)
        name = d.random.choice(ARITHMETIC)
        alpha = ", alpha=2" if name in (*rules.SUMS, "rsub") and d.random.random() < 0.3 else ""
        d.one(f"aten.{name}.Tensor({x}, {y}{alpha})")
    elif chance < 0.6:
        d.one(f"aten.{d.random.choice(rules.QUOTIENTS)}.Tensor({x}, {second(d, x, 0.4, 2.0)})")
    elif chance < 0.8:
        x = d.within(x, 0.3, 2.5)
        d.one(f"aten.{d.random.choice(POSITIVE)}({x}, {second(d, x, 0.3, 1.5)})")
    else:
        name = d.random.choice(ANY_SIGN)
        y = second(d, x)
        if name in ("heaviside.default", "nextafter.default"):  # these have no gradient
            d.one(f"aten.{name}({x}.detach(), {y}.detach()) + {x} * 0.5")
        else:
            d.one(f"aten.{name}({x}, {y})")


def with_number(d: Draw) -> None:
    x = d.apart(d.float(0))
    name = d.random.choice((*ARITHMETIC, *rules.QUOTIENTS))
    number = d.random.choice((2, 1.5, -0.7, 3))
    if name in rules.QUOTIENTS and d.random.random() < 0.3:
        d.one(f"1.5 / {d.within(x, 0.4, 3.0)}")
    else:
        d.one(f"aten.{name}.{d.random.choice(('Scalar', 'Tensor'))}({x}, {number})")


def remainder(d: Draw) -> None:
    x = d.apart(d.float(0))
    y = second(d, x, 0.4, 2.0)
    call = d.random.choice(
        (
            "fmod.Scalar({x}, 0.83)",
            "remainder.Scalar({x}, 0.83)",
            "fmod.Tensor({x}, {y})",
            "remainder.Tensor({x}, {y})",
            "floor_divide.default({x}.detach(), {y}.detach())",
            "floor_divide.Scalar({x}.detach(), 0.83)",
            'div.Tensor_mode({x}, {y}, rounding_mode="floor")',
            'div.Scalar_mode({x}, 0.83, rounding_mode="trunc")',
            'divide.Tensor_mode({x}, {y}, rounding_mode="trunc")',
            "xlogy.Scalar_Other({x}, 1.7)",
            "float_power.Tensor_Scalar({p}, 1.5)",
        )
    )
    p = d.within(x, 0.3, 2.5)
    d.one(f"aten.{call.format(x=x, y=y, p=p)} + {x} * 0.1")


def three(d: Draw) -> None:
    x = d.apart(d.float(0))
    y, z = second(d, x), second(d, x, 0.4, 2.0)
    call = d.random.choice(
        ("addcmul.default({x}, {y}, {z}, value=0.5)", "addcdiv.default({x}, {y}, {z}, value=0.5)",
         "lerp.Scalar({x}, {y}, 0.3)", "lerp.Tensor({x}, {y}, {z})")
    )  # fmt: skip
    d.one(f"aten.{call.format(x=x, y=y, z=z)}")


def compare(d: Draw) -> None:
    x = d.apart(d.float(0))
    name = d.random.choice(rules.COMPARISONS)
    made = d.one(
        f"aten.{name}.Tensor({x}, {second(d, x)})" if d.random.random() < 0.5 else f"aten.{name}.Scalar({x}, 0.123)"
    )
    d.one(f"{made}.to(torch.float64) * {x}")


def masks(d: Draw) -> None:
    x = d.apart(d.float(0))
    mask = d.boolean(d.apart(d.pick(lambda t: t.dtype == torch.float64 and t.shape == d.value(x).shape)))
    if d.random.random() < 0.3:
        other = d.boolean(x)
        mask = d.one(f"aten.{d.random.choice(('logical_and', 'logical_or', 'logical_xor'))}.default({mask}, {other})")
    if d.random.random() < 0.3:
        mask = d.one(f"aten.{d.random.choice(('logical_not', 'bitwise_not'))}.default({mask})")
    y = second(d, x)
    call = d.random.choice(
        ("where.self({m}, {x}, {y})", "where.ScalarOther({m}, {x}, 0)", "where.ScalarOther({m}, {x}, 0.7)",
         "where.ScalarSelf({m}, 0.0, {x})", "masked_fill.Scalar({x}, {m}, 0)", "masked_fill.Scalar({x}, {m}, -1.5)",
         "masked_fill.Tensor({x}, {m}, {s})", "where.Scalar({m}, 1.0, 0.0).to(torch.float64) * {x}")
    )  # fmt: skip
    s = d.parameter((), -0.7, 0.7) if "{s}" in call else ""
    d.one(f"aten.{call.format(m=mask, x=x, y=y, s=s)}")


def integers(d: Draw) -> None:
    x = d.float(1, 3)
    found = d.names(lambda t: t.dtype == torch.int64 and t.dim() > 0 and int(t.abs().max()) < 100)
    i = d.random.choice(found) if found else d.indices(d.signs(x), 6)
    j = d.indices(tuple(d.signs(i)[-1:]) if -1 not in d.signs(i)[-1:] else (), 5) if d.random.random() < 0.4 else "3"
    kind = "Scalar" if j == "3" else "Tensor"
    name = d.random.choice(rules.LOGICAL).split(".")[0]
    if name in ("logical_and", "logical_or", "logical_xor", "isclose"):
        made = d.one(f"aten.{name}.default({i}, {i} * 2 - 3)")
    elif "bitwise" in name and "shift" in name:
        made = d.one(
            f"aten.{name}.{'Tensor_Scalar' if kind == 'Scalar' else 'Tensor'}({i}, {2 if kind == 'Scalar' else j})"
        )
    elif "shift" in name:
        made = d.one(f"aten.{name}.Scalar({i}, 2)")
    else:
        made = d.one(f"aten.{name}.{kind}({i}, {j})")
    if d.random.random() < 0.5:
        d.one(f"{made}.to(torch.float64) * 0.1")


def casts(d: Draw) -> None:
    x = d.apart(d.float(0))
    call = d.random.choice(
        ("{}.float().double()", "{}.to(torch.float32).to(torch.float64)", "{x}.double()", "{}.type_as({}).double()",
         "{}.to({})", "{}.to(torch.device('cpu'), torch.float64)", "{}.float().type_as({})")
    )  # fmt: skip
    d.one(call.replace("{x}", x).replace("{}", x))


def complex_numbers(d: Draw) -> None:
    x = d.apart(d.float(1, 4))
    if d.shape(x)[-1] == 2 and d.fixed(x, -1) and d.random.random() < 0.7:
        z = d.one(f"aten.view_as_complex.default({x}.contiguous())")
    else:
        z = d.one(f"aten.polar.default({d.within(x, 0.2, 3.0)}, {second(d, x)})")
    if d.random.random() < 0.5:
        z = d.one(f"aten.conj.default({z}) * {z}" if d.random.random() < 0.5 else f"{z} * ({z} + 1.0)")
    d.one(
        d.random.choice(("aten.real.default({})", "aten.imag.default({})", "aten.view_as_real.default({})")).format(z)
    )


def dropout(d: Draw) -> None:
    x = d.apart(d.float(1))
    d.one(f"F.dropout({x}, {d.random.choice((0.1, 0.3, 0.5))}, True)")


def idle_dropout(d: Draw) -> None:
    x = d.apart(d.float(1))
    d.one(f"aten.{d.random.choice(('dropout', 'feature_dropout', 'alpha_dropout'))}.default({x}, 0.3, False)")


def filled(d: Draw) -> None:
    x = d.apart(d.float(1))
    y = second(d, x)
    s = d.parameter((), -0.7, 0.7)
    call = d.random.choice(
        (
            "copy.default({x}.detach(), {y}) * {x}",
            "fill.Scalar({x}.detach(), 0.7) * {x}",
            "fill.Tensor({x}.detach(), {s}) + {x}",
        )
    )
    d.one(f"aten.{call.format(x=x, y=y, s=s)}")


PROPOSALS = [
    (one, 10), (bounded, 3), (stepwise, 2), (same, 3), (two, 10), (with_number, 4), (remainder, 3), (three, 3), (compare, 4),
    (masks, 4), (integers, 5), (casts, 2), (complex_numbers, 2), (dropout, 1), (idle_dropout, 0.7), (filled, 1),
]  # fmt: skip
