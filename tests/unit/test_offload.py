"""Optimizer states on the host: updated as on the device, saved and loaded, counted, priced, chosen where memory lacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.codegen import generate
from autopar.costing import build, prepare
from autopar.costing.parameters import ParameterTable
from autopar.errors import InfeasibleError, InputError
from autopar.mesh import Mesh
from autopar.options import PRECISIONS, Parallelism, PlanOptions
from autopar.planner import plan_graph
from autopar.plans import Plan
from autopar.report import text
from autopar.runtime import Engine, load_program, saving
from autopar.simulation import run_ranks
from autopar.tracing import Traced, trace
from autopar.verifier import verify_traced
from cost_models import Cluster, CostModel, Host, Link, Node
from cost_models.parts import Device
from tests.support.models import gpt2

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 64
ON_GPUS = Cluster.homogeneous(num_nodes=1, devices_per_node=4, device="H100-SXM")
Inputs = dict[str, Tensor]


@cache
def traced(precision: str = "model") -> tuple[nn.Module, Inputs, Traced]:
    torch.manual_seed(0)
    model, inputs = gpt2(8, 1)
    return model, inputs, trace(model, inputs, precision=PRECISIONS[precision])


def planned(precision: str = "model", offload: str = "optimizer", **forced: Any) -> Plan:
    settings = {"pipeline": 1, "recompute": "none", **forced}
    options = PlanOptions(parallelism=Parallelism(**settings), precision=precision, offload=offload)
    return plan_graph(traced(precision)[2].graph, ON_GPUS, options, compare=False)


def on_the_device(plan: Plan) -> Plan:
    """The same plan without a host."""
    stages = tuple(
        replace(stage, parameters={name: replace(kept, offload=False) for name, kept in stage.parameters.items()})
        for stage in plan.stages
    )
    return replace(plan, stages=stages)


class Training:
    """One rank of a program, with AdamW."""

    def __init__(self, source: str, precision: str) -> None:
        model, inputs, found = traced(precision)
        self.engine = Engine(load_program(source))
        values = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        self.engine.load(lambda name: values[name].detach())
        by_path = {entry.path: inputs[entry.path] for entry in found.graph.inputs}
        names = zip(self.engine.program.INPUTS, found.graph.inputs, strict=True)
        self.inputs = {given.name: by_path[entry.path] for given, entry in names}
        self.optimizer = torch.optim.AdamW(self.engine.parameters(), lr=0.05)

    def steps(self, count: int) -> list[Tensor]:
        """Each of two batches, whose gradients are added up and clipped."""
        losses = []
        for _ in range(count):
            losses += [self.engine.step(**self.inputs), self.engine.step(**self.inputs)]
            losses.append(self.engine.clip_grad_norm_(0.5))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def state(self) -> dict[str, Tensor]:
        """Everything that the optimizer updates and keeps, whole."""
        slots, mesh = list(self.engine.slots.values()), self.engine.mesh
        found = {slot.name: saving.whole_tensor(slot, mesh).clone() for slot in slots}
        for slot in slots:
            for key, value in self.optimizer.state[slot.storage].items():
                whole = saving.whole_tensor(slot, mesh, value) if key != "step" else value
                found[f"{slot.name}:{key}"] = whole.clone()
        return found


def on_ranks(plan: Plan, run: Callable[[Training], Any], precision: str = "model") -> list[Any]:
    source = generate(plan, traced(precision)[2].graph)
    return run_ranks(plan.num_devices, lambda rank: run(Training(source, precision)))


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())


WAYS: dict[str, dict[str, Any]] = {
    "replicated": {"data": 4, "zero": 0},
    "zero-1": {"data": 4, "zero": 1, "micro_batch_size": 4},
    "hybrid zero-2": {"data": 4, "zero": 2, "zero_size": 2, "micro_batch_size": 4},
    "zero-3": {"data": 4, "zero": 3, "micro_batch_size": 4},
    "tensor": {"data": 2, "tensor": 2, "zero": 1},
    "pipeline": {"pipeline": 2, "data": 2, "zero": 1, "micro_batch_size": 4},
    "pipeline, zero-3": {"pipeline": 2, "data": 2, "zero": 3, "micro_batch_size": 4},
}


QUICK = [("zero-1", "bfloat16"), ("zero-3", "model"), ("pipeline", "bfloat16")]
REST = [(way, precision) for way in WAYS for precision in ("model", "bfloat16") if (way, precision) not in QUICK]


@pytest.mark.parametrize(
    ("way", "precision"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in REST)]
)
def test_trained_alike_to_the_last_bit(way: str, precision: str) -> None:
    """Losses, norms, parameters and states of two steps, with gradients of two batches added up and clipped."""
    plan = planned(precision, **WAYS[way])
    assert all(kept.offload for stage in plan.stages for kept in stage.parameters.values())

    def run(training: Training) -> tuple[list[Tensor], dict[str, Tensor]]:
        return training.steps(2), training.state()

    there, here = on_ranks(plan, run, precision), on_ranks(on_the_device(plan), run, precision)
    for (losses, state), (expected_losses, expected) in zip(there, here, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(losses, expected_losses, strict=True))
        assert same(state, expected)


@pytest.mark.parametrize("way", ["zero-1", pytest.param("zero-3", marks=pytest.mark.slow), "pipeline, zero-3"])
def test_equal_to_the_plain_model(way: str) -> None:
    model, _, found = traced()
    verify_traced(model, found, planned(**WAYS[way]), count_collectives=True).require()


@pytest.mark.parametrize("precision", [pytest.param("model", marks=pytest.mark.slow), "bfloat16"])
def test_the_host_has_memory_of_its_own(precision: str) -> None:
    """What rests, its gradient and its states are not what the device computes with, which follows at the next step."""

    def run(training: Training) -> None:
        slots = list(training.engine.slots.values())
        assert all(slot.offload for slot in slots)
        training.engine.step(**training.inputs)
        before = {slot.name: slot.leaf.clone() for slot in slots}
        training.optimizer.step()
        for slot in slots:
            assert slot.leaf.data_ptr() != slot.local.data_ptr()
            assert torch.equal(slot.leaf, before[slot.name])
            assert training.optimizer.state[slot.storage]["exp_avg"].device.type == "cpu"
        training.engine.step(**training.inputs)
        assert any(not torch.equal(slot.leaf, before[slot.name]) for slot in slots)

    on_ranks(planned(precision, data=4, zero=1), run, precision)


@pytest.mark.parametrize("precision", [pytest.param("model", marks=pytest.mark.slow), "bfloat16"])
def test_checkpoints_from_host_to_device_and_back(tmp_path: Path, precision: str) -> None:
    """Bitwise, and training goes on as it would have."""
    hosted = planned(precision, data=4, zero=3, micro_batch_size=8)
    resident = planned(precision, "none", data=2, tensor=2, zero=1)

    def save(training: Training, folder: Path) -> dict[str, Tensor]:
        training.steps(1)
        saving.save(folder, list(training.engine.slots.values()), training.engine.mesh, training.optimizer)
        return training.state()

    def load(training: Training, folder: Path) -> dict[str, Tensor]:
        saving.load(folder, list(training.engine.slots.values()), training.engine.mesh, training.optimizer)
        return training.state()

    for number, (first, second) in enumerate([(hosted, resident), (resident, hosted)]):
        folder = tmp_path / str(number)
        saved = on_ranks(first, lambda training, folder=folder: save(training, folder), precision)  # type: ignore[misc]
        loaded = on_ranks(second, lambda training, folder=folder: load(training, folder), precision)  # type: ignore[misc]
        assert all(same(state, saved[0]) for state in loaded)


# -- what it costs -----------------------------------------------------------------------------------------------------


class Matrix(nn.Module):
    """One parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


