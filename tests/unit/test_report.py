"""The report: its schema, its sums against the solver's cost and the ledger, its size, its text."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from autopar.batching import at_batch
from autopar.costing.operators import Role
from autopar.graph import OpGraph
from autopar.options import Parallelism, PlanOptions
from autopar.planner import named_axes, plan_graph, rank_order
from autopar.plans import Plan
from autopar.report import SCHEMA, details, text
from autopar.report.schema import SCHEMA_VERSION
from autopar.report.stages import runs
from autopar.report.timeline import timeline_json
from autopar.report.units import bytes_text, count_text, percent_text, seconds_text
from autopar.search.evaluate import Evaluated, Evaluator
from autopar.search.joint import Found
from autopar.search.space import Frame, Grid
from autopar.solver import solve
from autopar.tracing import trace
from cost_models import Cluster, CostModel, StageTimes, simulate
from tests.support.models import ZOO, cross_entropy, gpt2

VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
LOCAL = Cluster.local(4, memory_bytes=16 * 2**30, num_cores=4)
NODES = Cluster.homogeneous(num_nodes=2, devices_per_node=2)

WHOLE = Parallelism(pipeline=1, micro_batch_size=8)  # one stage, one micro-batch
CASES = {
    "searched": (LOCAL, WHOLE),
    "searched on nodes": (NODES, WHOLE),
    "data": (LOCAL, replace(WHOLE, data=4, zero=0)),
    "zero 1": (LOCAL, replace(WHOLE, data=4, zero=1)),
    "zero 2": (NODES, replace(WHOLE, data=4, zero=2)),
    "zero 3": (NODES, replace(WHOLE, data=4, zero=3)),
    "tensor": (LOCAL, replace(WHOLE, tensor=4)),
    "data x tensor": (NODES, replace(WHOLE, data=2, tensor=2)),
    "accumulated": (LOCAL, Parallelism(data=2, tensor=2, zero=1, micro_batch_size=4, recompute="full")),
}
EIGHT = Cluster.homogeneous(num_nodes=2, devices_per_node=4)


@dataclass(frozen=True)
class Pipeline:
    """Stages of two blocks each, planned without a search; ``order`` of the pipeline ranks."""

    schedule: str
    num_ranks: int
    mesh: tuple[int, ...]
    num_micro_batches: int
    forced: Parallelism
    roles: tuple[Role, ...] = ("data",)
    order: tuple[int, ...] = ()


PIPELINES = {
    "gpipe": Pipeline("gpipe", 4, (2,), 4, Parallelism()),
    "1f1b, recomputed": Pipeline("1f1b", 4, (2,), 8, Parallelism(recompute="full")),
    "interleaved": Pipeline(
        "interleaved_1f1b", 2, (2, 2), 4, Parallelism(recompute="selective"), ("data", "data"), (1, 0)
    ),
    "zero bubble": Pipeline("zbv", 2, (4,), 4, Parallelism()),
    "uneven": Pipeline("1f1b", 4, (2,), 5, Parallelism()),
}

OTHER_SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "gpipe",
    "interleaved_1f1b": "interleaved_zero_bubble",
    "zbv": "dualpipev",
}
"""Another schedule that places as many stages on as many ranks."""


@pytest.fixture(scope="module")
def graphs() -> dict[str, Any]:
    torch.manual_seed(0)
    found = {}
    for name in ("gpt2", "mlp", "moe"):
        model, batch = ZOO[name](8)
        found[name] = trace(model, batch, loss_fn=cross_entropy if name == "mlp" else None).graph
    return found


@pytest.fixture(scope="module")
def plans(graphs: dict[str, Any]) -> dict[str, Plan]:
    found = {
        f"gpt2, {name}": plan_graph(graphs["gpt2"], cluster, PlanOptions(parallelism=forced))
        for name, (cluster, forced) in CASES.items()
    }
    forced = PlanOptions(parallelism=WHOLE)
    found |= {name: plan_graph(graphs[name], NODES, forced) for name in ("mlp", "moe")}
    found["one device"] = plan_graph(graphs["gpt2"], Cluster.local(1, memory_bytes=2**33, num_cores=1), forced)
    return found


def _piped(graph: OpGraph, case: Pipeline) -> tuple[Plan, Evaluated]:
    """A plan of four stages of two blocks each, with its report."""
    (group,) = graph.block_groups
    cuts = [block.operators[0] for block in group.blocks[2::2]]
    grid = Grid(case.num_ranks, case.mesh, case.roles, case.order or tuple(range(case.num_ranks)))
    frame = Frame(grid, case.num_micro_batches, case.schedule, len(cuts) + 1)
    options = PlanOptions(parallelism=case.forced)
    evaluator = Evaluator(CostModel(EIGHT), options, solve)
    size = math.ceil(graph.batch_size / frame.num_micro_batches)
    best = evaluator.evaluate(frame, at_batch(graph, size), cuts, evaluator.styles(frame)[0])
    best = replace(best, stages=named_axes(best.stages))
    plan = Plan(
        model=graph.model,
        num_devices=EIGHT.num_devices,
        graph_fingerprint=graph.fingerprint,
        cluster_fingerprint=EIGHT.fingerprint(),
        options=options.to_json(),
        stages=tuple(stage.plan for stage in best.stages),
        schedule=frame.schedule,
        num_micro_batches=frame.num_micro_batches,
        cuts=tuple(cuts),
        batch_size=graph.batch_size,
        rank_order=rank_order(frame),
    )
    neighbour = replace(frame, schedule=OTHER_SCHEDULES[frame.schedule])
    other = replace(best, frame=neighbour, step_seconds=2 * best.step_seconds)
    looked_at = (
        (frame, 0.9 * best.step_seconds, best.step_seconds),
        (replace(frame, num_micro_batches=16), math.inf, math.inf),
    )
    found = Found(best, (best, other), 0.9 * best.step_seconds, 2, 1, 2, looked_at)
    return replace(plan, details=details(plan, graph, EIGHT, options, found, {})), best


@pytest.fixture(scope="module")
def piped() -> dict[str, tuple[Plan, Evaluated]]:
    torch.manual_seed(0)
    model, batch = gpt2(16, 8)
    graph = trace(model, batch).graph
    return {name: _piped(graph, case) for name, case in PIPELINES.items()}


def _all(plans: dict[str, Plan], piped: dict[str, tuple[Plan, Evaluated]]) -> dict[str, Plan]:
    return plans | {name: plan for name, (plan, _) in piped.items()}


def test_every_report_follows_the_schema(plans: dict[str, Plan], piped: dict[str, tuple[Plan, Evaluated]]) -> None:
    for name, plan in _all(plans, piped).items():
        json.dumps(plan.report(), allow_nan=False)
        errors = [f"{name}: {error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(plan.report())]
        assert not errors, errors[:5]


def test_the_schema_is_a_schema_and_is_published() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    published = Path(__file__).parents[2] / "docs" / "report.schema.json"
    assert json.loads(published.read_text()) == SCHEMA, (
        "write it again: autopar report --schema > docs/report.schema.json"
    )


def _spoiled(report: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Reports with one thing wrong each."""

    def change(name: str, act: Any) -> tuple[str, dict[str, Any]]:
        wrong = copy.deepcopy(report)
        act(wrong)
        return name, wrong

    for key in report:
        yield change(f"without {key}", lambda r, key=key: r.pop(key))
    yield change("a key that is not known", lambda r: r.update(surprise=1))
    yield change("another version", lambda r: r.update(schema_version=SCHEMA_VERSION + 1))
    yield change("a negative step", lambda r: r["predicted"].update(step_seconds=-1.0))
    yield change("text for a number", lambda r: r["predicted"]["memory"].update(total_bytes="3 GiB"))
    yield change("no layout", lambda r: r["operators"][0].update(outputs=["X"]))
    yield change("a ZeRO level of 4", lambda r: r["parameters"][0].update(zero=4))
    yield change("an unknown collective", lambda r: r["collectives"]["entries"][0].update(kind="gossip"))
    yield change("an unknown status", lambda r: r["solver"].update(status="SURE"))
    yield change("an unknown schedule", lambda r: r["schedule"].update(kind="fast"))
    yield change("an unknown mode", lambda r: r["stages"][0]["blocks"][0].update(recompute=[["some", 2]]))
    yield change("a span without its end", lambda r: r["predicted"]["timeline"]["ranks"][0]["spans"][0].pop())
    yield change("a mesh of no devices", lambda r: r["mesh"].update(shape=[0]))


