"""Small concrete calls of every operator that has a rule: what the property test of the rules runs.

``T`` is a float tensor with gradient, ``N`` one without, ``I`` integers below a bound, ``B`` booleans. Sizes are small and
uneven, so that pieces differ.
"""

from __future__ import annotations

from typing import Any

from autopar.graph import DeviceArgument, TorchName
from autopar.strategies import elementwise
from autopar.strategies.loss import FUSED
from autopar.strategies.registry import RULES
from tests.properties.mixture_samples import mixtures
from tests.properties.sample import F32, B, C, Given, I, N, Sample, T

FLOAT = TorchName("torch.float64")
DEVICE = DeviceArgument()
NESTED = ((2, 2), (2, 3))
SQUARE = ((2, 2),)
_found: list[Sample] = []


def _add(names: str, *args: Any, meshes: tuple[tuple[int, ...], ...] = (), **kwargs: Any) -> None:
    """A sample for each of several operators, whose names are without the library."""
    for name in names.split():
        target = f"aten.{name}" if "." in name else f"aten.{name}.default"
        if target in RULES:
            _found.append(Sample(target, args, tuple(kwargs.items()), meshes))
        else:
            raise AssertionError(f"a sample for {target}, which has no rule")


def _pointwise() -> None:
    special = {
        "acosh": (T(5, 7, low=1.2, high=1.8),), "clamp": (T(5, 7), 0.3, 0.6), "clamp_max": (T(5, 7), 0.5),
        "clamp_min": (T(5, 7), 0.5), "threshold": (T(5, 7), 0.5, 0.1),
    }  # fmt: skip
    integers = {"bitwise_not": (I(9, 5, 7),), "logical_not": (B(5, 7),)}
    for name in (*elementwise.KEEPS_INPUT, *elementwise.KEEPS_OUTPUT, *elementwise.KEEPS_NOTHING, *elementwise.LINEAR):
        if name in ("real", "imag", "conj"):
            continue
        _add(f"{name}.default", *special.get(name, integers.get(name, (T(5, 7),))))
    _add("gelu", T(5, 7), approximate="tanh")
    _add("conj real", T(5, 7))
    _add("imag view_as_real", Given((5, 7), "complex128", 0.2, 0.8, gradient=True))
    for name in (*elementwise.COMPARISONS,):
        _add(f"{name}.Tensor", N(5, 7), N(7))
        _add(f"{name}.Scalar", N(5, 7), 0.5)
    for name in elementwise.LOGICAL:
        if "shift" in name:
            _add(name, I(9, 5, 7), 2 if "calar" in name else I(3, 7))
        elif name == "isclose.default":
            _add(name, N(5, 7), N(7))
        else:
            _add(name, I(9, 5, 7), 5 if "Scalar" in name else I(9, 7))
    for name in elementwise.STEPWISE:
        mode = {"rounding_mode": "floor"} if "mode" in name else {}
        given = N if name.startswith(("heaviside", "nextafter", "floor_divide")) else T
        _add(name, given(5, 7), 0.3 if "calar" in name else given(7), **mode)
    for name in elementwise.REMAINDERS:
        _add(name, T(5, 7), T(7))
    for name in elementwise.ROUNDED_QUOTIENTS:
        _add(name, T(5, 7), T(7), rounding_mode="floor")
        _add(name, T(5, 7), N(7), rounding_mode="trunc")
        _add(name, T(5, 7), 0.3, rounding_mode="floor")
        _add(name, I(9, 5, 7), 4, rounding_mode="floor")
    for name in elementwise.TWO_KEPT:
        _add(name, T(5, 7), 3.0 if "calar" in name.split(".")[1] else T(7))
    for names in (elementwise.SUMS, elementwise.PRODUCTS, elementwise.QUOTIENTS):
        for name in names:
            _add(f"{name}.Tensor", T(5, 7), T(5, 1))
            _add(f"{name}.Tensor", T(3, 5, 7), 2.5)
            _add(f"{name}.Scalar", T(5, 7), 2)
    _add("add.Tensor sub.Tensor", T(5, 7), T(7), alpha=2)
    _add("add.Tensor mul.Tensor", T(5, 6, 7), T(6, 7), meshes=NESTED)
    _add("add.Tensor", I(9, 5, 7), -1)
    _add("pow.Scalar", 2, T(5, 7))
    _add("pow.Scalar", -2, N(5, 7, low=1.0, high=1.0))
    _add("pow.Tensor_Tensor float_power.Tensor_Tensor", T(5, 7), T(7))
    _add("rsub.Scalar", T(5, 7), 1)
    _add("rsub.Tensor", T(5, 7), T(5, 7))
    _add("rsub.Tensor", T(5, 7), T(5, 7), alpha=2)
    _add("where.self", B(5, 1), T(5, 7), T(7))
    _add("where.ScalarOther", B(5, 7), T(5, 7), float("-inf"))
    _add("where.ScalarOther", B(5, 7), T(5, 7), 0)
    _add("where.ScalarSelf", B(5, 7), 0.0, T(5, 7))
    _add("where.Scalar", B(5, 7), 1.0, 0.0)
    _add("masked_fill.Scalar", T(5, 7), B(5, 1), 0)
    _add("masked_fill.Scalar", T(5, 7), B(7), -1e9)
    _add("masked_fill.Tensor", T(5, 7), B(5, 7), T())
    _add("dropout", T(5, 7), 0.0, True)
    _add("dropout feature_dropout alpha_dropout", T(5, 7), 0.5, False)
    _add("dropout feature_dropout alpha_dropout", T(5, 7), 0.5, True)
    _add("bernoulli rand_like randn_like", N(5, 7))
    _add("bernoulli.p", N(5, 7), 0.3)
    _add("copy", N(5, 7), N(7))
    _add("copy", N(5, 7), Given((5, 7), "float32", 0.2, 0.8))
    _add("fill.Scalar", N(5, 7), 2.0)
    _add("fill.Tensor", N(5, 7), T())
    _add("lerp.Scalar", T(5, 7), T(5, 7), 0.3)
    _add("lerp.Tensor", T(5, 7), T(5, 7), T(7))
    _add("addcmul addcdiv", T(5, 7), T(5, 7), T(7), value=0.5)
    _add("round.decimals", T(5, 7), decimals=1)
    _add("log_sigmoid", T(5, 7))
    _add("polar hypot copysign.Tensor", T(5, 7), T(7))
    _add("view_as_complex", T(5, 7, 2))
    _add("to.dtype", T(5, 7), TorchName("torch.float32"))
    _add("to.dtype", T(5, 7), FLOAT)
    _add("to.dtype", I(9, 5, 7), FLOAT)
    _add("to.dtype_layout", I(9, 5, 7), dtype=FLOAT, layout=TorchName("torch.strided"), device=DEVICE)
    _add("to.device", T(5, 7), DEVICE, TorchName("torch.float32"))
    _add("_to_copy", T(5, 7), dtype=TorchName("torch.float32"))
    _add("to.other type_as", F32(5, 7), N(5, 7))
    _add("to.other type_as", F32(5, 7), N(3))


