"""parallelize() in one process without torchrun: inputs, outputs, modes, state dicts, errors. Many ranks: tests/e2e."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import AutoparError, InputError, PlanFileError, ProgramError
from autopar.mesh import Mesh
from autopar.options import Parallelism
from autopar.parallel import Parallel, parallelize
from autopar.runtime import ProgramError as RuntimeProgramError
from autopar.tracing import trace
from cost_models import Cluster
from tests.support import models
from tests.support.plans import make_plan


class Nested(nn.Module):
    """Inputs and outputs in trees; a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(2, 2)

    def forward(self, batch: dict[str, Any], scale: Tensor, *, doubled: bool = False) -> dict[str, Any]:
        left, right = self.first(batch["x"][0]), self.second(batch["x"][1])
        total = (left + right) * scale * (2 if doubled else 1)
        return {"loss": total.square().mean(), "parts": (left, [right]), "number": 7}


def nested_inputs(batch: int = 2) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ({"x": [torch.randn(batch, 4), torch.randn(batch, 4)]}, torch.tensor(3.0)), {"doubled": True}


def alone(model: nn.Module, inputs: Any, **options: Any) -> Parallel:
    """On one process by a plan without choices."""
    graph = trace(model, inputs, loss_fn=options.get("loss_fn")).graph
    return parallelize(model, None, inputs, plan=make_plan(graph, Mesh((1,), ("data",))), device="cpu", **options)


def test_trees_of_inputs_and_outputs() -> None:
    torch.manual_seed(0)
    model, example = Nested(), nested_inputs()
    parallel = alone(model, example)
    for batch in (2, 4):
        args, kwargs = nested_inputs(batch)
        expected = model(*args, **kwargs)
        loss = parallel.step(*args, **kwargs)
        torch.testing.assert_close(loss, expected["loss"].detach())
        found = parallel(*args, **kwargs)
        assert found["number"] == 7 and isinstance(found["parts"], tuple)
        torch.testing.assert_close(found["parts"][1][0], expected["parts"][1][0].detach())
    gradients = {name: parameter.grad for name, parameter in parallel.named_parameters()}
    assert gradients["unused.weight"] is None and gradients["first.weight"] is not None
    parallel.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in parallel.parameters() if p.grad is not None)
    parallel.zero_grad()
    assert all(parameter.grad is None for parameter in parallel.parameters())


def test_a_batch_in_a_dict_is_taken_apart() -> None:
    model, inputs = models.mlp(4)
    parallel = alone(model, inputs, loss_fn=models.cross_entropy)
    by_name, as_one = parallel.step(**inputs), parallel.step(inputs)
    assert torch.equal(by_name, as_one)
    torch.testing.assert_close(by_name, models.cross_entropy(model(inputs["x"]), inputs).detach())


def test_what_only_the_loss_reads_may_be_left_out_when_evaluating() -> None:
    model, inputs = models.mlp(4)
    parallel = alone(model, inputs, loss_fn=models.cross_entropy)
    for batch in (4, 6):
        x = torch.randn(batch, 12)
        torch.testing.assert_close(parallel(x=x), model(x).detach())
    with pytest.raises(InputError, match="missing inputs: target"):
        parallel.step(x=inputs["x"])
    with pytest.raises(InputError, match="missing inputs: x"):
        parallel(target=inputs["target"])
    model, inputs = models.gpt2(2)  # here the labels lead to what the model itself returns
    with pytest.raises(InputError, match="missing inputs: labels"):
        alone(model, inputs)(input_ids=inputs["input_ids"])


def test_errors_of_the_runtime_are_ours(tmp_path: Path) -> None:
    model, inputs = models.mlp(4)
    parallel = alone(model, inputs, loss_fn=models.cross_entropy)
    wrong = {"x": inputs["x"].double(), "target": inputs["target"]}
    for attempt in (lambda: parallel.step(**wrong), lambda: parallel(**wrong), lambda: parallel.load(tmp_path)):
        with pytest.raises(AutoparError) as caught:
            attempt()
        assert isinstance(caught.value, ProgramError) and isinstance(caught.value, RuntimeProgramError)
        assert type(caught.value.__cause__) is RuntimeProgramError


