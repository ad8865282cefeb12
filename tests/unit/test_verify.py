"""verify(): equal programs pass, broken ones do not, and what is said about either."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import AutoparError, InputError, PlanFileError
from autopar.mesh import Mesh
from autopar.options import Parallelism, PlanOptions
from autopar.planner import plan_graph
from autopar.plans import Plan
from autopar.randomness import mode_dependent_operators, random_operators
from autopar.tracing import trace
from autopar.verifier import Verification, VerificationError, verify, verifying
from autopar.verifier.outcome import Expected, measures
from autopar.verifier.trial import TrialResult
from cost_models import Cluster
from tests.support import models
from tests.support.pipelines import even_cuts, pipeline_plan
from tests.support.plans import make_plan

LOSS = {"mlp": models.cross_entropy}
BATCH = 32  # as many samples as any batch here has


def whole(**degrees: Any) -> PlanOptions:
    """One stage and one micro-batch, with the degrees given."""
    return PlanOptions(parallelism=Parallelism(pipeline=1, micro_batch_size=BATCH, **degrees))


def planned(name: str, num_devices: int, **degrees: Any) -> tuple[nn.Module, Plan, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, inputs = models.ZOO[name](8)
    graph = trace(model, inputs, loss_fn=LOSS.get(name)).graph
    return model, plan_graph(graph, Cluster.local(num_devices), whole(**degrees)), inputs


def errors(found: Verification) -> dict[str, float]:
    return {measure.kind: measure.error for measure in found.measures}


@pytest.mark.parametrize(
    ("name", "num_devices", "degrees"),
    [
        ("mlp", 4, {"data": 2, "tensor": 2}),
        ("gpt2", 3, {"tensor": 3}),
        ("llama", 2, {"data": 2, "zero": 3}),
        ("resnet", 2, {"data": 2}),
    ],
)
def test_programs_are_equal_to_their_models(name: str, num_devices: int, degrees: dict[str, int]) -> None:
    model, plan, inputs = planned(name, num_devices, **degrees)
    found = verify(model, plan, inputs, loss_fn=LOSS.get(name), count_collectives=True)
    assert found.require() is found
    assert found.differences == () and found.collectives
    kinds = ["loss", "outputs", "gradients", "parameters"]
    assert [measure.kind for measure in found.measures][:4] == kinds
    assert found.measures[2].num_tensors == len(list(model.parameters()))
    if name == "resnet":
        assert found.measures[4].kind == "buffers" and found.measures[4].num_tensors == len(list(model.buffers()))
    assert f"{plan.model} on {plan.stages[0].mesh}: equal" in str(found)


PIPELINES: list[tuple[str, int, str, tuple[int, ...], dict[str, Any]]] = [
    ("gpt2", 2, "1f1b", (2,), {"recompute": "selective"}),
    ("t5", 4, "zbv", (1,), {}),
    (
        "llama",
        2,
        "gpipe",
        (1, 2),
        {"recompute": "full", "parallelism": Parallelism(zero=3), "rank_order": (2, 1, 0, 3)},
    ),
    ("mlp", 1, "single", (2,), {"parallelism": Parallelism(zero=2)}),
]


@pytest.mark.parametrize(("name", "num_stages", "schedule", "mesh", "options"), PIPELINES)
def test_stages_and_micro_batches(
    name: str, num_stages: int, schedule: str, mesh: tuple[int, ...], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model, inputs = models.ZOO[name](10)
    graph = trace(model, inputs, loss_fn=LOSS.get(name)).graph
    cuts = even_cuts(graph, num_stages) if num_stages > 1 else ()
    plan = pipeline_plan(graph, cuts, mesh, schedule, 4, **options)
    found = verify(model, plan, inputs, loss_fn=LOSS.get(name), count_collectives=True)
    assert found.require() is found
    assert found.differences == ()
    assert found.measures[2].num_tensors == len(list(model.parameters()))
    assert found.mesh.endswith("4 micro-batches") and (schedule in found.mesh) == (num_stages > 1)


def test_what_only_one_pipeline_rank_does_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, inputs = models.gpt2(8)
    graph = trace(model, inputs).graph
    plan = pipeline_plan(graph, even_cuts(graph, 2), (1,), "1f1b", 4)
    pooled = verifying.generate

    def count_of_one_micro_batch(plan: Plan, graph: Any) -> str:
        source = pooled(plan, graph)
        assert 'mesh.count("' in source
        return re.sub(r"mesh\.count\(", "0.25 * mesh.count(", source)

    monkeypatch.setattr(verifying, "generate", count_of_one_micro_batch)
    found = verify(model, plan, inputs)
    assert not found.passed and errors(found)["loss"] > 1
    monkeypatch.setattr(verifying, "ledger", lambda plan, graph, pipeline_rank: [])
    monkeypatch.setattr(verifying, "generate", pooled)
    counted = verify(model, plan, inputs, count_collectives=True)
    assert counted.differences is not None
    assert {line.split(":")[0] for line in counted.differences} == {"pipeline rank 0", "pipeline rank 1"}


def test_replicated_plan_without_a_planner() -> None:
    model, inputs = models.mlp(4)
    graph = trace(model, inputs, loss_fn=models.cross_entropy).graph
    plan = make_plan(graph, Mesh((2,), ("data",)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert verify(model, plan, inputs, loss_fn=models.cross_entropy, count_collectives=True).require().collectives == {}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.dtype == torch.float32 and parameter.grad is None for parameter in model.parameters())


def broken(monkeypatch: pytest.MonkeyPatch, change: Callable[[str], str]) -> Verification:
    """Verify the mlp with a fault put into its program."""
    model, plan, inputs = planned("mlp", 4, data=2, tensor=2)
    generate = verifying.generate

    def with_fault(*args: Any) -> str:
        source = generate(*args)
        changed = change(source)
        assert changed != source
        return changed

    monkeypatch.setattr(verifying, "generate", with_fault)
    return verify(model, plan, inputs, loss_fn=models.cross_entropy, count_collectives=True)


def test_a_wrong_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = broken(monkeypatch, lambda source: source.replace("F.relu(", "F.leaky_relu("))
    assert not found.passed
    assert errors(found)["loss"] > 1e-6 and errors(found)["outputs"] > 1e-6 and not found.differences
    with pytest.raises(VerificationError, match=r"(?s)NOT equal to the plain model.*loss: .*too large.*please report"):
        found.require()
    assert issubclass(VerificationError, AutoparError)


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward is right; the gradients of what comes before the missing step are not, and its traffic is missing."""
    found = broken(monkeypatch, lambda source: source.replace(" = copy_to(layers_1, mesh.tensor)", " = layers_1"))
    assert errors(found)["loss"] < 1e-10 and errors(found)["outputs"] < 1e-10
    assert errors(found)["gradients"] > 1e-6 and errors(found)["parameters"] > 1e-6
    assert found.measures[2].worst.startswith("layers.0.")
    assert found.differences is not None and "all_reduce on tensor: the plan says" in found.differences[0]


