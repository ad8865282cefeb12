"""Proposals that take tensors apart, join them, read and write at places, and write in place."""

from __future__ import annotations

import torch

from tests.random_programs.drawing import Draw, Unfit
from tests.random_programs.families.elementwise import second


def _dim(d: Draw, x: str, least: int = 2) -> tuple[int, int]:
    dim = d.random.choice(d.fixed_dims(x, least))
    return dim, d.shape(x)[dim]


def _written(d: Draw, x: str, dim: int) -> int:
    """The dim from the front or from the end."""
    return dim - len(d.shape(x)) if d.random.random() < 0.4 else dim


def split(d: Draw) -> None:
    x = d.float(1)
    dim, size = _dim(d, x)
    at = _written(d, x, dim)
    chance = d.random.random()
    if chance < 0.35:
        cut = d.random.randrange(1, size)
        sizes = [cut, size - cut]
        if size > 3 and d.random.random() < 0.5:
            sizes = [1, cut, size - cut - 1] if cut < size - 1 else sizes
        name = d.random.choice(("split.sizes", "split_with_sizes.default"))
        made = d.line(
            f"{', '.join(f'{{{i}}}' for i in range(len(sizes)))} = aten.{name}({x}, {sizes}, {at})", len(sizes)
        )
    elif chance < 0.6:
        length = d.random.randrange(1, size)
        count = -(-size // length)
        count > 8 and _unfit()
        made = d.line(f"{', '.join(f'{{{i}}}' for i in range(count))}, = aten.split.Tensor({x}, {length}, {at})", count)
    elif chance < 0.8:
        chunks = d.random.choice((2, 3))
        count = len(d.value(x).chunk(chunks, dim))
        made = d.line(
            f"{', '.join(f'{{{i}}}' for i in range(count))}, = aten.chunk.default({x}, {chunks}, {at})", count
        )
    else:
        made = d.line(f"{', '.join(f'{{{i}}}' for i in range(size))}, = aten.unbind.int({x}, {at})", size)
    if len(made) > 1 and d.shape(made[0]) == d.shape(made[-1]) and d.random.random() < 0.5:
        d.one(f"{made[0]} * torch.sigmoid({made[-1]})")


def _unfit() -> bool:
    raise Unfit


def sliced(d: Draw) -> None:
    x = d.float(1)
    dim, size = _dim(d, x)
    at = _written(d, x, dim)
    start = d.random.randrange(size)
    end = d.random.randrange(start + 1, size + 1)
    call = d.random.choice(
        (f"slice.Tensor({x}, {at}, {start}, {end})", f"slice.Tensor({x}, {at}, {start}, 9223372036854775807)",
         f"slice.Tensor({x}, {at}, 0, {end})", f"slice.Tensor({x}, {at}, {start}, {size}, 2)",
         f"narrow.default({x}, {at}, {start}, {end - start})", f"select.int({x}, {at}, {start})",
         f"slice.Tensor({x}, {at}, {start - size}, 9223372036854775807)", f"select.int({x}, {at}, -1)")
    )  # fmt: skip
    d.one(f"aten.{call}")


def joined(d: Draw) -> None:
    x = d.float(1)
    dim = d.random.randrange(len(d.shape(x)))
    kept = [size for i, size in enumerate(d.shape(x)) if i != dim]

    def meets(t: torch.Tensor) -> bool:
        return (
            t.dtype == torch.float64
            and t.dim() == len(kept) + 1
            and [size for i, size in enumerate(t.shape) if i != dim] == kept
        )

    others = [d.pick(meets) for _ in range(d.random.choice((1, 1, 2)))]
    if d.fixed(x, dim) and -1 not in d.signs(x) and d.random.random() < 0.4:
        others.append(d.parameter([d.random.choice((1, 2, 3)) if i == dim else s for i, s in enumerate(d.shape(x))]))
    name = d.random.choice(("cat", "concat", "concatenate"))
    d.one(f"aten.{name}.default([{', '.join([x, *others])}], {_written(d, x, dim)})")


def stacked(d: Draw) -> None:
    x = d.float(0, 4)
    others = [d.pick(lambda t: t.dtype == torch.float64 and t.shape == d.value(x).shape) for _ in range(2)]
    dim = d.random.randint(-1, len(d.shape(x)))
    d.one(f"aten.stack.default([{', '.join([x, *others[: d.random.choice((1, 2))]])}], {dim})")


def padded(d: Draw) -> None:
    x = d.apart(d.float(1))
    dim, size = _dim(d, x)
    from_end = len(d.shape(x)) - 1 - dim
    pad = [*[0, 0] * from_end, d.random.choice((0, 1, 2)), d.random.choice((1, 2, -1))]
    modes = [
        f"pad.default({x}, {pad})",
        f'pad.default({x}, {pad}, "constant", 0.7)',
        f"constant_pad_nd.default({x}, {pad}, 0.0)",
    ]
    if len(d.shape(x)) in (2, 3) and size > 2 and from_end == 0:
        modes += [f'pad.default({x}, [1, 1], "{mode}")' for mode in ("reflect", "replicate", "circular")]
    d.one(f"aten.{d.random.choice(modes)}")


def moved(d: Draw) -> None:
    x = d.apart(d.float(1))
    dim = d.random.randrange(len(d.shape(x)))
    calls = [
        f"roll.default({x}, [1], [{dim}])", f"roll.default({x}, [2])", f"flip.default({x}, [{dim}])",
        f"diff.default({x}, 1, {dim})", f"diff.default({x}, 1, {dim}, {x})",
    ]  # fmt: skip
    if len(d.shape(x)) > 1:
        calls += [f"tril.default({x}, {d.random.choice((0, 1, -1))})", f"triu.default({x})"]
    fixed = d.fixed_dims(x, 3)
    calls += [f"unfold.default({x}, {fixed[0]}, 2, {d.random.choice((1, 2))})"]
    d.one(f"aten.{d.random.choice(calls)}")


def scattered(d: Draw) -> None:
    """A slice or a place replaced, out of place."""
    x = d.apart(d.float(1))
    dim, size = _dim(d, x, 2)
    start = d.random.randrange(size - 1)
    end = d.random.randrange(start + 1, size + 1)
    part = d.one(f"torch.sin({x}.narrow({dim}, {start}, {end - start}))")
    call = d.random.choice(
        (f"slice_scatter.default({x}, {part}, {dim}, {start}, {end})",
         f"select_scatter.default({x}, {part}.select({dim}, 0), {dim}, {start})")
    )  # fmt: skip
    d.one(f"aten.{call}")


def embedded(d: Draw) -> None:
    x = d.float(1, 3)
    words, width = d.random.choice((5, 7, 11)), d.random.choice((3, 4, 5, 6, 8))
    ids = d.indices(d.signs(x)[: d.random.choice((1, 2))], words)
    table = d.parameter((words, width))
    padding = d.random.choice(("", "", ", 3"))
    scaled = ", scale_grad_by_freq=True" if d.random.random() < 0.1 else ""
    d.one(f"F.embedding({ids}, {table}{padding and f', padding_idx={padding[2:]}'}{scaled})")


def indexed(d: Draw) -> None:
    x = d.float(1, 4)
    dim, size = _dim(d, x)
    signs = d.signs(x)
    chance = d.random.random()
    if chance < 0.3:
        ids = d.indices(d.random.choice(((3,), (2, 4), (5,))), size)
        d.one(f"aten.index.Tensor({x}, [{', '.join([*['None'] * dim, ids])}])")
    elif chance < 0.4 and len(signs) > 1 and d.fixed(x, 0) and d.fixed(x, 1):
        first, other = d.indices((3, 1), d.shape(x)[0]), d.indices((4,), d.shape(x)[1])
        d.one(f"aten.index.Tensor({x}, [{first}, {other}])")
    elif chance < 0.5 and signs[0] == -1 and dim == 1:
        d.one(f"{x}[torch.arange(b), {d.indices((-1,), size)}]")
    elif chance < 0.7:
        ids = d.indices((d.random.choice((1, 3, 5)),), size)
        d.one(f"aten.index_select.default({x}, {dim}, {ids})")
    else:
        length = d.random.choice((1, 2, 4))
        ids = d.indices([length if i == dim else s for i, s in enumerate(signs)], size)
        d.one(f"aten.gather.default({x}, {dim}, {ids})")


def placed(d: Draw) -> None:
    """Values written or added at ids."""
    x = d.apart(d.float(1, 3))
    dim, size = _dim(d, x)
    signs = d.signs(x)
    length = d.random.choice((1, 2, 3))
    source = d.one(f"torch.cos({x}).narrow({dim}, 0, {min(length, size)})")
    length = min(length, size)
    rows, own = d.indices((length,), size), d.indices([length if i == dim else s for i, s in enumerate(signs)], size)
    single = d.indices([1 if i == dim else s for i, s in enumerate(signs)], size)
    first = d.one(f"{source}.narrow({dim}, 0, 1)")
    places = f"[{', '.join([*['None'] * dim, rows])}]"
    d.one("aten." + d.random.choice(
        (f"index_add.default({x}, {dim}, {rows}, {source}, alpha=2)", f"scatter_add.default({x}, {dim}, {own}, {source})",
         f"scatter.src({x}, {dim}, {single}, {first})", f"scatter.value({x}, {dim}, {own}, 0)",
         f"scatter.value({x}, {dim}, {own}, 0.7)", f"index_put.default({x}, {places}, {source}, True)",
         f"index_copy.default({x}, {dim}, {d.indices((1,), size)}, {first})")
    ))  # fmt: skip


def one_hot(d: Draw) -> None:
    x = d.float(1, 3)
    classes = d.random.choice((3, 4, 5))
    hot = d.one(f"aten.one_hot.default({d.indices(d.signs(x), classes)}, {classes})")
    d.one(f"{hot}.to(torch.float64) * {x}.unsqueeze(-1)")


def in_place(d: Draw) -> None:
    """A fresh tensor is made and written into, whole or through a view."""
    x = d.apart(d.float(1, 4))
    y = second(d, x)
    y_fits = torch.broadcast_shapes(d.value(y).shape, d.value(x).shape) == d.value(x).shape
    y = y if y_fits else d.parameter(d.suffix(x))
    fresh = d.random.choice((f"{x} * 1.5", f"torch.sin({x})", f"{x}.clone()", f"{x} + {y}", f"torch.zeros_like({x})"))
    dim, size = _dim(d, x)
    part = f"{{0}}.narrow({dim}, {d.random.randrange(size - 1)}, 1)"
    last = f"{{0}}[..., {d.random.randrange(d.shape(x)[-1])}]" if d.fixed(x, -1) else part
    written = d.random.choice(
        (
            f"{{0}}.add_({y})",
            f"{{0}}.mul_({y})",
            "{0}.sub_(0.5)",
            "{0}.mul_(0.7)",
            "{0}.relu_()",
            "{0}.sigmoid_()",
            "{0}.clamp_(-0.5, 0.6)",
            f"{{0}}.masked_fill_({x} > 0.1, 0.3)",
            f"{{0}}.copy_({y})",
            f"{{0}}.lerp_({x}, 0.3)",
            f"{part}.add_(0.5)",
            f"{part}.mul_({part}.detach() + 2)",
            f"{part}.copy_({x}.narrow({dim}, 0, 1))",
            f"{last}.fill_(0.3)",
            f"{{0}}[:, {d.random.randrange(size)}] = 0.3" if dim == 1 else "{0}[...] = 0.4",
            f"{last}.mul_(2)",
            "{0}.transpose(0, -1).add_(1.0)",
            "{0}.zero_()",
            "{0}.fill_(0.4)",
            f"{{0}}.addcmul_({x}, {y})",
            "{0}.div_(2.0)",
            "{0}.view(-1).mul_(1.1)",
            "F.relu({0}, inplace=True)",
            "{0}.tanh_()",
            "{0}.neg_()",
            f"{{0}}[{', '.join([':'] * dim + ['::2'])}] += 0.2",
            f"{{0}}.index_fill_({dim}, torch.tensor([0]), 0.3)",
        )
    )
    if written in ("{0}.zero_()", "{0}.fill_(0.4)", f"{{0}}.copy_({y})"):
        fresh = f"{x}.detach() * 1.5"  # what is written over whole has a gradient of zero in torch, and none here
    d.line(f"{{0}} = {fresh}\n{written}\n{{0}} = {{0}} * {x}" if "zeros" in fresh else f"{{0}} = {fresh}\n{written}")


def counted(d: Draw) -> None:
    """A buffer that every forward pass updates: a running mean, or a number of calls."""
    x = d.apart(d.float(2))
    dims = [dim for dim in range(len(d.shape(x))) if dim != d.fixed_dims(x, 2)[0]]
    state = d.leaf("buffer", (d.shape(x)[d.fixed_dims(x, 2)[0]],), -0.3, 0.3)
    d.line(f"{state}.mul_(0.9).add_({x}.detach().mean({dims}), alpha=0.1)\n{{0}} = {x} * 0.9")


PIECES = [(split, 5), (sliced, 4), (joined, 4), (stacked, 1.5), (padded, 2), (moved, 2), (scattered, 1)]
INDEXING = [(embedded, 3), (indexed, 4), (placed, 2), (one_hot, 1)]
IN_PLACE = [(in_place, 4), (counted, 0.3)]