def _views() -> None:
    _add("view reshape _unsafe_view", T(6, 5, 8), (30, 8), meshes=NESTED)
    _add("view reshape", T(6, 5, 8), (-1, 8))
    _add("view", T(30, 8), (6, 5, -1, 4))
    _add("view", T(5, 12), (5, 3, 4), meshes=NESTED)
    _add("view", T(5, 3, 2, 2), (5, 12))
    _add("view", T(5, 35), (5, 7, 5))
    _add("view", T(2, 3, 50), (2, 3, 25, 2), meshes=((2, 3),))
    _add("view", T(4, 6), (6, 4))
    _add("view", T(2, 3, 4), (4, 6))
    _add("view", T(1, 6), (6,))
    _add("reshape", T(6, 1, 4), (2, 3, 4, 1))
    _add("flatten.using_ints", T(3, 5, 6, 2), 1, 2)
    _add("unflatten.int", T(5, 12), -1, (3, 4))
    _add("view_as reshape_as", T(5, 12), N(5, 3, 4))
    _add("ravel", T(5, 6))
    _add("transpose.int swapaxes swapdims", T(5, 6, 7), 1, -1)
    _add("t numpy_T mT adjoint matrix_H", T(5, 6))
    _add("numpy_T", T(5, 6, 3))
    _add("permute", T(5, 6, 7), (2, 0, 1))
    _add("movedim.int moveaxis.int", T(5, 6, 7), 0, -1)
    _add("movedim.intlist moveaxis.intlist", T(5, 6, 7), (0, 1), (2, 0))
    _add("unsqueeze", T(5, 6), -1)
    _add("squeeze", T(5, 1, 6))
    _add("squeeze.dim", T(5, 1, 6), 1)
    _add("squeeze.dim", T(5, 3, 6), 1)
    _add("squeeze.dims", T(5, 1, 6, 1), (1, 3))
    _add("expand broadcast_to", T(5, 1, 6), (5, 7, 6), meshes=NESTED)
    _add("expand", T(1, 6), (5, 4, -1))
    _add("expand", T(6), (5, 6))
    _add("expand_as", T(5, 1), N(5, 7))
    _add("broadcast_tensors", (T(5, 1), T(7)))
    _add("repeat tile", T(1, 5), (7, 2))
    _add("repeat", T(5, 6), (3, 1, 2))
    _add("repeat_interleave.self_int", T(5, 3, 2), 6, 1)
    _add("repeat_interleave.self_int", T(5, 6, 2), 3, -2)
    _add("repeat_interleave.self_int", T(5), 7)
    _add("meshgrid.indexing", (T(5), T(7)), indexing="ij")
    _add("meshgrid", (T(5), T(7)))