def test_a_wrong_type_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 somewhere on the way costs nine digits: the bound is tight enough to see it."""
    found = broken(monkeypatch, lambda source: source.replace("F.relu(layers_0)", "F.relu(layers_0.float().double())"))
    assert 1e-10 < errors(found)["outputs"] < 1e-6


def test_a_fault_of_the_program_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="out of order"):
        broken(monkeypatch, lambda source: source.replace("F.relu(", "undefined(", 1) + UNDEFINED)


UNDEFINED = """

def undefined(x):
    raise RuntimeError("out of order")
"""


class Mixed(nn.Module):
    """Computes in bfloat16, but for a norm in float32, with a literal and a factory call on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 4)
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.first(x).float()
        h = h / h.pow(2).mean(-1, keepdim=True).add(torch.full((), 0.1)).sqrt() * torch.tensor(0.3)
        logits = self.second(h.to(self.second.weight.dtype))
        return {"logits": logits, "loss": logits.to(torch.float32).square().mean()}


def test_lower_types_are_verified_in_double() -> None:
    torch.manual_seed(0)
    model, inputs = Mixed(), {"x": torch.randn(4, 8).bfloat16()}
    plan = plan_graph(trace(model, inputs).graph, Cluster.local(2), whole(tensor=2))
    verify(model, plan, inputs, count_collectives=True).require()


