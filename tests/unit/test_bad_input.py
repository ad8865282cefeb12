"""Bad input, one kind a test: the class of the error, and that its text names the fact, the values and the way out."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.codegen import generate
from autopar.errors import AutoparError, InfeasibleError, InputError, PlanFileError, RuleError, TraceError
from autopar.planner import plan_graph
from autopar.runtime import Engine, ProgramError, load_program
from autopar.simulation import run_ranks
from autopar.strategies import registry
from autopar.tracing import trace
from cost_models import Cluster, ClusterError

LOCAL = Cluster.local(2, memory_bytes=8 * 2**30, num_cores=2)


class Small(nn.Module):
    """x -> mean of a square."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = self.layer(x)
        return ((y if scale is None else y * scale) ** 2).mean()


def batch(size: int = 4, width: int = 16) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(size, width)}


def raises(kind: type[Exception], *texts: str) -> Any:
    """Expect an error whose text has all of ``texts``."""
    pattern = "".join(f"(?=.*{re.escape(text)})" for text in texts)
    return pytest.raises(kind, match=f"(?s){pattern}")


# -- the cluster -----------------------------------------------------------------------------------------------------


def cluster_file(path: Path, **changes: Any) -> Path:
    node = {"device": "A100-80GB", "num_devices": 8, "link": "NVLink3"}
    described = {"schema_version": 1, "nodes": [node], "inter_link": "InfiniBand-HDR", **changes}
    path.write_text(json.dumps(described))
    return path


def test_a_cluster_file_with_negative_bandwidth(tmp_path: Path) -> None:
    link = {"name": "mine", "bandwidth_bytes_per_second": -1e9, "latency_seconds": 1e-6}
    path = cluster_file(tmp_path / "cluster.json", inter_link=link)
    with raises(ClusterError, str(path), "mine", "bandwidth_bytes_per_second", "-1000000000.0", "more than zero"):
        Cluster.load(path)


def test_an_unknown_device_and_an_unknown_link(tmp_path: Path) -> None:
    node = {"device": "A1000-80GB", "num_devices": 8, "link": "NVLink3"}
    with raises(ClusterError, "A1000-80GB", "did you mean", "A100-"):
        Cluster.load(cluster_file(tmp_path / "cluster.json", nodes=[node]))
    with raises(ClusterError, "NVLink9", "NVLink4"):
        Cluster.homogeneous(num_nodes=1, devices_per_node=8, intra_link="NVLink9")


def test_a_cluster_without_nodes(tmp_path: Path) -> None:
    with raises(ClusterError, "no", "node"):
        Cluster.load(cluster_file(tmp_path / "cluster.json", nodes=[]))


# -- the example inputs ----------------------------------------------------------------------------------------------


def test_example_inputs_are_missing() -> None:
    with raises(InputError, "Small has no example inputs of its own", "give example_inputs", "forward(x: ", "scale"):
        autopar.plan(Small(), LOCAL)


def test_example_inputs_of_another_structure() -> None:
    with raises(InputError, "do not fit Small.forward", "['y']"):
        autopar.plan(Small(), LOCAL, {"y": torch.randn(4, 16)})
    with raises(InputError, "do not fit Small.forward", "given: 3 positional"):
        autopar.plan(Small(), LOCAL, tuple(torch.randn(4, 16) for _ in range(3)))
    with raises(InputError, "is a int", "tuple"):
        autopar.plan(Small(), LOCAL, 3)
    with raises(InputError, "numpy", "torch.from_numpy"):
        autopar.plan(Small(), LOCAL, {"x": torch.randn(4, 16).numpy()})


def test_inputs_that_are_not_dense_and_batch_dims_that_are_no_numbers() -> None:
    with raises(InputError, "input x", "sparse", "dense"):
        autopar.plan(Small(), LOCAL, {"x": batch()["x"].to_sparse()})
    with raises(InputError, "batch_dims['x'] is '0'", "number of a dim"):
        autopar.plan(Small(), LOCAL, batch(), batch_dims={"x": "0"})  # type: ignore[dict-item]


def test_a_step_with_inputs_of_another_structure() -> None:
    parallel = autopar.parallelize(Small(), Cluster.local(1), batch())
    with raises(InputError, "missing inputs: x"):
        parallel.step()
    with raises(InputError, "no input y", "x"):
        parallel.step(x=batch()["x"], y=batch()["x"])
    with raises(ProgramError, "x", "float64", "float32"):
        parallel.step(x=batch()["x"].double())