def _contractions() -> None:
    _add("linear", T(5, 6, 7), T(8, 7), T(8), meshes=NESTED)
    _add("linear", T(5, 6, 7), T(8, 7))
    _add("linear", T(7), T(8, 7), T(8))
    _add("linear", I(9, 5, 7), I(9, 6, 7))
    _add("matmul", T(3, 5, 6, 7), T(3, 5, 7, 4), meshes=NESTED)
    _add("matmul", T(5, 6, 7), T(7, 4))
    _add("matmul", T(5, 6), T(6, 4))
    _add("matmul", T(6), T(6, 4))
    _add("matmul", T(5, 6), T(6))
    _add("matmul", T(6), T(6))
    _add("matmul", T(3, 1, 6, 7), T(5, 7, 4))
    _add("matmul", T(5, 6, 7), T(7))
    _add("mm", T(5, 6), T(6, 7))
    _add("bmm", T(3, 5, 6), T(3, 6, 7))
    _add("mv", T(5, 6), T(6))
    _add("dot", T(5), T(5))
    _add("outer", T(5), T(6))
    _add("addmm", T(7), T(5, 6), T(6, 7), meshes=NESTED)
    _add("addmm", T(5, 1), T(5, 6), T(6, 7), beta=0.5, alpha=2.0)
    _add("baddbmm", T(3, 5, 7), T(3, 5, 6), T(3, 6, 7), beta=1, alpha=0.5)
    _add("baddbmm", T(1, 1, 7), T(3, 5, 6), T(3, 6, 7))
    _add("einsum", "bsd,edf->besf", (T(2, 3, 5), T(4, 5, 6)), meshes=NESTED)
    _add("einsum", "besd,bse->bsd", (T(2, 4, 3, 5), T(2, 3, 4)))
    _add("einsum", "...qd,...kd->...qk", (T(2, 5, 3, 4), T(2, 5, 6, 4)))
    _add("einsum", "ij,jk,kl", (T(3, 5), T(5, 4), T(4, 3)))
    _add("einsum", "ii->i", (T(5, 5),))
    _add("bilinear", T(5, 3), T(5, 4), T(6, 3, 4), T(6))
    _add("conv1d", T(5, 6, 9), T(8, 6, 3), T(8), (2,), (1,))
    _add("conv2d", T(3, 4, 6, 6), T(5, 4, 3, 3), None, (1, 1), (1, 1), meshes=NESTED)
    _add("conv2d", T(3, 6, 5, 5), T(9, 2, 3, 3), T(9), (2, 2), (1, 1), (1, 1), 3)
    _add("conv2d", T(3, 5, 5, 5), T(5, 1, 3, 3), T(5), (1, 1), (1, 1), (1, 1), 5)
    _add("conv2d", T(3, 8, 5, 5), T(8, 4, 3, 3), None, (1, 1), (1, 1), (1, 1), 2)
    _add("conv3d", T(2, 3, 4, 4, 4), T(4, 3, 2, 2, 2), T(4))
    _add("conv1d.padding", T(5, 6, 9), T(8, 6, 3), T(8), (1,), "same")
    _add("conv2d.padding", T(3, 4, 6, 6), T(5, 4, 3, 3), None, (1, 1), "same")
    _add("conv3d.padding", T(2, 3, 4, 4, 4), T(4, 3, 2, 2, 2), T(4), (1, 1, 1), "valid")
    _add("conv_transpose1d", T(3, 4, 5), T(4, 6, 3), T(6), (2,))
    _add("conv_transpose2d.input", T(3, 4, 5, 5), T(4, 6, 2, 2), T(6), (2, 2))
    _add("conv_transpose3d.input", T(2, 3, 3, 3, 3), T(3, 4, 2, 2, 2))