class Untyped(nn.Module):
    """Makes tensors without saying their type, has a complex parameter, returns a parameter, and has a gradient of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.turn = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.norm(torch.eye(8) @ self.layer(x).t() @ torch.ones(x.shape[0], 8) + x[:8])
        turned = (h.to(torch.complex64) @ self.turn).abs() * torch.tensor(0.3)
        return {"loss": turned.square().mean(), "turn": self.turn, "bias": self.layer.bias}


def test_types_left_to_torch_complex_parameters_and_parameters_as_outputs() -> None:
    torch.manual_seed(0)
    model, inputs = Untyped(), {"x": torch.randn(8, 8)}
    plan = plan_graph(trace(model, inputs).graph, Cluster.local(2), whole(data=2, zero=1))
    verify(model, plan, inputs, count_collectives=True).require()
    verify(model, plan, inputs, processes=True).require()


@dataclass
class Result:
    """Not known to torch as a container."""

    loss: Tensor


def test_a_loss_in_an_object_of_the_users() -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Result:  # type: ignore[override]
            return Result(super().forward(x).square().mean())

    model, inputs = Model(8, 8), (torch.randn(4, 8),)
    verify(model, plan_graph(trace(model, inputs).graph, Cluster.local(2), whole()), inputs).require()


def test_a_gradient_of_zero_does_not_decide_the_step() -> None:
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)  # the norm takes biases away
    model, inputs = nn.Sequential(*layers), (torch.randn(32, 8),)

    def loss_fn(outputs: Tensor, given: Any) -> Tensor:
        return 1e3 * outputs.exp().mean()

    plan = plan_graph(trace(model, inputs, loss_fn=loss_fn).graph, Cluster.local(3), whole())
    verify(model, plan, inputs, loss_fn=loss_fn).require()


def test_a_mean_of_zero_is_measured_by_the_other_statistics() -> None:
    torch.manual_seed(0)
    layers = nn.BatchNorm1d(8), nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 1)
    model, inputs = nn.Sequential(*layers), (torch.randn(32, 8),)  # what the second norm sees has a mean of zero

    def loss_fn(outputs: Tensor, given: Any) -> Tensor:
        return outputs.exp().mean()

    plan = plan_graph(trace(model, inputs, loss_fn=loss_fn).graph, Cluster.local(3), whole())
    verify(model, plan, inputs, loss_fn=loss_fn).require()
    means = {"first": torch.tensor([0.5, 1.0]), "second": torch.tensor([1e-18])}
    expected = Expected(torch.tensor(1.0), {}, {}, {}, means, statistics=frozenset(means))
    assert (expected.buffer_scale("first"), expected.buffer_scale("second")) == (1.0, 1e-3)
    assert Expected(torch.tensor(1.0), {}, {}, {}, means).buffer_scale("second") == pytest.approx(1e-18)


def mean(outputs: Tensor, given: Any) -> Tensor:
    return outputs.mean()


def test_a_loss_without_gradient_and_a_model_that_fails_by_itself() -> None:
    model, inputs = nn.Linear(8, 8).requires_grad_(False), (torch.randn(4, 8),)
    plan = plan_graph(trace(model, inputs, loss_fn=mean).graph, Cluster.local(2), whole())
    with pytest.raises(InputError, match="loss of Linear depends on no trainable parameter"):
        verify(model, plan, inputs, loss_fn=mean)
    table, ids = nn.Embedding(4, 8), (torch.tensor([1, 2, 9, 3]),)
    plan = plan_graph(trace(table, ids, loss_fn=mean).graph, Cluster.local(2), whole())
    with pytest.raises(InputError, match=r"Embedding itself, without autopar, fails .* IndexError"):
        verify(table, plan, ids, loss_fn=mean)


def test_meta_models_get_random_values() -> None:
    real, plan, inputs = planned("gpt2", 2, data=2)
    with torch.device("meta"):
        meta = type(real)(real.config).train()
    found = verify(meta, plan, inputs).require()
    assert found.differences is None
    assert all(parameter.is_meta for parameter in meta.parameters())


def test_refuses_what_cannot_be_compared() -> None:
    model, plan, inputs = planned("mlp", 2, data=2)
    with pytest.raises(PlanFileError, match="made for another model"):
        verify(model, plan, {**inputs, "x": torch.randn(16, 12), "target": torch.zeros(16).long()}, loss_fn=LOSS["mlp"])
    on_meta = {name: tensor.to("meta") for name, tensor in inputs.items()}
    with pytest.raises(InputError, match="input x is on the meta device"):
        verify(model, plan, on_meta, loss_fn=LOSS["mlp"])
    graph = trace(model, {"x": inputs["x"]}).graph
    with pytest.raises(InputError, match="MLP has no loss to verify"):
        verify(model, make_plan(graph, Mesh((2,), ("data",))), {"x": inputs["x"]})


class Noisy(nn.Module):
    """Dropout in two forms, and a norm of order 2, which is no chance."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.chance = chance
        self.drop = nn.Dropout(chance)

    def forward(self, q: Tensor) -> Tensor:
        p = self.chance if self.training else 0.0
        h = nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=p)
        return self.drop(h * self.scale).norm(2, dim=-1).sum()


