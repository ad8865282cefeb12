"""Examples, README and the demo, as a person would run them: alone and under torchrun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.plans import Plan

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else ""
TIMEOUT_SECONDS = 400


def run(*command: str, folder: Path, expected: int = 0) -> str:
    """Run a command in ``folder`` and return what it printed."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    assert done.returncode == expected, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def python(*arguments: str, folder: Path, expected: int = 0) -> str:
    return run(sys.executable, *arguments, folder=folder, expected=expected)


def torchrun(num_processes: int, *arguments: str, folder: Path) -> str:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes))
    return python(*launcher, *arguments, folder=folder)


def losses(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"^step\s+\d+\s+loss ([\d.]+)", printed, re.MULTILINE)]


def test_examples_are_short() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert set(lengths) == {
        "mlp.py",
        "transformers_gpt2.py",
        "mixture_of_experts.py",
        "pipeline.py",
        "plan_large_cluster.py",
    }
    assert all(length < 60 for length in lengths.values()), lengths


def test_mlp(tmp_path: Path) -> None:
    assert "predicted step" in python(str(EXAMPLES / "mlp.py"), folder=tmp_path)
    trained = losses(torchrun(2, str(EXAMPLES / "mlp.py"), folder=tmp_path))
    assert len(trained) == 10 and trained[-1] < 0.5 * trained[0]


def test_transformers_gpt2(tmp_path: Path) -> None:
    assert "predicted step" in python(str(EXAMPLES / "transformers_gpt2.py"), folder=tmp_path)
    trained = losses(torchrun(2, str(EXAMPLES / "transformers_gpt2.py"), folder=tmp_path))
    assert len(trained) == 10 and trained[-1] < 0.9 * trained[0]
    assert list((tmp_path / "gpt2-checkpoint").iterdir())


def test_mixture_of_experts(tmp_path: Path) -> None:
    shown = python(str(EXAMPLES / "mixture_of_experts.py"), folder=tmp_path)
    assert "all_to_all" in shown, "tokens travel to the experts' devices"
    model = f"{EXAMPLES / 'mixture_of_experts.py'}:model"
    printed = python(
        "-m", "autopar", "run", model, "--cluster", "local:2", "--tensor", "2", "--steps", "3", folder=tmp_path
    )
    trained = losses(printed)
    assert len(trained) == 3 and trained[-1] < trained[0]
    assert re.search(r"step: predicted .* measured ", printed)


def test_pipeline(tmp_path: Path) -> None:
    shown = python(str(EXAMPLES / "pipeline.py"), folder=tmp_path)
    assert "a pipeline of 2 ranks" in shown and "schedule 1f1b, in 4 micro-batches of 4" in shown
    trained = losses(torchrun(4, str(EXAMPLES / "pipeline.py"), folder=tmp_path))
    assert len(trained) == 10 and trained[-1] < 0.5 * trained[0]


def test_plan_large_cluster(tmp_path: Path) -> None:
    shown = python(str(EXAMPLES / "plan_large_cluster.py"), "2", folder=tmp_path)
    assert "8 x 8 H100-SXM5-80GB" in shown and "InfiniBand-NDR" in shown
    assert Plan.load(tmp_path / "llama.plan.json").num_devices == 64
    assert "search  " in python("-m", "autopar", "report", "llama.plan.json", folder=tmp_path)


def test_run_under_torchrun_takes_a_plan(tmp_path: Path) -> None:
    model = f"{EXAMPLES / 'mlp.py'}:model"
    planned = ("-m", "autopar", "plan", model, "--cluster", "local:2", "--data", "2", "--out", "plan.json", "--json")
    report = json.loads(python(*planned, folder=tmp_path))
    assert report["mesh"]["shape"] == [2]
    trained = losses(torchrun(2, "-m", "autopar", "run", model, "plan.json", "--steps", "3", folder=tmp_path))
    assert len(trained) == 3 and trained[-1] < trained[0]


def test_demo(tmp_path: Path) -> None:
    """The demo itself compares every step's loss with one process and fails when they differ."""
    shown = python("-m", "autopar", "demo", "--steps", "4", folder=tmp_path)
    assert "4 processes" in shown and "predicted step" in shown
    found = re.search(r"largest difference of the loss at any step: (\S+)", shown)
    assert found and float(found[1]) < 1e-4
    assert len(re.findall(r"^ +\d+ +\d+\.\d+ +\d+\.\d+ +\S+$", shown, re.MULTILINE)) == 4


def test_the_quick_start_is_one_block_of_two_commands() -> None:
    section = README.split("## Quick start")[1].split("\n## ")[0]
    (block,) = re.findall(r"```\w*\n(.*?)```", section, re.DOTALL)
    commands = [line for line in block.splitlines() if line.strip()]
    assert commands == [
        "pip install -c constraints.txt -e '.[demo]' && autopar demo",
        "pip install -c constraints.txt -e '.[test]' && pytest",
    ]


def test_the_readmes_python_example_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(block.strip().splitlines()) <= 14
    (tmp_path / "train.py").write_text(block)
    trained = [float(number) for number in re.findall(r"loss ([\d.]+)", torchrun(2, "train.py", folder=tmp_path))]
    assert trained[-1] < trained[0]