def _normalizations() -> None:
    _add("layer_norm", T(5, 6, 7), (7,), T(7), T(7), 1e-5, False, meshes=NESTED)
    _add("layer_norm", T(5, 6, 7), (6, 7), None, None, 1e-6)
    _add("rms_norm", T(5, 6, 7), (7,), T(7), 1e-6)
    _add("group_norm", T(3, 12, 5), 6, T(12), T(12), 1e-5, True, meshes=NESTED)
    _add("group_norm", T(3, 10, 5), 5, T(10), T(10))
    running = (N(6), N(6))
    _add("batch_norm", T(5, 6, 3), T(6), T(6), *running, True, 0.1, 1e-5, True, meshes=NESTED)
    _add("batch_norm", T(7, 6), T(6), T(6), *running, True, 0.1, 1e-5, True)
    _add("batch_norm", T(5, 6, 3), None, None, None, None, True, 0.1, 1e-5, True)
    _add("batch_norm", T(5, 6, 3), T(6), T(6), *running, False, 0.1, 1e-5, True)
    _add("instance_norm", T(5, 6, 7), T(6), T(6), None, None, True, 0.1, 1e-5, True)
    _add("softmax.int log_softmax.int", T(5, 6, 7), -1)
    _add("softmax.int", T(5, 6), 0, FLOAT)
    _add("_softmax _log_softmax", T(5, 6, 7), 1, False)


def _attention() -> None:
    qkv = (T(3, 5, 6, 4), T(3, 5, 7, 4), T(3, 5, 7, 4))
    _add("scaled_dot_product_attention", *qkv, meshes=NESTED)
    _add("scaled_dot_product_attention", *qkv, N(3, 1, 6, 7), scale=0.3)
    _add("scaled_dot_product_attention", *qkv, T(1, 5, 6, 7))
    _add("scaled_dot_product_attention", *qkv, B(6, 7))
    _add("scaled_dot_product_attention", *[T(3, 5, 6, 4)] * 3, None, 0.0, True)
    _add("scaled_dot_product_attention", *[T(3, 5, 6, 4)] * 3, None, 0.1, True)
    grouped = (T(2, 6, 5, 4), T(2, 2, 5, 4), T(2, 2, 5, 4))
    _add("scaled_dot_product_attention", *grouped, None, 0.0, True, scale=0.5, enable_gqa=True, meshes=((2, 3),))
    _add("scaled_dot_product_attention", T(2, 5, 3, 4), T(2, 1, 5, 4), T(2, 1, 5, 4), enable_gqa=True)
    _add("scaled_dot_product_attention", T(5, 6, 4), T(5, 7, 4), T(5, 7, 4))
    _ring_attention()


def _ring_attention() -> None:
    """Queries and keys split together: masks of every kind, uneven pieces, more dims, values of another width."""
    qkv = (T(2, 4, 6, 4), T(2, 4, 6, 4), T(2, 4, 6, 5))
    _add("scaled_dot_product_attention", *qkv, meshes=((4,), (2, 3)))
    _add("scaled_dot_product_attention", *qkv, None, 0.0, True, scale=0.7, meshes=((4,), (5,)))
    _add("scaled_dot_product_attention", *qkv, T(2, 1, 6, 6))
    _add("scaled_dot_product_attention", *qkv, B(1, 1, 1, 6))
    _add("scaled_dot_product_attention", *qkv, B(6, 1))
    _add("scaled_dot_product_attention", *qkv, N(1, 6))
    _add("scaled_dot_product_attention", *[T(3, 7, 4)] * 3, None, 0.0, True, meshes=((4,), (2, 2)))
    _add("scaled_dot_product_attention", *[T(2, 2, 3, 5, 4)] * 3, B(2, 1, 5, 5))
    grouped = (T(2, 6, 5, 4), T(2, 2, 5, 4), T(2, 2, 5, 4))
    _add("scaled_dot_product_attention", *grouped, N(2, 6, 5, 5), enable_gqa=True)


