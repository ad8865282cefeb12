"""Proposals of reductions, scans, creation, pooling and losses of each element."""

from __future__ import annotations

import torch

from tests.random_programs.drawing import Draw, Unfit
from tests.random_programs.families.elementwise import second


def over_dims(d: Draw) -> None:
    x = d.apart(d.float(1))
    count = len(d.shape(x))
    dims = sorted(d.random.sample(range(count), d.random.randint(1, min(2, count))))
    keep = d.random.random() < 0.5
    one = dims[0]
    y = d.within(x, 0.3, 1.8)
    call = d.random.choice(
        (f"sum.dim_IntList({x}, {dims}, {keep})", f"mean.dim({x}, {dims}, {keep})", f"sum.dim_IntList({x}, {dims}, {keep})",
         f"mean.dim({x}, {dims}, {keep})", f"amax.default({x}, {dims}, {keep})", f"amin.default({x}, {dims}, {keep})",
         f"logsumexp.default({x}, {dims}, {keep})", f"linalg_vector_norm.default({y}, 2, {dims}, {keep})",
         f"var.dim({x}, {dims})", f"std.dim({y}, {dims})", f"var.correction({x}, {dims}, correction=0, keepdim={keep})",
         f"std.correction({y}, {dims}, correction=0, keepdim={keep})", f"prod.dim_int({y}, {one}, {keep})",
         f"norm.ScalarOpt_dim({y}, 2, {dims}, {keep})")
    )  # fmt: skip
    made = d.one(f"aten.{call}")
    if keep and d.random.random() < 0.6:
        d.one(f"{x} - {made}")


def with_places(d: Draw) -> None:
    """Reductions and sorts that also say where."""
    x = d.apart(d.float(1))
    dim = d.random.randrange(len(d.shape(x)))
    size, keep = d.shape(x)[dim], d.random.random() < 0.5
    call = d.random.choice(
        (f"max.dim({x}, {dim}, {keep})", f"min.dim({x}, {dim}, {keep})", f"median.dim({x}, {dim}, {keep})",
         f"topk.default({x}, {max(1, min(2, size - 1))}, {dim})", f"sort.default({x}, {dim})",
         f"sort.stable({x}, stable=True, dim={dim})")
    )  # fmt: skip
    made, places = d.line(f"{{0}}, {{1}} = aten.{call}", 2)
    if d.random.random() < 0.4:
        d.one(f"{places}.to(torch.float64) * {made} * 0.1")


def pair(d: Draw) -> None:
    x = d.apart(d.float(1))
    dim = d.random.randrange(len(d.shape(x)))
    call = d.random.choice((f"dim({x}, [{dim}])", f"correction({x}, [{dim}], correction=0, keepdim=True)"))
    var, mean = d.line(f"{{0}}, {{1}} = aten.var_mean.{call}", 2)
    d.one(f"{mean} + {var}")


def along(d: Draw) -> None:
    x = d.apart(d.float(1))
    dim = d.random.randrange(len(d.shape(x)))
    call = d.random.choice((f"cumsum.default({x}, {dim})", f"cumsum.default({x}, {dim})", f"logcumsumexp.default({x}, {dim})",
                            f"cumprod.default({d.within(x, 0.4, 1.4)}, {dim})"))  # fmt: skip
    d.one(f"aten.{call}")


def whole(d: Draw) -> None:
    x = d.apart(d.float(1))
    y = d.within(x, 0.8, 1.2)
    call = d.random.choice(
        (f"sum.default({x}) * 0.1", f"mean.default({x})", f"max.default({x})", f"min.default({x})", f"var.default({x})",
         f"std.default({y})", f"prod.default({y})", f"norm.Scalar({y}, 2)")
    )  # fmt: skip
    made = d.one(f"aten.{call}")
    d.one(f"{x} * {d.apart(made)}")


def places(d: Draw) -> None:
    x = d.apart(d.float(1))
    dim = d.random.randrange(len(d.shape(x)))
    mask = f"({x} > 0.05)"
    call = d.random.choice(
        (f"argmax.default({x}, {dim})", f"argmin.default({x}, {dim})", f"argmax.default({x})", f"argsort.default({x}, {dim})",
         f"argsort.stable({x}, stable=True, dim={dim})", f"all.default({mask})", f"any.default({mask})",
         f"count_nonzero.default({mask})", f"all.dim({mask}, {dim})", f"any.dim({mask}, {dim})", f"any.dims({mask}, [{dim}])",
         f"all.dims({mask}, [{dim}])", f"sum.dim_IntList({mask}, [{dim}])")
    )  # fmt: skip
    d.one(f"aten.{call}.to(torch.float64) * 0.1 + 0.3")


def made(d: Draw) -> None:
    x = d.apart(d.float(1))
    sizes, n = d.sizes(x), d.size(x, -1)
    shape = f"[{', '.join(sizes)}]"
    double = "dtype=torch.float64"
    call = d.random.choice(
        (
            f"zeros.default({shape}, {double})",
            f"ones.default({shape}, {double})",
            f"full.default({shape}, 0.7, {double})",
            f"zeros_like.default({x})",
            f"ones_like.default({x})",
            f"full_like.default({x}, 0.4)",
            f"new_zeros.default({x}, {shape})",
            f"new_ones.default({x}, {shape})",
            f"new_full.default({x}, [{n}], 0.3)",
            f"arange.default({n}, {double})",
            f"arange.start(0, {n}, {double})",
            f"arange.start_step(0, {n} * 2, 2, {double})",
            f"linspace.default(0.0, 1.0, {n}, {double})",
            f"eye.default({n}, {double}).sum(0)",
            f"eye.m({n}, 3, {double}).sum(1)",
            f"scalar_tensor.default(0.3, {double})",
            f"empty_like.default({x}).zero_()",
            f"new_empty.default({x}, {shape}).fill_(0.2)",
            f"empty.memory_format({shape}, {double}).fill_(0.2)",
        )
    )
    made = d.one(f"aten.{call}")
    d.one(f"{x} + {made} * 0.3")