def test_the_schema_rejects_what_is_wrong(plans: dict[str, Plan]) -> None:
    for name, wrong in _spoiled(plans["gpt2, data x tensor"].report()):
        assert not VALIDATOR.is_valid(wrong), name


def test_the_seconds_add_up_to_what_was_minimised(
    plans: dict[str, Plan], piped: dict[str, tuple[Plan, Evaluated]]
) -> None:
    for name, plan in _all(plans, piped).items():
        report = plan.report()
        predicted, solver = report["predicted"], report["solver"]
        assert math.isclose(sum(predicted["breakdown"].values()), predicted["step_seconds"], rel_tol=1e-9), name
        assert predicted["step_seconds"] == solver["cost_seconds"]
        assert solver["lower_bound_seconds"] <= solver["cost_seconds"]
        for stage in report["stages"]:
            seconds, count = stage["seconds"], report["schedule"]["num_micro_batches"]
            kinds = [seconds[kind] for kind in predicted["breakdown"] if kind != "idle_seconds"]
            each = seconds["forward_seconds"] + seconds["backward_seconds"]
            assert math.isclose(math.fsum(kinds), seconds["busy_seconds"], rel_tol=1e-9), name
            assert math.isclose(count * each + seconds["once_seconds"], seconds["busy_seconds"], rel_tol=1e-9), name


