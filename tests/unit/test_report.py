"""The report: its schema, its sums against the solver's cost and the ledger, its size, its text."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from autopar.options import Parallelism, PlanOptions
from autopar.planner import plan_graph
from autopar.plans import Plan
from autopar.report import SCHEMA, text
from autopar.report.schema import SCHEMA_VERSION
from autopar.report.summary import runs
from autopar.report.units import bytes_text, count_text, percent_text, seconds_text
from autopar.tracing import trace
from cost_models import Cluster
from tests.support.models import ZOO, cross_entropy, gpt2

VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
LOCAL = Cluster.local(4, memory_bytes=16 * 2**30, num_cores=4)
NODES = Cluster.homogeneous(num_nodes=2, devices_per_node=2)

CASES = {
    "searched": (LOCAL, Parallelism()),
    "searched on nodes": (NODES, Parallelism()),
    "data": (LOCAL, Parallelism(data=4, zero=0)),
    "zero 1": (LOCAL, Parallelism(data=4, zero=1)),
    "zero 2": (NODES, Parallelism(data=4, zero=2)),
    "zero 3": (NODES, Parallelism(data=4, zero=3)),
    "tensor": (LOCAL, Parallelism(tensor=4)),
    "data x tensor": (NODES, Parallelism(data=2, tensor=2)),
}


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
    found |= {name: plan_graph(graphs[name], NODES) for name in ("mlp", "moe")}
    found["one device"] = plan_graph(graphs["gpt2"], Cluster.local(1, memory_bytes=2**33, num_cores=1))
    return found


def test_every_report_follows_the_schema(plans: dict[str, Plan]) -> None:
    for name, plan in plans.items():
        errors = [f"{name}: {error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(plan.report())]
        assert not errors, errors[:5]


def test_the_schema_is_a_schema_and_is_published() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    published = Path(__file__).parents[2] / "docs" / "report.schema.json"
    assert json.loads(published.read_text()) == SCHEMA, "write it again: autopar report --schema > docs/report.schema.json"


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
    yield change("a mesh of no devices", lambda r: r["mesh"].update(shape=[0]))


def test_the_schema_rejects_what_is_wrong(plans: dict[str, Plan]) -> None:
    for name, wrong in _spoiled(plans["gpt2, data x tensor"].report()):
        assert not VALIDATOR.is_valid(wrong), name


def test_the_seconds_add_up_to_what_was_minimised(plans: dict[str, Plan]) -> None:
    for name, plan in plans.items():
        report = plan.report()
        predicted, solver = report["predicted"], report["solver"]
        assert math.isclose(sum(predicted["breakdown"].values()), predicted["step_seconds"], rel_tol=1e-9), name
        assert predicted["step_seconds"] == solver["cost_seconds"]
        assert solver["lower_bound_seconds"] <= solver["cost_seconds"]


def test_the_ledgers_collectives_cost_what_the_search_charged(plans: dict[str, Plan]) -> None:
    """Communication of the solver's problem = the collectives that the program issues, priced one by one."""
    for name, plan in plans.items():
        report = plan.report()
        breakdown = report["predicted"]["breakdown"]
        charged = breakdown["resharding_seconds"] + breakdown["parameter_communication_seconds"]
        issued = sum(entry["seconds"] for entry in report["collectives"]["entries"])
        assert math.isclose(charged, issued, rel_tol=1e-9, abs_tol=1e-12), (name, charged, issued)
        totals = report["collectives"]["totals"]
        assert math.isclose(sum(total["seconds"] for total in totals), issued, rel_tol=1e-9), name


def test_the_bytes_add_up_to_the_peak(plans: dict[str, Plan]) -> None:
    for name, plan in plans.items():
        report = plan.report()
        memory = dict(report["predicted"]["memory"])
        total, available = memory.pop("total_bytes"), memory.pop("available_bytes")
        assert math.isclose(sum(memory.values()), total, rel_tol=1e-12), name
        best = min((m for m in report["solver"]["meshes"] if m["fits"]), key=lambda m: (m["seconds"], len(m["mesh_shape"])))
        assert total <= available
        assert math.isclose(best["peak_bytes"], total, rel_tol=1e-12), name


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
    report = plan_graph(graphs["mlp"], small, PlanOptions(memory_margin=0.0)).report()
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
        report = plan_graph(trace(model, batch).graph, LOCAL, PlanOptions(parallelism=Parallelism(data=4, zero=3))).report()
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

    plan = plan_graph(trace(Model(), (torch.randn(8, 64),)).graph, LOCAL)
    (entry,) = plan.report()["fallbacks"]
    assert entry["target"] == "autopar_report_test.twice.default"
    assert entry["whole_bytes"] == 2 * 8 * 64 * 4 and entry["seconds"] > 0
    assert "test_report.py" in entry["source"]
    assert any("no sharding rule" in warning for warning in plan.report()["warnings"])
    assert "autopar_report_test.twice.default" in text(plan.report())
    VALIDATOR.validate(plan.report())


def test_the_saved_report_has_no_timings_and_is_the_same_each_time(graphs: dict[str, Any], tmp_path: Path) -> None:
    first, second = (plan_graph(graphs["gpt2"], NODES, tracing_seconds=seconds) for seconds in (1.0, 2.0))
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


def test_units() -> None:
    assert [seconds_text(s) for s in (0.0, 2e-9, 1.5e-6, 0.25, 12.0, 1234.0, None)] == [
        "0 s", "2 ns", "1.5 us", "250 ms", "12 s", "1234 s", "-",
    ]  # fmt: skip
    assert [bytes_text(b) for b in (12, 2048, 3 * 2**30, math.inf)] == ["12 B", "2 KiB", "3 GiB", "-"]
    assert (count_text(1.24e9), count_text(5), percent_text(0.1234)) == ("1.24 G", "5", "12.3%")
    assert runs([0, 0, 1, 0]) == [[0, 2], [1, 1], [0, 1]]