def _losses() -> None:
    for reduction in (0, 1, 2):
        _add("cross_entropy_loss", T(10, 7), I(7, 10), None, reduction)
        _add("nll_loss_nd nll_loss", T(10, 7), I(7, 10), None, reduction, 3)
        _add("mse_loss l1_loss smooth_l1_loss huber_loss", T(5, 7), T(5, 7), reduction)
        _add("soft_margin_loss", T(5, 7), N(5, 7), reduction)
        _add("kl_div", T(5, 7), N(5, 7), reduction)
        _add("binary_cross_entropy", T(5, 7), N(5, 7), None, reduction)
        _add("binary_cross_entropy_with_logits", T(5, 7), N(5, 7), None, N(7), reduction)
    _add("cross_entropy_loss", T(10, 7), I(7, 10), meshes=NESTED)
    _add("cross_entropy_loss", T(10, 7), I(7, 10), N(7), 1, 3, 0.1)
    _add("cross_entropy_loss", T(5, 7, 6), I(7, 5, 6))
    _add("cross_entropy_loss", T(7), I(7))
    _add("nll_loss_nd nll_loss2d", T(3, 7, 4, 5), I(7, 3, 4, 5), N(7), 2)
    _linear_losses()
    _add("mse_loss", T(6, 8), T(6, 8), meshes=NESTED)
    _add("huber_loss", T(5, 7), T(5, 7), 1, 0.3)
    _add("kl_div", T(5, 7), N(5, 7), 1, log_target=True)


def _linear_losses() -> None:
    """Rows of a width smaller than the number of classes, which makes several chunks."""
    for x, weight, bias, labels, classes, *numbers in (
        (T(10, 3), T(7, 3), None, I(7, 10), None, 1, -100, 0.0),
        (T(10, 3), T(8, 3), T(8), I(8, 10), None, 2, 3, 0.0),
        (T(4, 5, 3), T(8, 3), None, I(8, 4, 5), N(8), 1, 2, 0.1),
        (T(4, 5, 3), T(8, 3), T(8), I(8, 4, 5), None, 2, -100, 0.2),
        (T(10, 3), N(7, 3), None, I(7, 10), None, 1, -100, 0.0),
        (T(10, 3), T(7, 3), None, I(7, 10), None, 1, -100, 0.0, TorchName("torch.float32")),
    ):
        dtype = numbers[3] if len(numbers) > 3 else None
        args = (x, weight, bias, labels, classes, *numbers[:3], dtype)
        _found.append(Sample(FUSED, args, (), NESTED[:1] if classes is None else ()))


def _indexing() -> None:
    _add("embedding", T(11, 6), I(11, 5, 7), meshes=NESTED)
    _add("embedding", T(11, 6), I(11, 5, 7), 3)
    _add("embedding", T(11, 6), I(11, 5), -1, True)
    _add("index.Tensor", T(5, 6, 7), (I(5, 4),))
    _add("index.Tensor", T(5, 6, 7), (None, I(6, 4, 3)))
    _add("index.Tensor", T(5, 6, 7), (I(5, 4, 1), I(6, 3)))
    _add("index.Tensor", T(5, 6, 7), (I(5, 4), None, I(7, 4)))
    _add("index_put", T(5, 6, 7), (I(5, 4),), T(4, 6, 7), True)
    _add("index_put", T(5, 6, 7), (None, I(6, 4)), T(4, 7), True)
    _add("index_select", T(5, 6, 7), 1, I(6, 4))
    _add("gather", T(5, 6, 7), 1, I(6, 5, 3, 7))
    _add("gather", T(5, 6, 7), -1, I(7, 4, 6, 5))
    _add("scatter.src scatter_add", T(5, 6), 1, I(1, 5, 1), T(5, 1))
    _add("scatter.src scatter_add", N(5, 6), 0, I(1, 1, 6), N(3, 6))
    _add("scatter.value", T(5, 6), -1, I(6, 5, 2), 0)
    _add("scatter.value", T(5, 6), -1, I(6, 5, 2), 1.5)
    _add("index_add", T(5, 6), 0, I(5, 4), T(4, 6), alpha=2)
    _add("index_copy", T(5, 6), 0, I(1, 1), T(1, 6))
    _add("one_hot", I(4, 5, 7), 4)