# -- the batch -------------------------------------------------------------------------------------------------------


def engines(model: nn.Module, inputs: dict[str, torch.Tensor], ranks: int, steps: Any, **forced: int) -> list[Any]:
    """What ``steps(engine)`` returns on every simulated rank."""
    graph = trace(model, inputs).graph
    options = autopar.PlanOptions(parallelism=autopar.Parallelism(pipeline=1, micro_batch_size=4, **forced))
    plan = plan_graph(graph, Cluster.local(ranks, memory_bytes=8 * 2**30, num_cores=ranks), options)
    source = generate(plan, graph)
    state = model.state_dict()

    def rank_main(rank: int) -> Any:
        engine = Engine(load_program(source))
        engine.load(state.__getitem__)
        return steps(engine)

    return run_ranks(ranks, rank_main)


def test_another_batch_is_taken_where_the_program_can() -> None:
    model, larger = Small(), batch(6)
    expected = model(**larger).item()
    for loss in engines(model, batch(4), 2, lambda engine: engine.step(**larger).item(), data=2):
        assert loss == pytest.approx(expected, rel=1e-6)


def test_a_batch_that_does_not_divide_says_which_sizes_do() -> None:
    with raises(ProgramError, "multiples of 2", "batch of 5"):
        engines(Small(), batch(4), 2, lambda engine: engine.step(**batch(5)), data=2)


def test_micro_batches_of_unlike_sizes_that_devices_share_out_unlike() -> None:
    with raises(InputError, "micro_batch_size=3, data=2", "[2, 3] samples", "divides the batch"):
        autopar.plan(Small(), LOCAL, batch(7), parallelism=autopar.Parallelism(data=2, micro_batch_size=3))
    found = autopar.plan(Small(), LOCAL, batch(7), parallelism=autopar.Parallelism(pipeline=1, micro_batch_size=7, data=2))
    assert found.num_micro_batches == 1


def test_a_batch_other_than_the_planned_one_where_the_program_cannot() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, 16))  # one row for each sample: the batch is part of the model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.table).square().mean()

    parallel = autopar.parallelize(Fixed(), Cluster.local(1), batch(4))
    with raises(ProgramError, "6", "4"):
        parallel.step(**batch(6))


def test_a_batch_whose_inputs_disagree() -> None:
    parallel = autopar.parallelize(Small(), Cluster.local(1), {"x": torch.randn(4, 16), "scale": torch.randn(4, 16)})
    with raises(ProgramError, "scale", "4", "6"):
        parallel.step(x=torch.randn(4, 16), scale=torch.randn(6, 16))


# -- the model -------------------------------------------------------------------------------------------------------


def test_a_forward_that_depends_on_data_names_the_line() -> None:
    class Branching(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            y = self.layer(x)
            if y.sum() > 0:  # the line to be named
                return y.mean()
            return y.square().mean()

    lines, start = inspect.getsourcelines(Branching.forward)
    line = start + next(index for index, text in enumerate(lines) if "the line to be named" in text)
    with raises(TraceError, "Branching", f"test_bad_input.py:{line}", "depends on the values", "torch.where"):
        autopar.plan(Branching(), LOCAL, batch())


def test_a_loss_that_is_no_number() -> None:
    class Rows(Small):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"loss": self.layer(x).square().mean(-1)}

    with raises(InputError, "Rows, for its loss", "[4] in torch.float32", "take a mean or sum"):
        autopar.plan(Rows(), LOCAL, batch())


def test_a_step_without_anything_to_train() -> None:
    with raises(ProgramError, "no trainable parameter", "forward()"):
        autopar.parallelize(Small().requires_grad_(False), Cluster.local(1), batch()).step(**batch())


