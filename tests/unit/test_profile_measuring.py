"""The profiler in one process: what it finds to measure, how it measures, what it keeps; and plans priced by a profile."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.detection import machine_of
from autopar.errors import InputError
from autopar.graph import OpGraph
from autopar.options import Parallelism, PlanOptions
from autopar.planner import plan_graph
from autopar.profiler import session
from autopar.profiler.memory import measure_copy, measure_optimizer
from autopar.profiler.needs import Needs, OperatorNeed, needs_of, sizes_up_to
from autopar.profiler.operators import measure_operator
from autopar.profiler.session import Session, Work, is_complete
from autopar.profiler.timing import measuring_seconds, summary, undisturbed
from autopar.profiler.whole import measure_whole
from autopar.ranks import Ranks
from autopar.report import text
from autopar.running import comparison, fed_back
from autopar.tracing import trace
from autopar.training import Trained
from cost_models import Cluster, Machine, OperatorEntry, Profile, ProfileError

CPU = torch.device("cpu")
LOCAL = Cluster.local(2, kind="cpu", memory_bytes=2**34, num_cores=2)
ALONE = Cluster.local(1, kind="cpu", memory_bytes=2**34, num_cores=2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.wide, self.narrow = nn.Embedding(64, 32), nn.Linear(32, 96), nn.Linear(96, 64)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.wide(self.table(ids)).split(32, 2)
        mixed = torch.cat([torch.tanh(part) for part in hidden], 2).transpose(0, 1).reshape(-1, 96)
        return nn.functional.cross_entropy(self.narrow(mixed), labels.transpose(0, 1).reshape(-1))


BATCH = {"ids": torch.zeros(8, 6, dtype=torch.long), "labels": torch.zeros(8, 6, dtype=torch.long)}


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return trace(Block(), BATCH).graph


@pytest.fixture(scope="module")
def needs(graph: OpGraph) -> Needs:
    return needs_of(graph, LOCAL, PlanOptions())


pytestmark = pytest.mark.usefixtures("one_thread")


# -- what is needed ----------------------------------------------------------------------------------------------------


def test_operators_are_those_of_every_strategy(needs: Needs) -> None:
    keys = {need.key for need in needs.operators}
    assert len(keys) == len(needs.operators)
    linear = "aten.linear.default(float32[{b},6,32]g, float32[{n},32]g, float32[{n}]g) -> float32[{b},6,{n}]"
    for batch, columns in [(8, 96), (4, 96), (8, 48), (2, 96), (1, 96)]:  # whole, split, micro-batches
        assert linear.format(b=batch, n=columns) in keys
    whole = {key for need in needs.wholes for key in need.calls}
    worth = [(n.key in whole, n.step_seconds / measuring_seconds(n.estimated_seconds)) for n in needs.operators]
    assert worth == sorted(worth, reverse=True) and whole <= keys
    assert any(need.kind == "view" for need in needs.operators)


def test_groups_are_those_of_meshes_and_stages(graph: OpGraph) -> None:
    two_nodes = Cluster.homogeneous(num_nodes=2, devices_per_node=2)
    found = {need.key: need for need in needs_of(graph, two_nodes, PlanOptions()).groups}
    assert list(found) == [
        "size=2 stride=1 groups=1 per_node=2",
        "size=2 stride=1 groups=2 per_node=2",
        "size=2 stride=1 groups=1 per_node=1+1",
        "size=2 stride=2 groups=2 per_node=1+1",
        "size=4 stride=1 groups=1 per_node=2+2",
    ]
    hops = found["size=2 stride=2 groups=2 per_node=1+1"]
    assert hops.kinds == ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
    assert str(hops) == "ranks 0, 2 and ranks 1, 3"
    flat = needs_of(graph, two_nodes, PlanOptions(Parallelism(pipeline=1), max_mesh_axes=1)).groups
    assert [need.key for need in flat] == ["size=4 stride=1 groups=1 per_node=2+2"]


def test_sizes_reach_what_is_needed() -> None:
    assert sizes_up_to(100) == (1024,)
    assert sizes_up_to(5000) == (1024, 4096, 16384)
    assert sizes_up_to(10**12)[-1] == 2**26


# -- how it is measured ------------------------------------------------------------------------------------------------


def test_every_operator_of_the_model_runs_alone(needs: Needs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.profiler.operators.ROUND_SECONDS", 1e-5)
    for need in needs.operators:
        entry = measure_operator(need, CPU)
        assert entry is not None, need.key
        assert entry.forward_seconds > 0 and entry.count >= 1
        assert (entry.backward_seconds > 0) == any(flows for _, _, flows in need.inputs), need.key


def test_measured_seconds_grow_with_the_work(needs: Needs) -> None:
    linear = next(need for need in needs.operators if need.key.startswith("aten.linear.default(float32[8,6,32]"))
    (_, *rest), outputs = linear.inputs, linear.outputs
    sizes = [16, 4096]
    made = [
        replace(linear, inputs=(((size, 6, 32), "float32", True), *rest), outputs=((size, *outputs[0][1:]),))
        for size in sizes
    ]
    small, large = (measure_operator(need, CPU) for need in made)
    assert small is not None and large is not None
    assert large.forward_seconds > 10 * small.forward_seconds


def test_what_does_not_fit_or_run_is_left_out(needs: Needs, monkeypatch: pytest.MonkeyPatch) -> None:
    need = needs.operators[0]
    assert measure_operator(replace(need, operator=replace(need.operator, target="aten.no_such.default")), CPU) is None
    monkeypatch.setattr("autopar.profiler.operators.free_bytes", lambda device: 100)
    assert measure_operator(need, CPU) is None
    monkeypatch.setattr("autopar.profiler.memory.free_bytes", lambda device: 100)
    assert measure_copy(4096, CPU) is None and measure_optimizer("adamw", "float32", 4096, CPU, None) is None


def test_the_whole_model_against_its_operators(graph: OpGraph) -> None:
    took = measure_whole(graph, CPU)
    assert took is not None and all(seconds > 0 for seconds in took)
    assert measure_whole(replace(graph, loss=None), CPU) is None


def test_optimizers_that_torch_has() -> None:
    point = measure_optimizer("adamw", "float32", 4096, CPU, None)
    assert point is not None and point.num_bytes == 4096 and 0 < point.seconds < 1
    assert measure_optimizer("none", "float32", 4096, CPU, None) is None


def test_medians_and_spread() -> None:
    assert summary([1.0, 2.0, 3.0, 4.0, 100.0]).seconds == 3.0
    assert summary([1.0, 2.0, 3.0, 4.0, 100.0]).spread == pytest.approx(1 / 3)
    assert undisturbed([1.0, 1.1, 1.2, 50.0, 60.0]).seconds == 1.1


# -- what is kept ------------------------------------------------------------------------------------------------------


def work(graph: OpGraph, path: Path | None, budget: float = 30.0) -> Work:
    return Work(machine_of(ALONE), needs_of(graph, ALONE, PlanOptions()), path and str(path), budget, 5.0)


def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Operators measured in no time; their keys as they are asked for."""
    asked: list[str] = []

    def measure(need: OperatorNeed, device: torch.device, num_sharing: int) -> OperatorEntry | None:
        asked.append(need.key)
        if need.operator.target == "aten.tanh.default":
            return None
        return OperatorEntry(1e-5, 2e-5, 0.0, 1, need.kind, need.dtype, need.flops, need.backward_flops, need.num_bytes)

    monkeypatch.setattr(session, "measure_operator", measure)
    monkeypatch.setattr(session, "measure_whole", lambda *_: None)
    return asked


