"""Proposals of contractions, normalisations and attention."""

from __future__ import annotations

import torch

from tests.random_programs.drawing import Draw, Unfit
from tests.random_programs.families.views import divisors

WIDTHS = (2, 3, 4, 5, 6, 7, 8)


def _spread(size: int) -> float:
    """Bounds of a weight under which a sum over ``size`` products stays of ordinary size."""
    return round(1.6 / size**0.5, 3)


def linear(d: Draw) -> None:
    x = d.apart(d.float(1))
    d.fixed(x, -1) or _unfit()
    k, n = d.shape(x)[-1], d.random.choice(WIDTHS)
    weight = d.parameter((n, k), -_spread(k), _spread(k))
    bias = f", {d.parameter((n,))}" if d.random.random() < 0.6 else ""
    if d.random.random() < 0.1:
        d.one(f"aten.linear.default({x}, {d.parameter((k,))})")
    else:
        d.one(f"aten.linear.default({x}, {weight}{bias})")


def _unfit() -> bool:
    raise Unfit


def by_weight(d: Draw) -> None:
    x = d.apart(d.float(1))
    d.fixed(x, -1) or _unfit()
    k, n, count = d.shape(x)[-1], d.random.choice(WIDTHS), len(d.shape(x))
    w = d.parameter((k, n), -_spread(k), _spread(k))
    calls = [f"matmul.default({x}, {w})", f"matmul.default({x}, {d.parameter((k,))})"]
    if count == 1:
        calls += [f"dot.default({x}, {d.parameter((k,))})", f"outer.default({x}, {d.parameter((n,))})"]
    if count == 2:
        bias = d.parameter(d.random.choice(((n,), (1, n), (1, 1))))
        calls += [
            f"mm.default({x}, {w})", f"addmm.default({bias}, {x}, {w})",
            f"addmm.default({bias}, {x}, {w}, beta=0.5, alpha=2.0)", f"mv.default({x}, {d.parameter((k,))})",
        ]  # fmt: skip
    if count == 3 and d.fixed(x, 0):
        own = d.parameter((d.shape(x)[0], k, n), -_spread(k), _spread(k))
        bias = d.parameter((d.random.choice((1, d.shape(x)[0])), 1, n))
        calls += [f"bmm.default({x}, {own})", f"baddbmm.default({bias}, {x}, {own}, beta=1, alpha=0.5)"] * 3
    if count > 2:
        calls += [f'einsum.default("...k,kn->...n", [{x}, {w}])']
    d.one(f"aten.{d.random.choice(calls)}")


def of_two(d: Draw) -> None:
    """A product of two values of the model."""
    x = d.apart(d.float(2))
    other = d.pick(lambda t: t.dtype == torch.float64 and t.dim() >= 2 and t.shape[-1] == d.value(x).shape[-1])
    k = d.shape(x)[-1]
    d.one(f"torch.matmul({x}, {d.apart(other)}.transpose(-1, -2)) * {_spread(k) / 2:.3g}")


def einsum(d: Draw) -> None:
    x = d.apart(d.float(2, 4))
    d.fixed(x, -1) or _unfit()
    k, e = d.shape(x)[-1], d.random.choice((2, 3, 4, 5))
    w3, w2 = d.parameter((e, k, 5), -_spread(k), _spread(k)), d.parameter((k, e), -_spread(k), _spread(k))
    equations = {
        2: [f'"bk,ekf->bef", [{x}, {w3}]', f'"bk,ekf->ef", [{x}, {w3}]', f'"bk,bj->kj", [{x}, {x}]', f'"bk,ke", [{x}, {w2}]'],
        3: [f'"bsk,ekf->besf", [{x}, {w3}]', f'"bsk,ke->ebs", [{x}, {w2}]', f'"bsk,btk->bst", [{x}, {x}]',
            f'"bsk,ke,bsk->bse", [{x}, {w2}, {x}]', f'"bsk->skb", [{x}]'],
        4: [f'"...qd,...kd->...qk", [{x}, {x}]', f'"abcd,de->aecb", [{x}, {w2}]', f'"abcd->ad", [{x}]'],
    }  # fmt: skip
    d.one(f"aten.einsum.default({d.random.choice(equations[len(d.shape(x))])}) * 0.5")


def bilinear(d: Draw) -> None:
    x = d.apart(d.float(1, 3))
    d.fixed(x, -1) or _unfit()
    i, o = d.shape(x)[-1], d.random.choice(WIDTHS)
    w = d.parameter((o, i, i), -0.3, 0.3)
    d.one(f"aten.bilinear.default({x}, torch.sin({x}), {w}, {d.parameter((o,))})")