def test_a_model_that_is_too_large_names_the_memory_and_the_devices_that_would_do() -> None:
    with torch.device("meta"):
        large = Small(4096)  # 64 MiB of parameters, 256 MiB with gradients and states of Adam
    usable = 100 * 2**20
    cluster = Cluster.local(2, memory_bytes=2 * (256 * 2**20 + usable), num_cores=2)
    options = autopar.PlanOptions(memory_margin=0.0)
    with pytest.raises(InfeasibleError) as error:
        autopar.plan(large, cluster, batch(4, 4096), options=options)
    wanted = r"needs ([\d.]+) GiB on each of 2 devices, which have ([\d.]+) GiB.*?; ([\d.]+) GiB on each.* do; (\d+) of"
    found = re.search(wanted, str(error.value))
    assert found and found[1] == found[3], str(error.value)
    needed, available, devices = float(found[1]), float(found[2]), int(found[4])
    assert available < needed < 0.3 and devices in (4, 8)
    enough = Cluster.local(2, memory_bytes=int(2 * (256 * 2**20 + (needed + 0.006) * 2**30)), num_cores=2)
    autopar.plan(large, enough, batch(4, 4096), options=options)  # what the message names is true
    more = Cluster.local(devices, memory_bytes=devices * (256 * 2**20 + usable), num_cores=devices)
    autopar.plan(large, more, batch(4, 4096), options=options)


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (lambda: autopar.Parallelism(data=0), ("data=0", "at least 1")),
        (lambda: autopar.Parallelism(tensor=2.0), ("tensor=2.0", "whole number")),  # type: ignore[arg-type]
        (lambda: autopar.Parallelism(zero=4), ("zero=4", "0, 1, 2 or 3")),
        (lambda: autopar.Parallelism(pipeline=0), ("pipeline=0", "at least 1")),
        (lambda: autopar.Parallelism(context=0), ("context=0", "at least 1")),
        (lambda: autopar.Parallelism(context_form="ring"), ("context_form='ring'", "give context=")),
        (lambda: autopar.Parallelism(context=2, context_form="star"), ("star", "ring, ulysses")),
        (lambda: autopar.Parallelism(schedule="2f2b"), ("'2f2b'", "1f1b, interleaved_1f1b")),
        (lambda: autopar.Parallelism(recompute="all"), ("'all'", "none, selective, full")),
        (lambda: autopar.Parallelism(data=4, micro_batch_size=2), ("data=4, micro_batch_size=2", "4 or more")),
        (lambda: autopar.PlanOptions(gap=1), ("gap=1", "fraction")),
        (lambda: autopar.PlanOptions(max_evaluations=0), ("max_evaluations=0", "at least 1")),
        (lambda: autopar.PlanOptions(optimizer="adamw8"), ("adamw8", "adamw")),
        (lambda: autopar.PlanOptions(memory_margin=1.0), ("memory_margin=1.0", "fraction")),
        (lambda: autopar.PlanOptions(time_limit_seconds=0), ("time_limit_seconds=0", "above 0")),
        (lambda: autopar.PlanOptions(time_limit_seconds="1"), ("time_limit_seconds='1'", "a number")),  # type: ignore[arg-type]
        (lambda: autopar.PlanOptions(memory_margin=None), ("memory_margin=None", "a number")),  # type: ignore[arg-type]
        (lambda: autopar.PlanOptions(mesh_shape=(2.0,)), ("mesh_shape=(2.0,)", "whole numbers")),  # type: ignore[arg-type]
        (lambda: autopar.PlanOptions(mesh_shape=2), ("mesh_shape=2", "tuple")),  # type: ignore[arg-type]
        (lambda: autopar.PlanOptions(parallelism={"data": 2}), ("'data': 2", "Parallelism(")),  # type: ignore[arg-type]
    ],
)
def test_options_check_themselves(make: Any, texts: tuple[str, ...]) -> None:
    with raises(InputError, *texts):
        make()


def test_degrees_that_do_not_make_up_the_cluster() -> None:
    with raises(InputError, "data=3", "2 devices"):
        autopar.plan(Small(), LOCAL, batch(), parallelism=autopar.Parallelism(data=3))
    with raises(InputError, "(3,)", "3 devices", "the cluster 2"):
        autopar.plan(Small(), LOCAL, batch(), options=autopar.PlanOptions(mesh_shape=(3,)))
    both = autopar.Parallelism(data=2)
    with raises(InputError, "given twice"):
        autopar.plan(Small(), LOCAL, batch(), options=autopar.PlanOptions(parallelism=both), parallelism=both)


# -- plan files ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    autopar.plan(Small(), LOCAL, batch()).save(path)
    return path


def test_a_world_size_that_is_not_the_plans(plan_file: Path) -> None:
    with raises(InputError, "the plan has 2 devices", "one process", "torchrun --nproc-per-node"):
        autopar.parallelize(Small(), LOCAL, batch(), plan=plan_file)
    with raises(InputError, "the cluster has 2 devices", "one process"):
        autopar.parallelize(Small(), LOCAL, batch())