def pooled(d: Draw) -> None:
    x = d.apart(d.float(3, 5))
    n = len(d.shape(x)) - 2
    if min(d.shape(x)[2:]) < 2 or not all(d.fixed(x, dim) for dim in range(2, n + 2)):
        raise Unfit
    kernel, one = [2] * n, [1] * n
    calls = [
        f"max_pool{n}d.default({x}, {kernel})", f"max_pool{n}d.default({x}, {kernel}, {one}, {one})",
        f"avg_pool{n}d.default({x}, {kernel})", f"avg_pool{n}d.default({x}, {kernel}, {one}, {one})",
        f"adaptive_avg_pool{n}d.default({x}, {kernel})", f"adaptive_max_pool{n}d.default({x}, {kernel})",
    ]  # fmt: skip
    if "adaptive_max" in (call := d.random.choice(calls)):
        d.line(f"{{0}}, {{1}} = aten.{call}", 2)
    else:
        d.one(f"aten.{call}")


def resized(d: Draw) -> None:
    x = d.apart(d.float(3, 5))
    n = len(d.shape(x)) - 2
    target = [size + d.random.choice((1, 2)) for size in d.shape(x)[2:]]
    smooth = {1: ["linear1d"], 2: ["bilinear2d", "bicubic2d"], 3: ["trilinear3d"]}[n]
    calls = [f"upsample_nearest{n}d.vec({x}, {target}, None)", f"upsample_nearest{n}d.default({x}, {target})"]
    calls += [f"upsample_{name}.vec({x}, {target}, False, None)" for name in smooth]
    calls += [f"upsample_{name}.default({x}, {target}, False)" for name in smooth]
    if n == 2 and d.fixed(x, 1) and d.shape(x)[1] % 4 == 0:
        calls += [f"pixel_shuffle.default({x}, 2)"] * 3
    d.one(f"aten.{d.random.choice(calls)}")


def loss_of_each(d: Draw) -> None:
    x = d.apart(d.float(1))
    target = d.one(f"torch.sin({x}.detach() * 3)")
    reduction = d.random.choice((0, 0, 1, 2))
    inside, labels = d.within(x, 0.1, 0.9), d.within(target, 0.1, 0.9)
    weight = second(d, x, 0.4, 1.5) if d.random.random() < 0.3 else "None"
    if weight != "None" and torch.broadcast_shapes(d.value(weight).shape, d.value(x).shape) != d.value(x).shape:
        weight = "None"
    call = d.random.choice(
        (f"mse_loss.default({x}, {target}, {reduction})", f"l1_loss.default({x}, {target}, {reduction})",
         f"smooth_l1_loss.default({x}, {target}, {reduction})", f"huber_loss.default({x}, {target}, {reduction}, 0.3)",
         f"soft_margin_loss.default({x}, {target}, {reduction})", f"kl_div.default({x}, {labels}, {reduction})",
         f"binary_cross_entropy.default({inside}, {labels}, None, {reduction})",
         f"binary_cross_entropy_with_logits.default({x}, {labels}, None, None, {reduction})",
         f"kl_div.default({x}, {target}, {reduction}, log_target=True)")
    )  # fmt: skip
    d.one(f"aten.{call}" + (" * 0.05" if reduction == 2 else ""))


def class_loss(d: Draw) -> None:
    x = d.apart(d.float(1, 4))
    signs = d.signs(x)
    count = len(signs)
    place = 1 if count > 1 else 0
    if not d.fixed(x, place) or signs[place] < 2:
        raise Unfit
    labels = d.indices([size for dim, size in enumerate(signs) if dim != place], signs[place])
    reduction = d.random.choice((0, 1, 1, 2))
    weight = d.leaf("buffer", (signs[place],), 0.5, 1.5) if d.random.random() < 0.3 else "None"
    ignored, smoothing = d.random.choice((-100, -100, 1)), d.random.choice((0.0, 0.0, 0.1))
    name = {1: "nll_loss_nd", 2: "nll_loss", 3: "nll_loss_nd", 4: "nll_loss2d"}[count]
    if d.random.random() < 0.35:
        if int(d.value(labels).ne(ignored).sum()) == 0:
            raise Unfit
        made = d.one(f"aten.log_softmax.int({x}, {place})")
        d.one(f"aten.{d.random.choice((name, 'nll_loss_nd'))}.default({made}, {labels}, {weight}, {reduction}, {ignored})"
              + (" * 0.05" if reduction == 2 else ""))  # fmt: skip
    else:
        d.one(f"aten.cross_entropy_loss.default({x}, {labels}, {weight}, {reduction}, {ignored}, {smoothing})"
              + (" * 0.05" if reduction == 2 else ""))  # fmt: skip


REDUCTIONS = [(over_dims, 7), (with_places, 3), (pair, 1.5), (along, 2.5), (whole, 2), (places, 3)]
CREATION = [(made, 2)]
POOLING = [(pooled, 3), (resized, 3)]
LOSSES = [(loss_of_each, 2), (class_loss, 2)]