def _charged_and_issued(report: dict[str, Any], stage: int) -> tuple[float, float]:
    """Seconds of communication among a stage's devices: as the solver charged them, and of its collectives one by one."""
    seconds = report["stages"][stage]["seconds"]
    entries = [entry for entry in report["collectives"]["entries"] if stage in entry["stages"]]
    issued = sum(entry["seconds"] for entry in entries if entry["axis"] != "stages" and entry["phase"] != "recompute")
    return seconds["resharding_seconds"] + seconds["parameter_communication_seconds"], issued


def test_the_ledgers_collectives_cost_what_the_search_charged(
    plans: dict[str, Plan], piped: dict[str, tuple[Plan, Evaluated]]
) -> None:
    """Communication of the solver's problem = the collectives that the program issues, priced one by one."""
    for name, plan in _all(plans, piped).items():
        report = plan.report()
        entries = report["collectives"]["entries"]
        assert all(len(set(entry["stages"])) == len(entry["stages"]) for entry in entries), name
        for stage in range(len(report["stages"])) if name != "uneven" else ():
            charged, issued = _charged_and_issued(report, stage)
            assert math.isclose(charged, issued, rel_tol=1e-9, abs_tol=1e-12), (name, stage, charged, issued)
        total = sum(entry["seconds"] * len(entry["stages"]) for entry in entries)
        totals = report["collectives"]["totals"]
        assert math.isclose(sum(total["seconds"] for total in totals), total, rel_tol=1e-9), name


def test_what_a_stage_sends_is_charged() -> None:
    """Stage 0 computes whole and sends the batch in parts: its gradient is gathered."""
    model, batch = gpt2(16, 8)
    plan, _ = _piped(trace(model, batch).graph, Pipeline("gpipe", 4, (2,), 4, Parallelism(), ("free",)))
    charged, issued = _charged_and_issued(plan.report(), 0)
    assert math.isclose(charged, issued, rel_tol=1e-9, abs_tol=1e-12)


