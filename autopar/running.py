"""``autopar run``: a model trained for some steps, to see its loss fall and to compare measured with predicted seconds.

Enters: a model source and a plan. Leaves: a :class:`~autopar.training.Trained`. The example batch is used for every step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from autopar.errors import InputError
from autopar.launching import torchrun
from autopar.parallel import parallelize
from autopar.tracing.examples import named_leaves
from autopar.training import Trained, train_parallel

if TYPE_CHECKING:
    from autopar.plans import Plan
    from autopar.references import ModelSource


def run_processes(model: str, plan: Plan, arguments: Sequence[str]) -> int:
    """Start the plan's processes on this machine, each as ``autopar run MODEL PLAN arguments``; torchrun's exit code."""
    with tempfile.TemporaryDirectory(prefix="autopar-run-") as folder:
        path = Path(folder, "plan.json")
        plan.save(path)
        return torchrun("autopar", ["run", model, str(path), *arguments], plan.num_devices)


def run_rank(
    source: ModelSource,
    plan: Plan,
    num_steps: int,
    learning_rate: float,
    each: Callable[[int, float, float], None] | None = None,
) -> Trained:
    """This process's part of the training; ``each(step, loss, seconds)`` is called after every step."""
    leaves = (leaf for _, leaf in named_leaves(source.example_inputs, "inputs"))
    if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves):
        raise InputError("the example inputs are on the meta device: to run a model, return a batch with values")
    parallel = parallelize(source.model, None, source.example_inputs, plan=plan, loss_fn=source.loss_fn)
    trained = train_parallel(parallel, [source.example_inputs] * num_steps, learning_rate, each)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return trained
