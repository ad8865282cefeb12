"""Precision policies: what is traced, what it costs, and that programs train as one device does under the same policy."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar.codegen import generate, ledger
from autopar.codegen.ledger import totals
from autopar.costing import Costed, build, prepare
from autopar.costing.setting import Setting
from autopar.errors import InputError, PlanFileError, TraceError
from autopar.mesh import Mesh
from autopar.options import PRECISIONS, Parallelism, PlanOptions, Precision
from autopar.parallel import parallelize
from autopar.planner import plan
from autopar.plans import Plan
from autopar.tracing import trace
from autopar.verifier import verify
from cost_models import Cluster, CostModel
from tests.support import models
from tests.support.memory import MIXED_CASES, Case, compare
from tests.support.pipelines import even_cuts, pipeline_plan
from tests.support.precision import largest_difference, micro_batches_of, train_alone, train_program

BFLOAT16, AUTOCAST = PRECISIONS["bfloat16"], PRECISIONS["autocast"]
LOSS = {"mlp": models.cross_entropy}
BATCH = 8


class Small(nn.Module):
    """One trained and one frozen matrix, a persistent and a computed table; the loss is in the type computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("kept", torch.ones(8))
        self.register_buffer("computed", torch.ones(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.trained(x) * self.kept * self.computed.to(x.dtype)).square().mean()


def small_graph(precision: Precision | None = BFLOAT16) -> Any:
    return trace(Small(), {"x": torch.randn(BATCH, 4)}, precision=precision).graph


# -- what is traced ----------------------------------------------------------------------------------------------------


def test_types_of_the_traced_graph() -> None:
    model = Small()
    graph = trace(model, {"x": torch.randn(BATCH, 4)}, precision=BFLOAT16).graph
    dtypes = {name: value.dtype for name, value in graph.values.items()}
    assert dtypes["x"] == "float32" and dtypes[graph.loss] == "float32"
    own = ("trained.weight", "frozen.weight", "kept", "computed")
    assert [dtypes[name] for name in own] == ["bfloat16", "bfloat16", "bfloat16", "float32"]
    assert {entry.name: entry.master for entry in graph.parameters} == {"trained.weight": "float32", "frozen.weight": None}
    products = [graph.values[op.outputs[0]].dtype for op in graph.operators if "linear" in op.target]
    assert products == ["bfloat16", "bfloat16"]
    assert all(tensor.dtype == torch.float32 for tensor in (*model.parameters(), *model.buffers()))


def test_masters_are_float32_at_least() -> None:
    assert [BFLOAT16.master(dtype) for dtype in ("float64", "float32", "bfloat16", "float16", "int64")] == [
        "float64", "float32", "float32", "float32", None,
    ]  # fmt: skip
    assert Precision().master("float32") is None and Precision().computed("float32") == "float32"


def test_the_policy_is_part_of_the_fingerprint() -> None:
    narrow = Small().bfloat16()
    inputs = {"x": torch.randn(BATCH, 4, dtype=torch.bfloat16)}
    plain, mixed = trace(narrow, inputs).graph, trace(narrow, inputs, precision=BFLOAT16).graph
    assert plain.fingerprint != mixed.fingerprint
    assert plain.fingerprint == trace(narrow, inputs, precision=Precision()).graph.fingerprint


def test_loss_fn_gets_outputs_in_float32_and_inputs_as_they_are() -> None:
    seen = {}

    def loss_fn(outputs: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.update(outputs=outputs.dtype, target=inputs["target"].dtype)
        return (outputs - inputs["target"]).square().mean()

    inputs = {"x": torch.randn(BATCH, 12), "target": torch.randn(BATCH, 5)}
    traced = trace(models.MLP(), inputs, loss_fn=loss_fn, precision=BFLOAT16)
    assert seen == {"outputs": torch.float32, "target": torch.float32}
    assert traced.graph.values[traced.graph.outputs[0].value].dtype == "bfloat16"


def test_autocast_becomes_casts_of_the_graph() -> None:
    graph = small_graph(AUTOCAST)
    cast = [op.inputs[0] for op in graph.operators if op.target == "aten.to.dtype"]
    assert cast[:2] == ["x", "trained.weight"] and "frozen.weight" in cast
    dtypes = {op.target: graph.values[op.outputs[0]].dtype for op in graph.operators}
    assert dtypes["aten.linear.default"] == "bfloat16"
    assert dtypes["aten.mul.Tensor"] == "float32", "a float32 buffer is not cast for a plain product"
    assert {entry.master for entry in graph.parameters} == {None}


def test_a_parameter_is_cast_once_under_autocast() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.linear(self.linear(x)), x], 1).softmax(1).square().mean()

    graph = trace(Twice(), {"x": torch.randn(BATCH, 4)}, precision=AUTOCAST).graph
    cast = [op.inputs[0] for op in graph.operators if op.target == "aten.to.dtype"]
    assert cast.count("linear.weight") == cast.count("linear.bias") == 1