def test_messages_between_stages(piped: dict[str, tuple[Plan, Evaluated]]) -> None:
    """What stages send is in the ledger with the price that the simulation took, and with its links."""
    plan, best = piped["gpipe"]
    report = plan.report()
    sent = [entry for entry in report["collectives"]["entries"] if entry["kind"] == "send_recv"]
    links = {link for entry in sent for link in entry["links"]}
    assert links == {"NVLink4", "InfiniBand-NDR"} == set(report["schedule"]["links"])
    hops = plan.num_micro_batches * (sum(best.hops.forward_seconds) + sum(best.hops.backward_seconds))
    assert math.isclose(sum(entry["seconds"] * len(entry["stages"]) for entry in sent), hops)
    assert math.isclose(sum(stage["seconds"]["send_recv_seconds"] for stage in report["stages"]), hops)
    assert [total["count"] for total in report["collectives"]["totals"] if total["kind"] == "broadcast"] == [4]


def test_the_bytes_add_up_to_the_peak(plans: dict[str, Plan], piped: dict[str, tuple[Plan, Evaluated]]) -> None:
    for name, plan in _all(plans, piped).items():
        report = plan.report()
        memory = dict(report["predicted"]["memory"])
        rank, total, available = (memory.pop(key) for key in ("pipeline_rank", "total_bytes", "available_bytes"))
        assert math.isclose(sum(memory.values()), total, rel_tol=1e-12), name
        assert total <= available
        assert math.isclose(report["solver"]["evaluated"][0]["peak_bytes"], total, rel_tol=1e-12), name
        stages = [stage for stage in report["stages"] if stage["pipeline_rank"] == rank]
        assert math.isclose(sum(stage["memory"]["total_bytes"] for stage in stages), total, rel_tol=1e-12), name
    for plan, best in piped.values():
        for stage, solved in zip(plan.report()["stages"], best.stages, strict=True):
            assert math.isclose(stage["memory"]["total_bytes"], solved.candidate.peak_bytes, rel_tol=1e-12)


def test_stages_say_where_they_are(piped: dict[str, tuple[Plan, Evaluated]]) -> None:
    stages = piped["gpipe"][0].report()["stages"]
    assert [stage["like"] for stage in stages] == [0, 1, 1, 3]
    assert [stage["first_device"] for stage in stages] == [0, 2, 4, 6]
    assert [stage["blocks"][0]["last_block"] for stage in stages] == [f"transformer.h.{last}" for last in (1, 3, 5, 7)]
    assert (stages[0]["first_module"], stages[3]["last_module"]) == ("transformer.wte", "lm_head")
    turned = piped["interleaved"][0].report()["stages"]
    assert [(stage["pipeline_rank"], stage["first_device"]) for stage in turned] == [(0, 4), (1, 0), (0, 4), (1, 0)]
    assert [stage["in_flight"] for stage in piped["1f1b, recomputed"][0].report()["stages"]] == [4, 3, 2, 1]
    bent = piped["zero bubble"][0].report()
    assert [stage["pipeline_rank"] for stage in bent["stages"]] == [0, 1, 1, 0]
    assert bent["schedule"]["kind"] == "zbv" and bent["schedule"]["num_pipeline_ranks"] == 2