def run(given: Work) -> Profile:
    return Session(given, Ranks(), CPU, lambda message: None).run()


def test_interrupted_session_resumes(graph: OpGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, path = quick(monkeypatch), tmp_path / "profile.json"
    whole = session.measure_operator

    def interrupted(*given: Any) -> OperatorEntry | None:
        if len(asked) == 5:
            raise KeyboardInterrupt
        return whole(*given)

    monkeypatch.setattr(session, "measure_operator", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(work(graph, path))
    before = Profile.load(path)
    assert len(before.operators) + len(before.unmeasurable) == 5
    assert not is_complete(work(graph, path), before)
    monkeypatch.setattr(session, "measure_operator", whole)
    found = run(work(graph, path))
    assert len(asked) == len(set(asked)) == len(work(graph, path).needs.operators)
    assert found == Profile.load(path) and is_complete(work(graph, path), found)
    asked.clear()
    assert run(work(graph, path)) == found and not asked  # what does not run alone is not tried again


def test_a_finished_profile_is_served_without_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise AssertionError("nothing is to be started")

    path, said = tmp_path / "profile.json", list[str]()
    graph = trace(Block(), BATCH).graph
    key = needs_of(graph, ALONE, PlanOptions()).key
    finished = Profile(machine_of(ALONE), finished={key: 60.0})
    finished.save(path)
    monkeypatch.setattr("autopar.profiler.profiling.torchrun", refuse)
    found = autopar.profile(Block(), ALONE, BATCH, path=path, budget_seconds=60.0, progress=said.append)
    assert found == finished and said == [f"{path} has everything"]
    with pytest.raises(AssertionError, match="nothing is to be started"):
        autopar.profile(Block(), ALONE, BATCH, path=path, budget_seconds=61.0)


def test_budget_goes_to_the_heaviest(graph: OpGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = quick(monkeypatch)
    spent = run(work(graph, None, budget=0.0))
    assert spent.operators == {} and not asked
    assert is_complete(work(graph, None, budget=0.0), spent) and not is_complete(work(graph, None), spent)
    operators = work(graph, None).needs.operators
    budget = 20 * measuring_seconds(operators[0].estimated_seconds)
    run(work(graph, None, budget))
    assert asked[0] == operators[0].key


def test_file_of_another_machine(graph: OpGraph, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    Profile(Machine("another processor", "cpu", (1,), 1, 2, "2.0")).save(path)
    with pytest.raises(ProfileError, match="device: another processor there"):
        run(work(graph, path))
    with pytest.raises(ProfileError, match="measured on another machine"):
        autopar.profile(Block(), ALONE, BATCH, path=path)
    with pytest.raises(ProfileError, match="measured on another machine"):
        autopar.plan(Block(), ALONE, BATCH, profile=path)


def test_profiles_of_other_places_are_refused() -> None:
    with pytest.raises(InputError, match="2 nodes: start the profile with torchrun on all of them"):
        autopar.profile(Block(), Cluster.homogeneous(num_nodes=2, devices_per_node=1), BATCH)
    with pytest.raises(InputError, match="cluster= is left out"):
        autopar.profile(Block(), None, BATCH)


# -- plans priced by a profile -----------------------------------------------------------------------------------------


def profile_of(needs: Needs, seconds_of: Any) -> Profile:
    entries = {}
    for need in needs.operators:
        forward = seconds_of(need)
        backward = 2 * forward if any(flows for _, _, flows in need.inputs) else 0.0
        entries[need.key] = OperatorEntry(
            forward, backward, 0.0, 1, need.kind, need.dtype, need.flops, need.backward_flops, need.num_bytes
        )
    return Profile(machine_of(LOCAL), entries)


def test_plan_follows_what_was_measured(graph: OpGraph, needs: Needs) -> None:
    """Where batches of four are as slow as those of eight and narrow matrices are fast, columns are split."""

    def slow_batches(need: OperatorNeed) -> float:
        rows = need.inputs[0][0][0] if need.inputs and need.inputs[0][0] else 8
        return 1e-1 if rows < 8 and need.flops else 1e-3 * need.flops / 1e5

    def even(need: OperatorNeed) -> float:
        return 1e-3 * need.flops / 1e5

    options = PlanOptions(Parallelism(pipeline=1, micro_batch_size=8))
    splits = {}
    for name, seconds in (("slow batches", slow_batches), ("even", even)):
        report = plan_graph(graph, LOCAL, options, profile=profile_of(needs, seconds)).report()
        linear = next(entry for entry in report["operators"] if entry["target"] == "aten.linear.default")
        splits[name] = set(linear["splits"].values())
    assert splits["even"] == {"batch"}
    assert "batch" not in splits["slow batches"]


def test_report_says_what_is_measured(graph: OpGraph, needs: Needs) -> None:
    whole = profile_of(needs, lambda need: 1e-4)
    some = replace(whole, operators={key: entry for key, entry in whole.operators.items() if "linear" in key})
    plain = plan_graph(graph, LOCAL).report()["predicted"]
    assert plain["provenance"] == "estimated" and plain["basis"]["profile"] is None
    full = plan_graph(graph, LOCAL, profile=whole)
    basis = full.report()["predicted"]["basis"]
    assert basis["kinds"]["compute_seconds"]["shares"] == {"measured": 1.0}
    assert basis["profile"] == whole.fingerprint
    partly = plan_graph(graph, LOCAL, profile=some).report()
    shares = partly["predicted"]["basis"]["kinds"]["compute_seconds"]["shares"]
    assert 0 < shares["measured"] < 1 and math.isclose(sum(shares.values()), 1.0)
    said = {entry["target"]: entry["provenance"] for entry in partly["operators"]}
    assert said["aten.linear.default"] == "measured" and said["aten.tanh.default"] == "corrected"
    assert "measured, to within about" in text(full.report())
    assert full.report()["predicted"]["step_seconds"] != plain["step_seconds"]


def test_same_profile_same_plan(graph: OpGraph, needs: Needs) -> None:
    profile = profile_of(needs, lambda need: 1e-4)
    one, other = (
        plan_graph(graph, LOCAL, profile=given) for given in (profile, Profile(profile.machine, profile.operators))
    )
    assert one.fingerprint == other.fingerprint
    assert one.to_json() == other.to_json()


def test_a_run_is_fed_back(graph: OpGraph, needs: Needs) -> None:
    profile = profile_of(needs, lambda need: 1e-4)
    plan = plan_graph(graph, LOCAL, profile=profile)
    predicted = plan.report()["predicted"]["step_seconds"]
    trained = Trained((1.0,) * 6, (9.0, 9.0, *(4 * predicted + 0.5,) * 4), (0.5,) * 6, (0.1,) * 6)
    found = comparison(plan, trained)
    assert found["ratio"] == pytest.approx(4.0)
    assert found["predicted"]["step_seconds"] == predicted and found["measured"]["clip_seconds"] == 0.5
    learnt = fed_back(profile, plan, trained)
    again = plan_graph(graph, LOCAL, profile=learnt)
    assert again.report()["predicted"]["step_seconds"] == pytest.approx(4 * predicted)
    assert fed_back(learnt, again, trained).correction == pytest.approx(4.0)  # and not sixteen times
    with pytest.raises(InputError, match="made without a profile"):
        fed_back(profile, plan_graph(graph, LOCAL), trained)