def _pieces() -> None:
    _add("split.Tensor", T(5, 12), 4, -1, meshes=NESTED)
    _add("split.Tensor", T(5, 30, 2), 10, 1)
    _add("split.Tensor", T(2, 3, 150), 50, 2)
    _add("split.Tensor", T(7, 5), 3)
    _add("split.sizes", T(5, 16), (8, 4, 4), 1)
    _add("split_with_sizes", T(5, 20), (12, 4, 4), -1, meshes=NESTED)
    _add("chunk", T(5, 14), 2, 1)
    _add("chunk", T(5, 7), 3, -1)
    _add("chunk", T(5, 7), 1, -1)
    _add("slice.Tensor", T(5, 7), 1, 0, 3)
    _add("slice.Tensor", T(5, 12), 1, 6, 9223372036854775807)
    _add("slice.Tensor", T(5, 12), 1, 4, 8)
    _add("slice.Tensor", T(5, 20), -1, 10, 15)
    _add("slice.Tensor", T(3, 5, 12), 2, 0, -1)
    _add("slice.Tensor", T(5, 7), 0, 0, 9223372036854775807)
    _add("slice.Tensor", T(5, 7), 1, 1, 7, 2)
    _add("slice.Tensor", T(5, 7), 1, -3)
    _add("narrow", T(5, 12), 1, 6, 6)
    _add("narrow", T(5, 12), -1, -8, 4)
    _add("select.int", T(5, 6, 7), 1, 2)
    _add("select.int", T(5, 6, 7), -1, -1)
    _add("unbind.int", T(5, 3, 7), 1)
    _add("cat concat concatenate", (T(5, 6), T(5, 6)), 1, meshes=NESTED)
    _add("cat", (T(5, 8), T(5, 4)), -1)
    _add("cat", (T(3, 5), T(4, 5)), 0)
    _add("cat", (T(5, 6),), 1)
    _add("stack", (T(5, 6), T(5, 6), T(5, 6)), 1)
    _add("pad", T(5, 7), (1, 2))
    _add("pad", T(3, 5, 7), (0, 0, 1, 1), "constant", 1.5)
    _add("pad", T(3, 5, 7), (1, 1), "reflect")
    _add("constant_pad_nd", T(5, 7), (1, 2), 0.0)
    _add("roll", T(5, 7), (2,), (1,))
    _add("roll", T(5, 7), (2,))
    _add("flip", T(5, 7), (0,))
    _add("diff", T(5, 7), 1, -1, T(5, 1))
    _add("diff", T(5, 7))
    _add("tril triu", T(3, 5, 6), 1)
    _add("slice_scatter", T(5, 7), T(5, 3), 1, 2, 5)
    _add("select_scatter", T(5, 7), T(5), 1, 2)
    _add("unfold", T(5, 9), 1, 3, 2)


def _reductions() -> None:
    _add("sum mean", T(5, 7))
    _add("sum.dim_IntList mean.dim", T(5, 6, 7), (0, -1), meshes=NESTED)
    _add("sum.dim_IntList mean.dim", T(5, 6, 7), (1,), True, dtype=FLOAT)
    _add("sum.dim_IntList mean.dim", T(5, 6), None)
    _add("mean.dim", T(6, 6), (0, 1))
    _add("sum", I(9, 5, 7))
    _add("sum.dim_IntList", B(5, 7), (1,))
    _add("amax amin logsumexp", T(5, 6, 7), (1,), True)
    _add("max min all any count_nonzero", N(5, 7))
    _add("max min", T(5, 7))
    _add("max.dim min.dim median.dim", T(5, 6, 7), 1)
    _add("max.dim", T(5, 6), -1, True)
    _add("argmax argmin", N(5, 7), -1)
    _add("argmax argmin", N(5, 7))
    _add("all.dim any.dim", B(5, 7), 1)
    _add("all.dims any.dims", B(5, 7), (1,))
    _add("var std prod", T(5, 7))
    _add("var.dim std.dim var_mean.dim", T(5, 7), (1,))
    _add("var.correction std.correction var_mean.correction", T(5, 7), (1,), correction=0, keepdim=True)
    _add("prod.dim_int", T(5, 7), 1)
    _add("linalg_vector_norm", T(5, 7), 2, (-1,), True)
    _add("norm.Scalar", T(5, 7), 2)
    _add("norm.ScalarOpt_dim", T(5, 7), 2, (1,))
    _add("cumsum cumprod logcumsumexp", T(5, 7), -1)
    _add("topk", T(5, 7), 3)
    _add("topk", T(5, 6, 7), 2, 1)
    _add("sort argsort", T(5, 7), 0)
    _add("sort.stable argsort.stable", T(5, 7), stable=True, dim=0)
    _add("glu", T(5, 8))