def test_recomputation_has_its_price(plans: dict[str, Plan], piped: dict[str, tuple[Plan, Evaluated]]) -> None:
    """Full recomputation does the blocks' forward passes once more: a third of their FLOPs."""
    for report in (plans["gpt2, accumulated"].report(), piped["1f1b, recomputed"][0].report()):
        assert all(stage["blocks"][0]["recompute"][0][0] == "full" for stage in report["stages"])
        seconds = report["predicted"]["breakdown"]
        once = seconds["compute_seconds"] + seconds["resharding_seconds"]
        assert 0.2 * once < seconds["recomputation_seconds"] < 0.6 * once
        assert 0.2 < report["predicted"]["mfu"]["recomputed_work"] < 0.34
        assert "blocks are computed whole again in backward" in text(report)
    again = plans["gpt2, accumulated"].report()["collectives"]["entries"]
    assert sum(entry["seconds"] for entry in again if entry["phase"] == "recompute") > 0
    assert piped["gpipe"][0].report()["predicted"]["breakdown"]["recomputation_seconds"] == 0


def test_the_timeline_is_the_simulated_step(piped: dict[str, tuple[Plan, Evaluated]]) -> None:
    for name, (plan, best) in piped.items():
        predicted = plan.report()["predicted"]
        timeline, step = predicted["timeline"], best.step_seconds
        busy = sum(rank["busy_seconds"] for rank in timeline["ranks"])
        assert math.isclose(1 - busy / (len(timeline["ranks"]) * step), predicted["bubble_fraction"], rel_tol=1e-9), (
            name
        )
        assert timeline["complete"] and timeline["micro_batches"] == list(range(plan.num_micro_batches))
        spans = [span for rank in timeline["ranks"] for span in rank["spans"]]
        assert math.isclose(max(span[4] for span in spans), step)
        assert sum(span[0] == "F" for span in spans) == len(plan.stages) * plan.num_micro_batches
        for rank in timeline["ranks"]:
            idle = rank["chart"].count(".") / len(rank["chart"])
            assert abs(idle - (1 - rank["busy_seconds"] / step)) < 0.08, (name, rank["chart"])


def test_long_timelines_are_cut_in_the_middle() -> None:
    step = simulate("1f1b", [StageTimes(1.0, 1.0, 1.0, 2.0)] * 4, None, 4, 64)
    found = timeline_json(step, 64)
    assert found["micro_batches"] == [0, 1, 62, 63] and not found["complete"]
    assert {span[2] for rank in found["ranks"] for span in rank["spans"]} == {-1, 0, 1, 62, 63}
    large = timeline_json(simulate("1f1b", [StageTimes(1.0, 1.0, 1.0)] * 64, None, 64, 128), 128)
    assert sum(len(rank["spans"]) for rank in large["ranks"]) <= 400 and len(large["ranks"]) == 64
    assert found["ranks"][3]["chart"].startswith(".F") and found["ranks"][0]["chart"].endswith("U")


def test_neighbours_say_why_they_lose(graphs: dict[str, Any], piped: dict[str, tuple[Plan, Evaluated]]) -> None:
    reasons = {other["change"]: other["reason"] for other in piped["gpipe"][0].report()["alternatives"]["neighbours"]}
    assert reasons == {"more micro-batches": "nothing fits"}
    reasons = {other["change"]: other["reason"] for other in piped["uneven"][0].report()["alternatives"]["neighbours"]}
    assert reasons == {"more micro-batches": "nothing fits", "other schedule": "slower by 100%"}
    report = plan_graph(graphs["mlp"], NODES).report()
    neighbours = {other["change"]: other for other in report["alternatives"]["neighbours"]}
    assert neighbours, "a search of everything looks at more than one arrangement"
    for other in neighbours.values():
        assert other["reason"] and (other["seconds"] is None or other["ratio"] >= 1 - 1e-9)
        assert other["seconds"] is None or other["lower_bound_seconds"] <= other["seconds"] * (1 + 1e-9)
    VALIDATOR.validate(report)


def test_parameters_are_all_there(plans: dict[str, Plan], graphs: dict[str, Any]) -> None:
    report = plans["gpt2, data"].report()
    assert sum(entry["occurrences"] for entry in report["parameters"]) == len(graphs["gpt2"].parameters)
    assert sum(entry["occurrences"] for entry in report["operators"]) == len(graphs["gpt2"].operators)
    names = {name for entry in report["parameters"] for name in entry["names"]}
    assert {"transformer.wte.weight", "lm_head.weight"} <= names, "both names of a tied parameter"
    elements = sum(math.prod(entry["shape"]) * entry["occurrences"] for entry in report["parameters"])
    assert elements == report["model"]["num_parameters"]