def test_a_plan_of_another_model(plan_file: Path) -> None:
    with raises(PlanFileError, str(plan_file), "another model", "Small"):
        autopar.parallelize(Small(32), LOCAL, batch(4, 32), plan=plan_file)
    with raises(PlanFileError, "another model"):
        autopar.verify(Small(32), plan_file, batch(4, 32))


def test_a_plan_of_another_schema_version(plan_file: Path, tmp_path: Path) -> None:
    document = json.loads(plan_file.read_text())
    path = tmp_path / "newer.json"
    path.write_text(json.dumps({**document, "schema_version": 99}))
    with raises(PlanFileError, str(path), "schema version 99", "reads version 2", "plan the model again"):
        autopar.Plan.load(path)
    path.write_text("[]")
    with raises(PlanFileError, "schema version None"):
        autopar.Plan.load(path)


def test_a_plan_that_is_cut_off_in_the_middle(plan_file: Path, tmp_path: Path) -> None:
    whole = plan_file.read_text()
    path = tmp_path / "cut.json"
    for share in (0.0, 0.3, 0.5, 0.99):
        path.write_text(whole[: int(share * len(whole))])
        with raises(PlanFileError, str(path), "damaged or cut off", "plan.save()"):
            autopar.Plan.load(path)
    document = json.loads(whole)
    del document["stages"]
    path.write_text(json.dumps(document))
    with raises(PlanFileError, str(path), "'stages'"):
        autopar.Plan.load(path)
    with raises(PlanFileError, "cannot be read"):
        autopar.Plan.load(tmp_path / "missing.json")


def test_a_plan_that_was_edited(plan_file: Path, tmp_path: Path) -> None:
    whole = plan_file.read_text()
    path = tmp_path / "edited.json"

    def written(**changes: Any) -> Path:
        path.write_text(json.dumps({**json.loads(whole), **changes}))
        return path

    autopar.verify(Small(), autopar.Plan.load(written()), batch())  # other white space is no change
    with raises(PlanFileError, str(path), "changed after it was written", "Parallelism"):
        autopar.verify(Small(), autopar.Plan.load(written(num_devices=3)), batch())
    stage = json.loads(whole)["stages"][0]
    for part, change in (("operators", []), ("variants", True), ("mesh", {"shape": [2], "names": ["a=1); b("]})):
        with raises(PlanFileError, str(path), "wrong one"):
            autopar.Plan.load(written(stages=[{**stage, part: change}]))


# -- rules -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_operator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model with an operator of its own, and a registry that forgets what the test registers."""
    monkeypatch.setattr(registry, "_registered", {})
    with torch.library._scoped_library("autopar_bad_input_test", "DEF") as library:
        library.define("halve(Tensor x) -> Tensor")
        library.impl("halve", lambda x: x / 2, "CompositeImplicitAutograd")
        library.define("own(Tensor x) -> Tensor")
        library.impl("own", lambda x: x.clone(), "CompositeExplicitAutograd")

        class Model(Small):
            def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                with torch.no_grad():
                    scale = torch.ops.autopar_bad_input_test.own(x)
                return super().forward(x, scale)

        yield Model()


def test_a_rule_with_dims_that_the_operator_does_not_have(own_operator: nn.Module) -> None:
    autopar.register_rule("autopar_bad_input_test::own", "b c d -> b c d")
    with raises(RuleError, "autopar_bad_input_test::own", "b c d", "3 dims", "has 2"):
        autopar.plan(own_operator, LOCAL, batch())


def test_a_rule_with_another_number_of_tensors(own_operator: nn.Module) -> None:
    autopar.register_rule("autopar_bad_input_test::own", "b c, c -> b c")
    with raises(RuleError, "autopar_bad_input_test::own", "3 terms", "2 tensors"):
        autopar.plan(own_operator, LOCAL, batch())


def test_a_rule_that_is_no_rule() -> None:
    with raises(RuleError, "mylib::op", "one arrow"):
        autopar.register_rule("mylib::op", "b c")
    with raises(RuleError, "not an operator", "my op"):
        autopar.register_rule("my op", "b -> b")


def test_every_error_of_this_package_is_an_autopar_error() -> None:
    kinds = (InputError, TraceError, RuleError, InfeasibleError, PlanFileError)
    assert all(issubclass(kind, AutoparError) for kind in kinds)
    assert issubclass(InputError, ValueError) and issubclass(ClusterError, ValueError)
