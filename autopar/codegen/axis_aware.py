"""Calls that must know the mesh or the micro-batch: their local result alone is not the local part of the whole result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from autopar.codegen.called import SHARE, Called, atom, joined
from autopar.codegen.local_sizes import num_parts, same_everywhere, size_at
from autopar.codegen.scope import AxisCuts
from autopar.codegen.text import words
from autopar.layout import Cut, local_shape
from autopar.strategies.attention import repeated_heads
from autopar.strategies.choices import CHUNKS
from autopar.strategies.logits import chunk_rows
from autopar.strategies.loss import ELEMENTWISE_LOSSES, FUSED, MEAN, SUM, class_loss, reduction_of
from autopar.strategies.rule import in_whole_groups
from autopar.strategies.signatures import dims_argument, place_in_inputs

_REDUCTIONS = ("none", "mean", "sum")


def _tuple(items: Iterable[str]) -> str:
    given = list(items)
    return f"({given[0]},)" if len(given) == 1 else f"({', '.join(given)})"


def one_dim(text: str) -> str:
    """``(-1,)`` as ``-1``."""
    return text[1:-2] if text.endswith(",)") else text


def _embedding(call: Called) -> str:
    """Rows of a split vocabulary are looked up where they are."""
    weight, ids = call.names[0], call.names[1]
    padding = call.given(2, "padding_idx", -1)
    end = [] if padding == -1 else [f"padding_idx={padding}"]
    cuts = call.input_cuts(0, 0)
    if cuts:
        split = call.scope.split(call.input_shape()[0], cuts, "vocab")
        return joined(call.scope.runtime("vocab_embedding"), [ids, weight, split, *end])
    if call.given(3, "scale_grad_by_freq", False):
        end.append("scale_grad_by_freq=True")
    return joined(call.scope.functional("embedding"), [ids, weight, *end])


def _cross_entropy(call: Called) -> str:
    """Split rows share the count of a mean, split classes their sums."""
    loss = class_loss(call.operator)
    place = call.operator.inputs.index(loss.labels)
    classes, index = (0, 1) if call.operator.target == FUSED else (min(1, len(call.input_shape()) - 1), 0)
    by_chunks = call.scope.forms.get(call.operator.id) == CHUNKS
    weight = "class_weight" if by_chunks else "weight"
    options = [] if loss.weight is None else [f"{weight}={call.names[call.operator.inputs.index(loss.weight)]}"]
    if loss.ignore_index != -100:
        options.append(f"ignore_index={loss.ignore_index}")
    if loss.reduction != MEAN:
        options.append(f'reduction="{_REDUCTIONS[loss.reduction]}"')
    if loss.label_smoothing:
        options.append(f"label_smoothing={loss.label_smoothing}")
    vocab = call.input_cuts(classes, index)
    rows = _axes_cutting(call, range(len(call.input_shape(place))), place) if loss.reduction == MEAN else []
    shared = []
    if call.count is not None:  # a number for all devices and micro-batches
        shared.append(f"count={call.count}")
    elif rows:
        shared.append(f"batch_axes={_tuple(call.scope.axis(axis) for axis in rows)}")
    if vocab:
        shared.append(f"vocab={call.scope.split(call.input_shape(index)[classes], vocab, 'vocab')}")
    if by_chunks:
        return joined(call.scope.runtime("linear_cross_entropy"), [*_by_chunks(call, place), *options, *shared])
    given = _logits(call, place) if call.operator.target == FUSED else call.names[:2]
    function = call.scope.runtime("cross_entropy") if shared else call.scope.functional("cross_entropy")
    return joined(function, [*given, *options, *shared])


def _logits(call: Called, labels: int) -> list[str]:
    """Logits and labels, classes last and then rows in one dim."""
    x, weight, *bias = call.names[:labels]
    text = joined(call.scope.functional("linear"), [x, weight, *bias])
    dtype = call.operator.args[8]
    if dtype is not None:
        text = f"{text}.to({call.literal(dtype)})"
    if len(call.input_shape()) == 2:
        return [text, call.names[labels]]
    return [f"{text}.flatten(0, -2)", f"{atom(call.names[labels])}.flatten()"]


def _by_chunks(call: Called, labels: int) -> list[str]:
    """What logits are made of, labels, and how many rows are a chunk."""
    x, weight, *bias = call.names[:labels]
    mesh = call.scope.mesh.shape
    num_rows = math.prod(local_shape(call.input_shape(labels), call.input_layouts[labels], mesh))
    num_classes, width = local_shape(call.input_shape(1), call.input_layouts[1], mesh)
    options = [f"bias={bias[0]}"] if bias else []
    dtype = call.operator.args[8]
    options += [f"dtype={call.literal(dtype)}"] if dtype is not None else []
    return [x, weight, call.names[labels], f"rows={chunk_rows(num_rows, num_classes, width)}", *options]


def _nll(call: Called) -> str:
    """Rows of a mean are whole, so that each device's call is the whole one's or a term of its sum."""
    weight = place_in_inputs(call.operator, 2, "weight")
    options = [] if weight is None else [f"weight={call.names[weight]}"]
    if call.given(4, "ignore_index", -100) != -100:
        options.append(f"ignore_index={call.given(4, 'ignore_index')}")
    reduction = SUM if call.count else call.given(3, "reduction", MEAN)
    if reduction != MEAN:
        options.append(f'reduction="{_REDUCTIONS[reduction]}"')
    text = joined(call.scope.functional("nll_loss"), [*call.names[:2], *options])
    return f"{text} / {call.count}" if call.count else text


def _axes_cutting(call: Called, dims: Iterable[int], index: int = 0) -> list[int]:
    """Axes that cut some of an input's dims, in order."""
    return sorted({axis for dim in dims for axis, _ in call.input_cuts(dim, index)})