def convolution(d: Draw) -> None:
    x = d.apart(d.float(3, 5))
    shape, space = d.shape(x), len(d.shape(x)) - 2
    d.fixed(x, 1) or _unfit()
    c, kernel = shape[1], d.random.choice((1, 2, 3))
    groups = d.random.choice([1, 1, *(g for g in (2, 3, c) if c % g == 0)])
    o = groups * d.random.choice((1, 2, 3)) if groups > 1 else d.random.choice(WIDTHS)
    if d.random.random() < 0.25:
        w = d.parameter((c, o, *[kernel] * space), -_spread(c * 2), _spread(c * 2))
        name = {1: "conv_transpose1d.default", 2: "conv_transpose2d.input", 3: "conv_transpose3d.input"}[space]
        stride = d.random.choice((1, 2))
        bias = d.random.choice((d.parameter((o,)), "None"))
        d.one(f"aten.{name}({x}, {w}, {bias}, {[stride] * space})")
        return
    w = d.parameter((o, c // groups, *[kernel] * space), -_spread(c * 2), _spread(c * 2))
    bias = d.random.choice((d.parameter((o,)), "None"))
    if d.random.random() < 0.25:
        padding = d.random.choice(("same", "valid"))
        d.one(f'aten.conv{space}d.padding({x}, {w}, {bias}, {[1] * space}, "{padding}", {[1] * space}, {groups})')
    else:
        stride, padding = d.random.choice((1, 1, 2)), d.random.choice((0, 1))
        d.one(
            f"aten.conv{space}d.default({x}, {w}, {bias}, {[stride] * space}, {[padding] * space}, {[1] * space}, {groups})"
        )


def layer_norm(d: Draw) -> None:
    x = d.float(1)
    (d.fixed(x, -1) and d.shape(x)[-1] > 1) or _unfit()
    count = 2 if len(d.shape(x)) > 2 and d.fixed(x, -2) and d.random.random() < 0.2 else 1
    shape = list(d.shape(x)[-count:])
    w, v = d.parameter(shape, 0.5, 1.5), d.parameter(shape)
    call = d.random.choice(
        (f"layer_norm.default({x}, {shape}, {w}, {v}, 1e-2)", f"layer_norm.default({x}, {shape}, None, None, 1e-2)",
         f"rms_norm.default({x}, {shape}, {w}, 1e-2)", f"rms_norm.default({x}, {shape}, None, 1e-2)")
    )  # fmt: skip
    d.one(f"aten.{call}")


def group_norm(d: Draw) -> None:
    x = d.float(3)
    d.fixed(x, 1) or _unfit()
    c = d.shape(x)[1]
    groups = d.random.choice([1, c, *divisors(c)])
    w, v = d.parameter((c,), 0.5, 1.5), d.parameter((c,))
    if d.random.random() < 0.3:
        d.one(f"aten.instance_norm.default({x}, {w}, {v}, None, None, True, 0.1, 1e-2, True)")
    else:
        d.one(f"aten.group_norm.default({x}, {groups}, {w}, {v}, 1e-2, True)")


def batch_norm(d: Draw) -> None:
    x = d.float(2)
    d.fixed(x, 1) or _unfit()
    c = d.shape(x)[1]
    w, v = d.parameter((c,), 0.5, 1.5), d.parameter((c,))
    mean, var = d.leaf("buffer", (c,), -0.3, 0.3), d.leaf("buffer", (c,), 0.5, 1.5)
    training = d.random.random() < 0.7
    d.one(f"aten.batch_norm.default({x}, {w}, {v}, {mean}, {var}, {training}, 0.1, 1e-2, True)")


def softmax(d: Draw) -> None:
    x = d.apart(d.float(1))
    dim = d.random.randrange(-len(d.shape(x)), len(d.shape(x)))
    call = d.random.choice(
        (f"softmax.int({x}, {dim})", f"log_softmax.int({x}, {dim})", f"_softmax.default({x}, {dim}, False)",
         f"_log_softmax.default({x}, {dim}, False)")
    )  # fmt: skip
    d.one(f"aten.{call}")


def attention(d: Draw) -> None:
    """Self-attention of [batch, sequence, width] from one fused projection, or from three."""
    x = d.apart(d.float(3, 3))
    (d.fixed(x, 1) and d.fixed(x, 2)) or _unfit()
    b, s, k = d.size(x, 0), d.shape(x)[1], d.shape(x)[2]
    heads, width = d.random.choice((1, 2, 3, 4, 6)), d.random.choice((2, 3, 4))
    groups = d.random.choice([g for g in (1, 1, 2, 3) if heads % g == 0])
    keys = heads // groups
    n = (heads + 2 * keys) * width
    fused = d.one(f"F.linear({x}, {d.parameter((n, k), -_spread(k), _spread(k))})")
    q, key, value = d.line(
        f"{{0}}, {{1}}, {{2}} = {fused}.split([{heads * width}, {keys * width}, {keys * width}], -1)", 3
    )
    q = d.one(f"{q}.view({b}, {s}, {heads}, {width}).transpose(1, 2)")
    key, value = (d.one(f"{t}.view({b}, {s}, {keys}, {width}).transpose(1, 2)") for t in (key, value))
    grouped = ", enable_gqa=True" if keys != heads else ""
    mask = d.random.choice(("", "", ", is_causal=True", ", attn_mask={bool}", ", attn_mask={float}", ", scale=0.4"))
    if "{bool}" in mask:
        mask = mask.replace("{bool}", d.one(f"torch.ones({s}, {s}, dtype=torch.bool).tril(1)"))
    elif "{float}" in mask:
        mask = mask.replace("{float}", d.parameter(d.random.choice(((s, s), (heads, s, s), (1, 1, s, s)))))
    dropped = ", dropout_p=0.2" if not grouped and d.random.random() < 0.1 else ""
    made = d.one(f"F.scaled_dot_product_attention({q}, {key}, {value}{mask}{dropped}{grouped})")
    d.one(f"{made}.transpose(1, 2).reshape({b}, {s}, {heads * width})")


def cross_attention(d: Draw) -> None:
    """Attention over what other values of the model hold, without heads of its own."""
    x = d.apart(d.float(3, 4))
    width = d.shape(x)[-1]
    d.fixed(x, -1) or _unfit()
    made = d.one(f"F.linear({x}, {d.parameter((width, width), -_spread(width), _spread(width))})")
    d.one(f"aten.scaled_dot_product_attention.default({made}, torch.sin({x}), {x})")


CONTRACTIONS = [(linear, 6), (by_weight, 7), (of_two, 4), (einsum, 4), (bilinear, 0.7), (convolution, 6)]
NORMALIZATIONS = [(layer_norm, 3), (group_norm, 1.5), (batch_norm, 2), (softmax, 2.5)]
ATTENTION = [(attention, 3), (cross_attention, 1)]
