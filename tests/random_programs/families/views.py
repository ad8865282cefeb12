"""Proposals of the views: reshapes that merge, divide or keep dims, permutations, broadcasts, repetitions."""

from __future__ import annotations

import torch

from tests.random_programs.drawing import Draw, Unfit


def divisors(size: int) -> list[int]:
    return [factor for factor in range(2, size) if size % factor == 0]


def merged(d: Draw) -> None:
    x = d.float(2)
    sizes, at = d.sizes(x), d.random.randrange(len(d.shape(x)) - 1)
    if d.random.random() < 0.3:
        d.one(f"aten.flatten.using_ints({x}, {at}, {at + 1})")
        return
    new = [*sizes[:at], "-1" if d.random.random() < 0.5 else f"{sizes[at]} * {sizes[at + 1]}", *sizes[at + 2 :]]
    name = d.random.choice(("view", "reshape", "reshape", "_unsafe_view"))
    d.one(f"aten.{name}.default({x}, [{', '.join(new)}])")


def divided(d: Draw) -> None:
    x = d.float(1, 4)
    at = d.random.choice([dim for dim in d.fixed_dims(x, 4) if divisors(d.shape(x)[dim])] or [None])
    if at is None:
        raise Unfit
    factor, sizes = d.random.choice(divisors(d.shape(x)[at])), d.sizes(x)
    rest = d.shape(x)[at] // factor
    if d.random.random() < 0.3:
        d.one(f"aten.unflatten.int({x}, {at}, [{factor}, {rest}])")
        return
    name = d.random.choice(("view", "reshape", "reshape"))
    d.one(f"aten.{name}.default({x}, [{', '.join([*sizes[:at], str(factor), str(rest), *sizes[at + 1 :]])}])")


def regrouped(d: Draw) -> None:
    """Two dims as two others: 4 x 6 as 6 x 4, 3 x 8 as 6 x 4."""
    x = d.float(2)
    dims = d.fixed_dims(x, 2)
    pairs = [dim for dim in dims if dim + 1 in dims]
    if not pairs:
        raise Unfit
    at, sizes = d.random.choice(pairs), d.sizes(x)
    total = d.shape(x)[at] * d.shape(x)[at + 1]
    first = d.random.choice(divisors(total))
    d.one(f"{x}.reshape({', '.join([*sizes[:at], str(first), str(total // first), *sizes[at + 2 :]])})")


def like(d: Draw) -> None:
    x = d.float(1)
    other = d.pick(lambda t: t.numel() == d.value(x).numel() and t.dtype == torch.float64)
    name = d.random.choice(("view_as", "reshape_as", "reshape_as"))
    d.one(f"aten.{name}.default({x}, {other})")


def raveled(d: Draw) -> None:
    d.one(f"aten.ravel.default({d.float(1, 3)})")


def permuted(d: Draw) -> None:
    x = d.float(2)
    count = len(d.shape(x))
    order = list(range(count))
    d.random.shuffle(order)
    first, other = d.random.sample(range(count), 2)
    calls = [f"permute.default({x}, {order})"]
    calls += [
        f"{name}({x}, {first}, {other - count})" for name in ("transpose.int", "swapaxes.default", "swapdims.default")
    ]
    calls += [f"{name}.int({x}, {first}, {other})" for name in ("movedim", "moveaxis")]
    calls += [f"{name}.intlist({x}, [{first}, {other}], [{other}, {first}])" for name in ("movedim", "moveaxis")]
    calls += [f"mT.default({x})", f"adjoint.default({x})"]
    if count == 2:
        calls += [f"{name}.default({x})" for name in ("t", "numpy_T", "matrix_H", "t")]
    d.one(f"aten.{d.random.choice(calls)}" + (".contiguous()" if d.random.random() < 0.2 else ""))


def unsqueezed(d: Draw) -> None:
    x = d.float(0, 4)
    d.one(f"aten.unsqueeze.default({x}, {d.random.randint(-1, len(d.shape(x)))})")


def squeezed(d: Draw) -> None:
    x = d.pick(lambda t: t.dtype == torch.float64 and 1 in t.shape)
    ones = [dim for dim, size in enumerate(d.shape(x)) if size == 1]
    call = d.random.choice(("default({x})", "dim({x}, {one})", "dims({x}, {ones})", "dim({x}, 0)"))
    d.one(f"aten.squeeze.{call.format(x=x, one=ones[0], ones=ones)}")


def expanded(d: Draw) -> None:
    x = d.float(0, 4)
    sizes = [
        str(d.random.choice((2, 3, 5))) if size == "1" and d.random.random() < 0.7 else size for size in d.sizes(x)
    ]
    if d.random.random() < 0.4:
        sizes = [d.random.choice(("2", "3", "5")), *sizes]
    d.one(f"aten.{d.random.choice(('expand', 'broadcast_to'))}.default({x}, [{', '.join(sizes)}])")


def expanded_like(d: Draw) -> None:
    x = d.float(1)
    small = d.parameter(d.suffix(x))
    if d.random.random() < 0.5:
        d.one(f"aten.expand_as.default({small}, {x}) * {x}")
    else:
        first, _ = d.line(f"{{0}}, {{1}} = aten.broadcast_tensors.default([{small}, {x}])", 2)
        d.one(f"torch.sin({first})")


def repeated(d: Draw) -> None:
    x = d.float(1, 3)
    times = [d.random.choice((1, 1, 2, 3)) for _ in d.shape(x)]
    if d.random.random() < 0.2:
        times = [2, *times]
    if d.random.random() < 0.4:
        dim = d.random.randrange(len(d.shape(x)))
        d.one(f"aten.repeat_interleave.self_int({x}, {d.random.choice((2, 3))}, {dim})")
    else:
        d.one(f"aten.{d.random.choice(('repeat', 'tile'))}.default({x}, {times})")


def grid(d: Draw) -> None:
    first, second = (d.parameter([d.random.choice((2, 3, 5))]) for _ in range(2))
    call = d.random.choice(('indexing([{}, {}], indexing="ij")', "default([{}, {}])")).format(first, second)
    one, other = d.line(f"{{0}}, {{1}} = aten.meshgrid.{call}", 2)
    d.one(f"{one} * {other}")


PROPOSALS = [
    (merged, 5), (divided, 6), (regrouped, 1), (like, 1), (raveled, 0.5), (permuted, 7), (unsqueezed, 2), (squeezed, 2),
    (expanded, 3), (expanded_like, 2), (repeated, 2), (grid, 0.7),
]  # fmt: skip
