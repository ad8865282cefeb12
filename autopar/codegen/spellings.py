"""How a person writes each operator: the name to call and the parameters, with the defaults that are left out.

``.name(...)`` is a method of the first argument; ``F.`` is ``torch.nn.functional``. Parameters are those of the ATen
schema, in order; ``python:aten`` where the names differ, ``-name`` is never written, ``*name`` is a tuple written out.
``= x`` is the value left out; after ``*`` come keywords.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

INFIX = {
    "aten.add.Tensor": "+", "aten.add.Scalar": "+", "aten.sub.Tensor": "-", "aten.sub.Scalar": "-",
    "aten.mul.Tensor": "*", "aten.mul.Scalar": "*", "aten.div.Tensor": "/", "aten.div.Scalar": "/",
    "aten.multiply.Tensor": "*", "aten.subtract.Tensor": "-", "aten.true_divide.Tensor": "/", "aten.divide.Tensor": "/",
    "aten.pow.Tensor_Scalar": "**", "aten.pow.Tensor_Tensor": "**", "aten.pow.Scalar": "**",
    "aten.matmul.default": "@", "aten.mm.default": "@", "aten.bmm.default": "@", "aten.mv.default": "@",
    "aten.eq.Tensor": "==", "aten.eq.Scalar": "==", "aten.ne.Tensor": "!=", "aten.ne.Scalar": "!=",
    "aten.lt.Tensor": "<", "aten.lt.Scalar": "<", "aten.le.Tensor": "<=", "aten.le.Scalar": "<=",
    "aten.gt.Tensor": ">", "aten.gt.Scalar": ">", "aten.ge.Tensor": ">=", "aten.ge.Scalar": ">=",
    "aten.__and__.Tensor": "&", "aten.__or__.Tensor": "|", "aten.__xor__.Tensor": "^",
    "aten.__and__.Scalar": "&", "aten.__or__.Scalar": "|", "aten.__xor__.Scalar": "^",
    "aten.bitwise_and.Tensor": "&", "aten.bitwise_or.Tensor": "|", "aten.bitwise_xor.Tensor": "^",
    "aten.floor_divide.default": "//", "aten.floor_divide.Scalar": "//",
    "aten.remainder.Tensor": "%", "aten.remainder.Scalar": "%",
}  # fmt: skip
PREFIX = {"aten.neg.default": "-", "aten.bitwise_not.default": "~"}
SAME = ("aten.alias.default", "aten.lift_fresh_copy.default", "aten.lift_fresh.default")

PROPERTIES = {
    "aten.mT.default": "mT",
    "aten.real.default": "real",
    "aten.imag.default": "imag",
}

METHODS = """
abs acos asin atan cos cosh sin sinh tan tanh exp expm1 log log10 log1p log2 sqrt rsqrt square reciprocal erf floor ceil
round trunc sign frac sigmoid isnan isinf isfinite logical_not contiguous detach t ravel conj
"""  # without other arguments
FUNCTIONS = "relu silu mish log_sigmoid:logsigmoid hardswish hardsigmoid relu6 selu"

TABLE = """
aten.clamp.default .clamp(min = None, max = None)
aten.clamp.Tensor .clamp(min = None, max = None)
aten.clamp_min.default .clamp_min(min)
aten.clamp_max.default .clamp_max(max)
aten.gelu.default F.gelu(input, *, approximate = "none")
aten.leaky_relu.default F.leaky_relu(input, negative_slope = 0.01)
aten.elu.default F.elu(input, alpha = 1.0)
aten.softplus.default F.softplus(input, beta = 1, threshold = 20)
aten.hardtanh.default F.hardtanh(input, min_val = -1.0, max_val = 1.0)
aten.glu.default F.glu(input, dim = -1)
aten.dropout.default F.dropout(input, p, training:train)
aten.softmax.int .softmax(dim, dtype = None)
aten.log_softmax.int .log_softmax(dim, dtype = None)
aten._softmax.default .softmax(dim, -half_to_float)
aten._log_softmax.default .log_softmax(dim, -half_to_float)
aten.linear.default F.linear(input, weight, bias = None)
aten.addmm.default torch.addmm(input, mat1, mat2, *, beta = 1, alpha = 1)
aten.baddbmm.default torch.baddbmm(input, batch1, batch2, *, beta = 1, alpha = 1)
aten.dot.default torch.dot(input, tensor)
aten.outer.default torch.outer(input, vec2)
aten.layer_norm.default F.layer_norm(input, normalized_shape, weight = None, bias = None, eps = 1e-05, -cudnn_enable)
aten.rms_norm.default F.rms_norm(input, normalized_shape, weight = None, eps = None)
aten.scaled_dot_product_attention.default F.scaled_dot_product_attention(query, key, value, attn_mask = None, \
dropout_p = 0.0, is_causal = False, *, scale = None, enable_gqa = False)
aten.transpose.int .transpose(dim0, dim1)
aten.permute.default .permute(*dims)
aten.unsqueeze.default .unsqueeze(dim)
aten.flatten.using_ints .flatten(start_dim = 0, end_dim = -1)
aten.movedim.int .movedim(source, destination)
aten.movedim.intlist .movedim(source, destination)
aten.expand_as.default .expand_as(other)
aten.view_as.default .view_as(other)
aten.reshape_as.default .reshape_as(other)
aten.type_as.default .type_as(other)
aten.clone.default .clone(*, memory_format = None)
aten.unbind.int .unbind(dim = 0)
aten.chunk.default .chunk(chunks, dim = 0)
aten.cat.default torch.cat(tensors, dim = 0)
aten.concat.default torch.cat(tensors, dim = 0)
aten.concatenate.default torch.cat(tensors, dim = 0)
aten.stack.default torch.stack(tensors, dim = 0)
aten.pad.default F.pad(input, pad, mode = "constant", value = None)
aten.constant_pad_nd.default F.pad(input, pad, *, value = 0)
aten.roll.default .roll(shifts, dims = ())
aten.flip.default .flip(dims)
aten.diff.default .diff(n = 1, dim = -1, prepend = None, append = None)
aten.tril.default .tril(diagonal = 0)
aten.triu.default .triu(diagonal = 0)
aten.unfold.default .unfold(dimension, size, step)
aten.fft_fft.default torch.fft.fft(input, n = None, dim = -1, norm = None)
aten.fft_ifft.default torch.fft.ifft(input, n = None, dim = -1, norm = None)
aten.fft_rfft.default torch.fft.rfft(input, n = None, dim = -1, norm = None)
aten.fft_irfft.default torch.fft.irfft(input, n = None, dim = -1, norm = None)
aten.fft_hfft.default torch.fft.hfft(input, n = None, dim = -1, norm = None)
aten.fft_ihfft.default torch.fft.ihfft(input, n = None, dim = -1, norm = None)
aten.fft_fft2.default torch.fft.fft2(input, s = None, dim = None, norm = None)
aten.fft_ifft2.default torch.fft.ifft2(input, s = None, dim = None, norm = None)
aten.fft_rfft2.default torch.fft.rfft2(input, s = None, dim = None, norm = None)
aten.fft_irfft2.default torch.fft.irfft2(input, s = None, dim = None, norm = None)
aten.fft_fftn.default torch.fft.fftn(input, s = None, dim = None, norm = None)
aten.fft_ifftn.default torch.fft.ifftn(input, s = None, dim = None, norm = None)
aten.fft_rfftn.default torch.fft.rfftn(input, s = None, dim = None, norm = None)
aten.fft_irfftn.default torch.fft.irfftn(input, s = None, dim = None, norm = None)
aten.fft_fftshift.default torch.fft.fftshift(input, dim = None)
aten.fft_ifftshift.default torch.fft.ifftshift(input, dim = None)
aten.slice_scatter.default .slice_scatter(src, dim = 0, start = None, end = None, step = 1)
aten.select_scatter.default .select_scatter(src, dim, index)
aten.gather.default .gather(dim, index)
aten.index_select.default .index_select(dim, index)
aten.scatter.src .scatter(dim, index, src)
aten.scatter.value .scatter(dim, index, value)
aten.scatter_add.default .scatter_add(dim, index, src)
aten.index_add.default .index_add(dim, index, source, *, alpha = 1)
aten.one_hot.default F.one_hot(input, num_classes = -1)
aten.masked_fill.Scalar .masked_fill(mask, value)
aten.masked_fill.Tensor .masked_fill(mask, value)
aten.where.self torch.where(condition, input, other)
aten.where.ScalarOther torch.where(condition, input, other)
aten.where.ScalarSelf torch.where(condition, input, other)
aten.where.Scalar torch.where(condition, input, other)
aten.maximum.default torch.maximum(input, other)
aten.minimum.default torch.minimum(input, other)
aten.max.other torch.maximum(input, other)
aten.min.other torch.minimum(input, other)
aten.lerp.Scalar torch.lerp(input, end, weight)
aten.lerp.Tensor torch.lerp(input, end, weight)
aten.logical_and.default torch.logical_and(input, other)
aten.logical_or.default torch.logical_or(input, other)
aten.logical_xor.default torch.logical_xor(input, other)
aten.atan2.default torch.atan2(input, other)
aten.polar.default torch.polar(abs, angle)
aten.view_as_real.default torch.view_as_real(input)
aten.sum.default .sum(*, dtype = None)
aten.sum.dim_IntList .sum(dim, *, keepdim = False, dtype = None)
aten.mean.default .mean(*, dtype = None)
aten.mean.dim .mean(dim, *, keepdim = False, dtype = None)
aten.amax.default .amax(dim = (), *, keepdim = False)
aten.amin.default .amin(dim = (), *, keepdim = False)
aten.max.default .max()
aten.min.default .min()
aten.max.dim .max(dim, *, keepdim = False)
aten.min.dim .min(dim, *, keepdim = False)
aten.argmax.default .argmax(dim = None, *, keepdim = False)
aten.argmin.default .argmin(dim = None, *, keepdim = False)
aten.all.default .all()
aten.any.default .any()
aten.all.dim .all(dim, *, keepdim = False)
aten.any.dim .any(dim, *, keepdim = False)
aten.var.correction .var(dim = None, *, correction = 1, keepdim = False)
aten.std.correction .std(dim = None, *, correction = 1, keepdim = False)
aten.var.dim .var(dim, unbiased = True, *, keepdim = False)
aten.std.dim .std(dim, unbiased = True, *, keepdim = False)
aten.logsumexp.default .logsumexp(dim, *, keepdim = False)
aten.cumsum.default .cumsum(dim, *, dtype = None)
aten.cumprod.default .cumprod(dim, *, dtype = None)
aten.topk.default .topk(k, dim = -1, largest = True, sorted = True)
aten.sort.default .sort(dim = -1, descending = False)
aten.argsort.default .argsort(dim = -1, descending = False)
aten.linalg_vector_norm.default torch.linalg.vector_norm(x, ord = 2, dim = None, *, keepdim = False, dtype = None)
aten.max_pool1d.default F.max_pool1d(input, kernel_size, stride = (), padding = 0, dilation = 1, ceil_mode = False)
aten.max_pool2d.default F.max_pool2d(input, kernel_size, stride = (), padding = 0, dilation = 1, ceil_mode = False)
aten.max_pool3d.default F.max_pool3d(input, kernel_size, stride = (), padding = 0, dilation = 1, ceil_mode = False)
aten.avg_pool1d.default F.avg_pool1d(input, kernel_size, stride = (), padding = 0, ceil_mode = False, \
count_include_pad = True)
aten.avg_pool2d.default F.avg_pool2d(input, kernel_size, stride = (), padding = 0, ceil_mode = False, \
count_include_pad = True, divisor_override = None)
aten.adaptive_avg_pool1d.default F.adaptive_avg_pool1d(input, output_size)
aten.adaptive_avg_pool2d.default F.adaptive_avg_pool2d(input, output_size)
aten.adaptive_avg_pool3d.default F.adaptive_avg_pool3d(input, output_size)
aten.broadcast_tensors.default torch.broadcast_tensors(*tensors)
aten.zeros_like.default torch.zeros_like(input, *, dtype = None, -layout, -device, -pin_memory, -memory_format)
aten.ones_like.default torch.ones_like(input, *, dtype = None, -layout, -device, -pin_memory, -memory_format)
aten.full_like.default torch.full_like(input, fill_value, *, dtype = None, -layout, -device, -pin_memory, -memory_format)
aten.empty_like.default torch.empty_like(input, *, dtype = None, -layout, -device, -pin_memory, -memory_format)
aten.arange.default torch.arange(end, *, dtype = None, -layout, device = None, -pin_memory)
aten.arange.start torch.arange(start, end, *, dtype = None, -layout, device = None, -pin_memory)
aten.arange.start_step torch.arange(start, end, step = 1, *, dtype = None, -layout, device = None, -pin_memory)
"""


@dataclass(frozen=True)
class Parameter:
    """``name`` in Python, ``source`` in the schema; ``default`` as text, left out where it is given."""

    name: str
    source: str
    default: str | None
    written: bool = True
    keyword_only: bool = False
    unpacked: bool = False


@dataclass(frozen=True)
class Spelling:
    """``callee`` is a function, or a method (``.view``) of the first argument."""

    callee: str
    parameters: tuple[Parameter, ...]

    @property
    def is_method(self) -> bool:
        return self.callee.startswith(".")


def _parsed(line: str) -> tuple[str, Spelling]:
    target, rest = line.split(" ", 1)
    callee, inside = rest.rstrip(")").split("(", 1)
    parameters = []
    keyword_only = False
    for word in inside.replace("()", "<>").split(", "):
        if word == "*":
            keyword_only = True
        elif word:
            name, _, default = word.partition(" = ")
            python, _, source = name.lstrip("-*").partition(":")
            value = default.replace("<>", "()") or None
            mark = name[0]
            parameters.append(Parameter(python, source or python, value, mark != "-", keyword_only, mark == "*"))
    return target, Spelling(callee, tuple(parameters))


@cache
def spellings() -> dict[str, Spelling]:
    """All of the table, by target."""
    found = dict(_parsed(line) for line in TABLE.strip().splitlines())
    for name in METHODS.split():
        found[f"aten.{name}.default"] = Spelling(f".{name}", ())
    for entry in FUNCTIONS.split():
        name, _, python = entry.partition(":")
        parameter = Parameter("input", "input", None)
        found[f"aten.{name}.default"] = Spelling(f"F.{python or name}", (parameter,))
    return found