def _batch_norm(call: Called) -> str:
    """In training the runtime's own: statistics over all rows, and the new running ones as further results."""
    texts = call.args
    training, momentum, eps = texts[5], texts[6], texts[7]
    x, weight, bias, mean, var = texts[:5]
    axes = _axes_cutting(call, [dim for dim in range(len(call.input_shape())) if dim != 1])
    if call.given(5, "training") and (axes or len(call.outputs) > 1):
        arguments = [x, weight, bias, mean, var, training, momentum, eps]
        if axes:
            arguments.append(f"axes={_tuple(call.scope.axis(axis) for axis in axes)}")
        text = joined(call.scope.runtime("batch_norm"), arguments)
        return text if len(call.outputs) > 1 else f"{text}[0]"
    return joined(call.scope.functional("batch_norm"), [x, mean, var, weight, bias, training, momentum, eps])


def _mean(call: Called) -> str:
    """The local term of a mean over split dims."""
    shape = call.input_shape()
    over_all = call.operator.target.endswith("default")
    dims = tuple(range(len(shape))) if over_all else dims_argument(call.given(1, "dim"), len(shape))
    dim = None if over_all else one_dim(call.literal(call.given(1, "dim")))
    keepdim = False if over_all else call.given(2, "keepdim", False)
    dtype = dict(call.operator.kwargs).get("dtype")
    options = [f"dtype={call.literal(dtype)}"] if dtype is not None else []
    first = [] if dim is None else [dim, *(["keepdim=True"] if keepdim else [])]
    text = joined(f"{call.receiver}.mean", [*first, *options])
    return _averaged(
        call, text, shape, dims, lambda count: [call.names[0], dim or "None", repr(keepdim), count, *options]
    )


def _averaged(
    call: Called, local: str, shape: tuple[int, ...], dims: Iterable[int], arguments: Callable[[str], list[str]]
) -> str:
    """A mean over local elements as a term of the whole mean: divided by the number of equal pieces, or by the count."""
    kept = tuple(dims)
    cuts = [(dim, call.input_cuts(dim)) for dim in kept]
    split = [(dim, some) for dim, some in cuts if some]
    if not split:
        return local
    if all(_is_even(call, shape[dim], some) for dim, some in split):
        return f"{local} / {math.prod(num_parts(some, call.scope) for _, some in split)}"
    return joined(call.scope.runtime("partial_mean"), arguments(_number_of_elements(call, kept)))


def _number_of_elements(call: Called, dims: Iterable[int], index: int = 0) -> str:
    """How many elements some dims of an input have in all: a number, which follows the size of micro-batches."""
    averaged, shape = set(dims), call.input_shape(index)
    count = math.prod(shape[dim] for dim in averaged)
    if call.scope.num_micro_batches > 1:
        follows = averaged.intersection(call.graph.values[call.operator.inputs[index]].batch_dims)
        return call.scope.batch_literal(count) if follows else str(count)
    call.scope.fixed_batch = True
    return str(count)


def _is_even(call: Called, size: int, cuts: AxisCuts) -> bool:
    return same_everywhere([cuts], lambda place: size_at(size, cuts, place, call.scope), call.scope) is not None