def test_random_operators() -> None:
    inputs = (torch.randn(2, 2, 4, 4),)
    for model, number in ((Noisy(0.5), 2), (Noisy(0.5).eval(), 0), (Noisy(0.0), 0)):
        graph = trace(model, inputs).graph
        assert len(random_operators(graph)) == number
    graph = trace(Noisy(0.5), inputs).graph
    assert len(mode_dependent_operators(graph)) == 2
    assert verify(Noisy(0.5), make_plan(graph, Mesh((2,), ("data",))), inputs).passed
    shaken = nn.Sequential(nn.Linear(4, 4), nn.AlphaDropout(0.5), nn.Linear(4, 1))
    alpha = trace(shaken, (torch.randn(2, 4),), loss_fn=lambda found, given: found.sum()).graph
    with pytest.raises(InputError, match=r"draws random numbers \(1 operators.*leave them out"):
        verify(
            shaken,
            make_plan(alpha, Mesh((2,), ("data",))),
            (torch.randn(2, 4),),
            loss_fn=lambda found, given: found.sum(),
        )
    norm, _ = models.resnet(2)
    assert mode_dependent_operators(trace(norm, models.resnet(2)[1]).graph)


# -- measures --------------------------------------------------------------------------------------------------------


def result(**changes: Any) -> TrialResult:
    """What one rank of a model with one parameter of three elements has."""
    facts: dict[str, Any] = {
        "outputs": {"y": torch.tensor([1.0, float("-inf"), float("nan")])},
        "loss": torch.tensor(4.0),
        "gradients": {"w": [((0,), torch.tensor([1.0, 2.0, 3.0]))]},
        "parameters": {"w": [((0,), torch.zeros(3))]},
        "buffers": {"count": torch.tensor(1)},
        "sent": {},
    }
    return TrialResult(**(facts | changes))


def error_of(kind: str, **changes: Any) -> float:
    expected = Expected(
        loss=torch.tensor(4.0),
        outputs={"y": torch.tensor([1.0, float("-inf"), float("nan")])},
        gradients={"w": torch.tensor([1.0, 2.0, 3.0])},
        parameters={"w": torch.zeros(3)},
        buffers={"count": torch.tensor(1)},
    )
    found = {measure.kind: measure.error for measure in measures(expected, [result(), result(**changes)], 1e-10, 0.5)}
    assert all(error == 0 for other, error in found.items() if other != kind)
    return found[kind]


def test_measures() -> None:
    assert error_of("loss") == 0.0
    assert error_of("loss", loss=torch.tensor(5.0)) == 0.25
    assert error_of("outputs", outputs={"y": torch.tensor([0.0, float("-inf"), float("nan")])}) == 1.0
    assert error_of("outputs", outputs={"y": torch.tensor([1.0, 0.0, float("nan")])}) == float("inf")
    assert error_of("outputs", outputs={"y": torch.ones(2)}) == float("inf")
    assert error_of("gradients", gradients={"w": [((1,), torch.tensor([2.0, 3.3]))]}) == pytest.approx(0.1)
    assert error_of("parameters", parameters={"w": [((2,), torch.tensor([0.1]))]}) == pytest.approx(0.2)
    assert error_of("buffers", buffers={"count": torch.tensor(2)}) == float("inf")


def test_pieces_that_do_not_make_up_the_whole_are_an_error() -> None:
    expected = Expected(torch.tensor(1.0), {}, {"w": torch.ones(3)}, {}, {})
    partial = result(
        gradients={"w": [((0,), torch.ones(2))]}, loss=torch.tensor(1.0), outputs={}, parameters={}, buffers={}
    )
    found = {measure.kind: measure.error for measure in measures(expected, [partial], 1e-10, 1e-3)}
    assert found["gradients"] == float("inf")
