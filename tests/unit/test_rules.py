"""Rules: their text, the letters of reshapes, how cuts wander, what users register, and which operators have none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import RuleError
from autopar.graph import Operator, OpGraph, Ref, Value
from autopar.layout import PARTIAL, REPLICATED, SUMMED_GRADIENT, Cut, Shard
from autopar.strategies import register_rule, registered_targets, registry, signature_of
from autopar.strategies.choices import axis_choices, strategies
from autopar.strategies.cuts import letter_cuts
from autopar.strategies.registry import full_target
from autopar.strategies.rule import Part, Signature, parse
from autopar.strategies.views import factorize
from autopar.tracing import trace
from tests.support.models import ZOO, cross_entropy

# -- text ---------------------------------------------------------------------------------------------------------


def test_parse_linear() -> None:
    inputs, outputs, sizes = parse("b.. k, n k, n -> b.. n", [(2, 3, 4), (5, 4), (5,), (2, 3, 5)])
    assert inputs == ((("b0",), ("b1",), ("k",)), (("n",), ("k",)), (("n",),))
    assert outputs == ((("b0",), ("b1",), ("n",)),)
    assert sizes == {"b0": 2, "b1": 3, "k": 4, "n": 5}


def test_parse_broadcast_loses_the_letter() -> None:
    inputs, _, sizes = parse("b.., b.. -> b..", [(2, 1, 4), (3, 1), (2, 3, 4)])
    assert inputs == ((("b0",), (), ("b2",)), (("b1",), ()))
    assert sizes == {"b0": 2, "b1": 3, "b2": 4}


def test_parse_products_numbers_and_scalars() -> None:
    inputs, _, sizes = parse("b (n d) -> b n d", [(2, 12), (2, 3, 4)])
    assert inputs == ((("b",), ("n", "d")),) and sizes == {"b": 2, "n": 3, "d": 4}
    assert parse("b 2 -> b", [(3, 2), (3,)])[0] == ((("b",), (2,)),)
    assert parse("a ->", [(3,), ()])[1] == ((),)
    assert parse("-> a", [(3,)])[:2] == ((), ((("a",),),))


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("a b", [(2, 3)], "one arrow"),
        ("a -> b -> c", [(2,), (3,)], "one arrow"),
        ("a, b -> a", [(2,), (2,)], "3 terms"),
        ("a b -> a", [(2,), (2,)], "2 dims to a tensor that has 1"),
        ("a, a -> a", [(2,), (3,), (2,)], "does not fit"),
        ("(a b) -> a", [(6,), (4,)], "should have|does not follow"),
        ("b.. x y -> b..", [(3,), ()], "more dims"),
    ],
)
def test_parse_errors(text: str, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(RuleError, match=message):
        parse(text, shapes)


# -- reshapes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "wanted"),
    [
        ((8, 16, 32), (128, 32), "(a b) c"),
        ((8, 12), (8, 3, 4), "a|b|c"),
        ((2, 3, 25, 64), (2, 3, 1600), "a|b|c d"),
        ((4, 2, 2, 8), (4, 4, 8), "a|b c|d"),
    ],
)
def test_factorize_finds_all_letters(source: tuple[int, ...], target: tuple[int, ...], wanted: str) -> None:
    first, second, sizes = factorize(source, target)
    flat = [letter for dim in first for letter in dim]  # type: ignore[union-attr]
    assert flat == [letter for dim in second for letter in dim] == list(sizes), wanted  # type: ignore[union-attr]
    for term, shape in ((first, source), (second, target)):
        products = [torch.Size([sizes[letter] for letter in dim]).numel() for dim in term]  # type: ignore[union-attr,index]
        assert products == list(shape)


def test_factorize_keeps_numbers_where_shapes_cross() -> None:
    first, second, sizes = factorize((4, 6), (6, 4))
    assert sizes == {} or all(letter in str(first) and letter in str(second) for letter in sizes)
    assert factorize((2, 3, 4), (4, 6)) == (((("v0"),), (3,), (4,)), (("v0", 2), (6,)), {"v0": 2})
    assert factorize((1, 6), (6, 1, 1))[0] == ((), ("v0",))
    assert factorize((0, 4), (4, 0))[2] == {}


# -- cuts ---------------------------------------------------------------------------------------------------------


class FusedAttention(nn.Module):
    """GPT-2's: one product for q, k and v, which are then split. ``kv`` heads for keys and values."""

    def __init__(self, heads: int, kv: int, width: int) -> None:
        super().__init__()
        self.heads, self.kv, self.width = heads, kv, width
        self.qkv = nn.Linear(heads * width, (heads + 2 * kv) * width)
        self.out = nn.Linear(heads * width, heads * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        sizes = [self.heads * self.width, self.kv * self.width, self.kv * self.width]
        q, k, v = self.qkv(x).split(sizes if self.kv != self.heads else sizes[0], 2)
        q = q.view(batch, length, self.heads, self.width).transpose(1, 2)
        k, v = (t.view(batch, length, self.kv, self.width).transpose(1, 2) for t in (k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv != self.heads)
        return self.out(a.transpose(1, 2).reshape(batch, length, -1)).square().mean()


def _cuts(module: nn.Module, *shape: int):
    graph = trace(module, (torch.randn(*shape),)).graph
    signatures = {op.id: found for op in graph.operators if (found := signature_of(op, graph))}
    batch = [(entry.value, 0, shape[0]) for entry in graph.inputs]
    return graph, signatures, letter_cuts(graph.operators, signatures, batch)


def _operators(graph: OpGraph, target: str) -> list[Operator]:
    return [operator for operator in graph.operators if operator.target == target]


def test_fused_attention_is_cut_by_heads() -> None:
    graph, signatures, cuts = _cuts(FusedAttention(25, 25, 2), 4, 6, 50)
    qkv, out = _operators(graph, "aten.linear.default")
    by_heads = Cut(((3, 50, 2),))
    assert by_heads in cuts[qkv.id].cuts["n"], "the fused projection learns to be cut between heads"
    assert Cut(((1, 50, 2),)) in cuts[out.id].cuts["k"]
    split = next(op for op in graph.operators if "split" in op.target)
    choices = axis_choices(signatures[split.id], cuts[split.id], ([True], [True] * 3), 2)
    assert [c.cut for c in choices if c.letter == "d2"] == [by_heads], "never across the border of q, k and v"


def test_grouped_attention_is_cut_by_groups() -> None:
    graph, signatures, cuts = _cuts(FusedAttention(8, 2, 4), 4, 6, 32)
    qkv = _operators(graph, "aten.linear.default")[0]
    by_groups = Cut(((1, 32, 16), (1, 8, 4), (1, 8, 4)))
    assert by_groups in cuts[qkv.id].cuts["n"]
    attention = next(op for op in graph.operators if "scaled_dot" in op.target)
    assert signatures[attention.id].inputs[0][1] == ("h", "g") and signatures[attention.id].sizes["h"] == 2
    states = [
        choice
        for choice in axis_choices(signatures[qkv.id], cuts[qkv.id], ([True] * 3, [True]), 2)
        if choice.letter == "n" and choice.cut == by_groups
    ]
    assert [state.outputs for state in states] == [(Shard(2, by_groups),)]
    assert states[0].inputs == (SUMMED_GRADIENT, Shard(0, by_groups), Shard(0, by_groups))


def test_batch_is_followed_through_reshapes() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.reshape(-1, 8)).view(x.shape).sum()

    graph, _, cuts = _cuts(Flat(), 4, 6, 8)
    linear = _operators(graph, "aten.linear.default")[0]
    assert ("b0", Cut(((1, 24, 6),))) in cuts[linear.id].batch


# -- choices ------------------------------------------------------------------------------------------------------


def _operator(target: str, *args: object, **shapes: tuple[int, ...]) -> tuple[Operator, OpGraph]:
    outputs = tuple(name for name in shapes if name.startswith("y"))
    operator = Operator("op", target, args, (), outputs)
    values = {name: Value(name, shape, "float32", True) for name, shape in shapes.items()}
    return operator, OpGraph("test", values, (), (), (), (), (operator,), (), None, 1)


def test_choices_of_a_linear_layer() -> None:
    operator, graph = _operator(
        "aten.linear.default", Ref("x"), Ref("w"), Ref("b"), x=(4, 6), w=(5, 6), b=(5,), y=(4, 5)
    )
    signature = signature_of(operator, graph)
    assert signature is not None
    letters = letter_cuts((operator,), {"op": signature}, ())["op"]
    found = {c.label: c for c in axis_choices(signature, letters, ([True] * 3, [True]), 2) if c.label != "P"}
    plain = {size: Cut.plain(size) for size in (4, 5, 6)}
    assert set(found) == {"R", "G", "b0", "n", "k"}
    assert found["b0"].inputs == (Shard(0, plain[4]), SUMMED_GRADIENT, SUMMED_GRADIENT)
    assert found["k"].inputs == (Shard(1, plain[6]), Shard(1, plain[6]), PARTIAL), "the bias counts once"
    assert found["k"].outputs == (PARTIAL,)
    assert found["n"].inputs == (SUMMED_GRADIENT, Shard(0, plain[5]), Shard(0, plain[5]))


def test_no_device_is_left_empty() -> None:
    """6 columns on 4 devices are 2, 2, 1 and 1; 3 rows cannot be cut in 4."""
    operator, graph = _operator("aten.relu.default", Ref("x"), x=(3, 6), y=(3, 6))
    signature = signature_of(operator, graph)
    assert signature is not None
    letters = letter_cuts((operator,), {"op": signature}, ())["op"]
    labels = [s.label for s in strategies([axis_choices(signature, letters, ([True], [True]), 4)], (4,))]
    assert "b1" in labels and "b0" not in labels


def test_split_classes_leave_the_loss_replicated() -> None:
    operator, graph = _operator("aten.cross_entropy_loss.default", Ref("x"), Ref("t"), x=(8, 10), t=(8,), y=())
    graph.values["t"] = Value("t", (8,), "int64", False)
    signature = signature_of(operator, graph)
    assert signature is not None
    letters = letter_cuts((operator,), {"op": signature}, ())["op"]
    by_letter = {c.letter: c for c in axis_choices(signature, letters, ([True, False], [True]), 2)}
    assert by_letter["v"].outputs == (REPLICATED,) and by_letter["b0"].outputs == (PARTIAL,)
    assert [(e.letter, e.count, e.letters, e.item_bytes) for e in signature.exchanges] == [
        ("b0", 1, (), 8),
        ("v", 3, ("b0",), 4),
    ]


def test_training_batch_norm_exchanges_statistics() -> None:
    operator, graph = _operator(
        "aten.batch_norm.default", Ref("x"), Ref("w"), Ref("b"), Ref("m"), Ref("v"), True, 0.1, 1e-5, True,
        x=(8, 6, 5), w=(6,), b=(6,), m=(6,), v=(6,), y=(8, 6, 5), y1=(6,), y2=(6,),
    )  # fmt: skip
    signature = signature_of(operator, graph)
    assert signature is not None and signature.replicated_after == {"b0", "b2"}
    exchanged = [(e.backward, e.item_bytes * (6 + e.more_elements)) for e in signature.exchanges if e.letter == "b0"]
    assert exchanged == [(False, 28), (False, 24), (True, 48)]


# -- registry -----------------------------------------------------------------------------------------------------


@pytest.fixture
def clean_registry() -> Iterator[None]:
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


def test_full_target() -> None:
    assert full_target("lib::op") == "lib.op.default"
    assert full_target("torch.ops.lib.op") == "lib.op.default"
    assert full_target("aten.add.Tensor") == "aten.add.Tensor"
    with pytest.raises(RuleError, match="not an operator"):
        full_target("add")


@pytest.mark.usefixtures("clean_registry")
def test_users_rule_as_text() -> None:
    register_rule("mylib::scaled", "b.. k, n k -> b.. n", linear=[(0,), (1,)], kind="matmul")
    assert "mylib.scaled.default" in registered_targets()
    operator, graph = _operator("mylib.scaled.default", Ref("x"), Ref("w"), x=(2, 3, 4), w=(5, 4), y=(2, 3, 5))
    signature = signature_of(operator, graph)
    assert signature is not None and signature.kind == "matmul"
    assert signature.saved_inputs == {0, 1} and signature.linear == (frozenset({0}), frozenset({1}))
    register_rule("aten.relu.default", lambda operator, graph: None)
    operator, graph = _operator("aten.relu.default", Ref("x"), x=(4,), y=(4,))
    assert signature_of(operator, graph) is None, "a user's rule comes before ours"


@pytest.mark.usefixtures("clean_registry")
def test_users_wrong_rules() -> None:
    with pytest.raises(RuleError, match="one arrow"):
        register_rule("mylib::op", "b k")
    with pytest.raises(RuleError, match="letters, numbers"):
        register_rule("mylib::op", "b (k -> b")
    register_rule("mylib::op", "b k, k -> b")
    operator, graph = _operator("mylib.op.default", Ref("x"), Ref("w"), x=(2, 4), w=(5,), y=(2,))
    with pytest.raises(RuleError, match=r"mylib::op does not fit op: .*\[\(2, 4\), \(5,\), \(2,\)\]"):
        signature_of(operator, graph)

    def wrong(operator: Operator, graph: OpGraph) -> Signature:
        return Signature(((("a",),),), ((("a",),),), {"a": 2})

    register_rule("mylib::op", wrong)
    with pytest.raises(RuleError, match=r"1 inputs and 1 outputs"):
        signature_of(operator, graph)


def test_operator_without_rule() -> None:
    operator, graph = _operator("aten.linalg_inv.default", Ref("x"), x=(4, 4), y=(4, 4))
    assert signature_of(operator, graph) is None
    choices = axis_choices(None, None, ([True], [True]), 2)
    assert [choice.label for choice in choices] == ["R"]


def test_parts_of_a_split() -> None:
    operator, graph = _operator("aten.split.Tensor", Ref("x"), 4, 1, x=(3, 12), y=(3, 4), y1=(3, 4), y2=(3, 4))
    signature = signature_of(operator, graph)
    assert signature is not None and signature.parts == {"d1": (4, 4, 4)}
    assert signature.outputs[2] == (("d0",), Part("d1", 2))


# Operators of the models below that have no rule on purpose: computed replicated.
REPLICATED_OPERATORS: frozenset[str] = frozenset()


@pytest.mark.parametrize("name", ZOO)
def test_every_operator_of_the_models_has_a_rule(name: str) -> None:
    model, inputs = ZOO[name](4) if name in ("resnet", "mlp", "unet") else ZOO[name](4, 1)
    graph = trace(model, inputs, loss_fn=cross_entropy if name == "mlp" else None).graph
    without = {operator.target for operator in graph.operators if signature_of(operator, graph) is None}
    assert without <= REPLICATED_OPERATORS
    random = {op.target for op in graph.operators if (found := signature_of(op, graph)) is not None and found.random}
    assert not random, "dropout is off in these models"