GPU = Device("gpu", "cuda", 2**34, 1e12, {"float32": 1e13}, launch_seconds=0.0, source="made up")
CPU = Device("cpu", "cpu", 2**34, 1e10, {"float32": 1e11}, launch_seconds=0.0, memory_efficiency=1.0, source="made up")
LINK = Link("fast", 1e11, 0.0)
HOST = Host("host", 2**32, 4e9, Link("bus", 1e9, 1e-3), memory_efficiency=0.5)


def table(device: Device, zero: int, precision: str, offload: str, host: Host | None = HOST) -> ParameterTable:
    """Of the matrix, on two devices along the batch."""
    node = Node(device, 2, LINK, host if device is GPU else None)
    options = PlanOptions(parallelism=Parallelism(zero=zero), offload=offload)
    graph = prepare(trace(Matrix(), {"x": torch.randn(8, WIDTH)}, precision=PRECISIONS[precision]).graph)
    costed = build(graph, Mesh((2,), ("data",)), ("data",), CostModel(Cluster((node,), LINK)), options)
    return costed.parameter_table(graph.graph.parameters[0].value)


# Bytes of each of the matrix's elements: master or parameter, working copy, gradient and states on the device, all on the host.
BYTES = {
    ("model", 0): ((0, 4, 4, 0), 16),
    ("model", 1): ((0, 4, 4, 0), 8),
    ("model", 2): ((0, 4, 2, 0), 8),
    ("model", 3): ((0, 2, 2, 0), 8),
    ("bfloat16", 0): ((0, 2, 4, 0), 18),
    ("bfloat16", 1): ((0, 2, 4, 0), 9),
    ("bfloat16", 3): ((0, 2, 2, 0), 8),
}


