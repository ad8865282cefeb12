"""``autopar demo``: plan a small GPT-2, train it on local processes, and compare every loss with one process.

Enters: a number of processes and of steps. Leaves: a :class:`DemoResult`. The model is transformers' own GPT-2 without
changes; the text is this package's source, a byte a token. The processes run ``autopar.demo_rank`` under torchrun.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import InputError
from autopar.launching import LaunchError, torchrun
from autopar.planner import plan
from autopar.plans import Plan
from autopar.training import Trained, train_plain
from cost_models import Cluster

BATCH, SEQUENCE = 8, 128
TOLERANCE = 1e-4  # of the loss, relative, in float32
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class DemoResult:
    """Both trainings, and the largest relative difference of a step's loss."""

    parallel: Trained
    plain: Trained
    largest_difference: float

    @property
    def passed(self) -> bool:
        return self.largest_difference < TOLERANCE


def demo_model() -> nn.Module:
    """transformers' GPT-2, small, without dropout; the same weights in every process."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise InputError(
            "the demo trains a model of transformers, which is not installed: pip install transformers"
        ) from error
    config = GPT2Config(
        n_layer=4, n_embd=128, n_head=4, vocab_size=256, n_positions=SEQUENCE, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what it falls back to, with a warning
    trained: nn.Module = model.train()
    return trained


def demo_batches(num_steps: int) -> list[dict[str, torch.Tensor]]:
    """Global batches of consecutive text: the source of this package, a byte a token."""
    text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py")))
    wanted = num_steps * BATCH * SEQUENCE
    text = (text * (wanted // len(text) + 1))[:wanted]
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(num_steps, BATCH, SEQUENCE)
    return [{"input_ids": batch, "labels": batch.clone()} for batch in tokens]


@contextmanager
def one_thread() -> Iterator[None]:
    """As in the parallel processes, so that their seconds compare."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def plan_demo(num_devices: int, say: Callable[[str], None]) -> Plan:
    """The best plan of the demo's model for processes on this machine."""
    return plan(demo_model(), Cluster.local(num_devices), demo_batches(1)[0], progress=say)


def train_demo(chosen: Plan, num_steps: int, say: Callable[[str], None]) -> DemoResult:
    """Train by the plan and in this process, and compare. Raises LaunchError when the processes fail."""
    with tempfile.TemporaryDirectory(prefix="autopar-demo-") as folder:
        chosen.save(Path(folder, "plan.json"))
        say(f"training {num_steps} steps in {chosen.num_devices} processes (torchrun, gloo)")
        code = torchrun("autopar.demo_rank", [folder, str(num_steps)], chosen.num_devices, TIMEOUT_SECONDS)
        if code:
            raise LaunchError(f"the demo's processes failed with exit code {code}; their messages are above")
        found = json.loads(Path(folder, "trained.json").read_text())
    parallel = Trained(tuple(found["losses"]), tuple(found["step_seconds"]))
    say("training the same steps in one process")
    with one_thread():
        plain = train_plain(demo_model(), demo_batches(num_steps))
    pairs = zip(parallel.losses, plain.losses, strict=True)
    return DemoResult(parallel, plain, max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs))