def _creation() -> None:
    _add("zeros ones", (5, 7), dtype=FLOAT, device=DEVICE)
    _add("full", (5, 7), 2.5, device=DEVICE)
    _add("empty.memory_format", (5, 7), device=DEVICE)
    _add("zeros_like ones_like empty_like", T(5, 7), pin_memory=False)
    _add("full_like", N(5, 7), 1.5)
    _add("new_zeros new_ones new_empty", N(5, 3), (5, 7))
    _add("new_zeros", N(5, 7), (5, 7))
    _add("new_full", N(5, 3), (7,), 2.5)
    _add("arange", 7, device=DEVICE)
    _add("arange.start", 2, 7, dtype=FLOAT, device=DEVICE)
    _add("arange.start_step", 0, 7, 2, device=DEVICE)
    _add("eye", 5, device=DEVICE)
    _add("eye.m", 5, 7, device=DEVICE)
    _add("linspace", 0.0, 1.0, 7, device=DEVICE)
    _add("scalar_tensor", 2.5, device=DEVICE)
    _add("rand randn", (5, 7), device=DEVICE)
    _add("randint", 9, (5, 7), device=DEVICE)
    _add("randint.low", 2, 9, (5, 7), device=DEVICE)
    _add("randperm", 7, device=DEVICE)
    _add("normal_functional", N(5, 7))


def _spectral() -> None:
    """Fourier transforms; a part of a spectrum put into zeros."""
    _add("fft_fft fft_ifft fft_rfft fft_hfft fft_ihfft fft_irfft", T(3, 5, 8))
    _add("fft_rfft", T(3, 5, 8), 6, 1, "ortho")
    _add("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2", T(4, 3, 5, 8), meshes=NESTED)
    _add("fft_irfft2", C(3, 5, 4), (5, 6))
    _add("fft_fftn fft_ifftn fft_rfftn fft_irfftn", T(3, 5, 8), (4, 6))
    _add("fft_fftn", C(3, 5, 4), None, (0, 2))
    _add("fft_fftshift fft_ifftshift", T(3, 5, 8), (1,))
    _add("slice_scatter", C(3, 5, 4, gradient=False), C(3, 5, 2, gradient=False), -1, 1, 3)
    _add("select_scatter", C(3, 5, 4, gradient=False), C(3, 4, gradient=False), 1, 2)
    _add("einsum", "bixy,ioxy->boxy", (C(2, 3, 4, 5), C(3, 2, 4, 5)))


