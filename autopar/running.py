"""``autopar run``: a model trained for some steps, to see its loss fall and to compare measured with predicted seconds.

Enters: a model source and a plan. Leaves: a :class:`~autopar.training.Trained`, and from it the prediction beside what was
measured, and a profile that has learnt from the difference. The example batch is used for every step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autopar.errors import InputError
from autopar.launching import torchrun
from autopar.parallel import parallelize
from autopar.tracing.examples import named_leaves
from autopar.training import Trained, train_parallel, typical
from cost_models import Profile, Run

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


def comparison(plan: Plan, trained: Trained) -> dict[str, Any]:
    """What ``autopar run --out`` writes: the prediction beside what was measured, in SI units.

    The predicted step has no clipping of gradients, and neither has ``compared_seconds``, of which ``ratio`` is the part
    that was measured over the part that was predicted.
    """
    predicted = plan.report()["predicted"]
    compared = _without_clipping(trained)
    return {
        "schema_version": 1,
        "model": plan.model,
        "plan": plan.fingerprint,
        "num_devices": plan.num_devices,
        "num_steps": len(trained.losses),
        "predicted": {
            "step_seconds": predicted["step_seconds"],
            "optimizer_seconds": predicted["breakdown"]["optimizer_seconds"],
            "peak_bytes": predicted["memory"]["total_bytes"],
            "provenance": predicted["provenance"],
            "expected_error": predicted["basis"]["step_seconds"]["expected_error"],
        },
        "measured": {
            "step_seconds": trained.typical_seconds,
            "clip_seconds": typical(trained.clip_seconds),
            "optimizer_seconds": typical(trained.optimizer_seconds),
            "compared_seconds": compared,
            "peak_bytes": trained.peak_bytes,
        },
        "ratio": compared / predicted["step_seconds"],
        "losses": list(trained.losses),
        "steps_seconds": list(trained.step_seconds),
    }


def _without_clipping(trained: Trained) -> float:
    """The typical step without what the prediction does not count."""
    return typical([step - clip for step, clip in zip(trained.step_seconds, trained.clip_seconds, strict=True)])


def fed_back(profile: Profile, plan: Plan, trained: Trained) -> Profile:
    """The profile with this run, whose difference to its prediction corrects what is predicted next.

    Raises InputError for a plan that was made without a profile: its prediction says nothing about one.
    """
    basis = plan.report()["predicted"]["basis"]
    if basis["profile"] is None:
        raise InputError(
            "the plan was made without a profile, so that the run says nothing about one: plan with --profile"
        )
    raw = plan.report()["predicted"]["step_seconds"] / basis["correction"]
    run = Run(plan.fingerprint, raw, _without_clipping(trained), len(trained.losses))
    others = tuple(known for known in profile.runs if known.plan != plan.fingerprint)
    return replace(profile, runs=(*others, run))