def test_types_that_do_not_meet_are_explained() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("table", torch.ones(4), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[1] == 4:
                return self.linear(x + self.table).mean()
            return torch.bmm((x + self.table[:1])[None], x.t()[None]).mean()

    said = r"at .*test_precision.py:\d+ it gives aten.linear.default tensors of types float32 and bfloat16, which it refuses"
    with pytest.raises(TraceError, match=said):
        trace(Table(), {"x": torch.randn(BATCH, 4)}, precision=BFLOAT16)
    with pytest.raises(TraceError, match=r"cannot be computed in bfloat16: at .*test_precision.py.* different types meet"):
        trace(Table(), {"x": torch.randn(BATCH, 3)}, precision=BFLOAT16)


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(InputError, match="precision 'float8' is not known; choose one of model, bfloat16, autocast"):
        PlanOptions(precision="float8")
    graph = small_graph()
    other = Plan(graph.model, 1, graph.fingerprint, "", {"precision": "float8"}, ())
    with pytest.raises(PlanFileError, match="precision 'float8', which this version does not know"):
        _ = other.precision
    assert PlanOptions.from_json(PlanOptions(precision="bfloat16").to_json()).precision == "bfloat16"


# -- what it costs -----------------------------------------------------------------------------------------------------


def priced(precision: Precision | None, zero: int, num_micro_batches: int = 2) -> Costed:
    """On two devices along the batch."""
    options = PlanOptions(parallelism=Parallelism(zero=zero))
    model = CostModel(Cluster.homogeneous(num_nodes=1, devices_per_node=2))
    graph = prepare(small_graph(precision))
    return build(graph, Mesh((2,), ("data",)), ("data",), model, options, Setting(num_micro_batches))


# Of the 32 elements of the trained matrix: bytes of what rests, of the working copy, gradient and AdamW's states, and
# what is held for a moment; by policy and ZeRO level.
BYTES = {
    ("model", 0): (128, 0, 128, 256, 0),
    ("model", 1): (64, 128, 128, 128, 0),
    ("model", 2): (64, 128, 64, 128, 128),
    ("model", 3): (64, 0, 64, 128, 256),
    ("bfloat16", 0): (128, 64, 128, 256, 64),
    ("bfloat16", 1): (64, 64, 128, 128, 64),
    ("bfloat16", 2): (64, 64, 64, 128, 192),
    ("bfloat16", 3): (64, 0, 64, 128, 192),
}


@pytest.mark.parametrize(("policy", "zero"), BYTES)
def test_bytes_of_a_parameter(policy: str, zero: int) -> None:
    costed = priced(PRECISIONS[policy], zero)
    table = costed.parameter_table("trained.weight")
    summed = [at for at, choice in enumerate(table.choices) if str(choice.use[0]) == "G" and choice.zero == zero]
    assert summed, "the batch may be split"
    for at in summed:
        found = (*table.parts[:, at], table.transient_bytes[at])
        assert tuple(int(num_bytes) for num_bytes in found) == BYTES[policy, zero]
    frozen = costed.parameter_table("frozen.weight").parts[:, 0]
    assert tuple(frozen) == (16 * (2 if policy == "bfloat16" else 4), 0, 0, 0)


def test_gathers_send_the_working_type_and_reductions_the_masters() -> None:
    seconds = {}
    for policy in ("model", "bfloat16"):
        graph = small_graph(PRECISIONS[policy])
        made = pipeline_plan(graph, (), (2,), "single", 2, parallelism=Parallelism(zero=1))
        sent = [entry for entry in ledger(made, graph) if entry.what == "trained.weight"]
        seconds[policy] = {(entry.kind, entry.phase): entry.num_bytes for entry in sent}
    assert seconds["model"][("all_gather", "parameter")] == 2 * seconds["bfloat16"][("all_gather", "parameter")] > 0
    assert seconds["model"][("reduce_scatter", "gradient")] == seconds["bfloat16"][("reduce_scatter", "gradient")] > 0


def test_a_plan_in_bfloat16_is_faster_and_smaller() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048))
        inputs = {"input": torch.empty(16384, 2048)}
    cluster = Cluster.homogeneous(num_nodes=1, devices_per_node=4, device="H100-SXM")
    reports = []
    for policy in ("model", "bfloat16"):
        options = PlanOptions(precision=policy, parallelism=Parallelism(data=4, pipeline=1, zero=0, micro_batch_size=16384))
        reports.append(plan(model, cluster, inputs, options=options, loss_fn=lambda y, inputs: y.square().mean()).report())
    assert [report["options"]["precision"] for report in reports] == ["model", "bfloat16"]
    assert [report["model"]["dtype"] for report in reports] == ["float32", "bfloat16"]
    wide, narrow = (report["predicted"] for report in reports)
    assert narrow["step_seconds"] < 0.75 * wide["step_seconds"]
    assert narrow["memory"]["saved_activation_bytes"] < 0.7 * wide["memory"]["saved_activation_bytes"]
    assert narrow["memory"]["optimizer_state_bytes"] == wide["memory"]["optimizer_state_bytes"]
    assert narrow["memory"]["working_copy_bytes"] * 2 == narrow["memory"]["parameter_bytes"]
    assert narrow["mfu"]["dtype"] == "bfloat16"