def test_forced_plans_say_what_they_are(plans: dict[str, Plan]) -> None:
    data, tensor = plans["gpt2, data"].report(), plans["gpt2, tensor"].report()
    assert all(axis["splits"]["batch"] > 0.9 for axis in data["mesh"]["axes"])
    assert all(axis["splits"]["other"] > 0.5 and axis["splits"]["batch"] == 0 for axis in tensor["mesh"]["axes"])
    zero = plans["gpt2, zero 3"].report()
    assert {entry["zero"] for entry in zero["parameters"]} >= {3}
    assert {total["kind"] for total in zero["collectives"]["totals"]} >= {"all_gather", "reduce_scatter"}
    links = [link for axis in zero["mesh"]["axes"] for link in axis["links"]]
    assert "InfiniBand-NDR" in links and "NVLink4" in links


def test_flops_and_utilisation(plans: dict[str, Plan]) -> None:
    """The MLP of 12, 20, 20, 5: 2 FLOP per weight and sample forward, twice that backward, less the first layer's inputs."""
    report = plans["mlp"].report()
    weights = (12 * 20, 20 * 20, 20 * 5)
    products = 8 * (2 * sum(weights) + 4 * sum(weights) - 2 * weights[0])
    assert products <= report["model"]["flops_per_step"] <= 1.3 * products
    mfu = report["predicted"]["mfu"]
    peak = 4 * NODES.nodes[0].device.flops_per_second("float32")
    assert mfu["peak_flops_per_second"] == peak
    assert math.isclose(mfu["value"], report["model"]["flops_per_step"] / (peak * report["predicted"]["step_seconds"]))


def test_rivals_are_priced_whether_they_fit_or_not(graphs: dict[str, Any]) -> None:
    small = Cluster.local(4, memory_bytes=4 * (256 * 2**20 + 14_000), num_cores=4)
    report = plan_graph(graphs["mlp"], small, PlanOptions(WHOLE, memory_margin=0.0)).report()
    by_hand = report["alternatives"]["by_hand"]
    assert set(by_hand) == {"data", "zero-3", "tensor"}
    assert all(rival["ratio"] >= 1 - 1e-9 for rival in by_hand.values() if rival["fits"])
    assert not by_hand["data"]["fits"] and by_hand["data"]["seconds"] > 0
    assert by_hand["data"]["missing_bytes"] == by_hand["data"]["peak_bytes"] - 14_000
    assert "does not fit: " in text(report) and " too much" in text(report)


def test_the_report_does_not_grow_with_depth() -> None:
    sizes = []
    for layers in (3, 9):
        model, batch = gpt2(8, layers)
        report = plan_graph(trace(model, batch).graph, LOCAL, PlanOptions(replace(WHOLE, data=4, zero=3))).report()
        assert report["stages"][0]["blocks"][0]["num_blocks"] == layers
        sizes.append((len(report["operators"]), len(report["parameters"]), len(report["collectives"]["entries"])))
    assert sizes[0] == sizes[1]