def _elementwise_loss(call: Called) -> str:
    """mse_loss and the like: a mean over split elements is a term of the whole mean."""
    reduction = reduction_of(call.operator)
    options = _loss_options(call)
    function = call.scope.functional({"kl_div": "kl_div"}.get(call.kind, call.kind))
    tensors = list(call.names[:2])
    if reduction == MEAN:
        plain = joined(function, [*tensors, *options])
        each = joined(function, [*tensors, *options, 'reduction="none"'])
        widest = 0 if math.prod(call.input_shape(0)) >= math.prod(call.input_shape(1)) else 1
        shape = call.input_shape(widest)
        if not _axes_cutting(call, range(len(shape)), widest):
            return plain
        if widest:
            count = _number_of_elements(call, range(len(shape)), widest)
            return joined(call.scope.runtime("partial_mean"), [each, "None", "False", count])
        return _averaged(call, plain, shape, range(len(shape)), lambda count: [each, "None", "False", count])
    word = '"sum"' if reduction == SUM else '"none"'
    return joined(function, [*tensors, *options, f"reduction={word}"])


def _loss_options(call: Called) -> list[str]:
    options = []
    names = {"binary_cross_entropy": ("weight",), "binary_cross_entropy_with_logits": ("weight", "pos_weight")}
    for position, name in enumerate(names.get(call.kind, ()), start=2):
        place = place_in_inputs(call.operator, position, name)
        if place is not None:
            options.append(f"{name}={call.names[place]}")
    defaults = {"smooth_l1_loss": ("beta", 1.0), "huber_loss": ("delta", 1.0)}
    if call.kind in defaults:
        name, default = defaults[call.kind]
        if call.given(3, name, default) != default:
            options.append(f"{name}={call.given(3, name, default)!r}")
    if call.kind == "kl_div" and dict(call.operator.kwargs).get("log_target"):
        options.append("log_target=True")
    return options


def ring_attention(call: Called) -> str:
    """Attention whose keys are split along the sequence."""
    shape = call.input_shape(1)
    rows = len(shape) - 2
    options = [call.names[3]] if place_in_inputs(call.operator, 3, "attn_mask") is not None else []
    options.append(f"keys={call.scope.split(shape[rows], call.input_cuts(rows, 1))}")
    if call.given(5, "is_causal", False):
        options.append("is_causal=True")
    if call.given(6, "scale") is not None:
        options.append(f"scale={call.given(6, 'scale')!r}")
    repeats = repeated_heads(call.operator, call.graph)
    heads, cuts = shape[-3], call.input_cuts(len(shape) - 3, 1)
    parts = num_parts(cuts, call.scope)
    if repeats > 1 and all(in_whole_groups(cut or Cut.plain(heads), parts, repeats) for _, cut in cuts):
        options.append(f"repeats={repeats}")
    return joined(call.scope.runtime("ring_attention"), [*call.names[:3], *options])


def _dropout(call: Called) -> str:
    """Each element is dropped by its place in the whole tensor."""
    if not call.given(2, "train") or call.given(1, "p") == 0:
        return call.names[0]
    value = call.graph.values[call.outputs[0]]
    arguments = [
        call.names[0], repr(call.given(1, "p")), "mesh", call.scope.site(call.operator.id), repr(value.shape),
        f'"{words(call.output_layouts[0])}"', *([f"batch_dims={value.batch_dims}"] if value.batch_dims else []),
    ]  # fmt: skip
    return joined(call.scope.runtime("dropout"), arguments)


def _scaled(write: Callable[[Called], str]) -> Callable[[Called], str]:
    """A mean over this micro-batch, as a term of the mean over all of them."""

    def written(call: Called) -> str:
        text = write(call)
        shares = call.term is not None and call.term.kind == "share" and not call.term.inputs
        return f"{text} * {SHARE}" if shares else text

    return written


AXIS_AWARE: dict[str, Callable[[Called], str]] = {
    "aten.embedding.default": _embedding,
    **dict.fromkeys(("aten.cross_entropy_loss.default", FUSED), _scaled(_cross_entropy)),
    **{f"aten.{name}.default": _nll for name in ("nll_loss_nd", "nll_loss", "nll_loss2d")},
    "aten.batch_norm.default": _batch_norm,
    "aten.dropout.default": _dropout,
    "aten.mean.default": _scaled(_mean),
    "aten.mean.dim": _scaled(_mean),
    **{f"aten.{name}.default": _scaled(_elementwise_loss) for name in ELEMENTWISE_LOSSES},
}