@pytest.mark.parametrize("case", [MIXED_CASES[1], MIXED_CASES[3]], ids=str)
def test_the_predicted_peak_is_that_of_the_allocator(case: Case) -> None:
    for found in compare(case):
        assert 0.97 <= found.ratio <= 1.10, (found.pipeline_rank, found.ratio)


# -- that it trains ----------------------------------------------------------------------------------------------------

RUNS: list[tuple[str, int, tuple[int, ...], str, int, int | None]] = [
    ("gpt2", 1, (2,), "single", 2, 0),
    ("gpt2", 1, (2,), "single", 2, 1),
    ("gpt2", 1, (2,), "single", 2, 2),
    ("gpt2", 1, (2,), "single", 2, 3),
    ("llama", 1, (1, 2), "single", 2, None),
    ("mlp", 1, (1,), "single", 4, None),
    ("moe", 1, (2, 2), "single", 2, 3),
    ("llama", 2, (2,), "1f1b", 2, 1),
    ("gpt2", 2, (1,), "gpipe", 4, None),
    ("gpt2", 4, (1,), "zbv", 4, None),
]


def trained(
    policy: Precision, dtype: torch.dtype, name: str, stages: int, mesh: tuple[int, ...], schedule: str, count: int,
    zero: int | None,
) -> tuple[float, float, float]:  # fmt: skip
    """Train by a program and alone: the largest difference of a loss (of itself), of a gradient in the first step (of the
    largest gradient) and of a master after the last (of the learning rates so far). The ledger must agree exactly."""
    torch.manual_seed(0)
    model, batch = models.ZOO[name](BATCH)
    model = model.to(dtype)
    batch = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in batch.items()}
    traced = trace(model, batch, loss_fn=LOSS.get(name), precision=policy)
    graph = traced.graph
    cuts = even_cuts(graph, stages) if stages > 1 else ()
    made = pipeline_plan(graph, cuts, mesh, schedule, count, parallelism=Parallelism(zero=zero))
    expected = train_alone(model, micro_batches_of(batch, count), policy, LOSS.get(name))
    ranks = train_program(generate(made, graph), traced, model, batch, made.num_devices)
    size = made.stages[0].mesh.num_devices
    for place in range(made.num_devices // size):
        assert ranks[place * size].sent == totals(ledger(made, graph, pipeline_rank=place))
    scale = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    pairs = [pair for rank in ranks for pair in zip(rank.losses, expected.losses, strict=True)]
    assert all(loss[1] < loss[0] for loss in (rank.losses for rank in ranks)), "the loss falls"
    return (
        max(abs(float(found - wanted)) / float(wanted) for found, wanted in pairs),
        max(largest_difference(rank.gradients, expected.gradients, scale) for rank in ranks),
        max(largest_difference(rank.masters, expected.masters, 2e-2) for rank in ranks),
    )


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_equal_to_one_device_in_float32_with_float64_masters(run: tuple[Any, ...]) -> None:
    """The policy with types in which rounding leaves little: gradients agree to some ulps of float32."""
    loss, gradient, master = trained(Precision("float32"), torch.float64, *run)
    assert loss <= 3e-7 and gradient <= 1e-6 and master <= 1e-4, (loss, gradient, master)


@pytest.mark.parametrize("run", [RUNS[1], RUNS[3], RUNS[7], RUNS[9]], ids=str)
def test_equal_to_one_device_in_bfloat16(run: tuple[Any, ...]) -> None:
    """An ulp of bfloat16 is 2 ** -8, or 0.4%."""
    loss, gradient, master = trained(BFLOAT16, torch.float32, *run)
    assert loss <= 1e-3 and gradient <= 2e-2 and master <= 0.1, (loss, gradient, master)


@pytest.mark.parametrize("run", [RUNS[2], RUNS[4], RUNS[8]], ids=str)
def test_equal_to_one_device_under_autocast(run: tuple[Any, ...]) -> None:
    loss, gradient, master = trained(AUTOCAST, torch.float32, *run)
    assert loss <= 1e-3 and gradient <= 2e-2 and master <= 0.1, (loss, gradient, master)


def test_autocast_casts_what_torch_casts() -> None:
    """On one device nothing is rounded otherwise."""
    loss, gradient, _ = trained(AUTOCAST, torch.float32, "gpt2", 2, (1,), "gpipe", 4, None)
    assert loss <= 1e-6 and gradient <= 1e-6


def test_gradients_are_added_up_in_the_masters_type() -> None:
    """Eight micro-batches: a sum in bfloat16 would be rounded eight times."""
    loss, gradient, _ = trained(BFLOAT16, torch.float32, "mlp", 1, (1,), "single", 8, None)
    assert loss <= 1e-6 and gradient <= 1e-6


@pytest.mark.parametrize("policy", ["bfloat16", "autocast"])
@pytest.mark.parametrize("degrees", [{"data": 2, "zero": 1}, {"data": 2, "tensor": 2, "zero": 3}])
def test_verify_runs_the_policys_program_in_float64(degrees: dict[str, int], policy: str) -> None:
    torch.manual_seed(0)
    model, inputs = models.gpt2(BATCH)
    parallelism = Parallelism(pipeline=1, micro_batch_size=BATCH // 2, **degrees)
    devices = degrees["data"] * degrees.get("tensor", 1)
    made = plan(model, Cluster.local(devices), inputs, options=PlanOptions(precision=policy, parallelism=parallelism))
    found = verify(model, made, inputs, count_collectives=True).require()
    assert found.differences == ()


# -- parallelize -------------------------------------------------------------------------------------------------------


def alone(model: nn.Module, batch: Any, precision: str) -> Any:
    options = PlanOptions(precision=precision, parallelism=Parallelism(pipeline=1, micro_batch_size=BATCH))
    return parallelize(model, None, batch, options=options, device="cpu")


def test_checkpoints_hold_masters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = models.gpt2(BATCH, layers=1)
    parallel = alone(model, batch, "bfloat16")
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    for _ in range(2):
        parallel.step(**batch)
        norm = parallel.clip_grad_norm_(0.1)
        optimizer.step()
        parallel.zero_grad()
    assert norm.dtype == torch.float32
    parallel.save(tmp_path, optimizer)
    masters = parallel.full_state_dict()
    assert masters["transformer.wte.weight"].dtype == torch.float32
    assert not torch.equal(masters["transformer.wte.weight"], masters["transformer.wte.weight"].bfloat16().float())
    losses = []
    for precision in ("bfloat16", "model"):
        torch.manual_seed(1)
        other = alone(models.gpt2(BATCH, layers=1)[0], batch, precision)
        other.load(tmp_path, torch.optim.AdamW(other.parameters(), lr=1e-3))
        for name, value in other.full_state_dict().items():
            assert torch.equal(value, masters[name]), name
        losses.append(other.step(**batch))
    assert torch.equal(losses[0], parallel.step(**batch))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-2, atol=0.0)
    loaded = copy.deepcopy(model)
    loaded.load_state_dict(masters, strict=True)


def test_models_on_meta_and_in_bfloat16_get_masters_in_float32() -> None:
    torch.manual_seed(0)
    model, batch = models.gpt2(BATCH, layers=1)
    with torch.device("meta"):
        empty = type(model)(model.config).train()
    found = alone(empty.bfloat16(), batch, "bfloat16")
    weight = found.full_state_dict()["transformer.h.0.mlp.c_fc.weight"]
    assert weight.dtype == torch.float32 and 0.01 < float(weight.std()) < 0.03
    assert {parameter.dtype for parameter in found.parameters()} == {torch.float32}


def test_a_plan_file_brings_its_policy(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = models.gpt2(BATCH, layers=1)
    parallel = alone(model, batch, "bfloat16")
    parallel.plan.save(tmp_path / "plan.json")
    again = parallelize(model, None, batch, plan=tmp_path / "plan.json", device="cpu")
    assert again.source == parallel.source and "compute=torch.bfloat16" in again.source
    assert torch.equal(again.step(**batch), parallel.step(**batch))
