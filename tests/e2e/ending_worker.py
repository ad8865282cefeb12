"""Profiles a model, and says which threads are left when the process ends."""

# ruff: noqa: E402
import atexit
import sys
from pathlib import Path


def _say_what_is_left() -> None:
    names = [name.read_text(encoding="utf-8").strip() for name in Path("/proc/self/task").glob("*/comm")]
    sys.stdout.write(f"left: {sorted(name for name in names if 'gloo' in name)}\n")


atexit.register(_say_what_is_left)  # before all others: it runs after them

import torch
from torch import nn

import autopar

if __name__ == "__main__":
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    autopar.profile(model, autopar.Cluster.local(2), torch.ones(4, 8), loss_fn=lambda out, given: out.sum(), budget_seconds=5)
