"""The command line: what it accepts, what it prints, its exit codes. Training commands are in tests/e2e."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from autopar.cli import main, parser
from autopar.errors import InputError
from autopar.plans import Plan
from autopar.references import load_cluster, load_model, read_shape
from autopar.report import SCHEMA
from cost_models import ClusterError

MODEL = """
import torch
from torch import nn

def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return model, {"input": torch.randn(8, 16), "target": torch.randint(0, 4, (8,))}, loss

def loss(outputs, inputs):
    return nn.functional.cross_entropy(outputs, inputs["target"])

def only_a_model():
    return small()[0]
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_model.py"
    path.write_text(MODEL)
    return path


def test_plan_report_and_verify(model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    model = f"{model_file}:small"
    assert main(["plan", model, "--cluster", "local:4", "--data", "2", "--tensor", "2", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "mesh  data=2 x tensor=2" in printed.out and f"written to {out}" in printed.out
    assert "pricing 2 x 2" in printed.err, "progress goes to stderr"

    assert main(["report", str(out)]) == 0
    shown = capsys.readouterr().out
    assert shown.strip() in printed.out or "mesh  data=2 x tensor=2" in shown
    assert "planned in" not in shown, "a saved plan has no timings"

    assert main(["report", str(out), "--json"]) == 0
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(capsys.readouterr().out))

    assert main(["verify", model, str(out)]) == 0
    assert "equal to the plain model" in capsys.readouterr().out


def test_plan_as_json_keeps_stdout_clean(model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--mesh-shape", "2", "--optimizer", "sgd", "--memory-margin", "0.2", "--max-mesh-axes", "1"]
    options += ["--offload", "optimizer", "--zero", "1", "--zero-size", "2"]
    out = str(tmp_path / "plan.json")
    assert main(["plan", f"{model_file}:small", "--cluster", "1x2:A100-80GB", *options, "--json", "--out", out]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["mesh"]["shape"] == [2]
    assert (report["options"]["optimizer"], report["options"]["memory_margin"]) == ("sgd", 0.2)
    assert (report["options"]["offload"], report["options"]["parallelism"]["zero_size"]) == ("optimizer", 2)
    assert all(entry["offload"] for entry in report["parameters"])
    assert Plan.load(out).fingerprint == report["fingerprints"]["plan"]


def test_a_pipeline_is_forced_and_verified(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forced = ["--pipeline", "2", "--schedule", "1f1b", "--micro-batch-size", "2", "--recompute", "none"]
    assert main(["verify", f"{model_file}:small", "--cluster", "local:2", *forced]) == 0
    assert "2 stages (1f1b)" in (shown := capsys.readouterr().out) and "4 micro-batches: equal" in shown


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA


def test_errors_for_the_user_are_one_message_and_exit_code_1(
    model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged.json"
    damaged.write_text('{"schema_version": 1, "mod')
    for arguments, message in (
        (["plan", "nowhere.py:f"], "there is no file 'nowhere.py'"),
        (["plan", f"{model_file}:small", "--cluster", "2x4:Z80"], "Z80"),
        (["plan", f"{model_file}:small", "--data", "3"], "data=3"),
        (["plan", f"{model_file}:small", "--cluster", "local:2", "--expert", "2"], "no mixture of experts"),
        (["plan", f"{model_file}:small", "--cluster", "local:2", "--expert-form", "exchanged"], "give expert= as well"),
        (["plan", f"{model_file}:small", "--cluster", "local:2", "--zero-size", "2"], "give zero=1, 2 or 3"),
        (["report", str(damaged)], "is damaged or cut off"),
        (["report", str(tmp_path / "none.json")], "cannot be read"),
    ):
        assert main(arguments) == 1, arguments
        printed = capsys.readouterr()
        assert message in printed.err.splitlines()[-1] and printed.err.splitlines()[-1].startswith("autopar: ")
        assert "Traceback" not in printed.err and not printed.out


def test_faults_of_the_users_code_keep_their_traceback(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def model():\n    return 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        main(["plan", f"{path}:model"])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["plan"],
        ["plan", "m:f", "--zero", "4"],
        ["plan", "m:f", "--data", "0"],
        ["demo", "--steps", "x"],
        ["plan", "m:f", "--schedule", "2f2b"],
        ["plan", "m:f", "--recompute", "all"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: autopar" in capsys.readouterr().err


def test_report_without_a_plan_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == 2
    assert "give PLAN.json" in capsys.readouterr().err


def test_commands_offered_are_those_that_work() -> None:
    (commands,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    assert set(commands.choices) == {"plan", "report", "profile", "run", "verify", "validate", "demo"}


def test_help_and_version_load_neither_torch_nor_the_solver() -> None:
    code = (
        "import sys, contextlib, io\n"
        "from autopar.cli import main\n"
        "for option in ('--help', '--version'):\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        main([option])\n"
        "print(sorted({'torch', 'ortools', 'rich'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]", found.stdout


def test_models_by_name(model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = load_model(f"{model_file}:small")
    assert source.loss_fn is not None and set(source.example_inputs) == {"input", "target"}
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_model("my_model:small").model is not source.model
    for reference, message in (
        ("my_model", "names no model"),
        ("my_model:", "names no model"),
        ("no_such_package.module:f", "there is no module 'no_such_package'"),
        ("my_model:large", "has no function 'large'; it has small, loss, only_a_model"),
        (f"{model_file}:only_a_model", "returned a Sequential; return (model, example_inputs)"),
    ):
        with pytest.raises(InputError) as error:
            load_model(reference)
        assert message in str(error.value)


def test_clusters_by_name(tmp_path: Path) -> None:
    assert load_cluster("local:3").num_devices == 3
    cluster = load_cluster("4x8:A100-80GB")
    assert cluster.num_devices == 32
    assert (cluster.nodes[0].link.name, cluster.inter_link.name) == ("NVLink3", "InfiniBand-HDR")
    assert load_cluster("2x8:H100-SXM,NVLink4,EFA-P5").inter_link.name == "EFA-P5"
    assert load_cluster("1x1:T4").nodes[0].link.name == "PCIe4"
    cluster.save(tmp_path / "cluster.json")
    assert load_cluster(str(tmp_path / "cluster.json")) == cluster
    with pytest.raises(InputError, match="names no cluster"):
        load_cluster("eight gpus")
    with pytest.raises(ClusterError, match="num_nodes"):
        load_cluster("0x8:H100-SXM")


def test_mesh_shapes() -> None:
    assert (read_shape("4"), read_shape("4x2x1")) == ((4,), (4, 2, 1))
    for text in ("", "4x", "0x2", "4,2"):
        with pytest.raises(InputError, match="mesh shape"):
            read_shape(text)
