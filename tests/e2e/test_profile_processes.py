"""Profiling with processes: by a process that starts them, and under torchrun; then a plan from it, and its run fed back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cost_models import Profile

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
MODEL = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.narrow(torch.tanh(self.wide(x))).square().mean()

def small():
    torch.manual_seed(0)
    return Small(), {"x": torch.ones(8, 16)}
"""


def python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_profile_plan_run_and_update(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    measured = python(
        "-m", "autopar", "profile", "model.py:small", "--cluster", "local:2", "--out", "profile.json", folder=tmp_path
    )
    assert measured.returncode == 0, measured.stderr
    profile = Profile.load(tmp_path / "profile.json")
    assert profile.machine.devices_per_node == (2,) and profile.machine.threads == 1
    kinds = {key.split()[0] for key in profile.collectives}
    assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"}
    assert profile.overlaps and profile.contexts and set(profile.memory) == {"copy", "adamw float32"}
    assert any(key.startswith("aten.linear.default(float32[4,16]") for key in profile.operators)

    ran = python(
        *(
            "-m",
            "autopar",
            "run",
            "model.py:small",
            "--cluster",
            "local:2",
            "--profile",
            "profile.json",
            "--steps",
            "3",
        ),
        *("--out", "run.json", "--update", "profile.json"),
        folder=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    assert "measured, to within about" in ran.stdout and "later predictions are corrected by" in ran.stdout
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["ratio"] == pytest.approx(found["measured"]["compared_seconds"] / found["predicted"]["step_seconds"])
    learnt = Profile.load(tmp_path / "profile.json")
    assert learnt.correction == pytest.approx(found["ratio"]) and learnt.operators == profile.operators


def test_profile_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    command = [*TORCHRUN, "-m", "autopar", "profile", "model.py:small", "--out", "profile.json", "--budget", "0"]
    measured = python(*command, folder=tmp_path)
    assert measured.returncode == 0, measured.stderr
    profile = Profile.load(tmp_path / "profile.json")
    assert not profile.operators and "all_reduce size=2 stride=1 groups=1 per_node=2" in profile.collectives
    assert measured.stdout.count("kinds of collectives in profile.json") == 1  # one process speaks


def test_a_collective_that_hangs_is_named(tmp_path: Path) -> None:
    found = python(*TORCHRUN, "-m", "tests.e2e.profile_worker", folder=ROOT)
    assert found.returncode == 0, found.stderr
    assert "all_reduce of 4096 bytes between ranks 0, 1 did not end within 2 s on rank 0" in found.stdout
    assert "give a longer time-out" in found.stdout


def test_no_thread_outlives_the_groups() -> None:
    """One that still frees a tensor while the interpreter ends aborts the process."""
    found = python(*TORCHRUN, "-m", "tests.e2e.ending_worker", folder=ROOT)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("left: []") == 2, found.stdout