@pytest.mark.parametrize(("precision", "zero"), BYTES)
def test_bytes_on_device_and_host(precision: str, zero: int) -> None:
    parts, on_host = BYTES[precision, zero]
    found = table(GPU, zero, precision, "optimizer")
    at = next(at for at, choice in enumerate(found.choices) if choice.zero == zero and "G" in str(choice.use[0]))
    assert tuple(found.parts[:, at] / WIDTH**2) == parts
    assert found.host_bytes[at] / WIDTH**2 == on_host
    assert found.kept_bytes[at] == sum(parts) * WIDTH**2 and found.landed_bytes[at] == 0


def test_the_host_of_a_cpu_process_is_the_process() -> None:
    """Parameter, gradient and states are counted where they are, and the working copy and the gradient on their way besides."""
    found = table(CPU, 1, "bfloat16", "optimizer")
    at = next(at for at, choice in enumerate(found.choices) if choice.zero == 1)
    assert tuple(found.parts[:, at] / WIDTH**2) == (2, 2 + 1, 4 + 2, 4)
    assert found.landed_bytes[at] / WIDTH**2 == 2
    assert found.kept_bytes[at] - found.host_bytes[at] == (2 + 4) * WIDTH**2


def test_seconds_by_hand() -> None:
    """Gradient down and parameter up at 1 GB/s and 1 ms, the update at half of 4 GB/s for two devices."""
    elements = WIDTH**2 / 2
    there, here = table(GPU, 1, "bfloat16", "optimizer"), table(GPU, 1, "bfloat16", "none")
    at = next(at for at, choice in enumerate(here.choices) if choice.zero == 1)
    copies = 2e-3 + elements * (4 + 2) / 1e9
    assert there.offload_seconds[at] == pytest.approx(copies)
    updating = elements * (2 * 8 + 3 * 4 + (4 + 2)) / 1e9  # the update, and the cast of what comes back
    on_device = elements * (2 * 8 + 3 * 4 + (4 + 2)) / (1e12 * GPU.memory_efficiency)
    assert there.once_seconds[at] - here.once_seconds[at] == pytest.approx(copies + updating - on_device)
    assert there.seconds[at] - here.seconds[at] == pytest.approx(copies + updating - on_device)


def test_devices_that_share_an_uplink_wait_for_one_another() -> None:
    shared = replace(HOST, link=replace(HOST.link, ports_per_node=1))
    alone, both = table(GPU, 0, "model", "optimizer"), table(GPU, 0, "model", "optimizer", shared)
    assert (both.offload_seconds - 2e-3) / 2 == pytest.approx(alone.offload_seconds - 2e-3)