def test_wrong_inputs() -> None:
    (batch, scale), _ = nested_inputs()
    parallel = alone(Nested(), nested_inputs())
    with pytest.raises(InputError, match=r"missing inputs: scale; give all"):
        parallel.step(batch)
    with pytest.raises(InputError, match=r"there is no input size: the example inputs had batch\[\"x\"\]\[0\], "):
        parallel.step(batch, scale, size=torch.ones(1))
    with pytest.raises(InputError, match="doubled is fixed at True"):
        parallel.step(batch, scale, doubled=False)
    with pytest.raises(InputError, match="input scale must be a tensor, as in the example inputs, not float"):
        parallel.step(batch, 3.0)
    with pytest.raises(InputError, match="scale is given twice"):
        parallel.step(batch, scale, scale=scale)


def test_values_come_from_the_model_and_go_back() -> None:
    torch.manual_seed(0)
    model, inputs = models.gpt2(2)
    parallel = alone(model, inputs)
    whole = parallel.full_state_dict()
    assert whole.keys() == model.state_dict().keys()
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())
    next(iter(parallel.parameters())).data.zero_()
    assert not torch.equal(parallel.full_state_dict()["transformer.wte.weight"], model.transformer.wte.weight)
    assert set(parallel.state_dict()) == set(whole) - {"lm_head.weight"}
    assert (parallel.data_rank, parallel.data_size, parallel.device.type) == (0, 1, "cpu")
    assert "class Stage0" in parallel.source and "rank 0" in repr(parallel)


def test_saves_and_loads(tmp_path: Path) -> None:
    model, inputs = models.gpt2(2)
    parallel = alone(model, inputs)
    optimizer = torch.optim.AdamW(parallel.parameters())
    parallel.step(**inputs)
    parallel.clip_grad_norm_(1.0)
    optimizer.step()
    parallel.save(tmp_path, optimizer)
    other = alone(models.gpt2(2)[0], inputs)
    other.load(tmp_path, torch.optim.AdamW(other.parameters()))
    saved = parallel.full_state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in other.full_state_dict().items())


def test_dropout_goes_on_after_a_checkpoint_as_without_a_break(tmp_path: Path) -> None:
    def made() -> Parallel:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 4))
        return alone(model, torch.ones(4, 8), loss_fn=lambda outputs, inputs: outputs.square().mean())

    parallel = made()
    losses = [float(parallel.step(torch.ones(4, 8))) for _ in range(2)]
    parallel.save(tmp_path)
    losses.append(float(parallel.step(torch.ones(4, 8))))
    assert len(set(losses)) == 3  # other elements in every step
    other = made()
    other.load(tmp_path)
    assert other.num_steps == 2
    assert float(other.step(torch.ones(4, 8))) == losses[2]


def test_modes() -> None:
    model, inputs = models.gpt2(2)
    parallel = alone(model, inputs)
    assert parallel.eval() is parallel and parallel.train() is parallel
    model, inputs = models.resnet(2)
    training = alone(model, inputs)
    with pytest.raises(
        InputError, match=r"made for training and ResNet.* parallelize the model anew after model\.eval"
    ):
        training.eval()
    torch.testing.assert_close(alone(model.eval(), inputs)(**inputs).logits, model(**inputs).logits)


def test_devices_and_processes_must_agree() -> None:
    model, inputs = models.mlp(4)
    given: dict[str, Any] = {"example_inputs": inputs, "loss_fn": models.cross_entropy}
    with pytest.raises(InputError, match="the cluster has 2 devices and there is one process: start with torchrun"):
        parallelize(model, Cluster.local(2), **given)
    graph = trace(model, inputs, loss_fn=models.cross_entropy).graph
    plan = make_plan(graph, Mesh((2,), ("data",)))
    with pytest.raises(InputError, match="the plan has 2 devices and there is one process"):
        parallelize(model, plan=plan, **given)
    with pytest.raises(InputError, match="plan= is given together with options=, parallelism= or profile="):
        parallelize(model, plan=plan, parallelism=Parallelism(data=1), **given)
    with pytest.raises(PlanFileError, match="made for another model"):
        parallelize(models.mlp(8)[0], example_inputs=models.mlp(8)[1], loss_fn=models.cross_entropy, plan=plan)
