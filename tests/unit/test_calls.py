"""The text of calls on local tensors: as a person writes them, with local sizes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from autopar.codegen.calls import call
from autopar.codegen.scope import Scope
from autopar.graph import BatchLiteral, DeviceArgument, Operator, OpGraph, Ref, TorchName, Value
from autopar.layout import Layout, parse_layout
from autopar.mesh import Mesh
from autopar.strategies import registered_targets
from autopar.strategies.experts import TARGET as MIXTURE
from autopar.strategies.loss import FUSED

MESH = Mesh((2, 2), ("data", "tensor"))
Tensor = tuple[tuple[int, ...], str]  # shape and layout
END = 2**63 - 1


def _layout(text: str, shape: tuple[int, ...]) -> Layout:
    """Layouts as people write them here: ``S1`` is the plain cut of dim 1."""
    return parse_layout(re.sub(r"S(\d)(?!\[)", lambda m: f"{m[0]}[1x{shape[int(m[1])]}/1]", text))


def written(
    target: str,
    inputs: list[Tensor],
    outputs: list[Tensor],
    *arguments: Any,
    scope: Scope | None = None,
    dtypes: tuple[str, ...] = (),
    names: tuple[str, ...] = ("x", "y", "z", "w", "v"),
    **keywords: Any,
) -> str:
    """The text of a call. Arguments that are given as ``...`` are the tensor inputs in order."""
    supply = iter(range(len(inputs)))

    def placed(argument: Any) -> Any:
        if argument is ...:
            return Ref(f"i{next(supply)}")
        return tuple(placed(item) for item in argument) if isinstance(argument, tuple) else argument

    args = tuple(placed(argument) for argument in arguments)
    operator = Operator(
        "op", f"aten.{target}", args, tuple(keywords.items()), tuple(f"o{index}" for index in range(len(outputs)))
    )
    kinds = (*dtypes, *["float32"] * (len(inputs) + len(outputs) - len(dtypes)))
    ids = [f"i{index}" for index in range(len(inputs))] + [f"o{index}" for index in range(len(outputs))]
    shapes = [shape for shape, _ in (*inputs, *outputs)]
    values = {name: Value(name, shape, kind, True) for name, shape, kind in zip(ids, shapes, kinds, strict=True)}
    graph = OpGraph("test", values, (), (), (), (), (operator,), (), None, 8)
    layouts = [_layout(text, shape) for shape, text in (*inputs, *outputs)]
    scope = scope or Scope(MESH, 8)
    return call(operator, names[: len(inputs)], layouts[: len(inputs)], layouts[len(inputs) :], graph, MESH, scope)


@pytest.mark.parametrize(
    ("text", "target", "arguments"),
    [
        ("x + y", "add.Tensor", (..., ...)),
        ("x + 1e-06", "add.Tensor", (..., 1e-6)),
        ("x - 1", "add.Tensor", (..., -1)),
        ("x @ y", "matmul.default", (..., ...)),
        ("1 - x", "rsub.Scalar", (..., 1)),
        ("x ** 2", "pow.Tensor_Scalar", (..., 2)),
        ("(-2) ** x", "pow.Scalar", (-2, ...)),
        ("-x", "neg.default", (...,)),
        ("x == -100", "eq.Scalar", (..., -100)),
        ("x & y", "__and__.Tensor", (..., ...)),
        ("x.transpose(1, 2)", "transpose.int", (..., 1, 2)),
        ("x.permute(0, 2, 1)", "permute.default", (..., (0, 2, 1))),
        ("x.mean(-1, keepdim=True)", "mean.dim", (..., (-1,), True)),
        ("x.sum((0, 1))", "sum.dim_IntList", (..., (0, 1))),
        ("F.gelu(x)", "gelu.default", (...,)),
        ("x.tanh()", "tanh.default", (...,)),
        ("F.layer_norm(x, (8,), y, z)", "layer_norm.default", (..., (8,), ..., ..., 1e-05, False)),
        ("F.layer_norm(x, (8,), y, z, 1e-12)", "layer_norm.default", (..., (8,), ..., ..., 1e-12, False)),
        ("F.layer_norm(x, (8,), eps=1e-12)", "layer_norm.default", (..., (8,), None, None, 1e-12)),
        ("torch.cat((x, y), 1)", "cat.default", ((..., ...), 1)),
        ("torch.cat((x, y))", "cat.default", ((..., ...),)),
        ('torch.einsum("ab,bc->ac", x, y)', "einsum.default", ("ab,bc->ac", (..., ...))),
        ("torch.broadcast_tensors(x, y)", "broadcast_tensors.default", ((..., ...),)),
        ("F.max_pool2d(x, 3, 2, 1)", "max_pool2d.default", (..., (3, 3), (2, 2), (1, 1))),
        ("F.conv2d(x, y, stride=2, padding=3)", "conv2d.default", (..., ..., None, (2, 2), (3, 3))),
        ("F.conv2d(x, y, z, 4)", "conv2d.default", (..., ..., ..., (4, 4))),
        ("x[:, y]", "index.Tensor", (..., (None, ...))),
        ("x[:, 1:]", "slice.Tensor", (..., 1, 1, END)),
        ("x[:, :-1]", "slice.Tensor", (..., 1, 0, -1)),
        ("x[:, 0]", "select.int", (..., 1, 0)),
        ("x.topk(2)", "topk.default", (..., 2)),
        ("torch.where(x, y, float(\"-inf\"))", "where.ScalarOther", (..., ..., float("-inf"))),
        ("x.slice_scatter(y, 1, 2)", "slice_scatter.default", (..., ..., 1, 2, END)),
        ("torch.ops.aten.cross.default(x, y, 1)", "cross.default", (..., ..., 1)),
    ],
)  # fmt: skip
def test_as_a_person_writes_it(text: str, target: str, arguments: tuple[Any, ...]) -> None:
    def count(argument: Any) -> int:
        return sum(map(count, argument)) if isinstance(argument, tuple) else int(argument is ...)

    tensors = [((4, 6, 8, 8), "R,R")] * count(arguments)
    output = (4, 5, 8, 8) if "slice.Tensor" in target else (4, 6, 8, 8)
    assert written(target, tensors, [(output, "R,R")], *arguments) == text


def test_keywords_and_constants() -> None:
    x = [((2, 4, 6, 8), "R,R")]
    text = written("scaled_dot_product_attention.default", x * 3, x, ..., ..., ..., None, 0.0, True, scale=0.5)
    assert text == "F.scaled_dot_product_attention(x, y, z, is_causal=True, scale=0.5)"
    text = written("arange.default", [], [((7,), "R,R")], 7, dtype=TorchName("torch.int64"), device=DeviceArgument())
    assert text == "torch.arange(7, dtype=torch.int64, device=mesh.device)"
    assert written("to.dtype", x, x, ..., TorchName("torch.float32")) == "x", (
        "all is on one device, and the dtype stays"
    )
    text = written("to.dtype", x, x, ..., TorchName("torch.bfloat16"), dtypes=("float32", "bfloat16"))
    assert text == "x.to(torch.bfloat16)"
    assert written("add.Tensor", x * 2, x, ..., ..., alpha=2) == "torch.ops.aten.add.Tensor(x, y, alpha=2)"


def test_expressions_are_set_in_parentheses() -> None:
    x = [((4, 6), "R,R")]
    names = ("a + b", "self.weight()")
    assert written("mul.Tensor", x * 2, x, ..., ..., names=names) == "(a + b) * self.weight()"
    assert written("transpose.int", x, x, ..., 0, 1, names=names) == "(a + b).transpose(0, 1)"


def test_sizes_of_views() -> None:
    """The batch is left open; even pieces are numbers, uneven ones the local size of a cut."""
    batch = BatchLiteral(8)
    flat, apart = ((8, 16, 1600), "S0,S2[1x1600/64]"), ((8, 16, 25, 64), "S0,S2")
    scope = Scope(MESH, 8)
    assert written("view.default", [flat], [apart], ..., (batch, 16, -1, 64), scope=scope) == (
        "x.view(-1, 16, tensor_25.local, 64)"
    )
    assert scope.constants() == ["tensor_25 = Split(25, (mesh.tensor, None))"]
    assert not scope.fixed_batch and scope.runtime_names == {"Split"}
    even = ((8, 16, 768), "S0,S2"), ((8, 16, 12, 64), "S0,S2")
    assert written("view.default", [even[0]], [even[1]], ..., (batch, 16, -1, 64)) == "x.view(-1, 16, 6, 64)"
    assert written("reshape.default", [even[1]], [even[0]], ..., (8, 16, -1)) == "x.reshape(4, 16, -1)"
    rows = ((16, 50), "S1,S1")
    scope = Scope(MESH, 8)
    assert written("view.default", [rows], [((2, 8, 50), "S2,S2")], ..., (2, 8, 50), scope=scope) == "x.view(2, 8, -1)"


def test_sizes_that_follow_the_batch() -> None:
    scope = Scope(MESH, 8, "mesh.batch")
    spread = [((1, 16), "R,R")], [((8, 16), "S0,R")]
    assert (
        written("expand.default", *spread, ..., (BatchLiteral(8), -1), scope=scope) == "x.expand(mesh.batch // 2, -1)"
    )
    assert not scope.fixed_batch
    text = written("expand.default", [((1, 4), "R,R")], [((16, 4), "S0,R")], ..., (BatchLiteral(16), -1), scope=scope)
    assert text == "x.expand(mesh.batch, -1)"
    scope = Scope(MESH, 8)
    assert written("expand.default", *spread, ..., (BatchLiteral(8), -1), scope=scope) == "x.expand(4, -1)"
    assert scope.fixed_batch
    scope = Scope(MESH, 7, "mesh.batch")
    text = written("expand.default", [((1, 4), "R,R")], [((7, 4), "S0,R")], ..., (BatchLiteral(7), -1), scope=scope)
    assert text == "x.expand(data_7.local, -1)" and scope.fixed_batch


def test_sizes_of_parts() -> None:
    thirds = ((8, 16, 768), "S0,S2")
    fused = ((8, 16, 2304), "S0,S2[3x768/64]")
    assert written("split.Tensor", [fused], [thirds] * 3, ..., 768, 2) == "x.split(384, 2)"
    odd = ((8, 4, 4800), "R,S2[3x1600/64]")
    assert written("split.Tensor", [odd], [((8, 4, 1600), "R,S2[1x1600/64]")] * 3, ..., 1600, 2) == "x.chunk(3, 2)"
    grouped = ((8, 4, 48), "R,S2[1x32/16+1x8/4+1x8/4]")
    parts = [((8, 4, 32), "R,S2[1x32/16]"), ((8, 4, 8), "R,S2[1x8/4]"), ((8, 4, 8), "R,S2[1x8/4]")]
    assert written("split_with_sizes.default", [grouped], parts, ..., (32, 8, 8), 2) == "x.split((16, 4, 4), 2)"
    half = ((8, 12), "R,S1[2x6/1]"), ((8, 6), "R,S1")
    assert written("slice.Tensor", [half[0]], [half[1]], ..., 1, 6, END) == "x[:, 3:]"
    assert written("slice.Tensor", [half[0]], [half[1]], ..., 1, 0, 6) == "x[:, :3]"


def test_sizes_of_other_operators() -> None:
    heads = [((2, 8, 4), "R,S1")], [((2, 24, 4), "R,S1[1x24/3]")]
    assert written("repeat_interleave.self_int", *heads, ..., 3, 1) == "x.repeat_interleave(3, 1)"
    zeros = written("zeros.default", [], [((8, 6), "S0,S1")], (BatchLiteral(8), 6), scope=Scope(MESH, 8, "mesh.batch"))
    assert zeros == "torch.zeros((mesh.batch // 2, 3), device=mesh.device)"
    norm = [((8, 6, 4), "R,S1"), ((6,), "R,S0"), ((6,), "R,S0")], [((8, 6, 4), "R,S1")]
    assert written("group_norm.default", *norm, ..., 6, ..., ..., 1e-5, True) == "F.group_norm(x, 3, y, z)"
    depthwise = [((8, 6, 4, 4), "R,S1"), ((6, 1, 3, 3), "R,S0")], [((8, 6, 2, 2), "R,S1")]
    arguments = (None, (1, 1), (0, 0), (1, 1), 6)
    assert written("conv2d.default", *depthwise, ..., ..., *arguments) == "F.conv2d(x, y, groups=3)"
    assert written("squeeze.default", [((2, 1, 6), "S0,R")], [((2, 6), "S0,R")], ...) == "x.squeeze(1)"


def test_axis_aware_operators() -> None:
    scope = Scope(MESH, 8)
    table = [((50257, 8), "G,S0"), ((8, 16), "S0,R")], [((8, 16, 8), "S0,P")]
    assert written("embedding.default", *table, ..., ..., scope=scope) == "vocab_embedding(y, x, vocab)"
    assert scope.constants() == ["vocab = Split(50257, (mesh.tensor, None))"]
    assert written("embedding.default", [((9, 8), "R,S1"), ((4,), "R,R")], [((4, 8), "R,S1")], ..., ...) == (
        "F.embedding(y, x)"
    )
    loss = [((128, 50257), "S0,S1"), ((128,), "S0,R")], [((), "P,R")]
    assert written("cross_entropy_loss.default", *loss, ..., ..., scope=scope) == (
        "cross_entropy(x, y, batch_axes=(mesh.data,), vocab=vocab)"
    )
    assert scope.runtime_names == {"Split", "cross_entropy", "vocab_embedding"}
    whole = [((128, 10), "R,R"), ((128,), "R,R")], [((), "R,R")]
    assert written("cross_entropy_loss.default", *whole, ..., ..., None, 1, 0, 0.1) == (
        "F.cross_entropy(x, y, ignore_index=0, label_smoothing=0.1)"
    )
    channel = ((6,), "R,R")
    images = [((8, 6, 4), "S0,R"), *[channel] * 4], [((8, 6, 4), "S0,R"), channel, channel]
    assert written("batch_norm.default", *images, *[...] * 5, True, 0.1, 1e-5, True) == (
        "batch_norm(x, y, z, w, v, True, 0.1, 1e-05, axes=(mesh.data,))"
    )
    assert written("batch_norm.default", images[0], images[1][:1], *[...] * 5, False, 0.1, 1e-5, True) == (
        "F.batch_norm(x, w, v, y, z, False, 0.1, 1e-05)"
    )
    assert written("mean.dim", [((8, 6), "S0,S1")], [((), "P,P")], ..., (0, 1)) == "x.mean((0, 1)) / 4"
    scope = Scope(MESH, 8)
    assert written("mean.dim", [((8, 5), "S0,S1")], [((8,), "S0,P")], ..., (1,), scope=scope) == (
        "partial_mean(x, 1, False, 5)"
    )
    pair = [((8, 6), "S0,R")] * 2, [((), "P,R")]
    assert written("mse_loss.default", *pair, ..., ...) == "F.mse_loss(x, y) / 2"
    assert written("mse_loss.default", *pair, ..., ..., 2) == 'F.mse_loss(x, y, reduction="sum")'


def test_split_names_are_unique_and_shared() -> None:
    scope = Scope(MESH, 8, taken={"tensor_25"})
    assert scope.split(25, ((1, None),)) == "tensor_25_2"
    assert scope.split(25, ((1, None),)) == "tensor_25_2"
    assert scope.split(7, ((0, None), (1, None))) == "data_tensor_7"
    assert scope.constants()[-1] == "data_tensor_7 = Split(7, (mesh.data, None), (mesh.tensor, None))"


@pytest.mark.parametrize("target", [target for target in registered_targets() if target not in (MIXTURE, FUSED)])
def test_every_target_has_some_text(target: str) -> None:
    """Operators without a spelling are called by name: no target may be unknown to ``torch.ops``, but for our own."""
    import torch

    function: Any = torch.ops
    for part in target.split("."):
        function = getattr(function, part)
    assert callable(function)