def test_fallbacks_are_listed_with_their_price(plans: dict[str, Plan]) -> None:
    library = torch.library.Library("autopar_report_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.autopar_report_test.twice(self.first(x).detach()).sum() + self.first(x).sum()

    plan = plan_graph(trace(Model(), (torch.randn(8, 64),)).graph, LOCAL, PlanOptions(WHOLE))
    (entry,) = plan.report()["fallbacks"]
    assert entry["target"] == "autopar_report_test.twice.default"
    assert entry["whole_bytes"] == 2 * 8 * 64 * 4 and entry["seconds"] > 0
    assert "test_report.py" in entry["source"]
    assert any("no sharding rule" in warning for warning in plan.report()["warnings"])
    assert "autopar_report_test.twice.default" in text(plan.report())
    VALIDATOR.validate(plan.report())


def test_the_saved_report_has_no_timings_and_is_the_same_each_time(graphs: dict[str, Any], tmp_path: Path) -> None:
    first, second = (
        plan_graph(graphs["gpt2"], NODES, PlanOptions(WHOLE), tracing_seconds=seconds) for seconds in (1.0, 2.0)
    )
    first.save(tmp_path / "first.json")
    second.save(tmp_path / "second.json")
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "second.json").read_bytes()
    loaded = Plan.load(tmp_path / "first.json").report()
    assert loaded["timings"] == {} and first.report()["timings"]["trace"] == 1.0
    assert {**loaded, "timings": first.report()["timings"]} == first.report()
    VALIDATOR.validate(loaded)


def test_text_says_the_main_things(plans: dict[str, Plan]) -> None:
    for name, plan in plans.items():
        shown = text(plan.report())
        for wanted in ("mesh  ", "predicted step", "memory  ", "search  "):
            assert wanted in shown, name
        assert max(len(line) for line in shown.splitlines() if not line.startswith(("warning", "planned"))) <= 140
    shown = text(plans["gpt2, data x tensor"].report())
    assert "mesh  data=2 x tensor=2" in shown and "data: batch, tensor: " in shown
    assert "InfiniBand-NDR between nodes" in shown


def test_text_of_pipelines(piped: dict[str, tuple[Plan, Evaluated]]) -> None:
    for name, (plan, _) in piped.items():
        shown = text(plan.report())
        for wanted in ("plan  a pipeline of ", "stages  (", "timeline of a step", "  rank 1  ", "why not otherwise"):
            assert wanted in shown, name
        assert max(len(line) for line in shown.splitlines() if not line.startswith("warning")) <= 140, name
    assert "schedule gpipe, in 4 micro-batches of 4" in text(piped["gpipe"][0].report())


def test_like_stages_share_their_entries(piped: dict[str, tuple[Plan, Evaluated]]) -> None:
    report = piped["gpipe"][0].report()
    assert sum(entry["occurrences"] for entry in report["parameters"]) == 8 * 12 + 4
    modules = [("transformer.h.0.mlp.c_fc", "aten.addmm.default")]
    inner = [entry for entry in report["operators"] if (entry["module"], entry["target"]) in modules]
    assert [(entry["occurrences"], entry["stages"]) for entry in inner] == [(8, [0, 1, 2, 3])]


def test_saved_bytes_are_of_a_micro_batch(piped: dict[str, tuple[Plan, Evaluated]]) -> None:
    """Operators' saved bytes, for all micro-batches in flight, with what stages receive and conversions, are what is kept."""
    for name in ("gpipe", "zero bubble", "uneven"):
        report = piped[name][0].report()
        saved = sum(entry["saved_bytes"] * entry["occurrences"] for entry in report["operators"])
        kept = sum(stage["memory"]["saved_activation_bytes"] / stage["in_flight"] for stage in report["stages"])
        assert 0.9 * kept < saved <= kept, name


def test_units() -> None:
    assert [seconds_text(s) for s in (0.0, 2e-9, 1.5e-6, 0.25, 12.0, 1234.0, None)] == [
        "0 s", "2 ns", "1.5 us", "250 ms", "12 s", "1234 s", "-",
    ]  # fmt: skip
    assert [bytes_text(b) for b in (12, 2048, 3 * 2**30, math.inf)] == ["12 B", "2 KiB", "3 GiB", "-"]
    assert (count_text(1.24e9), count_text(5), percent_text(0.1234)) == ("1.24 G", "5", "12.3%")
    assert runs([0, 0, 1, 0]) == [[0, 2], [1, 1], [0, 1]]