def test_auto_offers_both() -> None:
    found, here = table(GPU, 1, "model", "auto"), table(GPU, 1, "model", "none")
    assert [choice.offload for choice in found.choices] == [False] * len(here.choices) + [True] * len(here.choices)
    assert np.array_equal(found.seconds[: len(here.choices)], here.seconds)


# -- what is chosen ----------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


ELEMENTS = 4 * WIDTH**2


def searched(offload: str, bytes_per_element: float, host_bytes: float = 1e9, **forced: Any) -> Plan:
    """One device with so many bytes for each element of the parameters: 16 hold them with gradients and states."""
    device = replace(GPU, memory_bytes=int(ELEMENTS * bytes_per_element) + 2**30)
    node = Node(device, 1, LINK, replace(HOST, memory_bytes=int(host_bytes)))
    settings = {"pipeline": 1, "recompute": "none", "micro_batch_size": 2, **forced}
    options = PlanOptions(parallelism=Parallelism(**settings), offload=offload, memory_margin=0.0)
    graph = trace(Layers(), {"x": torch.randn(2, WIDTH)}).graph
    return plan_graph(graph, Cluster((node,), LINK), options, compare=False)


def offloads(plan: Plan) -> list[bool]:
    return [kept.offload for stage in plan.stages for kept in stage.parameters.values()]


def test_nothing_is_offloaded_unasked_or_needlessly() -> None:
    assert not any(offloads(searched("none", 40.0)))
    assert not any(offloads(searched("auto", 40.0)))
    assert all(offloads(searched("optimizer", 40.0)))


def test_auto_offloads_as_much_as_must_be() -> None:
    some, everything = searched("auto", 14.5), searched("auto", 10.0)
    assert set(offloads(some)) == {True, False}
    assert all(offloads(everything))
    assert everything.report()["predicted"]["step_seconds"] > some.report()["predicted"]["step_seconds"]


def test_the_refusal_says_that_offloading_would_do() -> None:
    with pytest.raises(InfeasibleError, match="these devices would do with offload='auto', which keeps optimizer states"):
        searched("none", 10.0)


def test_it_does_not_say_so_where_it_would_not() -> None:
    with pytest.raises(InfeasibleError) as refused:
        searched("none", 5.0)
    assert "offload" not in str(refused.value)


def test_the_hosts_memory_is_a_budget() -> None:
    """16 bytes an element there: of less, auto keeps a part on the device, and all of them do not fit."""
    some = searched("auto", 14.5, host_bytes=ELEMENTS * 9.0)
    assert 0 < sum(offloads(some)) < len(offloads(some))
    with pytest.raises(InfeasibleError, match=r"keeps more on the hosts than the 0\.00 GiB that each device has"):
        searched("optimizer", 40.0, host_bytes=ELEMENTS * 15.0)
    assert all(offloads(searched("optimizer", 40.0, host_bytes=ELEMENTS * 17.0)))


def test_the_report_says_where_and_what_it_costs() -> None:
    plan = searched("optimizer", 40.0)
    predicted = plan.report()["predicted"]
    assert predicted["memory"]["host_bytes"] == ELEMENTS * 16
    assert predicted["memory"]["host_available_bytes"] == 1e9
    assert predicted["breakdown"]["offload_seconds"] == pytest.approx(4 * 2e-3 + ELEMENTS * 8 / 1e9)
    assert sum(predicted["breakdown"].values()) == pytest.approx(predicted["step_seconds"])
    written = text(plan.report())
    assert "copies to the host and back" in written and "updated on the host" in written
    assert "on the host, for each device: 256 KiB of optimizer states" in written
    assert "offload" not in str(on_the_device(plan).to_json()["stages"])


def test_the_plans_file_keeps_it(tmp_path: Path) -> None:
    plan = searched("optimizer", 40.0)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert on_the_device(plan).fingerprint != plan.fingerprint


def test_unknown_offload() -> None:
    with pytest.raises(InputError, match="offload 'disk' is not known; choose one of none, optimizer, auto"):
        PlanOptions(offload="disk")