def _space() -> None:
    """Windows over split space: halos on both sides and on one, wider than one element, with strides and dilations."""
    _add("conv1d", T(2, 3, 14), T(4, 3, 7), T(4), (2,), (3,))
    _add("conv1d", N(2, 3, 13), T(4, 3, 3), T(4), (1,), (2,), (2,))
    _add("conv1d", T(2, 3, 12), T(4, 3, 1), None, (2,))
    _add("conv1d.padding", T(2, 3, 11), T(3, 1, 5), T(3), (1,), "same", (2,), 3)
    _add("conv1d.padding", T(2, 3, 11), T(4, 3, 4), T(4), (1,), "same")
    _add("conv2d", T(1, 2, 10, 8), T(3, 2, 3, 5), T(3), (2, 1), (1, 2), meshes=SQUARE)
    _add("conv2d.padding", T(1, 2, 7, 6), T(3, 2, 3, 5), None, (1, 1), "same")
    _add("conv3d", T(1, 2, 8, 4, 6), T(2, 2, 3, 3, 3), T(2), (2, 1, 2), (1, 1, 1))
    _add("conv_transpose1d", T(2, 3, 7), T(3, 4, 4), T(4), (2,), (1,))
    _add("conv_transpose1d", T(2, 3, 7), T(3, 4, 3), T(4), (2,), (1,), (1,))
    _add("conv_transpose1d", T(2, 3, 8), T(3, 4, 5), None, (1,), (4,), (0,), 1, (2,))
    _add("conv_transpose2d.input", T(1, 2, 6, 5), T(2, 3, 4, 2), T(3), (2, 2), (1, 0), meshes=SQUARE)
    _add("conv_transpose3d.input", T(1, 2, 4, 5, 3), T(2, 2, 2, 4, 2), T(2), (2, 2, 2), (0, 1, 0))
    _add("max_pool1d avg_pool1d", T(2, 3, 14), (3,), (2,), (1,))
    _add("max_pool1d", T(2, 3, 14), (3,), (2,), (1,), 1, True)
    _add("max_pool1d", T(2, 3, 13), (3,), (1,), (1,))
    _add("max_pool1d", T(2, 3, 12), (3,), (2,), (0,), 1, True)
    _add("avg_pool1d", T(2, 3, 14), (4,), (2,), (1,), False, False)
    _add("max_pool2d avg_pool2d", T(1, 2, 8, 6), (3, 2), (2, 2), (1, 0), meshes=SQUARE)
    _add("max_pool3d avg_pool3d", T(1, 2, 6, 4, 4), (3, 2, 2), (2, 2, 2), (1, 0, 0))
    _add("adaptive_avg_pool2d", T(2, 3, 7, 5), (1, 1), meshes=SQUARE)
    _add("adaptive_avg_pool2d adaptive_max_pool2d", T(2, 3, 10, 5), (5, 1))
    _add("upsample_nearest1d.vec", T(2, 3, 7), None, (3.0,))
    _add("upsample_nearest2d", T(1, 2, 6, 5), (18, 8), None, 1.7)
    _add("upsample_linear1d.vec", T(2, 3, 7), None, False, (3.0,))
    _add("upsample_linear1d", T(2, 3, 7), (13,), True)
    _add("upsample_bilinear2d.vec", T(1, 2, 6, 5), None, False, (2.0, 1.7), meshes=SQUARE)
    _add("upsample_bicubic2d", T(1, 2, 6, 6), (12, 18), False, meshes=SQUARE)
    _add("upsample_trilinear3d.vec", T(1, 2, 4, 5, 4), None, False, (2.0, 2.0, 1.0))
    _add("group_norm", T(2, 6, 7, 4), 3, T(6), T(6), meshes=SQUARE)
    _add("batch_norm", T(2, 3, 7, 5), T(3), T(3), N(3), N(3), True, 0.1, 1e-5, True, meshes=SQUARE)
    _add("instance_norm", T(2, 3, 7, 5), T(3), T(3), None, None, True, 0.1, 1e-5, True, meshes=SQUARE)


def _pooling() -> None:
    _add("max_pool1d avg_pool1d", T(3, 5, 8), (2,))
    _add("max_pool2d avg_pool2d", T(3, 5, 6, 6), (3, 3), (2, 2), (1, 1))
    _add("max_pool3d avg_pool3d", T(2, 3, 4, 4, 4), (2, 2, 2))
    _add("adaptive_avg_pool1d adaptive_max_pool1d", T(3, 5, 8), (2,))
    _add("adaptive_avg_pool2d adaptive_max_pool2d", T(3, 5, 6, 6), (2, 2))
    _add("adaptive_avg_pool3d adaptive_max_pool3d", T(2, 3, 4, 4, 4), (2, 2, 2))
    _add("upsample_nearest1d.vec", T(3, 5, 6), (9,), None)
    _add("upsample_nearest2d.vec", T(3, 5, 4, 4), (8, 8), None)
    _add("upsample_nearest3d.vec", T(2, 3, 3, 3, 3), (6, 6, 6), None)
    _add("upsample_bilinear2d.vec upsample_bicubic2d.vec", T(3, 5, 4, 4), (8, 8), False, None)
    _add("upsample_linear1d.vec", T(3, 5, 6), (9,), False, None)
    _add("upsample_trilinear3d.vec", T(2, 3, 3, 3, 3), (6, 6, 6), False, None)
    _add("upsample_nearest1d", T(3, 5, 6), (9,))
    _add("upsample_nearest2d", T(3, 5, 4, 4), (8, 8))
    _add("upsample_nearest3d", T(2, 3, 3, 3, 3), (6, 6, 6))
    _add("upsample_bilinear2d upsample_bicubic2d", T(3, 5, 4, 4), (8, 8), False)
    _add("upsample_linear1d", T(3, 5, 6), (9,), False)
    _add("upsample_trilinear3d", T(2, 3, 3, 3, 3), (6, 6, 6), False)
    _add("pixel_shuffle", T(3, 8, 4, 4), 2)


def samples() -> tuple[Sample, ...]:
    """All samples, family by family."""
    if not _found:
        for family in (
            _pointwise, _views, _contractions, _normalizations, _attention, _losses, _indexing, _pieces, _reductions,
            _creation, _pooling, _space, _spectral,
        ):  # fmt: skip
            family()
        _found.extend(mixtures())
    return tuple(_found)
