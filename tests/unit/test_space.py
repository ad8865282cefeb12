"""Where space may be split, what halos cost, and when the search splits it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.codegen import generate
from autopar.costing.conversions import Conversions
from autopar.costing.space import halo_bytes, halo_seconds, sent_bytes
from autopar.errors import InputError
from autopar.mesh import Mesh
from autopar.options import Parallelism, PlanOptions
from autopar.planner import plan, plan_graph
from autopar.strategies.choices import Strategy, axis_choices, strategies
from autopar.strategies.cuts import LetterCuts
from autopar.strategies.registry import signature_of
from autopar.strategies.rule import Signature
from autopar.strategies.spatial import nearest_repeats
from autopar.tracing import trace
from cost_models import Cluster, CostModel
from tests.properties.rule_samples import Sample, T
from tests.support.images import slow_links
from tests.support.running import run_program, values_of
from tests.support.shards import cuts_to_try, on_one_device

KERNEL = T(4, 3, 3, 3)


def rule_of(target: str, *args: object) -> Signature:
    whole = on_one_device(Sample(f"aten.{target}", args), backward=False)
    found = signature_of(whole.operator, whole.graph)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("target", "args", "letters"),
    [
        ("conv2d.default", (T(1, 3, 8, 6), KERNEL, None, (2, 1), (1, 1)), {"s2", "s3"}),
        ("conv2d.default", (T(1, 3, 8, 6), KERNEL), set()),  # valid: the result is smaller than the image
        ("conv2d.default", (T(1, 3, 7, 6), KERNEL, None, (2, 2), (1, 1)), {"s3"}),  # 7 rows, stride 2
        ("conv2d.padding", (T(1, 3, 8, 6), T(4, 3, 2, 3), None, (1, 1), "same"), set()),  # padded unevenly
        ("conv_transpose2d.input", (T(1, 3, 4, 3), T(3, 4, 4, 3), None, (2, 2), (1, 1)), {"s2"}),
        ("max_pool2d.default", (T(1, 3, 8, 6), (3, 2), (2, 2), (1, 0)), {"s2", "s3"}),
        ("avg_pool2d.default", (T(1, 3, 8, 6), (3, 3), (2, 2), (1, 1), False, False), set()),  # fewer at borders
        ("adaptive_avg_pool2d.default", (T(1, 3, 8, 6), (4, 1)), {"s2", "s3"}),
        ("adaptive_max_pool2d.default", (T(1, 3, 8, 6), (4, 1)), set()),  # returns places in the whole image
        ("upsample_bilinear2d.vec", (T(1, 3, 8, 6), (16, 9), False, None), {"s2"}),
        ("upsample_bilinear2d.vec", (T(1, 3, 8, 6), (16, 12), True, None), set()),  # corners aligned
    ],
)
def test_space_is_split_where_windows_fit(target: str, args: tuple[object, ...], letters: set[str]) -> None:
    rule = rule_of(target, *args)
    assert rule.spatial == letters
    assert {letter for letter in rule.splittable() if letter.startswith("s")} == letters


def test_nearest_is_split_where_torch_repeats() -> None:
    assert nearest_repeats(64, 3)
    factor = next(factor for factor in range(2, 200) if not nearest_repeats(64, factor))  # 1/factor rounds down
    x = torch.arange(64.0).view(1, 1, 64)
    assert not torch.equal(F.interpolate(x, scale_factor=float(factor)), x.repeat_interleave(factor, 2))


def offered(rule: Signature, shape: tuple[int, ...]) -> tuple[Strategy, ...]:
    letters = LetterCuts(cuts_to_try(rule).cuts, frozenset())
    flows = ([True] * len(rule.inputs), [True] * len(rule.outputs))
    return strategies([axis_choices(rule, letters, flows, size) for size in shape], shape)


def test_no_halo_is_wider_than_a_piece_and_one_axis_splits_a_dim() -> None:
    rule = rule_of("conv1d.default", T(1, 2, 12), T(3, 2, 9), None, (1,), (4,))
    assert any(strategy.axes[0].letter == "s2" for strategy in offered(rule, (3,)))  # pieces of 4
    assert not any(strategy.axes[0].letter == "s2" for strategy in offered(rule, (4,)))  # pieces of 3
    rule = rule_of("conv2d.default", T(1, 3, 8, 8), KERNEL, None, (1, 1), (1, 1))
    pairs = {tuple(choice.letter for choice in strategy.axes) for strategy in offered(rule, (2, 2))}
    assert ("s2", "s3") in pairs and ("s2", "s2") not in pairs


def test_the_price_of_a_halo() -> None:
    """Rows of 2 x 3 x 4 elements of 8 bytes, 3 before and 2 after; columns 1 and 1, as long as rows and their halos."""
    rule = rule_of("conv2d.default", T(2, 3, 12, 8), T(4, 3, 7, 3), None, (2, 1), (3, 1))
    cluster = Cluster.homogeneous(num_nodes=1, devices_per_node=6, device="H100-SXM")
    conversions = Conversions(Mesh((3, 2), ("a", "b")), CostModel(cluster))
    found = [s for s in offered(rule, (3, 2)) if [c.letter for c in s.axes] == ["s2", "s3"]]
    seconds = halo_seconds(rule, conversions, found[:1], True)[:, 0]
    columns = [(3 + 2) * 2 * 3 * 4 * 8, 1 * 2 * 3 * (4 + 5) * 8]
    expected = sum(float(axis.seconds("send_recv", sent)) for axis, sent in zip(conversions.axes, columns, strict=True))
    assert seconds == pytest.approx([expected, expected])
    assert halo_bytes(rule, found[:1]) == [2 * 3 * (4 + 5) * (4 + 2) * 8]


class Smoothed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 5, padding=2), nn.Conv2d(4, 4, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


def test_a_device_between_two_sends_what_is_priced() -> None:
    torch.manual_seed(0)
    model, x = Smoothed().double(), torch.randn(1, 3, 12, 6, dtype=torch.float64)
    traced = trace(model, (x,))
    made = plan_graph(traced.graph, slow_links(3), PlanOptions(parallelism=Parallelism(spatial=3)), compare=False)
    ran = run_program(generate(made, traced.graph), traced, values_of(model), (x,), 3)
    priced = 0.0
    for operator in traced.graph.operators:
        rule = signature_of(operator, traced.graph)
        for halo in rule.halos if rule else ():
            if halo.letter == "s2":
                priced += sent_bytes(rule, halo, {"s2": rule.sizes["s2"] / 3}, 3) * (1 + halo.has_gradient)
    assert priced == (2 + 2) * 3 * 6 * 8 + 2 * 1 * 4 * 6 * 8  # the image has no gradient; stride 2 looks back only
    assert ran[1].sent["send_recv", "spatial"] == priced


class Restored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.GroupNorm(4, 64),
            nn.ReLU(), nn.ConvTranspose2d(64, 32, 2, 2), nn.ReLU(), nn.Conv2d(32, 1, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.body(x), target)


@pytest.mark.parametrize(("batch", "axis"), [(1, "spatial"), (4, "data")])
def test_the_search_splits_space_when_there_is_no_batch(batch: int, axis: str) -> None:
    with torch.device("meta"):
        model = Restored()
        inputs = {"x": torch.empty(batch, 3, 2048, 2048), "target": torch.empty(batch, 1, 2048, 2048)}
    cluster = Cluster.homogeneous(num_nodes=1, devices_per_node=4, device="H100-SXM")
    made = plan(model, cluster, inputs)
    assert made.stages[0].mesh.names == (axis,)
    assert made.report()["alternatives"]["by_hand"]["tensor"]["ratio"] > 1.2


def test_what_has_no_space_says_so() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0), nn.LayerNorm(8)), torch.ones(2, 4)
    forced = PlanOptions(parallelism=Parallelism(spatial=2))
    with pytest.raises(InputError, match=r"Parallelism\(spatial=2\): Sequential has no convolution or pooling"):
        plan(model, slow_links(2), (x,), options=forced, loss_fn=lambda y, given: y.sum())
    with pytest.raises(InputError, match=r"Parallelism\(spatial=0\): a degree is a whole number"):
        Parallelism(spatial=0)
